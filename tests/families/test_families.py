"""Every family and every capability; and docs/families.md, which says what came out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import family_page
import family_suite as suite
import pytest
import torch
import transformers
from family_models import FAMILIES, Bench

from tandem.build import training
from tandem.recipes import model_check

pytestmark = pytest.mark.usefixtures("one_thread", "forked_programs")
PAGE = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_holds_or_is_refused_by_a_sentence(name: str):
    told = suite.outcomes(name)
    assert told.keys() == suite.CELLS.keys()
    assert [text for text in told.values() if text not in ("yes", suite.TEXT_ONLY) and len(text) < 40] == []


@pytest.mark.timeout(1600)  # alone, it runs every family
@pytest.mark.skipif(f"transformers {transformers.__version__} " not in PAGE.read_text(), reason="other transformers")
def test_the_page_says_what_the_suite_found():
    assert PAGE.read_text() == family_page.page(), "run `python docs/make_families.py`"


def test_a_check_says_how_many_experts_the_trainer_chooses_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = str(Bench(FAMILIES["Qwen3-MoE"], tmp_path).path)
    said = model_check.check_model(path).answer["experts that differ"]
    assert re.fullmatch(r"0 of \d+ choices, one for each token and layer \(0.0%\)", said), said
    scorer = training.scorer

    def of_others(model: suite.BuiltModel, *args: Any) -> Any:
        router = model.policy.module.model.layers[1].mlp.gate
        with torch.no_grad():
            router.weight.copy_(-router.weight)
        return scorer(model, *args)

    monkeypatch.setattr(training, "scorer", of_others)
    told = re.match(r"(\d+) of (\d+) choices", model_check.check_model(path).answer["experts that differ"])
    assert told is not None
    assert int(told[1]) >= int(told[2]) / 4  # one layer of four, and what follows from it
