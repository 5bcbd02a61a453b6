"""Play environments of verifiers 0.4 by its own rollout, with a Chat as the model.

    [environment]
    name = "verifiers:my-taskset"          # an installed package that exports a Taskset

    [environment.params]
    taskset = { difficulty = "hard" }      # the taskset's configuration
    env = { agent = { max_turns = 8 } }    # the environment's configuration

verifiers runs everything except the model: setup, tools, user turns, limits, stops, rewards, metrics. Its client calls
an endpoint in this process, so that the Chat samples each token and records its version.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import itertools
import math
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tandem.env.adapters.verifiers_chat import SECRET, Endpoint, VerifiersConversation
from tandem.env.builtin.split import check_params
from tandem.errors import EpisodeFailed, SpecError
from tandem.protocols import Chat
from tandem.types import Outcome, Task

HARNESS = "tandem_chat"
_MODEL = "policy"


@dataclass(frozen=True)
class Verifiers:
    id: str
    """The taskset: the name after the colon."""
    taskset: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the taskset's configuration."""
    eval_taskset: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields that differ for evaluation, such as a split; when empty, one task in eight of the taskset is held out."""
    env: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the environment's configuration: `id`, limits, and its one agent."""
    max_tasks: int = 10_000
    """Most tasks of a split: a taskset may be endless."""

    _theirs: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict[str, Any])
    _tasks: dict[str, dict[str, Any]] = field(
        init=False, repr=False, compare=False, default_factory=dict[str, dict[str, Any]]
    )

    def __post_init__(self) -> None:
        check_params(self, max_tasks=(1, 1_000_000))
        vf = _library(self.id)
        self._theirs["env"] = vf.load_environment(self._config(self.taskset))
        self._theirs["served"] = _VerifiersRuntime(self._theirs["env"])

    def tasks(self, split: str) -> Sequence[Task]:
        """Return a split's tasks. A task's id is its own id or name, or else the beginning of its key."""
        if split not in ("train", "eval"):
            raise SpecError(f"split = '{split}': an environment has 'train' and 'eval'")
        return [_task(task_id, theirs, split) for task_id, theirs in self._split(split).items()]

    async def run(self, task: Task, chat: Chat) -> Outcome:
        theirs = self._split(task.payload["split"])[task.id]
        served: _VerifiersRuntime = self._theirs["served"]
        await served.ready()
        questions = served.endpoint.questions()

        def on_trace(trace: Any) -> None:
            questions.add(trace.id)

        play: Coroutine[Any, Any, Any] = self._theirs["env"].run_episode(theirs, served.context(), on_trace=on_trace)
        episode = asyncio.create_task(play)
        episode.add_done_callback(lambda _: questions.end())
        conversation = VerifiersConversation(task.id, task.messages, chat)
        try:
            while (question := await questions.next()) is not None:
                body, answer = question
                completion = await conversation.reply(body)
                if not answer.done():
                    answer.set_result(completion)
            return _outcome(task.id, await episode)
        finally:
            questions.close()
            episode.cancel()
            await asyncio.wait({episode})
            if not episode.cancelled():
                episode.exception()  # retrieved, or asyncio would log it; the first error was raised above

    def _split(self, split: str) -> dict[str, Any]:
        if split not in self._tasks:
            self._tasks[split] = self._load(split)
        return self._tasks[split]

    def _load(self, split: str) -> dict[str, Any]:
        vf = _library(self.id)
        taskset = self._theirs["env"].taskset
        if split == "eval" and self.eval_taskset:
            taskset = vf.load_environment(self._config({**self.taskset, **self.eval_taskset})).taskset
        tasks: list[Any] = list(itertools.islice(taskset, self.max_tasks))
        if not self.eval_taskset:
            tasks = _held_out(tasks) if split == "eval" else _without(tasks, _held_out(tasks))
        found: dict[str, Any] = {}
        for theirs in tasks:
            name = theirs.data.id or theirs.data.name or theirs.key[:16]
            task_id = name if name not in found else f"{name}-{theirs.data.idx}"
            found[f"{split}/{task_id}" if self.eval_taskset else task_id] = theirs
        return found

    def _config(self, taskset: Mapping[str, Any]) -> Any:
        vf = _library(self.id)
        settings = {**self.env, "taskset": {**self.env.get("taskset", {}), **taskset, "id": self.id}}
        kind = vf.env_config_type(self.id, self.env.get("id", ""))
        agents = [name for name, each in kind.model_fields.items() if isinstance(each.default, vf.AgentConfig)]
        if len(agents) != 1:
            raise SpecError(
                f"environment.name = 'verifiers:{self.id}': it has {len(agents)} agents ({', '.join(agents)}), and "
                "this adapter plays one; run it against `tandem gateway`, which records several"
            )
        (agent_name,) = agents
        agent: dict[str, Any] = {"runtime": {"type": "subprocess"}, **self.env.get(agent_name, {})}
        if "harness" not in agent and vf.default_harness_id(self.id) == "bash":  # the taskset has no harness
            agent["harness"] = {"id": HARNESS}
        return vf.resolve_env_config({**settings, agent_name: agent})


