"""`tandem engine install | check`: install vLLM in its own environment, and check that runs can train with it.

A check does what a run would do, with the trainer's own policy and vLLM in its own process and environment. It sends
versions over every bridge that the device allows, with a run's proofs. It sends requests, and compares the logprobs of
the answers with the trainer's. Of one model it does both over the bridges that are named, with texts in the model's own
template.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tandem.build import built_model, run_engines, standalone_engines, training
from tandem.errors import SpecError, TandemError
from tandem.protocols import Engine, Trainer
from tandem.recipes import sync_bench
from tandem.spec.bridges import BRIDGES, on_one_gpu
from tandem.spec.load import with_values
from tandem.types import Completion, Sampling

if TYPE_CHECKING:
    from tandem.build.built_model import BuiltModel
    from tandem.spec.run import RlSpec

CHECKED_BRIDGES = tuple(name for name, traits in BRIDGES.items() if not traits.in_process)
_ROUNDS, _PROMPTS, _TOKENS = 2, 8, 24
_NOT_CHECKED = {
    "python": "name the interpreter with --python",
    "url": "this starts an engine of its own",
    "replicas": "one engine is checked",
}
"""Fields of the engine table that a check takes from elsewhere."""
_CONTEXT = 1024
"""Tokens of a prompt and its answer, of a model that is named."""


class _Failed(TandemError):
    """What a check found."""


@dataclass(frozen=True, slots=True)
class OneCheck:
    name: str
    state: Literal["passed", "failed", "not here"]
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.state}{f': {self.why}' if self.why else ''}"


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """The result of checking one engine."""

    python: str
    version: str
    device: str
    checks: tuple[OneCheck, ...]

    @property
    def passed(self) -> bool:
        return all(check.state != "failed" for check in self.checks)


def install_engine(
    directory: str | Path | None = None,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    version: str = "",
    tell: Callable[[str], None] = lambda text: None,
) -> Path:
    """Create a Python environment with vLLM and return its interpreter. `directory` defaults to where runs look for
    one, `version` to one that has passed the conformance suite on this device."""
    place = Path(directory or Path(standalone_engines.default_python()).parent.parent)
    return standalone_engines.install_vllm(place, _picked(device), version, tell)


def check_engine(
    python: str | Path = "",
    *,
    model: str = "",
    bridges: Sequence[str] = (),
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    options: Mapping[str, Any] | None = None,
    targets: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> EngineCheck:
    """Check that the vLLM of an interpreter does what runs need. If it does, record that beside the interpreter.
    `model`: check that it computes this one as the trainer does; a directory, a GGUF file or an id of the hub.
    `bridges`: of the model's versions; by default the one that a run takes on this device. `dtype`: of its weights;
    auto is bfloat16 on a GPU, else float32. `options`: further fields of the spec's [engine] table for such a check.
    `targets`: of its adapters, where a bridge carries those; by default all linear layers, or those of the attention
    where a model has stacked experts."""
    python, picked = str(python or standalone_engines.default_python()), _picked(device)
    if odd := sorted(set(bridges) - set(CHECKED_BRIDGES)):
        raise SpecError(f"--bridge = '{odd[0]}': there are {', '.join(CHECKED_BRIDGES)}")
    if bridges and not model:
        raise SpecError("--bridge: name a model, too; without one all bridges are checked")
    if odd := sorted(_NOT_CHECKED.keys() & (options or {}).keys()):
        raise SpecError(f"--set {odd[0]}: {_NOT_CHECKED[odd[0]]}")
    if not model and (dtype != "auto" or options):
        raise SpecError(f"--{'dtype' if dtype != 'auto' else 'set'}: name a model, too; without one it is not used")
    if targets and not any(BRIDGES[name].carries == "adapter" for name in bridges):
        raise SpecError("--target: name a bridge that carries adapters, too: --bridge adapter or adapter_broadcast")
    if model and not bridges:
        bridges = [on_one_gpu(adapters=False).name if picked == "cuda" else sync_bench.ON_ANY_DEVICE]
    version = standalone_engines.vllm_version(python)
    tell(f"vLLM {version}, {python}, on {picked}")
    checks: list[OneCheck] = []
    for check in (
        _model_checks(python, picked, model, [*dict.fromkeys(bridges)], dtype, options or {}, targets)
        if model
        else _checks(python, picked)
    ):
        checks.append(check)
        tell(str(check))
    found = EngineCheck(python, version, picked, tuple(checks))
    if found.passed and not model:
        names = [check.name for check in checks if check.state == "passed"]
        tell(f"vLLM {version} has passed: recorded in {standalone_engines.record_passed(python, version, names)}")
    return found


def _picked(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    return device if device != "auto" else built_model.pick_device("auto").type


def _checks(python: str, device: Literal["cpu", "cuda"]) -> Iterator[OneCheck]:
    yield from _request_checks(python, device)
    yield from _bridge_checks(python, device)


def _model_checks(
    python: str, device: str, path: str, bridges: Sequence[str], dtype: str, options: Mapping[str, Any],
    targets: Sequence[str],
) -> Iterator[OneCheck]:  # fmt: skip
    for bridge in bridges:
        for check in _request_checks(python, device, path, bridge, dtype, options, targets):
            yield replace(check, name=f"{bridge}: {check.name}")


# --- bridges


def _bridge_checks(python: str, device: Literal["cpu", "cuda"]) -> Iterator[OneCheck]:
    for name in CHECKED_BRIDGES:
        (row,) = sync_bench.bench_sync(
            "tiny", [name], device=device, engine="vllm", rounds=_ROUNDS, python=python, unchecked=True
        ).rows
        if row.skipped:
            yield OneCheck(name, "not here", row.skipped)
        elif row.verified:
            yield OneCheck(name, "passed", f"{row.rounds} versions, {row.tensors} tensors, {row.how}")
        else:
            yield OneCheck(name, "failed", row.error or "published without proof")


# --- requests


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """An engine that serves a version, the trainer of that version, and the prompts to compare them with."""

    engine: Engine
    trainer: Trainer
    prompts: Sequence[list[int]]
    end_ids: frozenset[int]
    limit: float
    """Largest allowed difference of two computations of the same logprobs, in nats per token."""

    async def ask(self, sampling: Sampling) -> list[Completion]:
        """Send all prompts at once, each with its own seed."""
        return await asyncio.gather(
            *(
                self.engine.generate(prompt, replace(sampling, seed=sampling.seed + number))
                for number, prompt in enumerate(self.prompts)
            )
        )


def _request_checks(
    python: str,
    device: str,
    path: str = "",
    bridge: str = sync_bench.ON_ANY_DEVICE,
    dtype: str = "auto",
    options: Mapping[str, Any] | None = None,
    targets: Sequence[str] = (),
) -> list[OneCheck]:
    """`path`: of a model; empty: the small one of the conformance suite, with prompts of random ids."""
    with tempfile.TemporaryDirectory(prefix="tandem-engine-check-") as home:
        given = {**(options or {}), "python": python}
        spec = sync_bench.bench_spec(bridge, "tiny", device, "vllm", Path(home), given)
        if dtype != "auto":
            precision = {"weights": dtype, **({"master": "split"} if dtype == "bfloat16" else {})}
            spec = cast("RlSpec", with_values(spec, {"precision": precision}))
        if path:
            named = {"targets": list(targets)} if targets else {}
            lora = {} if spec.model.lora is None else {"lora": {**spec.model.lora.model_dump(), **named}}
            spec = cast("RlSpec", with_values(spec, {"model": {"path": path, **lora}}))
        spec, model, left_out = _built(spec)
        if path:
            longest: int = model.policy.module.config.get_text_config().max_position_embeddings
            asked: int = given.get("max_context", _CONTEXT)
            spec = cast("RlSpec", with_values(spec, {"engine.max_context": min(longest, asked)}))
        try:
            return left_out + asyncio.run(served_and_asked(spec, model, Path(home), own_prompts=bool(path)))
        except (TandemError, RuntimeError) as error:
            return [*left_out, OneCheck("requests", "failed", f"{type(error).__name__}: {error}")]


def _built(spec: RlSpec) -> tuple[RlSpec, BuiltModel, list[OneCheck]]:
    """Build the model. Where all-linear would adapt stacked experts, which no engine in another process serves, the
    attention alone has adapters."""
    model = built_model.model(spec.model, spec.precision, spec.seed, built_model.settle_torch(spec))
    lora = spec.model.lora
    linear = run_engines.targets_beside_experts(model) if lora and lora.targets == "all-linear" else []
    if not linear:
        return spec, model, []
    spec, device = cast("RlSpec", with_values(spec, {"model.lora.targets": linear})), model.device
    del model  # before it is built again
    gc.collect()
    model = built_model.model(spec.model, spec.precision, spec.seed, device)
    why = f"no vLLM serves them; checked with model.lora.targets = {json.dumps(linear)}"
    return spec, model, [OneCheck("adapters on stacked experts", "not here", why)]


async def served_and_asked(spec: RlSpec, model: BuiltModel, home: Path, *, own_prompts: bool) -> list[OneCheck]:
    joined = run_engines.join(spec, model, home, unchecked=True)
    publisher = run_engines.publisher(joined, model, spec.sync.deadline_s, training.caller(False))
    trainer = training.trainer(spec.train, model, training.algorithm(spec.algorithm, 8), 0, spec.seed)
    rng = random.Random("engine check")
    prompts = [[rng.randrange(model.num_ids) for _ in range(5 + 3 * number)] for number in range(_PROMPTS)]
    canary = run_engines.canary(model)
    if own_prompts:
        prompts = [list(each) for each in (canary.prompt_ids, *canary.more_prompts)]
    try:
        await publisher.publish(trainer)
        sync_bench.move_weights(model, trainer)
        await publisher.publish(trainer)
        served = ServedVersion(joined.engine, trainer, prompts, model.renderer.end_ids, canary.ceiling)
        return await request_checks(served)
    finally:
        await joined.engine.close()
        joined.bridge.close()


async def request_checks(served: ServedVersion) -> list[OneCheck]:
    """Send requests to the engine and compare its answers with the trainer's logprobs and version."""
    return [await _outcome(name, check, served) for name, check in _CHECKS.items()]


