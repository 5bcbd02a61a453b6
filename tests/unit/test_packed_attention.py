"""Spans instead of masks. The kernel itself runs on a GPU only (tests/gpu); what it is told is checked here, by plain
attention that is written from the spans alone."""

from __future__ import annotations

import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.algo import sft
from tandem.build import built_model, engaged
from tandem.errors import SpecError
from tandem.model import forward
from tandem.model.presets import make_model
from tandem.ops import packed_attention
from tandem.ops.byte_sizes import shares_unmasked
from tandem.ops.lm_head import Head
from tandem.ops.packed_attention import NAME, attend, pack
from tandem.spec.load import parse_spec
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.types import NO_VERSION, Spans, Trajectory


def by_spans(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None, window: int | None
) -> Tensor:
    """One span after the other; the diagonal ends at the last key."""
    starts_q, starts_k, longest_q, longest_k, _ = spans
    assert [longest_q, longest_k] == [starts_q.diff().max(), starts_k.diff().max()]
    groups = query.shape[1] // key.shape[1]
    parts: list[Tensor] = []
    for i in range(len(starts_q) - 1):
        q, k, v = query[starts_q[i] : starts_q[i + 1]], *(each[starts_k[i] : starts_k[i + 1]] for each in (key, value))
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
        back = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        seen = (back >= 0) & (back < (window or len(k)))
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


def rows(rng: random.Random) -> tuple[Tensor, Tensor]:
    """Plain sequences and trees, one behind the other, and padding."""
    width, segments, parents = 40, list[list[int]](), list[list[int]]()
    for _ in range(4):
        row, seen, number = list[int](), list[int](), 0
        while len(row) < 24:
            trunk, branches = number, rng.choice([0, 0, 1, 2, 3])
            for index in range(branches + 1):
                length = rng.randint(1, 5)
                row += [number] * length
                seen += [trunk if branches and index else number] * length
                number += 1
        padding = width - len(row[:width])
        segments.append(row[:width] + [-1] * padding)
        parents.append(seen[:width] + [-1] * padding)
    return torch.tensor(segments), torch.tensor(parents)


@pytest.mark.parametrize("seed", range(20))
def test_spans_say_what_the_mask_says(seed: int) -> None:
    segments_BT, parents_BT = rows(random.Random(seed))
    packed = pack(segments_BT, parents_BT, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(segments_BT.shape[0], 4, segments_BT.shape[1], 8, generator=generator)
    key, value = (torch.randn(segments_BT.shape[0], 2, segments_BT.shape[1], 8, generator=generator) for _ in range(2))

    order = torch.arange(segments_BT.shape[1])
    same = (segments_BT[:, :, None] == segments_BT[:, None, :]) | (parents_BT[:, :, None] == segments_BT[:, None, :])
    masked = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=(same & (order[:, None] >= order))[:, None], enable_gqa=True
    )
    want = masked.transpose(1, 2).flatten(0, 1)[packed.tokens_T]

    flat = (each.transpose(1, 2).flatten(0, 1)[packed.tokens_T].transpose(0, 1)[None] for each in (query, key, value))
    query_1HTD, key_1HTD, value_1HTD = flat
    gather = packed.spans[4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "kernel", by_spans)
        got, _ = attend(None, query_1HTD, key_1HTD, value_1HTD, None, spans=packed.spans)
    torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-5)
    assert (gather is None) == bool((segments_BT == parents_BT).all())
    real = (segments_BT >= 0).flatten()
    assert torch.equal(packed.tokens_T, real.nonzero().flatten())
    assert torch.equal(packed.place_of[packed.tokens_T], torch.arange(len(packed.tokens_T)))


def plain() -> Any:
    return make_model("tiny", byte_tokenizer(), 0, "sdpa").eval()


def tiny() -> Any:
    module = plain()
    packed_attention.engage(module)
    return module


def test_a_model_that_hands_spans_on_passes_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "kernel", by_spans)
    assert forward.try_spans(tiny()) == ""


