"""Models from GGUF files: what is loaded is the file's model to the bit, or the reason why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from gguf_files import KINDS, SIZES, TOKENS, random_model, write  # noqa: E402

from tandem.errors import SpecError  # noqa: E402
from tandem.io.gguf.directory import model_directory  # noqa: E402
from tandem.io.model_path_check import refuse_no_model  # noqa: E402
from tandem.model.load_checkpoint import load_model  # noqa: E402
from tandem.text.renderer import Renderer  # noqa: E402
from tandem.text.tokenizer import light_tokenizer, load_tokenizer  # noqa: E402


@pytest.fixture(autouse=True)
def _in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def configs() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Of each architecture a tiny config, and what its GGUF file says beside the common fields."""
    from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config

    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    theta = {"rope_type": "default", "rope_theta": 5e5}
    far, near = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, {"rope_type": "default", "rope_theta": 1e4}
    gemma = {"query_pre_attn_scalar": 32, "head_dim": 32, "sliding_window": 16}
    rope = {"rope.freq_base": 5e5}
    linear = {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    return {
        "llama": (LlamaConfig(**SIZES, **ids, rope_parameters=theta), rope),
        "qwen2": (Qwen2Config(**SIZES, **ids, rope_parameters=theta), rope),
        "qwen3": (
            Qwen3Config(**SIZES | {"tie_word_embeddings": False}, **ids, head_dim=32, rope_parameters=theta),
            rope,
        ),
        "gemma2": (
            Gemma2Config(**SIZES, **ids, **gemma),
            {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 16},
        ),
        "gemma3": (
            Gemma3TextConfig(
                **SIZES, **ids, **gemma, rope_parameters={"sliding_attention": near, "full_attention": far}
            ),
            linear | {"attention.sliding_window": 16},
        ),
        "phi3": (
            Phi3Config(**SIZES, **ids, sliding_window=None, original_max_position_embeddings=128),
            {"rope.scaling.type": "none"},
        ),
    }


def written(place: Path, arch: str = "llama", kind: str = "F32", **fields: Any) -> tuple[Path, Any]:
    config, said = configs()[arch]
    model = random_model(config)
    return write(place, arch, model, kind, {**{f"{arch}.{key}": value for key, value in said.items()}, **fields}), model


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_a_gguf_file_is_the_model_that_it_was_written_from(arch: str, tmp_path: Path):
    path, model = written(tmp_path / "m.gguf", arch)
    loaded = load_model(str(path), "main", "eager")
    assert type(loaded) is type(model)
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert (loaded(ids).logits - model(ids).logits).abs().max() < 1e-6
    if not arch.startswith("gemma"):  # x + 1 - 1 is not x
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_few_bits_are_dequantised_as_transformers_does(kind: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    path, _ = written(tmp_path / "m.gguf", kind=kind)
    reference: Any = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=path.name, dtype=torch.float32)
    ours = load_model(str(tmp_path), "main", "sdpa").state_dict()  # the folder, which holds one file
    theirs = reference.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_a_file_is_written_once_and_again_when_it_has_changed(tmp_path: Path):
    path, _ = written(tmp_path / "m.gguf")
    first = model_directory(str(path))
    inode = (Path(first) / "config.json").stat().st_ino
    assert model_directory(str(tmp_path)) == first
    assert (Path(first) / "config.json").stat().st_ino == inode
    written(tmp_path / "m.gguf", "qwen2")
    second = model_directory(str(path))
    assert second != first
    assert json.loads((Path(second) / "config.json").read_text())["model_type"] == "qwen2"


def test_tokenizer_template_and_special_tokens_are_those_of_the_file(tmp_path: Path):
    path, _ = written(tmp_path / "m.gguf", **{"tokenizer.ggml.eot_token_id": 0})
    for tokenizer in (load_tokenizer(str(path)), light_tokenizer(str(path))):
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (*TOKENS[1:3], TOKENS[2])
        assert tokenizer.get_vocab() == {token: number for number, token in enumerate(TOKENS)}
        renderer = Renderer(tokenizer)
        assert renderer.end_ids == {2}
        text = "<|im_start|>user\nhello hello 12<|im_end|>\n<|im_start|>assistant\n"
        ids = renderer.prompt([{"role": "user", "content": "hello hello 12"}])
        assert tokenizer.decode(ids) == text
        assert [tokenizer.convert_ids_to_tokens(i) for i in ids][5:13] == [
            "Ċ",
            "hello",
            "Ġhello",
            "Ġ",
            "1",
            "2",
            *TOKENS[2:3],
            "Ċ",
        ]
    generation = json.loads((Path(model_directory(str(path))) / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": [0, 2]}


def test_spaces_before_a_digit_stay_together_as_in_the_model_s_own_tokenizer(tmp_path: Path):
    """`smollm` is Digits, then ByteLevel: without Digits first, two spaces before a digit would be two pieces."""
    path, _ = written(tmp_path / "m.gguf")
    cut: Any = load_tokenizer(str(path)).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in cut.pre_tokenize_str("a  12 b")] == ["a", "ĠĠ", "1", "2", "Ġb"]


def test_a_sentencepiece_vocabulary_is_rebuilt_with_its_merges(tmp_path: Path):
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + [-10.0] * 5 + [-1.0, -2.0, -3.0, -4.0, -5.0]
    said = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": None, "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.padding_token_id": None, "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    path, _ = written(tmp_path / "m.gguf", **said)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello hello\n")) == ["<s>", "▁hello", "▁hello", "<0x0A>"]
    assert tokenizer.decode(tokenizer.encode("hello é", add_special_tokens=False)) == "hello é"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a mixture": ({"llama.expert_count": 8}, "a mixture of 8 experts, which is not read from GGUF files"),
    "a part": ({"split.count": 3}, "one part of several; join them with"),
    "another pre-tokenizer": ({"tokenizer.ggml.pre": "odd"}, "its pre-tokenizer is 'odd'"),
    "no pre-tokenizer": ({"tokenizer.ggml.pre": None}, "its pre-tokenizer is 'default'"),
    "another tokenizer": ({"tokenizer.ggml.model": "t5"}, "its tokenizer is 't5'"),
    "no end": ({"tokenizer.ggml.eos_token_id": None}, "no end of sequence"),
    "a rotary scaling": ({"llama.rope.scaling.type": "longrope"}, "its rotary scaling is 'longrope'"),
    "a missing field": ({"llama.block_count": None}, "its metadata lacks llama.block_count"),
    "an odd number of types": ({"tokenizer.ggml.token_type": KINDS[1:]}, "no tokenizer, or a damaged one"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused_before_anything_is_written(what: str, tmp_path: Path):
    fields, why = REFUSED[what]
    path, _ = written(tmp_path / "m.gguf", **fields)
    with pytest.raises(SpecError, match=f"^model.path = '{path}': .*{why}"):
        refuse_no_model(str(path))
    assert not (tmp_path / ".tandem").exists()


def test_another_architecture_and_a_torn_file_are_refused_by_name(tmp_path: Path):
    path, _ = written(tmp_path / "m.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"llama", b"mamba"))
    with pytest.raises(
        SpecError, match="its architecture is 'mamba'; those that are read from GGUF files are llama, qw"
    ):
        refuse_no_model(str(path))
    for kept in (20, 3000, len(whole) - 4000):
        path.write_bytes(whole[:kept])
        with pytest.raises(SpecError, match=r"damaged|ends before its last tensor"):
            model_directory(str(path))
    assert list((tmp_path / ".tandem" / "models").glob("*/config.json")) == []


def test_a_folder_with_two_files_asks_for_one(tmp_path: Path):
    written(tmp_path / "a.gguf")
    written(tmp_path / "b.gguf")
    with pytest.raises(SpecError, match=r"holds 2 GGUF files; name one, such as .*a\.gguf"):
        refuse_no_model(str(tmp_path))


def test_llama_3_rotary_scaling_is_found_from_its_factors(tmp_path: Path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = random_model(LlamaConfig(**SIZES | {"max_position_embeddings": 131072}, head_dim=64, rope_parameters=rope))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    unscaled = 1.0 / 5e5 ** (torch.arange(0, 64, 2) / 64)
    model.register_parameter("rope_freqs", torch.nn.Parameter(unscaled / scaled))
    path = write(tmp_path / "m.gguf", "llama", model, fields={"llama.rope.freq_base": 5e5})
    said = json.loads((Path(model_directory(str(path))) / "config.json").read_text())
    assert said["rope_parameters"] == rope
