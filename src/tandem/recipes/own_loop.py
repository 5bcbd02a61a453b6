"""The verbs of a training loop that the user writes: sample, forward_backward, optim_step, publish, save and load.

The parts are those of the RL recipe: its model, engine, bridge, publisher, batches and trainer. The order of the calls
is the user's.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from tandem.build import built_model, run_engines, training
from tandem.build.reference import served_teacher, set_reference
from tandem.errors import RunError, SpecError
from tandem.io import own_code
from tandem.io.own_code import OBJECT
from tandem.protocols import OptimizerRule
from tandem.recipes.objects import AnyAlgorithm, Objects, with_objects
from tandem.spec.load import AnySpec
from tandem.spec.run import RlSpec
from tandem.spec.toml import read_toml
from tandem.types import NO_VERSION, Completion, Group, Message, Metrics, Proof, Sampling, Trajectory

T = TypeVar("T")

Opening: TypeAlias = str | Sequence[Message]
"""How a conversation begins: the user's text, or messages."""

_TRAIN = {"steps": 1, "lr": 1e-4, "groups_per_step": 1, "group_size": 2}
"""Required by a spec; a loop of one's own has numbers of its own."""


class Trainer:
    """A model that is trained and sampled from, for a loop of your own.

    `spec`: of an RL run. `environment` may be left out, and so may `train`, of which `lr`, `schedule`, `clip_norm`,
    `temperature`, `top_p`, `max_tokens`, `micro_tokens` and `optimizer` are used. `directory`: for the logs of engine
    processes; without one, a temporary directory.
    """

    def __init__(
        self,
        spec: AnySpec,
        directory: str | Path | None = None,
        *,
        algorithm: AnyAlgorithm | None = None,
        optimizer: OptimizerRule | None = None,
    ) -> None:
        objects = Objects(algorithm=algorithm, optimizer=optimizer)
        checked = _checked(spec, objects)
        self._spec = checked
        self._temporary = "" if directory else tempfile.mkdtemp(prefix="tandem-")
        self._runner = asyncio.Runner()
        self._model = built_model.run_model(checked, None)
        with own_code.session(objects.by_name()):
            made = training.algorithm(checked.algorithm, checked.train.max_tokens)
            if made.needs_reference:
                set_reference(checked.algorithm, self._model, checked.precision)
            self._trainer: Any = training.trainer(checked.train, self._model, made, 0, checked.seed)
        self._teacher = self._run(served_teacher(checked.algorithm, self._model))
        self._make_batch = training.batches(checked.train, self._model, made)
        self._joined = run_engines.join(checked, self._model, Path(directory or self._temporary) / "engines")
        self._publisher = run_engines.publisher(
            self._joined, self._model, checked.sync.deadline_s, training.caller(checked.deterministic)
        )
        self._gradients: dict[str, Any] = {}
        self._sampled = 0
        self.publish()

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        return self._trainer.version

    def sample(self, openings: Sequence[Opening], n: int = 1, *, max_tokens: int = 0) -> list[Group]:
        """Return a group for each opening: `n` answers with ids, logprobs and versions, and reward 0 until you set it.
        The answer as text is `trajectory.messages[-1]["content"]`. `max_tokens`: 0 is train.max_tokens."""
        if self._joined.engine.version != self.version:
            raise RunError(
                f"sample: the engine has version {self._joined.engine.version}, the trainer {self.version}; call "
                "publish() first"
            )
        stage = self._spec.train
        sampling = Sampling(max_tokens or stage.max_tokens, stage.temperature, stage.top_p)
        return self._run(self._groups(openings, n, sampling))

    def forward_backward(self, groups: Sequence[Group]) -> Metrics:
        """Compute the loss and its gradients on these groups. Gradients of several calls are added up until
        `optim_step`."""
        self._publisher.check(groups)
        if self._teacher is not None:
            self._run(self._teacher.score(groups))
        batch = self._make_batch(list(groups), self.version)
        metrics, gradients = self._trainer.gradients_of(batch)
        for name, gradient in gradients.items():
            self._gradients[name] = self._gradients[name] + gradient if name in self._gradients else gradient
        return {**batch.metrics, **metrics}

    def optim_step(self, lr: float | None = None) -> Metrics:
        """Move the weights by the gradients so far, and make a new version. `lr`: without one, that of the spec."""
        if not self._gradients:
            raise RunError("optim_step: there is no gradient; call forward_backward first (equal rewards give none)")
        gradients, self._gradients = self._gradients, {}
        return self._run(self._apply(gradients, lr))

    def publish(self) -> Proof:
        """Copy the trainer's version to the engine; return the proof that both have the same weights."""
        return self._run(self._publisher.publish(self._trainer))

    def save(self, path: str | Path) -> None:
        """Write weights, optimizer state and counters into a new directory."""
        if self._gradients:
            raise RunError("save: there are gradients that no step has applied; call optim_step first")
        self._trainer.save(Path(path))
        (Path(path) / "loop.json").write_text(json.dumps({"sampled": self._sampled}))

    def load(self, path: str | Path) -> None:
        """Load what `save` wrote, and publish it: the loop goes on as if it had never ended."""
        self._trainer.load(Path(path))
        self._sampled = json.loads((Path(path) / "loop.json").read_text())["sampled"]
        self._gradients = {}
        self.publish()

    def export(self, path: str | Path) -> None:
        """Write the model (or its adapter) in Hugging Face format."""
        training.export(self._model, Path(path))

    def close(self) -> None:
        """End the engine; `with tandem.Trainer(...) as trainer:` calls it."""
        self._run(self._joined.engine.close())
        self._joined.bridge.close()
        self._runner.close()
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def _groups(self, openings: Sequence[Opening], n: int, sampling: Sampling) -> list[Group]:
        asked = [_messages(opening) for opening in openings]
        prompts = [self._model.renderer.prompt(messages) for messages in asked]
        first, self._sampled = self._sampled, self._sampled + n * len(prompts)

        async def answer(number: int, sibling: int) -> Trajectory:
            seed = (self._spec.seed << 32) + first + number * n + sibling
            room = self._model.context - len(prompts[number])
            its = replace(sampling, seed=seed, max_tokens=min(sampling.max_tokens, room))
            found = await self._joined.engine.generate(prompts[number], its)
            return self._trajectory(asked[number], prompts[number], found, str(first + number))

        # All in one batch: a small one is bound by reading the weights, and takes as long as a large one.
        numbers = range(len(prompts))
        answers = await asyncio.gather(*(answer(number, sibling) for number in numbers for sibling in range(n)))
        return [answers[number * n : (number + 1) * n] for number in numbers]

    def _trajectory(self, messages: list[Message], prompt: list[int], found: Completion, name: str) -> Trajectory:
        before, count = len(prompt), len(found.ids)
        return Trajectory(
            ids=[*prompt, *found.ids],
            trained=[False] * before + [True] * count,
            logprobs=[0.0] * before + list(found.logprobs),
            versions=[NO_VERSION] * before + found.versions,
            status="truncated" if found.finish_reason == "length" else "finished",
            task_id=name,
            messages=[*messages, {"role": "assistant", "content": self._model.renderer.visible(found.ids)}],
        )

    async def _apply(self, gradients: dict[str, Any], lr: float | None) -> Metrics:
        async with self._publisher.resting(self._trainer):
            return self._trainer.apply(gradients, lr)