class _VerifiersRuntime:
    """The endpoint and servers that episodes need; the first episode on an event loop starts them."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self.endpoint = Endpoint()

    async def ready(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._task is None or self._task.done() or self._ready is None:
            self._loop, self._ready, self.endpoint = loop, loop.create_future(), Endpoint()
            self._task = loop.create_task(self._serve(self._ready))
        await asyncio.shield(self._ready)

    def context(self) -> Any:
        vf: Any = importlib.import_module("verifiers.v1")
        headers = {SECRET: self.endpoint.secret}
        # A variable that is never set, so that no API key of the user is sent.
        client = vf.EvalClientConfig(base_url=self.endpoint.url, api_key_var="TANDEM_NO_KEY", headers=headers)
        return vf.ModelContext(model=_MODEL, client=client)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self.endpoint.serving(), self._env.serving():
                ready.set_result(None)
                await asyncio.get_running_loop().create_future()  # until the event loop ends and cancels it
        except Exception as error:  # noqa: BLE001 - passed to the waiting episode
            if not ready.done():
                ready.set_exception(error)


def _library(taskset: str) -> Any:
    if importlib.util.find_spec("verifiers") is None:
        raise SpecError(f"environment.name = 'verifiers:{taskset}': pip install 'tandem-rl[verifiers]'")
    try:
        vf = importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise SpecError(f"environment.name = 'verifiers:{taskset}': verifiers 0.4 is needed: {error}") from error
    if HARNESS not in sys.modules:  # verifiers finds a harness by a top-level module name
        sys.modules[HARNESS] = importlib.import_module("tandem.env.adapters.verifiers_harness")
    return vf


def _held_out(tasks: list[Any]) -> list[Any]:
    """Hold out one task in eight by a digest of its key, so that it is always the same ones."""
    return sorted(tasks, key=lambda theirs: hashlib.blake2b(theirs.key.encode()).digest())[: max(1, len(tasks) // 8)]


def _without(tasks: list[Any], others: list[Any]) -> list[Any]:
    keys = {theirs.key for theirs in others}
    return [theirs for theirs in tasks if theirs.key not in keys]


def _task(task_id: str, theirs: Any, split: str) -> Task:
    opening = importlib.import_module("tandem.env.adapters.verifiers_harness").opening
    messages = opening(theirs.data.system_prompt, theirs.data.prompt)
    if not messages:
        raise SpecError(
            f"environment.params: task '{task_id}' has neither a prompt nor a system prompt, so there is nothing to "
            "open the conversation with; give the taskset a file by taskset = { system_prompt = 'path' }"
        )
    return Task(task_id, tuple(messages), {"split": split})


def _outcome(task_id: str, episode: Any) -> Outcome:
    traces = cast("list[Any]", episode.traces)
    if not episode.ok or not traces:
        errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        told = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it ended without a trace"
        raise EpisodeFailed("raised", f"task {task_id}: verifiers: {told[:1_000]}")
    if len(traces) > 1:
        raise EpisodeFailed("raised", f"task {task_id}: verifiers played {len(traces)} rollouts of one conversation")
    (trace,) = traces
    metrics = {name: value for name, value in trace.metrics.items() if value is not None and math.isfinite(value)}
    rewards = {f"reward/{name}": each.value for name, each in trace.rewards.items() if each is not None}
    return Outcome(trace.reward, {**metrics, **rewards, "turns": float(trace.num_turns)})
