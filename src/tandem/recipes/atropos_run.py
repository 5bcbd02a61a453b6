"""`tandem atropos`: start a run on Atropos environments with all its processes, and end them with it.

consumes: a spec with rollouts.kind = "atropos"     waits for: each service to be ready, then for the trainer's end
produces: a run                                     the other processes end with this one, however it ends

The processes start in this order, each once the services that it calls are ready: engine and rollout service, then
gateway and trainer, then the environments. Their data, logs and ports are beside the run, in DIR.processes. The ports
stay the same when the run is resumed.
"""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.build import run_engines
from tandem.errors import ProcessEnded, SpecError
from tandem.io import atomic_write
from tandem.io.child_process import Child, Ready
from tandem.io.gguf.directory import model_directory
from tandem.runs.run import Run
from tandem.spec.engine import ServerEngineSpec, VllmEngineSpec
from tandem.spec.load import AnySpec, as_spec, to_toml
from tandem.spec.model import PathModel, PresetModel
from tandem.spec.precision import Bfloat16Precision
from tandem.spec.rollouts import AtroposRollouts, ServiceRollouts
from tandem.spec.run import RlSpec, RunSpec

_READY_S, _LOOK_S = 120.0, 0.1
_SERVICES = ("engine", "gateway", "rollouts")
_STEPS = 10**9
"""Steps of an environment: without end, because the trainer ends the run. Its command line would read -1 as a flag."""
_WRITE_PRESET = "import sys; from tandem.build.standalone_engines import write_preset; write_preset(*sys.argv[1:])"
_PROGRAM = (sys.executable, "-m", "tandem")


@dataclass(frozen=True)
class ProcessPlan:
    spec: RlSpec
    rollouts: AtroposRollouts
    engine: ServerEngineSpec | VllmEngineSpec
    model: str
    run_dir: Path
    home: Path
    ports: dict[str, int]

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def token_file(self, name: str) -> Path:
        return self.home / name / "token"

    def serving(self, name: str) -> list[str]:
        """Return the options that every service takes."""
        options = {"port": self.ports[name], "data-dir": self.home / name, "ready-file": self.ready_file(name)}
        return [str(word) for option, value in options.items() for word in (f"--{option}", value)]

    def ready_file(self, name: str) -> Path:
        return self.home / f"{name}.json"


def run_atropos(spec: AnySpec, run_dir: str | Path | None = None, *, tell: Callable[[str], None] = print) -> None:
    """Start all processes, train until the run ends, end all processes. A `run_dir` that holds a run is resumed.
    ProcessEnded names the process that ended too early, and why."""
    plan = plan_processes(as_spec(spec), Path(run_dir) if run_dir else None)
    with _ends_by_signal(), RunProcesses(plan, tell) as processes:
        processes.start()
        processes.watch()


def plan_processes(spec: RunSpec, run_dir: Path | None) -> ProcessPlan:
    if not isinstance(spec, RlSpec) or not isinstance(spec.rollouts, AtroposRollouts):
        raise SpecError("rollouts.kind: `tandem atropos` starts Atropos environments; set it to 'atropos'")
    engine, model = spec.engine, spec.model
    if not isinstance(engine, ServerEngineSpec | VllmEngineSpec) or engine.url or engine.replicas > 1:
        raise SpecError(
            "engine: `tandem atropos` starts one engine; set kind 'server' or 'vllm', no url, and replicas 1"
        )
    run_dir = (run_dir or Run.new_directory(Path("runs"), spec.name)).absolute()
    home = run_dir.with_name(f"{run_dir.name}.processes")
    home.mkdir(parents=True, exist_ok=True)
    if isinstance(model, PresetModel):
        model = _write_preset(model, spec.seed, home / "model")
    place = Path(model_directory(model.path))
    return ProcessPlan(
        spec.model_copy(update={"model": model}),
        spec.rollouts,
        engine,
        str(place.absolute()) if place.is_dir() else model.path,
        run_dir,
        home,
        _ports(home),
    )


