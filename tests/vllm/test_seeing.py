"""A model that sees, in vLLM: it answers as transformers does, and its vision tower is proven with everything else."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_vllm_engine import Rig
from vllm_cpu import PYTHON, adapted, changed, full

from tandem.bridge.files.checkpoint import DiskBridge
from tandem.build import run_engines
from tandem.engine.server.child_process import Owned
from tandem.engine.server.engine import ServerEngine
from tandem.engine.vllm.tested_versions import has_package
from tandem.io.image_store import ImageStore
from tandem.model import served_weights
from tandem.ops.digest import fingerprints
from tandem.spec.engine import VllmEngineSpec
from tandem.text.model_images import ModelImages
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, PlacedImage, Sampling, Sent, Served, Shape

pytestmark = pytest.mark.skipif(
    PYTHON.is_file() and not has_package(str(PYTHON), "torchvision"),
    reason="this vLLM has no torchvision, which it needs for models that see",
)
NEAR, FAR = 1e-4, 1e-3  # nats, float32
MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Seeing(Rig):
    def __init__(self, path: Path) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
        tokenizer.save_pretrained(path)
        self.start, self.end, self.pad, video = tokenizer.convert_tokens_to_ids(MARKS)
        module = seeing(len(tokenizer), self.start, self.end, self.pad, video)
        module.save_pretrained(path)
        sizes = {"size": {"shortest_edge": 256, "longest_edge": 65536}, "patch_size": 8, "merge_size": 2}
        middle = {"temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        for kind, name in (("image", "Qwen2VLImageProcessorFast"), ("video", "Qwen3VLVideoProcessor")):
            told = {f"{kind}_processor_type": name, "processor_class": "Qwen3VLProcessor", **sizes, **middle}
            (path / f"{'video_' * (kind == 'video')}preprocessor_config.json").write_text(json.dumps(told))
        self.store = ImageStore(path / "images")
        self.images = ModelImages(path, self.store)
        super().__init__(path, module, images=self.images, num_ids=len(tokenizer))
        self.process = self.engine._process

    def image(self, width: int, height: int, seed: int = 0) -> str:
        from PIL import Image

        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
        content = io.BytesIO()
        Image.fromarray(drawn.numpy()).save(content, "PNG")
        return self.store.put(content.getvalue())

    def prompt(self, *parts: str | list[int]) -> tuple[list[int], Sampling]:
        """A string is an image, by its digest; a list is of text's ids."""
        ids, placed = list[int](), list[PlacedImage]()
        for part in parts:
            if isinstance(part, str):
                length = self.images.length(part)
                placed.append(PlacedImage(part, len(ids) + 1, self.images.grid(part), length))
                ids += [self.start, *[self.pad] * length, self.end]
            else:
                ids += part
        return ids, Sampling(max_tokens=12, temperature=1.0, seed=3, images=tuple(placed))

    def ask(self, *parts: str | list[int], **sampling: Any) -> tuple[list[int], Sampling, Completion]:
        ids, how = self.prompt(*parts)
        how = replace(how, **sampling)
        return ids, how, self.run(self.engine.generate(ids, how))

    def far_off(self, module: Any, ids: Sequence[int], how: Sampling, told: Completion) -> float:
        return (self.scored(module, ids, how, told.ids) - torch.tensor(told.logprobs)).abs().max().item()

    @torch.no_grad()
    def scored(self, module: Any, ids: Sequence[int], how: Sampling, answer: Sequence[int]) -> torch.Tensor:
        """By one forward of transformers. It finds an image's place by its token: here, one that this text lacks."""
        whole, kinds = torch.tensor([[*ids, *answer]]), torch.zeros(1, len(ids) + len(answer), dtype=torch.int32)
        for image in how.images:
            kinds[:, image.offset : image.offset + image.length] = 1
        given: dict[str, Any] = {}
        if how.images:
            given["pixel_values"] = torch.cat([self.images.pixels(image.digest) for image in how.images])
            given["image_grid_thw"] = torch.tensor([image.grid for image in how.images])
            given["mm_token_type_ids"] = kinds
        unused = min(set(range(self.start)) - set(whole[0].tolist()))
        module.config.image_token_id, module.base_model.rope_deltas = unused, None
        logits = module(input_ids=whole.masked_fill(kinds == 1, unused), **given).logits[0]
        module.config.image_token_id = self.pad
        rows = logits[len(ids) - 1 : -1].log_softmax(-1)
        return rows[torch.arange(len(answer)), torch.tensor(answer)]


