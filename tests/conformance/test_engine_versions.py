"""What any Engine must do when the weights change, when it sleeps, and when something breaks."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from engines import (
    ARCHITECTURES,
    KINDS,
    SETTINGS,
    VOCAB,
    complete,
    finish,
    generated,
    llama,
    make_engine,
    prompts,
    teacher_forced,
    tiny,
)
from server_engine import LinkedBridge

from tandem.bridge.inproc import InprocBridge
from tandem.engine.hf.cache_room import try_states
from tandem.engine.hf.prefill_batch import PrefillBatch
from tandem.engine.hf.recurrent_cache import RecurrentCacheLayer
from tandem.errors import EngineError, SpecError, SyncError, SyncTimeout
from tandem.ops import attention_masks
from tandem.ops.lm_head import Head
from tandem.ops.named_tensors import live_tensors, whereabouts
from tandem.types import Completion, Sampling, Weights

# --- versions


def start(kind: str, module: Any, **options: Any) -> tuple[Any, InprocBridge]:
    return make_engine(kind, module, **options), (LinkedBridge if kind == "server" else InprocBridge)(deadline_s=0.3)


async def publish(engine: Any, bridge: InprocBridge, module: Any, version: int) -> Any:
    bridge.send(Weights(version, "live", lambda: live_tensors(module)))
    return await engine.load(version)


def receivers(kind: str) -> int:
    return 2 if kind == "pool" else 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama-gqa", "mistral-sliding", "falcon-h1-both"])
def test_every_token_is_exact_for_the_version_that_its_span_names(kind: str, architecture: str) -> None:
    module = ARCHITECTURES[architecture]()
    before = copy.deepcopy(module)
    engine, bridge = start(kind, module, max_running=4)
    requests = [(prompt, Sampling(max_tokens=25, seed=i)) for i, prompt in enumerate(prompts(*range(2, 26, 2)))]
    made = Counter[int]()
    if kind == "server":  # what it is told by HTTP is heard when it has made tokens already
        slowed = module.get_input_embeddings().register_forward_pre_hook(lambda *_: time.sleep(0.02))

    async def play() -> list[Completion]:
        await engine.attach(bridge.source(receivers(kind)))
        await publish(engine, bridge, module, 3)
        tasks = [
            asyncio.create_task(engine.generate(*request, on_token=lambda *_, number=number: made.update([number])))
            for number, request in enumerate(requests)
        ]
        while len(made) < 4 or made.total() < (4 if kind == "server" else 40):
            await asyncio.sleep(0.001)
        await engine.sleep()
        if kind == "server":
            slowed.remove()
        with torch.no_grad():
            for tensor in module.parameters():
                tensor.add_(torch.randn_like(tensor), alpha=0.05)
        await publish(engine, bridge, module, 4)
        assert engine.version == 4
        return await asyncio.gather(*tasks)

    completions = finish(engine, play)
    both = [c for c in completions if [span.version for span in c.spans] == [3, 4]]
    assert len(both) >= 3
    for (prompt, sampling), completion in zip(requests, completions, strict=True):
        assert set(completion.versions) <= {3, 4}
        under = {
            3: teacher_forced(before, prompt, completion, sampling),
            4: teacher_forced(module, prompt, completion, sampling),
        }
        exact = [under[version][index] for index, version in enumerate(completion.versions)]
        assert completion.logprobs == pytest.approx(exact, abs=1e-4)
    moved = max(
        abs(a - b)
        for (prompt, sampling), c in zip(requests, both, strict=False)
        for a, b in zip(
            teacher_forced(before, prompt, c, sampling), teacher_forced(module, prompt, c, sampling), strict=True
        )
    )
    assert moved > 0.1, "else the two versions could not be told apart"


@pytest.mark.parametrize("kind", KINDS)
def test_load_names_the_memory_of_every_tensor_and_it_is_the_trainer_s(kind: str) -> None:
    module = llama()
    engine, bridge = start(kind, module)

    async def play() -> Any:
        await engine.attach(bridge.source(receivers(kind)))
        return await publish(engine, bridge, module, 7), await publish(engine, bridge, module, 8)

    served, again = finish(engine, play)
    assert (served.version, again.version) == (7, 8)
    assert served.fingerprints == {name: whereabouts(tensor) for name, tensor in live_tensors(module)}
    assert len(set(served.engines)) == receivers(kind)
    assert again.cache_epoch > served.cache_epoch


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_decoded_in_sleep_and_waking_changes_no_token(kind: str) -> None:
    module = llama()
    requests = [(prompt, Sampling(max_tokens=40, seed=i)) for i, prompt in enumerate(prompts(4, 9, 6, 3))]
    expected = complete(make_engine(kind, module), requests)
    (engine, bridge), made = start(kind, module), []

    async def play() -> list[Completion]:
        await engine.attach(bridge.source(receivers(kind)))
        await publish(engine, bridge, module, 1)
        tell = lambda *token: made.append(token)  # noqa: E731
        tasks = [asyncio.create_task(engine.generate(*request, on_token=tell)) for request in requests[:3]]
        while len(made) < 9:
            await asyncio.sleep(0.001)
        await engine.sleep()
        tasks.append(asyncio.create_task(engine.generate(*requests[3], on_token=tell)))
        asleep = -1
        while asleep != len(made):  # over HTTP, what was made before is still told
            asleep = len(made)
            await asyncio.sleep(0.1 if kind == "server" else 0)
        await asyncio.sleep(0.1)
        assert len(made) == asleep < 3 * 40
        await engine.wake()
        return await asyncio.gather(*tasks)

    completions = finish(engine, play)
    assert [c.ids for c in completions] == [c.ids for c in expected]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", ["a copy", "one missing", "one too many", "another shape"])
def test_weights_that_are_not_this_memory_are_refused(kind: str, wrong: str) -> None:
    module = llama()
    engine, bridge = start(kind, module)
    offered = dict(live_tensors(copy.deepcopy(module) if wrong == "a copy" else module))
    name = "model.layers.1.mlp.up_proj.weight"
    if wrong == "one missing":
        del offered[name]
    if wrong == "one too many":
        offered["model.layers.9.mlp.up_proj.weight"] = offered[name]
    if wrong == "another shape":
        offered[name] = offered[name].view(64, 96)

    async def play() -> None:
        await engine.attach(bridge.source(receivers(kind)))
        await publish(engine, bridge, module, 1)
        bridge.send(Weights(2, "live", lambda: iter(offered.items())))
        await engine.load(2)

    with pytest.raises(SyncError, match="mlp.up_proj" if wrong != "a copy" else "not the trainer's memory"):
        finish(engine, play)
    assert engine.version == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_that_was_not_sent_is_refused_within_the_deadline(kind: str) -> None:
    module = llama()
    engine, bridge = start(kind, module)

    async def play() -> None:
        with pytest.raises(SyncError, match="before attach"):
            await engine.load(1)
        await engine.attach(bridge.source(receivers(kind)))
        with pytest.raises(SyncTimeout, match=r"version 5 was not sent within 0\.3 s"):
            await engine.load(5)
        bridge.send(Weights(6, "live", lambda: live_tensors(module)))
        with pytest.raises(SyncError, match="asked for version 5, sent was 6"):
            await engine.load(5)

    finish(engine, play)
    assert engine.version < 1


# --- failures


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", ["plain", "greedy", "all three"])
def test_logits_that_are_not_numbers_end_every_request_with_an_error(kind: str, setting: str) -> None:
    module, sampling = llama(), SETTINGS[setting]
    engine = make_engine(kind, module)
    with torch.no_grad():
        module.model.norm.weight[0] = torch.nan

    async def play() -> None:
        answers = [engine.generate(prompt, sampling) for prompt in prompts(3, 4, 5)]
        errors = await asyncio.gather(*answers, return_exceptions=True)
        assert all(isinstance(error, EngineError) for error in errors)
        assert any("not finite" in str(error) for error in errors)
        if kind != "server":  # over HTTP the others may come when it has stopped
            assert all("not finite" in str(error) for error in errors)
        with pytest.raises(EngineError, match="stopped"):
            await asyncio.wait_for(engine.generate([1], sampling), 5)

    finish(engine, play)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_ends_whoever_waits(kind: str) -> None:
    module = llama()
    engine, bridge = start(kind, module)

    async def play() -> None:
        await engine.attach(bridge.source(receivers(kind)))
        await publish(engine, bridge, module, 1)
        waiting = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=100, temperature=9.0)))
        await asyncio.sleep(0.01)
        await engine.sleep()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(waiting, 5)

    finish(engine, play)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (
            "mamba",
            lambda: transformers.MambaForCausalLM(
                transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1)
            ),
        ),
        ("lfm2", lambda: tiny(transformers.Lfm2Config, transformers.Lfm2ForCausalLM, layer_types=["conv"] * 2)),
    ],
)
def test_models_without_attention_are_refused_by_name(name: str, make: Callable[[], Any]) -> None:
    with pytest.raises(SpecError, match=f"{name} has layers of kind (linear_attention|conv)"):
        make_engine("inline", make())


def test_a_hybrid_whose_states_are_not_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = RecurrentCacheLayer.update_recurrent_state
    monkeypatch.setattr(
        RecurrentCacheLayer, "update_recurrent_state", lambda self, states, *_: keep(self, torch.zeros_like(states))
    )
    with pytest.raises(SpecError, match=r"qwen3_5_text has recurrent layers .* another result than the whole"):
        make_engine("inline", ARCHITECTURES["qwen3.5-delta-net"]())


@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("name", ["qwen3.5-delta-net", "lfm2-convolutions", "falcon-h1-both"])
def test_prompts_of_a_hybrid_are_computed_together_unless_padding_changes_what_they_say(
    name: str, is_masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = attention_masks.of_prompts_that_end_together

    def without(*given: Any) -> Any:
        return {**masks(*given), "linear_attention": None, "conv": None}

    if not is_masked:
        monkeypatch.setattr(attention_masks, "of_prompts_that_end_together", without)
    module = ARCHITECTURES[name]()
    engine = make_engine("inline", module, max_running=9, max_context=40)
    lengths, computed = (1, 2, 3, 5, 8, 8, 13), list[int]()
    logits = PrefillBatch.logits
    monkeypatch.setattr(
        PrefillBatch, "logits", lambda self, *given: computed.append(self.width) or logits(self, *given)
    )
    source = InprocBridge().source(1)
    told: list[Any] = []
    source.attached = told.append
    asked = prompts(*lengths)

    async def play() -> list[Completion]:
        await engine.attach(source)
        answers = (engine.generate(prompt, Sampling(max_tokens=12, temperature=0.0)) for prompt in asked)
        return await asyncio.gather(*answers)

    completions = finish(engine, play)
    assert [each.ids for each in completions] == [generated(module, prompt, 12) for prompt in asked]
    assert computed == ([13, 2] if is_masked else [13, 8, 5, 3, 2, 1])
    assert told[0]["lengths"]["engaged"] == is_masked
    assert told[0]["lengths"]["why_not"].startswith(
        "" if is_masked else "steps give another result than the whole text"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_that_enters_by_a_bias_is_noticed_in_16_bits_too(dtype: torch.dtype) -> None:
    """Of the first layer alone, and less than rounding in 16 bits hides."""

    def reported(std: float) -> Any:
        made = tiny(
            transformers.Lfm2Config, transformers.Lfm2ForCausalLM, num_key_value_heads=2, intermediate_size=96,
            num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], conv_bias=True,
        )  # fmt: skip
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.zeros_(parameter.data)
        torch.nn.init.normal_(made.model.layers[0].conv.in_proj.bias.data, std=std)
        return make_engine("inline", made.to(dtype)).passes.report["lengths"]

    assert reported(0.0) == {"requested": "together", "engaged": True, "why_not": ""}
    why_not = reported(0.1)["why_not"]
    assert why_not.startswith("padding before a prompt changes what Lfm2ShortConv computes (")
    assert 1e-4 < float(why_not.partition("(")[2].split()[0]) < 2e-2


def test_short_prompts_of_a_hybrid_are_not_padded_to_one_that_is_far_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, logits = list[list[int]](), PrefillBatch.logits
    monkeypatch.setattr(
        PrefillBatch, "logits", lambda self, *given: computed.append(self.lengths_P.tolist()) or logits(self, *given)
    )
    module, asked = ARCHITECTURES["lfm2-convolutions"](), [*prompts(3, 90, 5, 8), *prompts(3)]
    found = complete(
        make_engine("inline", module, max_running=9), [(each, Sampling(4, temperature=0.0)) for each in asked]
    )
    assert [each.ids for each in found] == [generated(module, prompt, 4) for prompt in asked]
    assert computed == [[90], [3, 5, 8]]  # the prompt of 3 tokens that came twice is computed once


def test_states_that_fill_their_memory_leave_room_for_fewer_requests_and_the_engine_says_so() -> None:
    module = ARCHITECTURES["qwen3.5-delta-net"]()
    row_bytes, _ = try_states(Head(module, VOCAB, None), 2, next(module.parameters()))
    engine = make_engine("inline", module, max_running=9, kv_gib=2 * 4 * row_bytes / 2**30, max_context=40)
    requests = [(prompt, Sampling(max_tokens=12, temperature=0.0)) for prompt in prompts(*range(1, 9))]
    source = InprocBridge().source(1)
    told: list[Any] = []
    source.attached = told.append

    async def play() -> list[Completion]:
        await engine.attach(source)
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    completions = finish(engine, play)
    assert [each.ids for each in completions] == [generated(module, prompt, 12) for prompt, _ in requests]
    assert told[0]["rows"] == {
        "requested": "9", "engaged": False, "why_not": "3: states of more rows do not fit into half of engine.kv_gib"
    }  # fmt: skip
    with pytest.raises(SpecError, match=r"engine\.kv_gib = .* holds fewer than two; raise it"):
        make_engine("inline", module, kv_gib=2 * 1.5 * row_bytes / 2**30)


def test_a_lack_of_memory_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(RecurrentCacheLayer, "update_conv_state", full)
    with pytest.raises(torch.OutOfMemoryError):
        make_engine("inline", ARCHITECTURES["lfm2-convolutions"]())
