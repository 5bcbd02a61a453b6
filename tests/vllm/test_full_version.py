"""A full version into vLLM's memory: proven from what is served, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm_cpu import Vllm, full, gap, small_model

from tandem.bridge.files.checkpoint import DiskBridge
from tandem.engine.vllm.weight_update import whole
from tandem.types import Weights

PROMPT = [5, 17, 33, 90, 121, 7, 64]
NEAR, FAR = 0.05, 0.3  # nats: bf16 against bf16 in another order of sums, and against other weights


class Pair:
    """A trainer's end and an engine, with the model that the engine was started with."""

    def __init__(self, vllm: Vllm, module: Any, path: Any) -> None:
        self.vllm, self.module = vllm, module
        self.bridge = DiskBridge(path / "versions", path, buffers=[n for n, _ in module.named_buffers()], deadline_s=5)
        self.reply: dict[str, Any] = {}
        self._version = 0

    def next(self) -> int:
        self._version += 1
        return self._version

    def attach(self) -> dict[str, Any]:
        source = self.bridge.source()
        self.reply = self.vllm.call("tandem_attach", dict(source.link))
        assert "error" not in self.reply, self.reply
        source.attached(self.reply)
        return self.reply

    def send(self, weights: Weights) -> tuple[Any, Any]:
        sent = self.bridge.send(weights)
        return sent, self.vllm.call("tandem_load", weights.version)


@pytest.fixture(scope="module", params=["tied", "untied"])
def pair(request: pytest.FixtureRequest, start: Callable[..., Vllm], tmp_path_factory: Any) -> Iterator[Pair]:
    path = tmp_path_factory.mktemp(request.param)
    module = small_model(tie_word_embeddings=request.param == "tied")
    module.save_pretrained(path)
    made = Pair(start(model=str(path), dtype="bfloat16"), module, path)
    made.attach()
    yield made
    made.bridge.close()


def test_every_name_of_the_trainer_is_found_and_no_other(pair: Pair):
    from tandem.model.served_weights import whole as all_of

    theirs = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in all_of(pair.module)}
    assert pair.reply["layout"] == theirs
    assert pair.reply["derived"] == ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
    assert bool(pair.reply["tied"]) == pair.module.config.tie_word_embeddings


def test_a_fresh_engine_serves_what_it_was_started_with_and_says_so(pair: Pair):
    sent, answer = pair.send(full(pair.module, pair.next()))
    assert whole(answer["pieces"], answer["shapes"]) == dict(sent.fingerprints)
    assert gap(pair.module, PROMPT, pair.vllm.generate(PROMPT)[0]) < NEAR


def test_new_weights_are_served_and_read_back(pair: Pair):
    other = small_model(seed=1, tie_word_embeddings=pair.module.config.tie_word_embeddings)
    sent, answer = pair.send(full(other, pair.next()))
    assert whole(answer["pieces"], answer["shapes"]) == dict(sent.fingerprints)
    pair.vllm.do("forget")
    told = pair.vllm.generate(PROMPT)[0]
    assert gap(other, PROMPT, told) < NEAR
    assert gap(pair.module, PROMPT, told) > FAR
    assert pair.vllm.call("tandem_status")["untouched"]


@pytest.mark.parametrize(
    "fault",
    [
        "del arrived['model.layers.1.self_attn.k_proj.weight']",
        "arrived['model.layers.0.mlp.up_proj.weight'] = arrived['model.layers.0.mlp.up_proj.weight'].T.contiguous()",
        "arrived['model.norm.weight'] = arrived['model.norm.weight'].half()",
        "arrived['lm_head.bias'] = arrived['model.norm.weight']",
        "arrived['model.rotary_emb.inv_freq'] = arrived['model.rotary_emb.inv_freq'] * 1.01",
    ],
)
def test_a_version_that_does_not_fit_is_refused_before_a_byte_is_written(pair: Pair, fault: str):
    pair.vllm.call("tandem_remember")
    plant = f"""
from tandem.vllm_worker import served_memory
whole_check = served_memory.check
def check(layout, arrived):
    {fault}
    served_memory.check = whole_check
    whole_check(layout, arrived)
served_memory.check = check
"""
    pair.vllm.do("plant", code=plant)
    _, answer = pair.send(
        full(small_model(seed=2, tie_word_embeddings=pair.module.config.tie_word_embeddings), pair.next())
    )
    assert answer["error"]["code"] == "sync"
    assert pair.vllm.call("tandem_intact")["intact"]
    assert pair.vllm.call("tandem_status")["untouched"]


