"""Every example runs as it stands: the specs as their first lines say, and the notebooks cell by cell."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.recipes.serve import find_model, load_model
from tandem.spec.engine import HfEngineSpec
from tandem.spec.hardware import Hardware, choose
from tandem.spec.load import load_spec
from tandem.spec.online import load_online_spec
from tandem.types import Sampling

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = Path(__file__).parents[2] / "examples"
LEARNS = (
    "preference", "orpo", "kto", "own_environment", "own_loss", "own_preference", "rejection_sampling",
    "multi_turn", "rl_async",
)  # fmt: skip
ELSEWHERE = {
    "quickstart": "tests/learning/test_quickstart.py",
    "online": "tests/http/test_online_take_home.py",
    "atropos": "tests/atropos/test_started_by_command.py",
    "prompts": "a chat model of the hub: tests/learning/test_your_data.py runs its like",
    "rl_maths": "a GPU: its spec is read here",
    "vllm_gpu": "a GPU: its spec is read here",
    "ten_lines": "with a tiny model, below",
    "distill": "with its teacher, below",
    "distill_teacher": "below",
    "reward_model": "below",
    "reward_model_rl": "with its reward model, below",
    "sweep": "below",
}


@pytest.fixture(autouse=True)
def _in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the examples are relative to the checkout; runs go where the test may write."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)


def status(directory: str) -> dict[str, Any]:
    return json.loads((Path(directory) / "status.json").read_text())


def trained(name: str, directory: str) -> dict[str, Any]:
    tandem.run(f"examples/{name}.toml", directory)
    return status(directory)


def test_every_example_is_run_somewhere():
    specs = {path.stem for path in EXAMPLES.glob("*.toml")}
    assert specs == {"sft", *LEARNS, *ELSEWHERE}
    table = (EXAMPLES / "README.md").read_text()
    listed = {name for name in re.findall(r"\(([\w/.]+)\)", table) if not name.startswith("..")}
    here = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*") if path.is_file()}
    assert listed == {name for name in here if "__pycache__" not in name} - {"README.md"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_spec_is_read_and_begins_with_its_command(path: Path):
    (load_online_spec if path.stem == "online" else load_spec)(path)
    head = path.read_text().split("recipe", 1)[0]
    assert f"examples/{path.name}" in head or path.stem == "quickstart"
    assert tomllib.loads(path.read_text())


@pytest.mark.parametrize("name", LEARNS)
def test_an_example_learns(name: str):
    ended = trained(name, "runs/example")
    assert (ended["state"], ended["verdict"]) == ("succeeded", "improved")


@pytest.mark.parametrize("name", ["negotiate", "units"])  # benchmarks/gallery.py trains them all
def test_an_environment_of_the_gallery_is_learned(name: str):
    ended = trained(f"gallery/{name}/run", "runs/gallery")
    assert (ended["state"], ended["verdict"], ended["eval"]["before"]) == ("succeeded", "improved", 0.0)
    assert ended["eval"]["after"] > ended["eval"]["before_rl"] + 0.3


def test_a_table_of_tickets_ends_in_a_served_model_that_sorts_them():
    ended = trained("sft", "runs/tickets")
    assert (ended["state"], ended["verdict"]) == ("succeeded", "improved")
    path, _, version = find_model("runs/tickets")
    model, engine = load_model(path, version, HfEngineSpec(), thinking=False, inline=True)
    rows = [json.loads(line) for line in (EXAMPLES / "data" / "tickets.jsonl").read_text().splitlines()][:24]

    async def ask() -> list[str]:
        sampling = Sampling(max_tokens=12, temperature=0.0)
        prompts = [model.renderer.prompt([{"role": "user", "content": row["prompt"]}]) for row in rows]
        try:
            return [model.renderer.visible((await engine.generate(prompt, sampling)).ids) for prompt in prompts]
        finally:
            await engine.close()

    right = [answer == row["completion"] for answer, row in zip(asyncio.run(ask()), rows, strict=True)]
    assert (version, sum(right) >= 22) == (120, True), right


def test_a_student_learns_from_a_teacher():
    assert trained("distill_teacher", "runs/teacher")["state"] == "succeeded"
    ended = trained("distill", "runs/student")
    assert (ended["state"], ended["verdict"]) == ("succeeded", "improved")


def test_a_reward_model_learns_and_the_rewards_that_it_gives_rise():
    for name, directory in (("reward_model", "runs/polite"), ("reward_model_rl", "runs/polite_rl")):
        ended = trained(name, directory)
        assert (ended["state"], ended["verdict"]) == ("succeeded", "improved")


def test_ten_lines_are_ten_and_run_with_a_tiny_model_and_choose_for_a_gpu():
    spec = Path("examples/ten_lines.toml")
    assert len([line for line in spec.read_text().splitlines() if line and not line.startswith("#")]) == 10
    tuned, _ = choose(load_spec(spec), Hardware("cuda", "NVIDIA H200", 139.8, vllm=True))
    by_hand = load_spec("examples/vllm_gpu.toml")
    assert (tuned.precision, tuned.sync) == (by_hand.precision, by_hand.sync)
    assert (tuned.model.attention, tuned.model.compile) == (by_hand.model.attention, by_hand.model.compile)
    spec.write_text(spec.read_text().replace('path = "Qwen/Qwen3-0.6B"', 'preset = "tiny"'))
    tiny = ["warmup.steps=60", "warmup.lr=2e-3", "environment.params.largest=9", "train.groups_per_step=8"]
    run = tandem.run(load_spec(spec, [*tiny, "train.steps=3", "train.max_tokens=6", "eval.tasks=32"]), "runs/example")
    assert (run.status["state"], run.status["steps_done"]) == ("succeeded", 63)


def test_a_sweep_has_a_row_for_each_seed():
    swept = tandem.sweep("examples/sweep.toml", [0, 1], "runs/sweep")
    assert swept is not None
    table = (Path("runs/sweep") / "sweep.md").read_text()
    assert re.findall(r"^\| (\d) \|", table, re.M) == ["0", "1"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_cell_by_cell(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path.cwd())])
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 3
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in code:
        exec(compile(cell, path.name, "exec"), names)
    (directory,) = Path("runs").iterdir()
    if path.stem == "own_loop":
        assert names["means"][-1] > 1.7 * names["means"][0]
        assert (directory / "export" / "model.safetensors").exists()
    else:
        assert status(str(directory))["state"] == "succeeded"
