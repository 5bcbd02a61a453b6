"""Every phase that a row of the ledger can have is shown, named in the docs, and drawn."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import tandem
from tandem.obs import sync_bench_report
from tandem.obs.sync_report import AROUND, AT_THE_TRAINER, ONE_AFTER_THE_OTHER, PHASES

PACKAGE = Path(tandem.__file__).parent


def ended() -> dict[str, set[str]]:
    """`phases.end("...")` wherever it stands, by the part of the package."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "phases.end":
                (name,) = node.args
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: a name that nobody can look up"
                found.setdefault(path.relative_to(PACKAGE).parts[0], set()).add(str(name.value))
    return found


def test_every_phase_that_anybody_ends_is_in_the_list_and_no_other_but_the_canary_and_the_pause():
    by_part = ended()
    assert by_part.keys() == {"bridge", "engine", "vllm_worker", "ops"}
    assert by_part["bridge"] | by_part["ops"] == set(AT_THE_TRAINER)
    assert by_part["engine"] | by_part["vllm_worker"] == {*AROUND, *ONE_AFTER_THE_OTHER} - {"canary", "paused"}
    assert len(PHASES) == len(set(PHASES))  # a row is both ends' in one: no name may be of two


def test_the_docs_name_them_all():
    text = (PACKAGE.parent.parent / "docs" / "sync.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| end \| phase .*?\n\n", text, re.MULTILINE | re.DOTALL)
    named = [name for row in table.strip().splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[2])]
    assert sorted(named) == sorted(PHASES)


def test_what_follows_one_another_is_drawn():
    assert sync_bench_report._COLORS.keys() == {*ONE_AFTER_THE_OTHER, "rest"}