def _write_preset(model: PresetModel, seed: int, path: Path) -> PathModel:
    """Write the preset model to a directory that engine, gateway and trainer load. A child process does it, so that
    this process does not import torch."""
    if not path.exists():
        words = (sys.executable, "-c", _WRITE_PRESET, model.preset, str(seed), str(path))
        made = subprocess.run(words, capture_output=True, text=True, check=False)
        if made.returncode:
            raise SpecError(f"model.preset = '{model.preset}': it could not be made: {made.stderr[-2000:]}")
    return PathModel(path=str(path), **model.model_dump(exclude={"preset"}))


def _ports(home: Path) -> dict[str, int]:
    """Choose free ports, once: a resumed run uses the same ones, because its spec names them."""
    kept = home / "ports.json"
    if not kept.exists():
        probes = {name: socket.socket() for name in _SERVICES}
        for probe in probes.values():
            probe.bind(("127.0.0.1", 0))
        atomic_write.write_json(kept, {name: probe.getsockname()[1] for name, probe in probes.items()})
        for probe in probes.values():
            probe.close()
    return json.loads(kept.read_text(encoding="utf-8"))


# --- command lines


def engine_command(plan: ProcessPlan) -> list[str]:
    spec, engine = plan.spec, plan.engine
    if isinstance(engine, VllmEngineSpec):
        engine = engine.model_copy(
            update={"sleep": "keep"}
        )  # an engine that shares its memory must be started by the trainer
    readable = run_engines.version_places(spec.sync, plan.run_dir / "engines" / "versions")
    return [
        *run_engines.engine_command(
            engine,
            device=spec.device,
            dtype="bfloat16" if isinstance(spec.precision, Bfloat16Precision) else "float32",
            thinking=spec.model.thinking,
            directory=plan.home / "engine",
            readable=readable,
        )(plan.model, 0, plan.ready_file("engine")),
        *run_engines.adapter_options(spec),
        "--port", str(plan.ports["engine"]),
    ]  # fmt: skip


def _rollouts_command(plan: ProcessPlan) -> list[str]:
    gateway = ("--gateway", plan.url("gateway"), "--gateway-token-file", str(plan.token_file("gateway")))
    return [*_PROGRAM, "rollouts", "serve", "--atropos", "--insecure-no-auth", *gateway, *plan.serving("rollouts")]


def _gateway_command(plan: ProcessPlan) -> list[str]:
    engine = ("--engine-url", plan.url("engine"), "--engine-token-file", str(plan.token_file("engine")))
    thinking = "--thinking" if plan.spec.model.thinking else "--no-thinking"
    return [*_PROGRAM, "gateway", "serve", "--model", plan.model, *engine, thinking, *plan.serving("gateway")]


def trainer_command(plan: ProcessPlan) -> list[str]:
    if (plan.run_dir / "spec.toml").exists():
        return [*_PROGRAM, "resume", str(plan.run_dir)]
    changes: dict[str, Any] = {
        "rollouts": ServiceRollouts(
            kind="service",
            url=plan.url("rollouts"),
            token_file=str(plan.token_file("rollouts")),
            lease_s=plan.rollouts.lease_s,
        ),
        "engine": plan.engine.model_copy(
            update={"url": plan.url("engine"), "token_file": str(plan.token_file("engine"))}
        ),
    }
    spec = plan.home / "trainer.toml"
    atomic_write.write_text(spec, to_toml(plan.spec.model_copy(update=changes)))
    return [*_PROGRAM, "train", str(spec), "--run-dir", str(plan.run_dir)]


def environment_command(plan: ProcessPlan, words: str, model_name: str) -> list[str]:
    """Return an environment's command line, with the options added that the spec leaves out."""
    command = shlex.split(words)
    options = {
        "--env.rollout_server_url": plan.url("rollouts"),
        "--env.tokenizer_name": plan.model,
        "--env.total_steps": str(_STEPS),
        "--openai.base_url": f"{plan.url('gateway')}/v1",
        "--openai.api_key": plan.token_file("gateway").read_text(encoding="utf-8").strip(),
        "--openai.server_type": plan.rollouts.server_type,
        "--openai.model_name": model_name,
        "--openai.tokenizer_name": plan.model,
    }
    given = {word.partition("=")[0] for word in command}
    return [*command, *(word for name, value in options.items() if name not in given for word in (name, value))]