def test_a_write_that_breaks_off_leaves_the_engine_torn_until_a_whole_version_came(pair: Pair):
    pair.vllm.do(
        "plant",
        code="""
from tandem.vllm_worker import served_memory
right = served_memory.write
def write(layout, *_):
    served_memory.write = right
    next(iter(layout)).view.zero_()
    raise RuntimeError("the other end is gone")
served_memory.write = write
""",
    )
    _, answer = pair.send(full(pair.module, pair.next()))
    assert "the other end is gone" in answer["error"]["message"]
    assert not pair.vllm.call("tandem_status")["untouched"]
    sent, answer = pair.send(full(pair.module, pair.next()))
    assert whole(answer["pieces"], answer["shapes"]) == dict(sent.fingerprints)
    assert pair.vllm.call("tandem_status")["untouched"]


@pytest.mark.parametrize(
    "fault",
    [
        "model.model.layers[1].mlp.down_proj.weight.data[3, 5] += 1",
        "w = model.model.layers[0].self_attn.qkv_proj.weight.data; w[[0, 1]] = w[[1, 0]].clone()",
        "model.model.norm.weight.data.neg_()",
    ],
)
def test_another_number_or_another_order_of_them_is_another_digest(pair: Pair, fault: str):
    sent, _ = pair.send(full(pair.module, pair.next()))
    pair.vllm.do("plant", code=fault)
    answer = pair.vllm.call("tandem_digest")
    assert whole(answer["pieces"], answer["shapes"]) != dict(sent.fingerprints)


@pytest.mark.parametrize("buffer", ["rotary_emb.cos_sin_cache", "attn._k_scale"])
def test_what_the_engine_derives_is_proven_too(pair: Pair, buffer: str):
    there = f"model.model.layers[0].self_attn.{buffer}"
    pair.vllm.do("plant", code=f"model.kept = {there}.clone(); {there} += 0.5")
    assert pair.vllm.call("tandem_digest")["error"]["code"] == "sync"
    pair.vllm.do("plant", code=f"{there}.copy_(model.kept)")
    assert "error" not in pair.vllm.call("tandem_digest")


def test_the_digest_of_the_trainer_does_not_depend_on_how_the_engine_lays_it_out(pair: Pair):
    """q, k and v lie in one parameter there, and the vocabulary is padded."""
    places = {name: (param, *box) for name, param, *box in pair.reply["places"]}
    assert places["model.layers.0.self_attn.k_proj.weight"][0].endswith("qkv_proj.weight")
    assert places["model.embed_tokens.weight"][1:] == (0, 200, 0, 64)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "l = layer.mlp.down_proj; kept = l.cpu_linear; l.cpu_linear = lambda *a: 0; undo = 'l.cpu_linear = kept'",
            "packed copy",
        ),
        (
            "l = layer.mlp.down_proj; kept = l.weight.data; l.weight.data = kept[:0]; undo = 'l.weight.data = kept'",
            "was packed away",
        ),
        (
            "l = layer.mlp.down_proj; kept = l.quant_method; l.quant_method = object(); undo = 'l.quant_method = kept'",
            "only unquantised",
        ),
        ("layer.extra = torch.nn.Linear(2, 2); undo = 'del layer.extra'", "'model.layers.0.extra.weight'"),
        (
            "layer.mlp.register_buffer('scale', torch.ones(1)); undo = 'del layer.mlp.scale'",
            "'model.layers.0.mlp.scale'",
        ),
        (
            "class FusedMoE(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        "
            "self.w13 = torch.nn.Parameter(torch.ones(2))\nlayer.experts = FusedMoE()\nundo = 'del layer.experts'",
            "mixture of experts",
        ),
    ],
)
def test_a_model_that_is_not_understood_in_full_is_refused_by_name(pair: Pair, code: str, told: str):
    assert told in pair.vllm.do("refusal", code=code)
    assert pair.vllm.do("refusal", code="") == ""


@pytest.mark.parametrize("kind", ["Qwen2", "Llama", "Mistral"])
def test_other_families_are_read_by_vllms_own_classes(kind: str, start: Callable[..., Vllm], tmp_path: Any):
    settings: dict[str, Any] = {"Llama": {"attention_bias": True, "mlp_bias": True}}.get(kind, {})
    if kind == "Qwen2":  # it has no head_dim of its own in vLLM
        settings = {"hidden_size": 128}
    module = small_model(kind, dtype=torch.float32, tie_word_embeddings=False, **settings)
    module.save_pretrained(tmp_path)
    vllm = start(model=str(tmp_path), dtype="float32")
    pair = Pair(vllm, module, tmp_path)
    pair.attach()
    other = small_model(kind, seed=3, dtype=torch.float32, tie_word_embeddings=False, **settings)
    sent, answer = pair.send(full(other, pair.next()))
    assert whole(answer["pieces"], answer["shapes"]) == dict(sent.fingerprints)
    assert gap(other, PROMPT, vllm.generate(PROMPT)[0]) < 0.001
    pair.bridge.close()
    vllm.close()
