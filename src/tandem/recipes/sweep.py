"""One spec with several seeds, one after the other, in a directory that can be taken up again."""

from __future__ import annotations

import gc
import logging
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from tandem.errors import DataError, RunError, SpecError
from tandem.io import atomic_write
from tandem.obs.live_view import LiveView, OutlivedConsole
from tandem.obs.run_history import read_status
from tandem.recipes import resume, run
from tandem.runs.run import Run
from tandem.runs.sweep import SeedResult, Sweep, conclusion, read_seed, summarise, table
from tandem.spec.load import AnySpec, as_spec, parse_spec, to_toml
from tandem.spec.run import RunSpec

_log = logging.getLogger(__name__)


def sweep(
    spec: AnySpec,
    seeds: Sequence[int],
    directory: str | Path | None = None,
    *,
    root: str | Path = "runs",
    console: Console | None = None,
) -> Sweep:
    """Run `spec` with each seed in `directory`/seed-N, and say what they show together (sweep.json, sweep.md).

    A seed that succeeded there is not run again; one that was cut off goes on; one that failed is set aside and run
    again.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise SpecError(f"seeds = {list(seeds)}: name one or more, each once, as in 0, 1, 2")
    spec = as_spec(spec)
    directory = Path(directory) if directory else Run.new_directory(Path(root), f"{spec.name}-sweep")
    console = console or OutlivedConsole(highlight=False)
    specs = {seed: parse_spec(tomllib.loads(to_toml(spec)) | {"seed": seed}).in_place() for seed in seeds}
    held = {seed: _succeeded(directory / f"seed-{seed}", specs[seed]) for seed in seeds}  # refused before hours of work
    results: list[SeedResult] = []
    statuses: list[Mapping[str, Any]] = []
    for number, seed in enumerate(seeds, start=1):
        place = directory / f"seed-{seed}"
        console.print(f"seed {seed} ({number} of {len(seeds)}): {'done already, ' if held[seed] else ''}{place}")
        try:
            error = "" if held[seed] else _play(specs[seed], place, console)
        except (KeyboardInterrupt, SystemExit):
            console.print(f"\nthe sweep is cut off; the same command with --dir {directory} goes on", soft_wrap=True)
            raise
        if (place / "status.json").exists():
            result, status = read_seed(place, seed)
        else:  # it failed before it had a directory
            result, status = SeedResult(seed, place.name, "failed", error=error), {}
        results.append(result)
        if result.state == "succeeded":
            statuses.append(status)
        _write(summarise(directory, results, statuses, spec.eval.confidence))  # after each: a sweep may be cut off
    found = summarise(directory, results, statuses, spec.eval.confidence)
    console.print(f"\nsweep {directory}\n\n{table(found)}", soft_wrap=True, markup=False)
    return found


def _succeeded(place: Path, spec: RunSpec) -> bool:
    if not (place / "status.json").exists():
        return False
    if read_seed(place, spec.seed)[0].state != "succeeded":
        return False
    if (place / "spec.toml").read_text(encoding="utf-8") != to_toml(spec):
        raise RunError(f"{place}: succeeded with another spec than this one; give this sweep a directory of its own")
    return True


def _play(spec: RunSpec, place: Path, console: Console) -> str:
    """Empty if it succeeded, else how it failed. A spec that is wrong is wrong for every seed, and ends the sweep."""
    view = LiveView(f"{spec.name} seed {spec.seed}", console)
    try:
        if _cut_off(place, spec):
            resume(place, view=view)
            return ""
        if place.exists() and any(place.iterdir()):
            place.rename(_aside(place))
        run(spec, place, view=view)
        return ""
    except (SpecError, DataError):
        raise
    except Exception as error:  # noqa: BLE001 - one seed's failure is a result; the others are still to come
        _log.warning("seed %d failed: %s: %s", spec.seed, type(error).__name__, error)
        return f"{type(error).__name__}: {error}"
    finally:
        gc.collect()  # the model of a failed run hangs on frames that point at each other


def _cut_off(place: Path, spec: RunSpec) -> bool:
    """It was begun with this spec, and did not come to an end of its own."""
    if not (place / "spec.toml").exists() or (place / "spec.toml").read_text(encoding="utf-8") != to_toml(spec):
        return False
    return read_status(place).get("state", "queued") not in ("succeeded", "failed")


def _aside(place: Path) -> Path:
    names = (place.with_name(f"{place.name}-failed-{number}") for number in range(1, 1000))
    return next(path for path in names if not path.exists())


def _write(found: Sweep) -> None:
    seeds = [asdict(each) | {"difference": each.difference} for each in found.seeds]
    content = asdict(found) | {"seeds": seeds, "directory": str(found.directory), "conclusion": conclusion(found)}
    found.directory.mkdir(parents=True, exist_ok=True)
    atomic_write.write_json(found.directory / "sweep.json", content)
    atomic_write.write_text(found.directory / "sweep.md", table(found))
