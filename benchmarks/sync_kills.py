"""Trainer and engine, two real processes, are killed and stopped at random instants: `make sync-kills`.

A trainer (sync_kills_trainer.py) publishes one version after another. What it announces goes to a journal before it is
sent: the digest of the whole model, and the first greedy token of a fixed prompt with its logprob. At a random instant
one side gets SIGKILL or SIGSTOP. The other side must notice within 30 s, a verified version must be published again
within 60 s (an engine that was killed is started again, a trainer is replaced by a new one, a stopped engine is let go
on), and whatever the engine serves afterwards must be something that was announced. A stopped trainer is let go on
last: it must find itself fenced.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

import sync_kills_trainer
from sync_kills_trainer import PROMPT, START_S, all_in_one

MODES = ("shared", "broadcast", "disk", "adapter", "adapter_broadcast", "restart")
DETECT_S, RECOVER_S = 30.0, 60.0
FENCE_S = 30.0
_NEAR = 2e-4  # nats: two programs' roundings
_POLL_S = 0.02

Event = dict[str, Any]


# --- processes, as the harness sees them


class Trainer:
    def __init__(self, mode: str, home: Path, number: int, version: int, engine: Mapping[str, Any]) -> None:
        self._journal = home / f"trainer-{number}.jsonl"
        told = {"mode": mode, "home": str(home), "number": number, "version": version, "engine": dict(engine)}
        with (home / f"trainer-{number}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, sync_kills_trainer.__file__, json.dumps(told)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment(),
            )  # fmt: skip

    def events(self) -> list[Event]:
        if not self._journal.exists():
            return []
        lines = self._journal.read_bytes().split(b"\n")[:-1]  # the last one may be cut short
        return [json.loads(line) for line in lines]

    def after(self, at: float, *kinds: str) -> Event | None:
        return next((each for each in self.events() if each["what"] in kinds and each["at"] > at), None)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Engine:
    """One at a time, always at the same port and with the same token."""

    def __init__(self, home: Path, mode: str) -> None:
        self._home, self._port = home, free_port()
        self._allow = mode in ("disk", "adapter")
        self.token_file = Path()
        self.url = ""
        self.start()

    def start(self) -> None:
        ready = self._home / "ready.json"
        ready.unlink(missing_ok=True)
        options = ["--version", 0, "--port", self._port, "--data-dir", self._home / "engine", "--ready-file", ready]
        options += ["--device", "cpu", "--set", "max_context=128"]
        options += ["--allow-dir", self._home] if self._allow else []
        with (self._home / "engine.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tandem", "engine", "serve", str(self._home / "model"), *map(str, options)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment(),
            )  # fmt: skip
        if not waited(ready.exists, START_S):
            raise RuntimeError("the engine did not start")
        told = json.loads(ready.read_text())
        self.url, self.token_file = told["url"], Path(told["token_file"])

    @property
    def place(self) -> dict[str, Any]:
        return {"url": self.url, "token_file": str(self.token_file)}

    def ask(self, route: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """(0, why) where none answers."""
        headers = {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}
        try:
            with httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=DETECT_S) as client:
                answer = client.get(route) if body is None else client.post(route, json=dict(body))
                lines = [json.loads(line) for line in answer.text.splitlines()]
        except httpx.HTTPError as error:
            return 0, type(error).__name__
        return answer.status_code, lines[0] if len(lines) == 1 else lines

    def first_token(self) -> tuple[int, Any]:
        sampling = {"max_tokens": 1, "temperature": 0.0}
        return self.ask("/engine/generate", {"prompt_ids": list(PROMPT), "sampling": sampling})

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def waited(done: Callable[[], Any], seconds: float) -> Any:
    """What it found; None when time was up."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := done():
            return found
        time.sleep(_POLL_S)
    return None


def newest_pid(files: Iterable[Path]) -> int | None:
    """The process that wrote the newest of these files; one that ends removes its own."""
    found: list[tuple[float, int]] = []
    for file in files:
        with suppress(FileNotFoundError):
            found.append((file.stat().st_mtime, json.loads(file.read_text())["pid"]))
    return max(found)[1] if found else None


# --- one instant


@dataclass
class Found:
    mode: str
    victim: str
    signal: str
    detected_s: float | None = None
    recovered_s: float | None = None
    how: str = ""
    hangs: list[str] = field(default_factory=list)
    unannounced: list[str] = field(default_factory=list)
    looks: int = 0
    """How often what is served was compared with what was announced."""


