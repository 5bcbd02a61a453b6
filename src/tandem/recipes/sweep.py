"""`tandem sweep`: train one spec with several seeds, one after the other; a sweep can be resumed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from tandem.build.this_machine import this_machine
from tandem.errors import DataError, RunError, SpecError
from tandem.io import atomic_write
from tandem.obs.live_view import LiveView, OutlivedConsole
from tandem.obs.run_history import read_status
from tandem.recipes import resume, run
from tandem.runs.run import Run
from tandem.runs.sweep import SeedResult, Sweep, conclusion, read_seed, summarise, table
from tandem.spec.hardware import choices_text, choose
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
    """Run `spec` with each seed in `directory`/seed-N and write the combined result (sweep.json, sweep.md).

    A seed that already succeeded is not run again. An interrupted one is resumed. A failed one is moved aside and run
    again.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise SpecError(f"seeds = {list(seeds)}: give one or more different seeds, as in 0, 1, 2")
    spec = as_spec(spec)
    directory = Path(directory) if directory else Run.new_directory(Path(root), f"{spec.name}-sweep")
    console = console or OutlivedConsole(highlight=False)
    spec, chosen = choose(spec, this_machine(spec.device))
    for line in choices_text(chosen):
        console.print(line, markup=False)
    specs = {seed: parse_spec(spec.as_written() | {"seed": seed}).in_place() for seed in seeds}
    # Before the first run, so that a directory of another spec is refused at once.
    done = {seed: _succeeded(directory / f"seed-{seed}", specs[seed]) for seed in seeds}
    results: list[SeedResult] = []
    statuses: list[Mapping[str, Any]] = []
    for number, seed in enumerate(seeds, start=1):
        run_dir = directory / f"seed-{seed}"
        console.print(f"seed {seed} ({number} of {len(seeds)}): {'done already, ' if done[seed] else ''}{run_dir}")
        try:
            error = "" if done[seed] else _run_seed(specs[seed], run_dir, console)
        except (KeyboardInterrupt, SystemExit):
            console.print(
                f"\nthe sweep was interrupted; to resume it, give the same command with --dir {directory}",
                soft_wrap=True,
            )
            raise
        if (run_dir / "status.json").exists():
            result, status = read_seed(run_dir, seed)
        else:  # it failed before it had a run directory
            result, status = SeedResult(seed, run_dir.name, "failed", error=error), {}
        results.append(result)
        if result.state == "succeeded":
            statuses.append(status)
        _write(
            summarise(directory, results, statuses, spec.eval.confidence)
        )  # after each seed, in case of an interrupt
    found = summarise(directory, results, statuses, spec.eval.confidence)
    console.print(f"\nsweep {directory}\n\n{table(found)}", soft_wrap=True, markup=False)
    return found


def _succeeded(place: Path, spec: RunSpec) -> bool:
    """Return whether a seed's run succeeded; RunError if it did so with another spec."""
    if not (place / "status.json").exists():
        return False
    if read_seed(place, spec.seed)[0].state != "succeeded":
        return False
    if (place / "spec.toml").read_text(encoding="utf-8") != to_toml(spec):
        raise RunError(f"{place}: succeeded with another spec than this one; choose another directory with --dir")
    return True


def _run_seed(spec: RunSpec, place: Path, console: Console) -> str:
    """Run or resume one seed; return the error, or empty if it succeeded. A wrong spec raises, as every seed has it."""
    view = LiveView(f"{spec.name} seed {spec.seed}", console)
    try:
        if _was_interrupted(place, spec):
            resume(place, view=view)
            return ""
        if place.exists() and any(place.iterdir()):
            place.rename(_failed_name(place))
        run(spec, place, view=view)
        return ""
    except (SpecError, DataError):
        raise
    except Exception as error:  # noqa: BLE001 - one seed's failure is a result; the other seeds still run
        _log.warning("seed %d failed: %s: %s", spec.seed, type(error).__name__, error)
        return f"{type(error).__name__}: {error}"
    finally:
        gc.collect()  # frees the model of a failed run, which the frames of its traceback keep in cycles


def _was_interrupted(place: Path, spec: RunSpec) -> bool:
    """Return whether a run was begun with this spec and neither succeeded nor failed."""
    if not (place / "spec.toml").exists() or (place / "spec.toml").read_text(encoding="utf-8") != to_toml(spec):
        return False
    return read_status(place).get("state", "queued") not in ("succeeded", "failed")


def _failed_name(place: Path) -> Path:
    """Return a free name for the directory of a failed run."""
    names = (place.with_name(f"{place.name}-failed-{number}") for number in range(1, 1000))
    return next(path for path in names if not path.exists())


def _write(found: Sweep) -> None:
    """Write sweep.json and sweep.md."""
    seeds = [asdict(each) | {"difference": each.difference} for each in found.seeds]
    content = asdict(found) | {"seeds": seeds, "directory": str(found.directory), "conclusion": conclusion(found)}
    found.directory.mkdir(parents=True, exist_ok=True)
    atomic_write.write_json(found.directory / "sweep.json", content)
    atomic_write.write_text(found.directory / "sweep.md", table(found))
