"""`tandem env check` without a model: splits, and what the environment's own demonstrations earn."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.build import training
from tandem.env.outcome_check import checked
from tandem.env.protocol_check import MAX_CHECKED
from tandem.env.scripted_chat import ScriptedChat
from tandem.errors import EpisodeFailed
from tandem.protocols import Demonstrator, Environment
from tandem.recipes.packages import ready_packages
from tandem.spec.environment import EnvironmentSpec
from tandem.spec.load import AnySpec
from tandem.types import Task


@dataclass(frozen=True, slots=True)
class DemonstrationCheck:
    """What can be said of an environment without a model. It follows the protocol, or it would not have loaded."""

    environment: str
    tasks: Mapping[str, int]
    """By split."""
    shared_prompts: int
    """Held-out tasks whose opening messages are those of a training task. Their ids differ."""
    demonstrations: int
    """Those that were played; 0 if the environment has none."""
    reward: float
    """Mean over the demonstrations that were played to their end."""
    best: float
    """Share of demonstrations that earned the highest reward of all."""
    equal: bool
    """Whether all earned the same."""
    failures: tuple[str, ...]
    """Demonstrations that could not be played, or whose episode went another way than they show."""
    seconds: float

    @property
    def passed(self) -> bool:
        """Return whether every demonstration was played as shown, and they do not all earn 0 or less."""
        return not self.failures and (not self.demonstrations or not self.equal or self.reward > 0)

    def row(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        return {
            "model": "", "environment": self.environment, "tasks": dict(self.tasks),
            "shared_prompts": self.shared_prompts, "demonstrations": self.demonstrations, "reward": self.reward,
            "best": self.best, "failures": list(self.failures), "seconds": self.seconds, "passed": self.passed,
        }  # fmt: skip

    def text(self) -> str:
        """Return the result as text."""
        counts = ", ".join(f"{count:,} of '{split}'" for split, count in self.tasks.items())
        lines = [f"{self.environment} follows the protocol; tasks: {counts}, no id twice"]
        if self.shared_prompts:
            lines.append(f"{self.shared_prompts:,} held-out tasks have the prompt of a training task")
        if self.demonstrations:
            best = "all equal" if self.equal else f"{self.best:.0%} earn the most"
            lines.append(
                f"{self.demonstrations} demonstrations: mean reward {self.reward:.3g}, {best}; {self.seconds:.1f} s"
            )
        else:
            lines.append("it has no demonstrations, so a warm-up needs a file (warmup.data.kind = 'file')")
        lines += [f"a demonstration of {failure}" for failure in self.failures[:3]]
        if self.failures:
            lines.append(f"{len(self.failures)} demonstrations do not show what happens when they are played.")
        elif not self.passed:
            lines.append("No demonstration earns anything: either they or the scorer are wrong.")
        lines.append("No model was played: --model DIR measures what one earns before it is trained.")
        return "\n".join(lines)


def check_demonstrations(
    source: AnySpec, *, params: Mapping[str, Any] | None = None, tasks: int = 256
) -> DemonstrationCheck:
    """Load an environment, look at its splits, and play the demonstrations of `tasks` training tasks, without a model.
    `source`: a spec, or the name of an environment, with its `params`."""
    _, environment_spec = training.read_environment(source, params)
    with ready_packages(environment_spec) as packages:
        environment = training.environment(environment_spec, packages and packages.installed)
    try:
        train, held_out = environment.tasks("train"), environment.tasks("eval")
        prompts = {_prompt(task) for task in itertools.islice(train, MAX_CHECKED)}
        shared = sum(_prompt(task) in prompts for task in itertools.islice(held_out, MAX_CHECKED))
        started = time.perf_counter()
        rewards, failures = _played(environment, environment_spec, train, tasks)
    finally:
        training.close(environment)
    return DemonstrationCheck(
        environment_spec.name,
        {"train": len(train), "eval": len(held_out)},
        shared,
        len(rewards) + len(failures),
        statistics.fmean(rewards) if rewards else 0.0,
        rewards.count(max(rewards)) / len(rewards) if rewards else 0.0,
        len(set(rewards)) <= 1,
        tuple(failures),
        time.perf_counter() - started,
    )


def _prompt(task: Task) -> str:
    return json.dumps([dict(message) for message in task.messages], sort_keys=True, default=str)


def _played(environment: Environment, spec: EnvironmentSpec, train: Any, most: int) -> tuple[list[float], list[str]]:
    """Return the rewards, and in words each demonstration that went wrong."""
    if not isinstance(environment, Demonstrator):
        return [], []
    rng = random.Random("demonstrations")
    chosen = rng.sample(range(len(train)), min(most, len(train)))
    rewards, failures = list[float](), list[str]()

    async def all_of() -> None:
        for index in chosen:
            task: Task = train[index]
            chat = ScriptedChat(environment.demonstrate(task, rng))
            try:
                async with asyncio.timeout(spec.episode_timeout_s):
                    outcome = await environment.run(task, chat)
                reward, _ = checked(task.id, outcome)
            except TimeoutError:
                failures.append(f"task {task.id}: no outcome within {spec.episode_timeout_s:g} s")
            except EpisodeFailed as failure:
                failures.append(f"task {task.id}: {chat.differs or failure}")
            except Exception as error:  # noqa: BLE001 - environment code: its errors are what this looks for
                failures.append(f"task {task.id}: {type(error).__name__}: {error}")
            else:
                chat.end()
                failures.append(f"task {task.id}: {chat.differs}") if chat.differs else rewards.append(reward)

    asyncio.run(all_of())
    return rewards, failures
