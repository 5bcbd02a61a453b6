"""Every family and every capability; and docs/families.md, which says what came out."""

from __future__ import annotations

from pathlib import Path

import family_suite as suite
import pytest
import transformers

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.mark.parametrize("name", suite.FAMILIES)
def test_a_family_holds_or_is_refused_by_a_sentence(name: str):
    told = suite.outcomes(name)
    assert told.keys() == suite.CELLS.keys()
    assert [text for text in told.values() if text != "yes" and len(text) < 40] == []


@pytest.mark.skipif(f"transformers {transformers.__version__} " not in PAGE.read_text(), reason="other transformers")
def test_the_page_says_what_the_suite_found():
    assert PAGE.read_text() == suite.page(), "run `python docs/make_families.py`"
