"""The embedded engine on a model that sees: every logprob is that of one plain forward of transformers."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import Request, complete, finish
from seeing import PAD, asked, engine_of, qwen3_vl, scored

from tandem.bridge.inproc import InprocBridge
from tandem.errors import EngineError, ImageError, SamplingRefused, SyncError
from tandem.ops.digest import fingerprints
from tandem.ops.named_tensors import live_tensors
from tandem.protocols import why_not_sampled
from tandem.types import Completion, Shape, Weights

BOTH = pytest.mark.parametrize("eager", [True, False], ids=["masks", "no masks"])


def gap(module: Any, requests: Sequence[Request], completions: Sequence[Completion]) -> float:
    each = zip(requests, completions, strict=True)
    return max(
        abs(ours - theirs)
        for (prompt, sampling), completion in each
        for ours, theirs in zip(completion.logprobs, scored(module, prompt, completion, sampling), strict=True)
    )


def started(engine: Any, requests: Sequence[Request], made: list[int]) -> list[asyncio.Task[Completion]]:
    """Ask for completions. `made` gets their tokens as they come."""
    tell = lambda token, *_: made.append(token)  # noqa: E731
    return [asyncio.create_task(engine.generate(*each, on_token=tell)) for each in requests]


@BOTH
def test_prompts_of_no_one_and_two_images_share_a_wave_and_rows_move(eager: bool):
    """Requests end at different times, so that rows move into the gaps."""
    module, engine = qwen3_vl(), None
    requests = [
        asked(9, max_tokens=3), asked(3, "cat", 4, max_tokens=5), asked(2, "cat", 3, "map", 5, max_tokens=20, seed=1),
        asked(30, max_tokens=18, seed=2), asked("map", 2, max_tokens=25, seed=3), asked(5, "dog", max_tokens=8),
    ]  # fmt: skip
    engine = engine_of(module, max_running=5, eager=eager)
    assert engine.passes.steps is None or not engine.passes.steps.why_masked
    completions = complete(engine, requests)
    assert sum(len(each.ids) for each in completions) > 60
    assert gap(module, requests, completions) < 1e-4
    for request, together in zip(requests[:4], completions, strict=False):
        (alone,) = complete(engine_of(module, eager=eager), [request])
        assert alone.ids == together.ids
        assert alone.logprobs == pytest.approx(together.logprobs, abs=1e-5)


def test_equal_tokens_with_another_image_are_another_prompt():
    """Of equal ones each is computed once."""
    module, seen = qwen3_vl(), list[int]()
    requests = [asked(3, name, 4, seed=seed) for seed in range(3) for name in ("cat", "dog")]
    engine = engine_of(module)
    module.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    assert requests[0][0] == requests[1][0]
    completions = complete(engine, requests)
    assert seen[0] == 2
    assert gap(module, requests, completions) < 1e-4


@BOTH
@pytest.mark.parametrize("on_update", ["follow", "pin"])
def test_a_new_version_finds_the_images_where_they_were(on_update: str, eager: bool):
    """The prompt is prefilled again with the tokens that were sampled, or ends on a twin."""
    module, bridge = qwen3_vl(), InprocBridge()
    before, engine = copy.deepcopy(module), engine_of(module, eager=eager)
    requests = [asked(2, "cat", 3, "map", max_tokens=24, on_update=on_update), asked(4, max_tokens=24)]

    async def publish(version: int) -> None:
        bridge.send(Weights(version, "live", lambda: live_tensors(module)))
        await engine.load(version)

    async def play() -> list[Completion]:
        made = list[int]()
        await engine.attach(bridge.source(1))
        await publish(1)
        tasks = started(engine, requests, made)
        while len(made) < 8:
            await asyncio.sleep(0)
        if on_update == "follow":
            await engine.sleep()
            for tensor in module.model.language_model.parameters():
                tensor.add_(torch.randn_like(tensor), alpha=0.05)
        await publish(2)
        return await asyncio.gather(*tasks)

    completions = finish(engine, play)
    versions = [1, 2] if on_update == "follow" else [1]
    assert [span.version for span in completions[0].spans] == versions
    for (prompt, sampling), completion in zip(requests, completions, strict=True):
        under = {1: scored(before, prompt, completion, sampling), 2: scored(module, prompt, completion, sampling)}
        exact = [under[version][at] for at, version in enumerate(completion.versions)]
        assert completion.logprobs == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("way", [{"share": "other"}, {"urgent": True}], ids=["share", "urgent"])
def test_a_request_that_comes_between_finds_its_images_and_so_do_the_others(way: dict[str, Any]):
    """One of those that run goes back to its queue, and is prefilled again; beside an urgent one both stay."""
    module = qwen3_vl()
    first = [asked(4, "map", 2, max_tokens=24, seed=seed) for seed in range(2)]
    late = asked(2, "cat", 3, max_tokens=4, **way)
    engine, made = engine_of(module, max_running=2), list[int]()

    async def play() -> list[Completion]:
        tasks = started(engine, first, made)
        while len(made) < 8:
            await asyncio.sleep(0)
        other = await engine.generate(*late)
        assert not any(task.done() for task in tasks)
        return [*await asyncio.gather(*tasks), other]

    assert gap(module, [*first, late], finish(engine, play)) < 1e-4


@BOTH
def test_a_sampled_token_of_images_is_a_token_like_others(eager: bool):
    """In decoding, and in the prefill after another request came between."""
    module, shape = qwen3_vl(), Shape(logit_bias=((PAD, 4.0),))
    requests = [asked(3, "cat", 4, max_tokens=30, shape=shape, seed=seed) for seed in range(2)]
    engine, made = engine_of(module, eager=eager, max_running=2), list[int]()

    async def play() -> list[Completion]:
        tasks = started(engine, requests, made)
        while len(made) < 24:
            await asyncio.sleep(0)
        await engine.generate(*asked(6, max_tokens=1, share="other"))
        assert not any(task.done() for task in tasks)
        return await asyncio.gather(*tasks)

    completions = finish(engine, play)
    assert all(PAD in completion.ids[:10] for completion in completions)
    assert gap(module, requests, completions) < 1e-4


def test_an_adapter_beside_the_base_sees_the_same_images():
    module, layer = qwen3_vl(), "model.language_model.layers.1.self_attn.q_proj"
    base, adapted = copy.deepcopy(module), copy.deepcopy(module)
    a, b = torch.randn(4, 64) * 0.3, torch.randn(128, 4) * 0.3
    adapted.get_submodule(layer).weight += b @ a
    tensors = {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
    requests = [asked(2, "cat", 3, seed=seed) for seed in range(4)]
    engine = engine_of(module)

    async def play() -> list[Completion]:
        await engine.put_adapter("tuned", tensors, {"r": 4}, fingerprints(tensors))
        names = ("", "tuned") * 2
        return await asyncio.gather(
            *(engine.generate(*each, adapter=name) for each, name in zip(requests, names, strict=True))
        )

    completions = finish(engine, play)
    assert gap(base, requests[::2], completions[::2]) < 1e-4
    assert gap(adapted, requests[1::2], completions[1::2]) < 1e-4
    assert gap(base, requests[1::2], completions[1::2]) > 1e-2


def test_an_adapter_of_the_tower_is_refused():
    engine, layer = engine_of(qwen3_vl()), "base_model.model.model.visual.merger.linear_fc2"
    tensors = {f"{layer}.lora_{side}.weight": torch.ones(1, 1) for side in "AB"}
    with pytest.raises(SyncError, match=f"adapter 'odd': '{layer}.lora_A.weight' is of the vision tower, which stays"):
        finish(engine, lambda: engine.put_adapter("odd", tensors, {"r": 1}, {}))


# --- refusals


def moved(request: Request, **changes: Any) -> Request:
    prompt, sampling = request
    return prompt, replace(sampling, images=(replace(sampling.images[0], **changes), *sampling.images[1:]))


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (moved(asked(3, "cat", 2), offset=2), "images: image cat: the prompt has no place for its 6 tokens at 2"),
        (moved(asked(3, "cat"), offset=4), "images: image cat: the prompt has no place for its 6 tokens at 4"),
        (moved(asked(1, "cat", "dog"), offset=7), "images: image dog: the prompt has no place for its 6 tokens at 7"),
        (
            moved(asked(3, "cat"), digest="map"),
            "images: image map: it has 8 tokens of grid (1, 8, 4), not 6 of (1, 4, 6)",
        ),
    ],
    ids=["text there", "beyond the end", "twice", "another size"],
)
def test_images_that_cannot_stand_so_are_refused(request_: Request, why: str):
    with pytest.raises(SamplingRefused, match=re.escape(why)):
        complete(engine_of(qwen3_vl()), [request_])


def test_an_image_that_cannot_be_read_ends_its_own_request_alone():
    engine, whole = engine_of(qwen3_vl()), asked(3, "cat")

    async def play() -> list[Any]:
        both = (engine.generate(*whole), engine.generate(*moved(whole, digest="gone")))
        return await asyncio.gather(*both, return_exceptions=True)

    answered, failed = finish(engine, play)
    assert len(answered.ids) == 12
    assert isinstance(failed, ImageError)


def test_an_engine_without_a_tower_refuses_images():
    engine, request = engine_of(qwen3_vl(), vision=None), asked(3, "cat")
    assert why_not_sampled(engine, request[1]) == "images: this engine takes text only"
    with pytest.raises(SamplingRefused, match="images: this engine takes text only"):
        complete(engine, [request])


def test_a_score_of_ids_alone_refuses_places_of_images():
    engine = engine_of(qwen3_vl())

    async def play() -> list[float]:
        with pytest.raises(EngineError, match="these ids have a place of an image, and only text is scored"):
            await engine.score(asked(3, "cat")[0])
        return await engine.score(asked(5)[0])

    assert len(finish(engine, play)) == 4
