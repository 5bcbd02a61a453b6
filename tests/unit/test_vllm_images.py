"""What vLLM is given of images, and how names of a model that sees are found; without vLLM."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tandem.engine.vllm.engine import VllmEngine
from tandem.engine.vllm.image_features import ImageFeatures
from tandem.engine.vllm.options import VllmOptions
from tandem.errors import EngineError, ImageError, SamplingRefused, SyncError
from tandem.io.engine_messages import encoded
from tandem.serve.engine.service import SamplingBody
from tandem.types import PlacedImage, Sampling
from tandem.vllm_worker.checkpoint_names import CheckpointNames
from tandem.vllm_worker.served_memory import layout_of

PAD = 9


class Images:
    pad_id = PAD

    def grid(self, digest: str) -> tuple[int, int, int]:
        return (1, 2, 4)

    def length(self, digest: str) -> int:
        return 2

    def pixels(self, digest: str) -> torch.Tensor:
        return torch.arange(24.0).view(8, 3) + ord(digest[0])

    def key(self, digest: str) -> str:
        return f"key of {digest}"


def placed(digest: str, offset: int) -> PlacedImage:
    return PlacedImage(digest, offset, (1, 2, 4), 2)


def test_siblings_that_ask_at_the_same_time_wait_for_one_message_of_their_image():
    class Counted(Images):
        made = 0

        def pixels(self, digest: str) -> torch.Tensor:
            self.made += 1
            time.sleep(0.02)
            return super().pixels(digest)

    source = Counted()
    features = ImageFeatures(source, "float32")

    async def ask() -> list[dict[str, Any]]:
        asked = (asyncio.to_thread(features.of, [1, PAD, PAD], [placed("a", 1)]) for _ in range(4))
        return await asyncio.gather(*asked)

    told = asyncio.run(ask())
    assert source.made == 1
    assert all(each == told[0] for each in told)


def test_an_image_is_sent_as_vllm_reads_it_and_named_by_its_content():
    told = ImageFeatures(Images(), "float32").of([1, PAD, PAD, 2, PAD, PAD], [placed("a", 1), placed("b", 4)])
    assert told["mm_placeholders"] == {"image": [{"offset": 1, "length": 2}, {"offset": 4, "length": 2}]}
    first, second = (msgspec.msgpack.decode(base64.b64decode(each)) for each in told["kwargs_data"]["image"])
    dtype, shape, raw = first["pixel_values"]["data"]
    assert (dtype, shape, raw.code) == ("float32", [8, 3], 3)
    assert torch.equal(torch.frombuffer(bytearray(raw.data), dtype=torch.float32).view(8, 3), Images().pixels("a"))
    assert first["pixel_values"]["field"] == ["flat", {"keep_on_cpu": False, "slices": [[0, 8, None]], "dim": 0}]
    grid = first["image_grid_thw"]
    assert (grid["data"][:2], grid["field"]) == (["int64", [3]], ["batched", {"keep_on_cpu": True}])
    assert grid["data"][2].data == torch.tensor([1, 2, 4]).numpy().tobytes()
    assert second["pixel_values"]["data"][2].data != raw.data

    moved = ImageFeatures(Images(), "float32").of([PAD, PAD, 1, 2, PAD, PAD], [placed("b", 0), placed("a", 4)])
    assert moved["mm_hashes"]["image"] == told["mm_hashes"]["image"][::-1]
    rounded = ImageFeatures(Images(), "bfloat16").of([PAD, PAD], [placed("a", 0)])
    assert rounded["mm_hashes"]["image"][0] not in told["mm_hashes"]["image"]
    half = msgspec.msgpack.decode(base64.b64decode(rounded["kwargs_data"]["image"][0]))["pixel_values"]["data"]
    assert (half[0], len(half[2].data)) == ("bfloat16", 8 * 3 * 2)


@pytest.mark.parametrize(
    "image", [placed("a", 0), placed("a", 3), PlacedImage("a", 1, (1, 4, 2), 2), PlacedImage("a", 1, (1, 2, 4), 3)]
)
def test_an_image_without_its_place_in_the_prompt_is_refused(image: PlacedImage):
    with pytest.raises(ImageError, match=r"^image a: (the prompt has no place for|it has 2 tokens)"):
        ImageFeatures(Images(), "auto").of([1, PAD, PAD, 2], [image])


def test_a_model_that_sees_gets_pixels_as_they_are_or_its_vllm_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    options = VllmOptions(str(tmp_path), "python")
    arguments = options.arguments(tmp_path / "socket", "0.32.0")
    assert "--no-mm-device-do-normalize" in arguments
    assert arguments[arguments.index("--limit-mm-per-prompt") + 1] == '{"video": 0}'
    with pytest.raises(EngineError, match=r"vLLM 0\.26\.0 was not tested with a model that sees"):
        options.arguments(tmp_path / "socket", "0.26.0")
    (tmp_path / "config.json").write_text("{}")
    arguments = VllmOptions(str(tmp_path), "python").arguments(tmp_path / "socket", "0.26.0")
    assert not [each for each in arguments if "mm" in each]


def test_an_engine_without_images_refuses_them():
    process: Any = SimpleNamespace(options=VllmOptions("model", "python"))
    sampling = Sampling(max_tokens=1, images=(placed("a", 0),))
    blind = VllmEngine(process, end_ids=frozenset(), num_ids=0)
    assert blind.why_not(Sampling(max_tokens=1)) == ""
    with pytest.raises(SamplingRefused, match=r"^images: this vLLM was started without"):
        asyncio.run(blind.generate([PAD, PAD], sampling))


def test_images_go_to_an_engine_s_own_process_by_digest_and_place():
    asked = Sampling(max_tokens=1, images=(PlacedImage("ab" * 32, 1, (1, 2, 4), 2),))
    sent: dict[str, Any] = json.loads(encoded(asdict(asked)))
    for name in ("shape", "top_logprobs", "on_update"):
        del sent[name]
    assert SamplingBody.model_validate_json(json.dumps(sent)).sampling() == asked


class Qwen3VLForConditionalGeneration(torch.nn.Module):
    hf_to_vllm_mapper = SimpleNamespace(
        orig_to_new_prefix={
            "model.visual.": "visual.",
            "lm_head.": "language_model.lm_head.",
            "model.language_model.": "language_model.model.",
        }
    )


class Conv3dLayer(torch.nn.Conv3d):
    __module__ = "vllm.conv"


class MMEncoderAttention(torch.nn.Module):
    __module__, fp8_enabled = "vllm.attention", False


def test_names_of_a_model_that_sees_are_those_of_its_checkpoint():
    model: Any = Qwen3VLForConditionalGeneration()
    names = CheckpointNames(model)
    for original, served in (
        ("lm_head.weight", "language_model.lm_head.weight"),
        ("model.visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"),
        ("model.language_model.layers.1.mlp.up_proj", "language_model.model.layers.1.mlp.up_proj"),
    ):
        assert (names.served(original), names.original(served)) == (served, original)
    with pytest.raises(SyncError, match=r"'lm_head\.weight' has 0 possible names"):
        names.original("lm_head.weight")  # whose checkpoint's name would be served elsewhere
    other = SimpleNamespace(hf_to_vllm_mapper=model.hf_to_vllm_mapper)
    with pytest.raises(SyncError, match=r"names its weights otherwise .* \(by prefix\)"):
        CheckpointNames(other)


def test_the_memory_of_a_vision_tower_is_found_and_quantised_attention_refused():
    model: Any = Qwen3VLForConditionalGeneration()
    model.visual = torch.nn.Module()
    model.visual.proj = Conv3dLayer(3, 4, (2, 2, 2))
    model.visual.pos_embed, model.visual.attn = torch.nn.Embedding(5, 4), MMEncoderAttention()
    forms = layout_of(model).forms()
    assert forms["model.visual.proj.weight"] == ("float32", [4, 3, 2, 2, 2])
    assert set(forms) == {f"model.visual.{name}" for name in ("proj.weight", "proj.bias", "pos_embed.weight")}
    model.visual.attn.fp8_enabled = True
    with pytest.raises(SyncError, match=r"'visual\.attn' is quantised attention"):
        layout_of(model)