class Pair:
    """A trainer and an engine of one mode, and all who stood in their places before."""

    def __init__(self, mode: str, home: Path) -> None:
        self.mode, self._home = mode, home
        self.engine = Engine(home, mode) if mode != "restart" else None
        self.trainers: list[Trainer] = []
        self._version = 1

    def new_trainer(self) -> Trainer:
        self._version = max((each["version"] for each in self._announced()), default=0) + 1000
        place = self.engine.place if self.engine is not None else {}
        self.trainers.append(Trainer(self.mode, self._home, len(self.trainers), self._version, place))
        return self.trainers[-1]

    def strike(self, victim: str, number: signal.Signals, wait_s: float) -> Found:
        found = Found(self.mode, victim, number.name)
        trainer = self.trainers[-1] if self.trainers else self.new_trainer()
        if trainer.process.poll() is not None:
            trainer = self.new_trainer()
        since = time.time()
        if waited(lambda: self._publishes(trainer, since), START_S) is None:
            found.hangs.append("no version was published before the instant")
            return found
        time.sleep(wait_s)
        if self.engine is None:
            self.strike_owned(found, trainer, number)
        elif victim == "engine":
            self._strike_engine(found, trainer, self.engine, number)
        else:
            self._strike_trainer(found, trainer, self.engine, number)
        return found

    def close(self) -> None:
        for each in (*self.trainers, *([self.engine] if self.engine is not None else [])):
            each.end()

    def _strike_engine(self, found: Found, trainer: Trainer, engine: Engine, number: signal.Signals) -> None:
        began = time.time()
        engine.process.send_signal(number)
        self._notice(found, trainer, began)
        again = time.time()
        if number == signal.SIGKILL:
            engine.process.wait()
            engine.start()
        else:
            engine.process.send_signal(signal.SIGCONT)
            self._look(found, engine)  # before anybody has attached again, if nobody has
        self._recover(found, trainer, again)
        self._look_often(found, engine)

    def _strike_trainer(self, found: Found, trainer: Trainer, engine: Engine, number: signal.Signals) -> None:
        began = time.time()
        trainer.process.send_signal(number)
        status, told = engine.first_token()
        if status in (200, 503):
            found.detected_s, found.how = time.time() - began, f"the engine answers {status}"
        else:
            found.hangs.append(f"the engine answers {status}: {told}")
        self._look_often(found, engine)  # of what the one before left behind
        again = time.time()
        heir = self.new_trainer()
        self._recover(found, heir, again)
        if number == signal.SIGSTOP:
            let_go = time.time()
            trainer.process.send_signal(signal.SIGCONT)
            if waited(lambda: trainer.process.poll() is not None, FENCE_S) is None:
                found.hangs.append("a trainer that was replaced goes on")
            elif self._publishes(trainer, let_go):  # one that was proven when it was stopped may be told of now
                found.unannounced.append("a trainer that was replaced had a version proven")
            self._recover(found, heir, let_go, what="after the one before had gone on")
        trainer.end()
        self._look_often(found, engine)

    def strike_owned(self, found: Found, trainer: Trainer, number: signal.Signals) -> None:
        """The trainer starts it again by itself. For the next version it would have done so anyway: then nobody has
        to notice, and the version is what is waited for."""
        pattern = f"run-{len(self.trainers) - 1}/*/ready*.json"  # there is none while the next engine starts
        process = waited(lambda: newest_pid(self._home.glob(pattern)), START_S)
        if process is None:
            found.hangs.append("the trainer's engine did not start")
            return
        began = time.time()
        os.kill(process, number)
        self._notice(found, trainer, began, "proof")
        self._recover(found, trainer, began)

    def _notice(self, found: Found, trainer: Trainer, began: float, *or_else: str) -> None:
        noticed = waited(lambda: trainer.after(began, "warning", "error", "ended", *or_else), DETECT_S)
        if noticed is None:
            found.hangs.append("the trainer did not notice")
        else:
            found.detected_s, found.how = noticed["at"] - began, noticed.get("text", "the next version")[:100]

    def _recover(self, found: Found, trainer: Trainer, since: float, what: str = "") -> None:
        proof = waited(lambda: self._publishes(trainer, since) or trainer.process.poll() is not None, RECOVER_S + 30)
        if not isinstance(proof, dict):
            found.hangs.append(f"no version was published again {what}: {[*trainer.events()[-3:]]}")
        else:
            found.recovered_s = max(found.recovered_s or 0.0, proof["at"] - since)

    def _publishes(self, trainer: Trainer, since: float) -> Event | None:
        """A version that was also begun since."""
        begun = trainer.after(since, "announced", "warning", "error")
        return trainer.after(max(since, begun["at"]), "proof") if begun else None

    # --- what is served

    def _announced(self) -> Iterator[Event]:
        for trainer in self.trainers:
            yield from (each for each in trainer.events() if each["what"] == "announced")

    def _look_often(self, found: Found, engine: Engine) -> None:
        for _ in range(5):
            self._look(found, engine)
            time.sleep(0.05)

    def _look(self, found: Found, engine: Engine) -> None:
        """The digest of what is served, and an answer with the version on it."""
        before = engine.ask("/engine/status")
        if before[0] != 200:
            found.hangs.append(f"/engine/status: {before}")
            return
        status, digest = engine.ask("/engine/digest", {"version": before[1]["version"]})
        after = engine.ask("/engine/status")
        asked, answer = engine.first_token()
        announced = list(self._announced())
        same = all(before[1][key] == after[1].get(key) for key in ("state", "version", "cache_epoch", "attachment"))
        # While it lends its memory, nobody is answered from it; a version that comes meanwhile is refused by name.
        if status == 200 and same and before[1]["state"] == "serving":
            found.looks += 1
            told = all_in_one(digest["fingerprints"])
            if not any(each["digest"] == told and each["version"] == digest["version"] for each in announced):
                found.unannounced.append(f"digest {told} of version {digest['version']}")
        if asked == 200:
            found.looks += 1
            tokens = answer[0]
            if not any(says(each, tokens) for each in announced):
                found.unannounced.append(f"an answer of version {tokens['version']}: {tokens}")
        elif asked != 503:
            found.hangs.append(f"/engine/generate: {asked} {answer}")


