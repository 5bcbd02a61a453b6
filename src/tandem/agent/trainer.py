"""The trainer of an attempt: `tandem train --supervise` in a process that outlives the agent."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx

from tandem.agent import keep
from tandem.errors import RunOwned
from tandem.io import atomic_write
from tandem.io.bounded_json import read_json
from tandem.io.process_identity import is_there
from tandem.shapes.agent import AdapterOrder, ServeOrder

TOLD = ".told"
"""What the server adds to the name of its file of adapters, for its answer."""
_LOCK, _WHO, _CODE, OUTPUT = "trainer.lock", "trainer.json", "trainer.code", "trainer.log"


class RunProcess:
    """`home`: the job's directory, with what must be known after the agent was killed."""

    def __init__(self, home: Path, run_dir: Path) -> None:
        self.run_dir, self.output = run_dir, home / OUTPUT
        self._home = home

    def begin(self, spec_toml: str, secrets: Mapping[str, str], hide: str, most_s: float = math.inf) -> bool:
        """Start it; return False if it was started before: then go on with that one. `hide`: a variable of this
        process that it does not get. `most_s`: then its keeper kills it, if no agent lives to do so."""
        lock = os.open(self._home / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits for a keeper that has not written down yet what it started
            if (self._home / _WHO).exists():
                return False
            env = {name: value for name, value in os.environ.items() if name != hide} | dict(secrets)
            command = [
                sys.executable,
                "-I",
                keep.__file__,
                str(self._home),
                str(lock),
                str(most_s),
                *self._command(spec_toml),
            ]
            with self.output.open("ab") as output:
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, pass_fds=(lock,),
                    start_new_session=True,
                )  # fmt: skip
        finally:
            os.close(lock)
        with self._begun():
            pass
        return True

    def exit_code(self) -> int | None:
        """Return its exit code; None while it runs. 137 if it was killed together with its keeper."""
        code = self._code()
        who = self._who()
        if code is None and not is_there(who.get("program", "")) and not is_there(who.get("keeper", "")):
            return 137 if (code := self._code()) is None else code
        return code

    def ask_to_end(self) -> None:
        """Send SIGTERM: it saves a checkpoint and ends."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to its supervisor. What that started is on a leash, and ends within seconds."""
        self._signal(signal.SIGKILL)

    def last_words(self) -> str:
        with suppress(OSError), self.output.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
            return file.read().decode("utf-8", "replace")
        return ""

    def _command(self, spec_toml: str) -> list[str]:
        tandem = [sys.executable, "-P", "-m", "tandem"]
        if (self.run_dir / "spec.toml").exists():
            return [*tandem, "resume", str(self.run_dir), "--supervise"]
        spec = self._home / "spec.toml"
        atomic_write.write_text(spec, spec_toml)
        return [*tandem, "train", str(spec), "--run-dir", str(self.run_dir), "--supervise"]

    def _signal(self, number: int) -> None:
        program = self._who().get("program", "")
        if is_there(program):
            with suppress(ProcessLookupError):
                os.kill(int(program.partition(":")[0]), number)

    def _who(self) -> dict[str, str]:
        try:
            return cast("dict[str, Any]", read_json(self._home / _WHO))
        except (OSError, ValueError):
            return {}

    def _code(self) -> int | None:
        with suppress(OSError, ValueError):
            return int((self._home / _CODE).read_text(encoding="ascii"))
        return None

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """Wait until the keeper has written down what it started."""
        with (self._home / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class ServeProcess(RunProcess):
    """A replica: `tandem serve` of one step of a run, which checks the seal before and after it loads."""

    def __init__(self, home: Path, trained: Path, kept: Path, order: ServeOrder) -> None:
        """`kept`: the server's data directory, which a further attempt finds again."""
        super().__init__(home, home / "replica")
        self._kept, self._trained, self._order, self._ready = kept, trained, order, home / "ready.json"
        self.answers = False
        """As `url` found it last."""
        self._adapters = home / "adapters.json"
        self._orders = (AdapterOrder(model=order.model, run=order.run, step=order.step),)
        self._http = httpx.Client(timeout=2.0, trust_env=False)  # used every second
        atomic_write.make_directory(self.run_dir, mode=atomic_write.PRIVATE)

    def url(self) -> str:
        """Return where it answers; empty if it does not."""
        try:
            url = str(cast("dict[str, Any]", read_json(self._ready))["url"])
            self.answers = self._http.get(f"{url}/health").status_code == 200
        except (OSError, ValueError, KeyError, httpx.HTTPError):
            self.answers = False
            return ""
        return url if self.answers else ""

    def served(self) -> dict[str, str]:
        """Return the models that it has, by `weights_of`: empty, or why one is refused. Of an adapter that it should
        not serve any more nothing is said."""
        if not self._order.base:
            return {self._orders[0].weights: ""}
        try:
            told = cast("dict[str, Any]", read_json(self._adapters.with_name(self._adapters.name + TOLD)))
        except (OSError, ValueError):
            return {}
        named = {f"{each.model}={self._source(each)}": each.weights for each in self._orders}
        return {weights: str(told[source])[:4000] for source, weights in named.items() if source in told}

    def serve_beside(self, orders: tuple[AdapterOrder, ...]) -> None:
        """Tell it which adapters to serve over its base."""
        if not self._order.base:
            return
        if orders != self._orders:
            self._orders = orders
            self._write_adapters()

    def _write_adapters(self) -> None:
        atomic_write.write_json(self._adapters, {each.model: self._source(each) for each in self._orders})

    def _source(self, order: AdapterOrder) -> str:
        return f"{self._trained.with_name(order.run)}@{order.step}"

    def _command(self, spec_toml: str) -> list[str]:
        data_dir = self._kept
        atomic_write.make_directory(data_dir, mode=atomic_write.PRIVATE)
        atomic_write.write_bytes(data_dir / "token", self._order.token.encode(), mode=0o600)
        if self._order.base:
            self._write_adapters()
        return [
            sys.executable, "-P", "-m", "tandem", "serve", str(self._trained), "--step", str(self._order.step),
            "--name", self._order.model, "--port", "0", "--data-dir", str(data_dir), "--ready-file", str(self._ready),
            "--engine", self._order.engine,
            *(["--feedback"] if self._order.feedback else []),
            *(["--adapters-file", str(self._adapters)] if self._order.base else []),
        ]  # fmt: skip


def has_ended(home: Path) -> bool:
    """Return whether the trainer of the job with this directory has ended, on whichever of its hosts it was."""
    return (home / _CODE).exists()


@contextmanager
def only_agent(home: Path, name: str = "agent") -> Iterator[None]:
    """Hold the job's directory as its only agent of this name; RunOwned if another one does."""
    lock = os.open(home / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunOwned(f"{home}: another agent works here; end it first") from None
        yield
    finally:
        os.close(lock)