# --- processes


class RunProcesses:
    def __init__(self, plan: ProcessPlan, tell: Callable[[str], None]) -> None:
        self._plan, self._tell = plan, tell
        self._children: dict[str, Child] = {}
        self._printed = 0
        """Bytes of the trainer's log that were printed."""

    def __enter__(self) -> RunProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the trainer first: it saves, and unregisters while the service still runs."""
        grace_s = self._plan.spec.checkpoint.grace_s + 10
        if (trainer := self._children.get("trainer")) is not None:
            trainer.stop(grace_s)
            self._print_log()
        for name, child in reversed(self._children.items()):
            if name != "trainer":
                child.stop()

    def start(self) -> None:
        plan = self._plan
        self._tell(f"processes, logs and data: {plan.home}")
        self.begin("engine", engine_command(plan))
        self.begin("rollouts", _rollouts_command(plan))
        self.wait_ready("engine", plan.engine.start_deadline_s)
        self.wait_ready("rollouts", _READY_S)
        self._printed = log.stat().st_size if (log := self._log("trainer")).exists() else 0
        self.begin("trainer", trainer_command(plan))
        self.begin("gateway", _gateway_command(plan))
        model_name = _model_of(self.wait_ready("gateway", _READY_S))
        for number, words in enumerate(plan.rollouts.environments):
            self.begin(f"environment-{number}", environment_command(plan, words, model_name))

    def watch(self) -> None:
        """Wait until the trainer ends with exit code 0. ProcessEnded if it fails, or if another process ends before."""
        while True:
            ended = {name: child for name, child in self._children.items() if child.exit_code is not None}
            self._print_log()
            if (trainer := ended.get("trainer")) is not None:
                if trainer.exit_code:
                    raise self._ended("trainer", trainer)
                return
            for name, child in ended.items():
                if not (name.startswith("environment-") and child.exit_code == 0 and self._others_play(name)):
                    raise self._ended(name, child)
                self._tell(f"{name} has ended with exit code 0; the others continue")
                del self._children[name]
            time.sleep(_LOOK_S)

    def _others_play(self, name: str) -> bool:
        return any(each.startswith("environment-") and each != name for each in self._children)

    def _ended(self, name: str, child: Child) -> ProcessEnded:
        return ProcessEnded(f"{name} ended before the run did, so all processes were stopped: {child.exit_report()}")

    def begin(self, name: str, command: Sequence[str]) -> None:
        try:
            child = Child(command, ready_file=self._plan.ready_file(name), log=self._log(name), name=name)
        except OSError as error:
            raise SpecError(f"{name}: cannot be started: {error}") from error
        self._children[name] = child
        self._tell(f"{name} starts")

    def wait_ready(self, name: str, deadline_s: float) -> Ready:
        ready = self._children[name].wait_ready(deadline_s)
        self._tell(f"{name} is ready: {ready.url}")
        return ready

    def _log(self, name: str) -> Path:
        return self._plan.home / f"{name}.log"

    def _print_log(self) -> None:
        """Print the lines that the trainer has written since the last call."""
        if not (log := self._log("trainer")).exists():
            return
        with log.open("rb") as file:
            file.seek(self._printed)
            new = file.read()
        if lines := new[: new.rfind(b"\n") + 1]:
            self._printed += len(lines)
            self._tell(lines.decode("utf-8", "replace").rstrip("\n"))


def _model_of(gateway: Ready) -> str:
    import httpx

    headers = {"Authorization": f"Bearer {gateway.token}"}
    return httpx.get(f"{gateway.url}/v1/models", headers=headers, trust_env=False).json()["data"][0]["id"]


@contextmanager
def _ends_by_signal() -> Iterator[None]:
    """Make SIGTERM and Ctrl-C end all processes in order."""

    def stop(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second signal must not interrupt the shutdown
        raise SystemExit(143)

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