def says(announced: Event, tokens: Event) -> bool:
    best, logprob = announced["greedy"]
    same = announced["version"] == tokens["version"] and best == tokens["ids"][0]
    return same and abs(logprob - tokens["logprobs"][0]) < _NEAR


# --- all of them


def make_model(path: Path) -> None:
    from tandem.model.presets import make_model as make
    from tandem.text.tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    make("tiny", tokenizer, seed=0).save_pretrained(path)
    tokenizer.save_pretrained(path)


def run_mode(mode: str, instants: int, seed: int, home: Path, tell: Callable[[str], None]) -> list[Found]:
    rng = random.Random(f"{seed} {mode}")
    kinds = [(victim, number) for number in (signal.SIGKILL, signal.SIGSTOP) for victim in ("engine", "trainer")]
    if mode == "restart":  # the engine is the trainer's own, and ends with it
        kinds = [("engine", signal.SIGKILL), ("engine", signal.SIGSTOP)]
    offset = rng.randrange(len(kinds))
    found: list[Found] = []
    home.mkdir()
    shutil.copytree(home.parent / "model", home / "model")
    pair = Pair(mode, home)
    try:
        for n in range(instants):
            found.append(pair.strike(*kinds[(offset + n) % len(kinds)], wait_s=rng.uniform(0.0, 1.5)))
            tell(json.dumps(asdict(found[-1])))
    finally:
        pair.close()
    return found


def shares(instants: int, modes: list[str]) -> dict[str, int]:
    """Equal ones; by restart an instant takes long, and two of them do."""
    slow = min(2, instants // len(modes)) if "restart" in modes and len(modes) > 1 else 0
    fast = [mode for mode in modes if mode != "restart" or not slow]
    found = {mode: (instants - slow) // len(fast) + (n < (instants - slow) % len(fast)) for n, mode in enumerate(fast)}
    return {**found, "restart": slow} if slow else found


def summary(found: list[Found]) -> dict[str, Any]:
    return {
        "instants": len(found),
        "hangs": sum(len(each.hangs) for each in found),
        "detected_max_s": max((each.detected_s or 0.0 for each in found), default=0.0),
        "recovered_max_s": max((each.recovered_s or 0.0 for each in found), default=0.0),
        "unannounced": sum(len(each.unannounced) for each in found),
        "looks": sum(each.looks for each in found),
    }


def missed(figures: Mapping[str, Any]) -> bool:
    slow = figures["detected_max_s"] > DETECT_S or figures["recovered_max_s"] > RECOVER_S
    return bool(slow or figures["hangs"] or figures["unannounced"] or not figures["looks"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Exit code 1 if a figure is missed.")
    parser.add_argument("--instants", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--jobs", type=int, default=2, help="modes at a time")
    parser.add_argument("--keep", type=Path, help="where journals and logs are to stay")
    options = parser.parse_args(arguments)

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="tandem-sync-kills-") as temporary:
        home = (options.keep or Path(temporary)).resolve()
        home.mkdir(parents=True, exist_ok=True)
        make_model(home / "model")  # once, and here: threads that import transformers together break it
        with ThreadPoolExecutor(options.jobs) as pool:
            counts = {mode: count for mode, count in shares(options.instants, options.modes).items() if count}
            runs = {
                mode: pool.submit(run_mode, mode, count, options.seed, home / mode, tell)
                for mode, count in counts.items()
            }
            by_mode = {mode: run.result() for mode, run in runs.items()}
    for mode, found in by_mode.items():
        print(mode, " ".join(f"{key}={value:.4g}" for key, value in summary(found).items()))
    figures = summary([each for found in by_mode.values() for each in found])
    print(json.dumps(figures))
    return 1 if missed(figures) else 0


if __name__ == "__main__":
    sys.exit(main())
