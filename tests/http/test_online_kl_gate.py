"""A lesson that moves answers to ordinary prompts further than `gates.kl` allows is rejected, from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
from online_served import SPEC, fact, online_server

pytestmark = pytest.mark.usefixtures("forked_programs")


def test_a_lesson_that_moves_ordinary_answers_too_far_is_rejected_by_kl(tmp_path: Path) -> None:
    with online_server(
        tmp_path, SPEC.replace("kl = 50.0", "kl = 1e-6").replace("update_norm = 0.3", "update_norm = 50.0")
    ) as server:
        before = server.get("/versions/served")
        row = server.wait(server.teach([fact(1)], lr=1e-3, steps=5))
        assert row["state"] == "rejected"
        assert "rejected by kl: answers to ordinary prompts moved by" in row["why"]
        (gate,) = [gate for gate in row["gates"] if not gate["passed"]]
        assert gate["gate"] == "kl"
        assert gate["value"] > gate["limit"] == 1e-6
        assert server.get("/versions/served") == before