def test_a_model_that_drops_them_does_not() -> None:
    """A packed row would be one long sequence to it."""
    module = tiny()
    theirs = type(module.model.layers[0]).forward

    def deaf(self: Any, *args: Any, spans: Any = None, attention_mask: Any = None, **given: Any) -> Any:
        return theirs(self, *args, attention_mask=None, **given)

    for layer in module.model.layers:
        layer.forward = deaf.__get__(layer)
    assert "affect each other" in forward.try_spans(module)


def test_a_kernel_that_does_not_see_the_prompt_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: Any, window: Any) -> Tensor:
        starts = spans[0]
        own = spans[4]
        assert own is not None
        ends = spans[1][1:] - starts.diff()
        keep = torch.cat([torch.arange(int(e), int(e + n)) for e, n in zip(ends, starts.diff(), strict=True)])
        longest = spans[2]
        return by_spans(query, key[keep], value[keep], (starts, starts, longest, longest, None), scale, window)

    monkeypatch.setattr(packed_attention, "kernel", blind)
    assert "ignores its prompt" in forward.try_spans(tiny())


def test_what_is_packed_with_the_batch_is_not_read_back_from_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "kernel", by_spans)
    groups = [
        [recorded([*range(9), *range(50, 50 + length)], 9) for length in (4, 7, 1)],
        [recorded(list(range(20, 33)), 5)],
    ]
    batch = make_batch(
        groups, sft.make(), micro_tokens=64, version=0, shares=shares_unmasked, device=torch.device("cpu")
    )
    (micro,) = batch.micro
    assert batch.metrics["tokens/shared"] == 18
    masked, packed = (forward.Forward(plain(), packed=False, compiled=False) for _ in range(2))
    packed.why_masked = ""
    with torch.no_grad():
        hidden_TH, at_N = masked.hidden(Head(plain(), 256), micro)
        want_NH = hidden_TH[at_N]
        micro.segments_BT, micro.parents_BT = micro.segments_BT.to("meta"), micro.parents_BT.to("meta")
        hidden_TH, at_N = packed.hidden(Head(tiny(), 256), micro)
    assert len(hidden_TH) == batch.metrics["tokens/computed"] == micro.ids_BT.numel() - 8
    torch.testing.assert_close(hidden_TH[at_N], want_NH, rtol=1e-4, atol=1e-5)


def recorded(ids: list[int], first: int) -> Trajectory:
    return Trajectory(ids, [i >= first for i in range(len(ids))], [0.0] * len(ids), [NO_VERSION] * len(ids))


def test_without_spans_it_is_plain_attention() -> None:
    with_name, without = tiny(), plain()
    assert with_name.config._attn_implementation == NAME
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(with_name(input_ids=ids).logits, without(input_ids=ids).logits)


def test_a_cpu_is_told_why_not() -> None:
    module = make_model("tiny", byte_tokenizer(), 0, "sdpa")
    made = forward.Forward(module, packed=True, compiled=True)
    assert made.why_masked == "the kernel is for GPUs" == made.why_not_compiled
    assert module.config._attn_implementation == "sdpa"
    assert not made.shares_freely


def quickstart(**model: Any) -> dict[str, Any]:
    raw = tomllib.loads(Path("examples/quickstart.toml").read_text())
    return {**raw, "model": {**raw["model"], **model}}


def test_a_run_says_that_it_was_asked_for_and_is_not_had() -> None:
    spec = parse_spec(quickstart(attention="packed", compile=True))
    made = built_model.model(spec.model, spec.precision, 0, built_model.pick_device("cpu"))
    told = {name: (asked, engaged, why_not) for name, asked, engaged, why_not in engaged.options(spec, made)}
    assert told["model.attention"] == ("packed", False, "the kernel is for GPUs")
    assert told["model.compile"] == (True, False, "the kernel is for GPUs")
    assert "model.compile" not in {name for name, *_ in engaged.options(parse_spec(quickstart()), made)}


def test_compiled_layers_are_packed_ones() -> None:
    with pytest.raises(SpecError, match="compile = true: needs attention = 'packed'"):
        parse_spec(quickstart(compile=True))