def seeing(vocabulary: int, start: int, end: int, pad: int, video: int, seed: int = 0) -> Any:
    """Random, with weights so large that an image decides what is said of it."""
    turns = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True, "mrope_section": [6, 5, 5]}
    text = {
        "vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
        "rope_parameters": turns,
    }  # fmt: skip
    tower = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    marks = {
        "image_token_id": pad, "video_token_id": video, "vision_start_token_id": start, "vision_end_token_id": end,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **marks)
    module = transformers.Qwen3VLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.08 * torch.randn_like(parameter))
    return module


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    made = Seeing(tmp_path_factory.mktemp("seeing"))
    yield made
    made.close()


def test_it_sees_what_transformers_sees(rig: Seeing):
    """Two images; one that is resized; the same one twice; a pad that was sampled earlier; a pad and no image."""
    wide, high, odd = rig.image(48, 32), rig.image(32, 64, seed=1), rig.image(50, 37, seed=2)
    for parts in (
        [[5, 6], wide, [7], high, [8]],
        [odd, [9, 10]],
        [wide, [5], wide, [6]],
        [[5, 6], wide, [7, rig.pad, 11], high, [8, rig.pad, rig.pad, 9]],
        [[5, rig.pad, 6]],
    ):
        ids, how, told = rig.ask(*parts)
        assert rig.far_off(rig.module, ids, how, told) < NEAR
    ids, how, told = rig.ask([5], wide, [7], shape=Shape(min_p=1e-9))  # which vLLM streams
    assert rig.far_off(rig.module, ids, how, told) < NEAR


def test_images_that_change_places_are_other_images_there(rig: Seeing):
    """Of one shape, so that the prompts are equal, in one wave."""
    one, two = rig.image(48, 32, seed=3), rig.image(48, 32, seed=4)
    asked = [rig.prompt(*parts) for parts in ([one, [7], two, [8]], [two, [7], one, [8]])]
    assert asked[0][0] == asked[1][0]

    async def together() -> list[Completion]:
        return list(await asyncio.gather(*(rig.engine.generate(*each) for each in asked)))

    for (ids, how), (_, other), told in zip(asked, reversed(asked), rig.run(together()), strict=True):
        assert rig.far_off(rig.module, ids, how, told) < NEAR
        assert rig.far_off(rig.module, ids, other, told) > FAR


def test_a_run_s_own_engine_process_sees_and_takes_a_version(rig: Seeing, tmp_path: Path):
    settings = VllmEngineSpec(python=str(PYTHON), eager=True, max_context=128, max_running=8)
    options: Any = {"device": "cpu", "dtype": "float32", "thinking": False, "directory": tmp_path}
    command = run_engines.engine_command(settings, **options, readable=[tmp_path])
    seeing_command = partial(_with_images, command, rig.path / "images")
    engine = ServerEngine(Owned(seeing_command, model=str(rig.path), directory=tmp_path))
    ids, how = rig.prompt([5], rig.image(48, 32), [7])
    other = changed(rig.module, seed=9)

    async def asked_twice() -> tuple[Completion, Sent, Served, Completion]:
        buffers = [name for name, _ in rig.module.named_buffers()]
        bridge = DiskBridge(tmp_path / "versions", rig.path, buffers=buffers, deadline_s=60)
        try:
            await engine.attach(bridge.source(1))
            sent, served = await asyncio.gather(asyncio.to_thread(bridge.send, full(rig.module, 1)), engine.load(1))
            assert sent.fingerprints == served.fingerprints
            first = await engine.generate(ids, how)
            sent, served = await asyncio.gather(asyncio.to_thread(bridge.send, full(other, 2)), engine.load(2))
            return first, sent, served, await engine.generate(ids, how)
        finally:
            await engine.close()
            bridge.close()

    first, sent, served, second = rig.run(asked_twice())
    assert sent.fingerprints == served.fingerprints
    assert rig.far_off(rig.module, ids, how, first) < NEAR
    assert rig.far_off(other, ids, how, second) < NEAR