async def _outcome(name: str, check: Callable[[ServedVersion], Awaitable[str]], served: ServedVersion) -> OneCheck:
    try:
        return OneCheck(name, "passed", await check(served))
    except _Failed as error:
        return OneCheck(name, "failed", str(error))
    except TandemError as error:
        return OneCheck(name, "failed", f"{type(error).__name__}: {error}")


async def _counts(served: ServedVersion) -> str:
    for answer in await served.ask(Sampling(max_tokens=_TOKENS, seed=1)):
        ended = bool(answer.ids) and answer.ids[-1] in served.end_ids
        if len(answer.ids) > _TOKENS or (len(answer.ids) < _TOKENS and not ended):
            raise _Failed(f"{len(answer.ids)} tokens instead of {_TOKENS}, and the last is not an end token")
        if len(answer.logprobs) != len(answer.ids) or len(answer.versions) != len(answer.ids):
            raise _Failed(f"{len(answer.ids)} tokens, {len(answer.logprobs)} logprobs, {len(answer.versions)} versions")
        if (answer.finish_reason == "stop") != ended:
            raise _Failed(f"finish_reason is '{answer.finish_reason}', but the last token is {answer.ids[-1]}")
    return ""


async def _logprobs(served: ServedVersion) -> str:
    gaps = list[float]()
    for sampling in (Sampling(max_tokens=_TOKENS, seed=2), Sampling(max_tokens=_TOKENS, temperature=0.0)):
        for prompt, told in zip(served.prompts, await served.ask(sampling), strict=True):
            if not told.ids or len(told.logprobs) != len(told.ids):
                raise _Failed(f"{len(told.ids)} tokens, {len(told.logprobs)} logprobs")
            ours = served.trainer.score([*prompt, *told.ids], len(prompt))
            gaps.append(sum(abs(a - b) for a, b in zip(ours, told.logprobs, strict=True)) / len(ours))
            if not gaps[-1] <= served.limit:
                raise _Failed(
                    f"{gaps[-1]:.4f} nats a token from the trainer's, at temperature {sampling.temperature:g}"
                )
    return f"within {max(gaps):.2g} nats a token in each of {len(gaps)} answers; {served.limit:g} are allowed"


