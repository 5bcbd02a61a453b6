"""The verbs of a loop of the user's own: what they learn, that a saved loop goes on exactly, and what they refuse."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.engine.hf.engine import EmbeddedEngine
from tandem.errors import RunError, SpecError

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
SPEC: dict[str, Any] = {"model": {"preset": "tiny"}, "train": {"max_tokens": 6, "lr": 2e-3}}


@pytest.fixture(autouse=True)
def _settings_of_torch_end_with_the_test() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def example() -> Any:
    spec = importlib.util.spec_from_file_location("own_loop_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_learns(capsys: pytest.CaptureFixture[str]):
    means = example().main(steps=8)
    assert means[-1] > 1.7 * means[0]
    assert "step 8" in capsys.readouterr().out


def test_the_examples_loop_has_twenty_lines():
    body = EXAMPLE.read_text().partition("def reward")[2].partition("if __name__")[0]
    assert len([line for line in body.splitlines() if line.strip() and '"""' not in line]) <= 20


def stepped(trainer: tandem.Trainer, steps: int) -> list[Any]:
    seen: list[Any] = []
    for _ in range(steps):
        groups = trainer.sample(["say something"], n=6)
        for trajectory in groups[0]:
            trajectory.reward = float(sum(trajectory.ids) % 7)
        metrics = trainer.forward_backward(groups)
        seen.append(([each.ids for each in groups[0]], metrics["loss/total"], trainer.optim_step()["grad/norm"]))
        assert trainer.publish().verified == "identity"
    return seen


def test_all_answers_of_a_sample_are_asked_at_once(monkeypatch: pytest.MonkeyPatch):
    waiting, most = 0, 0
    generate = EmbeddedEngine.generate

    async def counted(self: EmbeddedEngine, *args: Any, **kwargs: Any) -> Any:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        try:
            return await generate(self, *args, **kwargs)
        finally:
            waiting -= 1

    monkeypatch.setattr(EmbeddedEngine, "generate", counted)
    with tandem.Trainer(SPEC) as trainer:
        most = 0
        groups = trainer.sample(["say something", "and again", "more"], n=4)
    assert [len(group) for group in groups] == [4, 4, 4]
    assert {each.task_id for each in groups[1]} == {groups[1][0].task_id}
    assert len({group[0].task_id for group in groups}) == 3
    assert most == 12, "a batch of 4 answers reads all weights as often as one of 12"


def test_a_saved_loop_goes_on_as_if_it_had_never_ended(tmp_path: Path):
    with tandem.Trainer(SPEC) as whole:
        seen = stepped(whole, 4)
    with tandem.Trainer(SPEC) as first:
        assert stepped(first, 2) == seen[:2]
        first.save(tmp_path / "saved")
        first.export(tmp_path / "export")
    with tandem.Trainer({**SPEC, "seed": 0}) as second:
        second.load(tmp_path / "saved")
        assert second.version == 2
        assert stepped(second, 2) == seen[2:]
    assert (tmp_path / "export" / "model.safetensors").exists()


def test_gradients_of_several_calls_are_added_up():
    norms: list[float] = []
    for times in (1, 2):
        with tandem.Trainer(SPEC) as trainer:
            groups = trainer.sample(["say something"], n=4)
            for number, trajectory in enumerate(groups[0]):
                trajectory.reward = float(number)
            for _ in range(times):
                trainer.forward_backward(groups)
            norms.append(trainer.optim_step(lr=1e-3)["grad/norm"])
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-5)


def test_a_loss_of_ones_own_is_used():
    calls: list[int] = []

    def loss(scored: Any, micro: Any, totals: tandem.Totals) -> torch.Tensor:
        calls.append(totals.tokens)
        return -(micro.credit_N * scored.logprobs_N).sum() / totals.tokens

    with tandem.Trainer(SPEC, algorithm=loss) as trainer:
        groups = trainer.sample(["a"], n=2)
        groups[0][0].reward = 1.0
        trainer.forward_backward(groups)
    assert calls == [sum(each.num_trained for each in groups[0])]


def test_calls_out_of_order_are_refused():
    with tandem.Trainer(SPEC) as trainer:
        with pytest.raises(RunError, match="optim_step: there is no gradient; call forward_backward first"):
            trainer.optim_step()
        groups = trainer.sample(["a"], n=2)
        groups[0][0].reward = 1.0
        trainer.forward_backward(groups)
        with pytest.raises(RunError, match="save: there are gradients"):
            trainer.save("nowhere")
        trainer.optim_step()
        with pytest.raises(RunError, match="the engine has version 0, the trainer 1; call publish"):
            trainer.sample(["a"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe": "sft", "data": {"kind": "file", "path": "x.jsonl"}}, "recipe = 'sft'"),
        ({"parallel": {"shares": 2}}, "parallel"),
        ({"train": {"gradient_release": True}}, "gradient_release"),
    ],
)
def test_what_such_a_loop_cannot_do_is_refused(changes: dict[str, Any], said: str):
    with pytest.raises(SpecError, match=said):
        tandem.Trainer({**SPEC, **changes})
