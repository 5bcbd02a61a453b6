"""Runs of the real thing: `train` on a spec, in this process, in a directory of the test's own."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tandem import recipes
from tandem.obs.live_view import LiveView
from tandem.runs.run import Run
from tandem.spec.load import load_spec, parse_spec
from tandem.spec.run import RunSpec

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"


@pytest.fixture(autouse=True)
def _settings_of_torch_end_with_the_test() -> Iterator[None]:
    """A deterministic run switches torch for the whole process."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


class Trained:
    """A finished run, and what it printed."""

    def __init__(self, run: Run, printed: str) -> None:
        self.directory, self.printed = run.directory, printed
        self.status: dict[str, Any] = json.loads((run.directory / "status.json").read_text())

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / f"{name}.jsonl").read_text().splitlines()]


Train = Callable[..., Trained]


def trained(spec: RunSpec, directory: Path) -> Trained:
    printed = io.StringIO()
    view = LiveView(directory.name, Console(file=printed, width=120))
    return Trained(recipes.run(spec, directory, view=view), printed.getvalue())


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """`train(spec, "key=value", ..., name="a")`: a spec's path or its table, with overrides."""

    def run(spec: Path | dict[str, Any], *overrides: str, name: str = "run") -> Trained:
        return trained(load_spec(spec, overrides) if isinstance(spec, Path) else parse_spec(spec), tmp_path / name)

    return run