async def _seeds(served: ServedVersion) -> str:
    first, again, other = [await served.ask(Sampling(max_tokens=_TOKENS, seed=seed)) for seed in (3, 3, 1003)]
    if [answer.ids for answer in first] != [answer.ids for answer in again]:
        raise _Failed("one seed gave two answers")
    if [told.ids for told in first] == [told.ids for told in other]:
        raise _Failed("two seeds gave one answer")
    return ""


async def _stop_ids(served: ServedVersion) -> str:
    prompt = served.prompts[0]
    free = await served.engine.generate(prompt, Sampling(max_tokens=_TOKENS, temperature=0.0))
    stop = free.ids[len(free.ids) // 2]
    told = await served.engine.generate(prompt, Sampling(max_tokens=_TOKENS, temperature=0.0, stop_ids=(stop,)))
    until = free.ids[: free.ids.index(stop) + 1]
    if told.ids != until or told.finish_reason != "stop":
        raise _Failed(f"{told.ids} ('{told.finish_reason}') instead of {until}: it must end at the first {stop}")
    return ""


async def _versions(served: ServedVersion) -> str:
    found = {
        version for answer in await served.ask(Sampling(max_tokens=_TOKENS, seed=4)) for version in answer.versions
    }
    if found != {served.trainer.version}:
        raise _Failed(f"{sorted(found)} instead of {served.trainer.version}")
    return ""


_CHECKS: dict[str, Callable[[ServedVersion], Awaitable[str]]] = {
    "as many tokens as asked for": _counts,
    "logprobs match the trainer's": _logprobs,
    "a seed gives the same tokens again": _seeds,
    "a stop id ends the answer": _stop_ids,
    "every token has the version served": _versions,
}
"""Each returns more of what passed, or nothing, and raises `_Failed`."""