def _messages(opening: Opening) -> list[Message]:
    return [{"role": "user", "content": opening}] if isinstance(opening, str) else list(opening)


def _checked(spec: AnySpec, objects: Objects) -> RlSpec:
    """Return the spec, with what a loop of one's own needs no value for; SpecError for what it cannot do."""
    if isinstance(spec, str | Path):
        spec = read_toml(spec)
    if isinstance(spec, Mapping):
        if spec.get("recipe", "rl") != "rl":
            raise SpecError(f"recipe = {spec['recipe']!r}: a loop of your own samples, which needs recipe = 'rl'")
        train = {**_TRAIN, **spec.get("train", {})}
        spec = {"environment": {"name": f"{OBJECT}none"}, **spec, "recipe": "rl", "train": train}
    checked = with_objects(spec, objects)
    if not isinstance(checked, RlSpec):
        raise SpecError(f"recipe = '{checked.recipe}': a loop of your own samples, which needs recipe = 'rl'")
    checked = checked.in_place()
    if checked.parallel.num_shares > 1:
        raise SpecError(
            f"parallel.ranks = {checked.parallel.ranks}: a loop of your own runs in one process; leave it out"
        )
    if checked.train.gradient_release:
        raise SpecError("train.gradient_release = true: applies gradients before optim_step is called; leave it out")
    return checked
