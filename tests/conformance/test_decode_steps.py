"""Decode steps of the embedded engine without masks give what those with masks give."""

from __future__ import annotations

import pytest
from engines import ARCHITECTURES, check_same, complete, make_engine, of_many_lengths

from tandem.ops import decode_attention

REFUSED = {"qwen3-eager": "model.attention = 'eager'", "gemma2-softcap-mixed": "model.attention = 'eager'"}
HYBRIDS = ["qwen3.5-delta-net", "lfm2-convolutions", "falcon-h1-both"]
EACH = ["llama-gqa", "mistral-sliding", "gemma3-mixed", "granite-scaled", *HYBRIDS, *REFUSED]


@pytest.mark.parametrize("name", EACH)
def test_steps_without_masks_sample_the_same(name: str):
    """Rows of many lengths, more requests than rows, and ends at different times: rows move, and some are dead."""
    module, asked = ARCHITECTURES[name](), of_many_lengths(11, most_tokens=24)
    expected = complete(make_engine("inline", module, max_running=6), asked)
    engine = make_engine("inline", module, max_running=6, eager=False)
    found = complete(engine, asked)
    why = REFUSED.get(name, "")
    assert engine.passes.steps.why_masked == why
    assert engine.passes.steps.report == {
        "requested": "graphs",
        "engaged": False,
        "why_not": why or "graphs are for GPUs",
    }
    assert engine.passes.prompts.report == {"requested": "graphs", "engaged": False, "why_not": "graphs are for GPUs"}
    check_same(found, expected)


def test_steps_are_filled_up_to_few_numbers_of_rows_and_to_no_more_than_there_are():
    steps = make_engine("inline", ARCHITECTURES["llama-gqa"](), max_running=256, eager=False).passes.steps
    rows = [steps.rows_for(live) for live in range(1, 258)]
    assert rows[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert rows[-1] == 257  # the last one is for an urgent request
    assert len(set(rows)) == 20
    assert all(live <= filled <= 1.25 * live + 7 for live, filled in enumerate(rows, 1))
    assert steps.rows_for(600) == 257


def test_a_module_whose_attention_goes_another_way_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """A trial compares both ways when the engine is made: of a model whose forward does not pass it on, for example."""
    attend = decode_attention.attend
    monkeypatch.setattr(decode_attention, "attend", lambda q, k, v, ends, *more: attend(q, k, v, ends - 1, *more))
    steps = make_engine("inline", ARCHITECTURES["llama-gqa"](), eager=False).passes.steps
    assert steps.why_masked.startswith("steps without masks give another result than with masks (")
