"""The adapters of one base that a server has: of its command line, and of a file that is read again when it changes.

consumes: a JSON file, {name: source}        waits for: a change of the file
produces: models of the server, and FILE.told with {"name=source": ""}, or why it is refused

A source is a directory in PEFT's format, a run, or RUN@STEP. The files of a step are checked by its seal before and
after they are read; of what was read, the engine compares fingerprints with what it holds.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tandem.agent.trainer import TOLD
from tandem.build import served_adapters
from tandem.errors import CheckpointDamaged, RunError, SpecError, TandemError, Unproven
from tandem.io import atomic_write
from tandem.io.bounded_json import read_json
from tandem.runs.checkpoints import Checkpoints
from tandem.serve.openai.adapter_models import AdapterModel

_log = logging.getLogger(__name__)
_POLL_S = 0.2


def find_step(run_dir: Path, step: int) -> tuple[str, str, int]:
    """Return path, name and version of a checkpoint of a run. Unproven if there is none, or if its files differ from
    its seal."""
    checkpoints = Checkpoints(run_dir)
    if step not in checkpoints.versions():
        raise Unproven(f"{run_dir}: has no checkpoint of step {step}, so there is no proof of its weights")
    try:
        return str(checkpoints.read(step).path / "deploy"), run_dir.name, step
    except CheckpointDamaged as error:
        raise Unproven(f"step {step} is not served: {error}") from error


def find_adapter(source: str) -> tuple[Path, int]:
    """Return the directory of an adapter, and its version. RunError if there is none."""
    run, _, step = source.rpartition("@")
    if run and step.isascii() and step.isdigit():
        return Path(find_step(Path(run), int(step))[0]), int(step)
    if (Path(source) / "status.json").exists():
        status = cast("dict[str, Any]", read_json(Path(source) / "status.json"))
        return Path(source) / "export" / "adapter", int(status.get("steps_done", 0))
    return Path(source), 0


class AdapterTable:
    def __init__(self, own: Sequence[str], named: Sequence[str], file: str | Path | None) -> None:
        """`own`, `named`: NAME=SOURCE; SpecError if one is not."""
        self.models: dict[str, AdapterModel] = {}
        self._file, self._text = None if file is None else Path(file), ""
        self._sources: dict[str, str] = {}
        self._fixed = dict(map(_pair, (*own, *named)))
        self._task: asyncio.Task[None] | None = None
        self._engine: Any = None

    def highest_rank(self) -> int:
        """Return the highest rank of the adapters of the command line."""
        return max((served_adapters.rank_of(find_adapter(source)[0]) for source in self._fixed.values()), default=0)

    async def begin(self, engine: Any) -> None:
        """Serve the adapters of the command line. RunError, SyncError or Unproven if one cannot be served."""
        self._engine = engine
        if (self._fixed or self._file) and not hasattr(engine, "put_adapter"):
            raise SpecError("adapters: several engines (engine.replicas) serve no adapters beside a base")
        for name, source in self._fixed.items():
            await self.put(name, source)

    async def follow(self) -> None:
        """Begin to follow the file."""
        if self._file is not None:
            await self._look(self._file)
            self._task = asyncio.create_task(self._following(self._file), name="adapters")

    async def _following(self, file: Path) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            await self._look(file)

    async def _look(self, file: Path) -> None:
        try:
            text = await asyncio.to_thread(file.read_text, "utf-8")
            wanted = cast("dict[str, str]", json.loads(text)) if text != self._text else None
        except (OSError, ValueError):
            return
        if wanted is None:
            return
        told = dict[str, str]()
        for name in [name for name in self._sources if name not in wanted and name not in self._fixed]:
            try:
                await self._engine.drop_adapter(name)
            except TandemError:  # it answers a request now; it is tried again
                text = ""
                continue
            del self._sources[name], self.models[name]
        answer = file.with_name(file.name + TOLD)
        if any(self._sources.get(name, source) != source for name, source in wanted.items()):
            answer.unlink(missing_ok=True)  # what it says is not true any more once one is replaced
        for name, source in wanted.items():
            told[f"{name}={source}"] = ""
            if self._sources.get(name) != source:
                try:
                    await self.put(name, source)
                except (TandemError, OSError) as error:
                    told[f"{name}={source}"] = str(error)
                    _log.error("adapter %s: %s", name, error)
        atomic_write.write_json(answer, told)
        self._text = text

    async def put(self, name: str, source: str) -> None:
        """Serve an adapter under a name. RunError, SyncError or Unproven if it cannot be served."""
        path, version = await asyncio.to_thread(find_adapter, source)
        try:
            read, told = await asyncio.to_thread(self._read, path)
            await asyncio.to_thread(find_adapter, source)
            await self._engine.put_adapter(name, read.tensors, read.config, **told)
        except (MemoryError, RuntimeError) as error:  # of torch, where there is no memory for it
            raise RunError(f"adapter '{name}': {type(error).__name__}: {error}") from error
        self._sources[name] = source
        self.models[name] = AdapterModel(self._engine, name, version)

    def _read(self, path: Path) -> tuple[served_adapters.ServedAdapter, dict[str, Any]]:
        """Return an adapter, and what else `put_adapter` is told: fingerprints, if the engine takes them of tensors
        that were read while the next are read."""
        if not hasattr(self._engine, "host_memory"):  # vLLM reads adapters from files of its own
            return served_adapters.read_adapter(path), {}
        expected = dict[str, str]()

        def look(tensors: Mapping[str, Any]) -> None:
            expected.update(self._engine.host_fingerprints(tensors))

        return served_adapters.read_adapter(path, self._engine.host_memory, look), {"expected": expected}


def _pair(text: str) -> tuple[str, str]:
    name, _, source = text.partition("=")
    if not (name and source):
        raise SpecError(f"--adapter = '{text}': write NAME=DIR, NAME=RUN or NAME=RUN@STEP")
    return name, source