def _with_images(command: Any, directory: Path, *which: Any) -> list[str]:
    return [*command(*which), "--images", str(directory)]


@pytest.mark.parametrize("mode", ["disk", "broadcast"])
def test_a_version_is_proven_with_its_vision_tower(rig: Seeing, mode: str):
    parts, bridge = ([5], rig.image(48, 32), [7]), rig.bridge(mode)
    rig.ask(*parts)
    other = changed(rig.module, seed=len(mode))
    sent, served = rig.publish(bridge, other)
    assert sent.fingerprints == served.fingerprints == rig.run(rig.engine.fingerprints())
    assert {"model.visual.patch_embed.proj.weight", "lm_head.weight"} < set(served.fingerprints)
    ids, how, told = rig.ask(*parts)
    assert rig.far_off(other, ids, how, told) < NEAR, "and no features of the older tower were kept"
    assert rig.far_off(rig.module, ids, how, told) > FAR
    rig.publish(bridge, rig.module)
    bridge.close()


def test_a_request_with_images_continues_under_a_version_with_another_tower(rig: Seeing):
    bridge, old = rig.bridge("broadcast"), rig.version + 1
    rig.publish(bridge, rig.module)
    ids, how = rig.prompt([5], rig.image(48, 32), [7], rig.image(32, 64, seed=1))
    how, other = replace(how, max_tokens=80), changed(rig.module, seed=11)

    async def begun() -> asyncio.Task[Completion]:
        told: list[int] = []
        asking = asyncio.ensure_future(rig.engine.generate(ids, how, on_token=lambda token, *_: told.append(token)))
        while len(told) < 5:
            await asyncio.sleep(0.002)
        await rig.engine.sleep()
        return asking

    asking = rig.run(begun())
    rig.publish(bridge, other)
    told: Completion = rig.run(asking)
    before = told.versions.count(old)
    assert 5 <= before < 80
    gaps = [(rig.scored(each, ids, how, told.ids) - torch.tensor(told.logprobs)).abs() for each in (rig.module, other)]
    assert max(gaps[0][:before].max(), gaps[1][before:].max()) < NEAR
    assert gaps[0][before:].max() > FAR
    rig.publish(bridge, rig.module)
    bridge.close()


@pytest.mark.parametrize("mode", ["adapter", "adapter_broadcast"])
def test_an_adapter_of_the_text_is_served_beside_a_tower_that_stays(rig: Seeing, mode: str):
    bridge = rig.bridge(mode)
    if mode == "adapter":
        source = bridge.source()
        rig.run(rig.engine.attach(source))
        assert source.reply["base"] == fingerprints(dict(served_weights.base(rig.module)))
    for seed in (1, 2):
        trained = adapted(rig.module, seed=seed, targets=TARGETS)
        sent, served = rig.publish(bridge, trained)
        assert sent.fingerprints == served.fingerprints
        ids, how, told = rig.ask([5], rig.image(48, 32), [7])
        assert rig.far_off(trained.base_model.model, ids, how, told) < NEAR
        assert rig.far_off(rig.module, ids, how, told) > FAR
    bridge.close()
