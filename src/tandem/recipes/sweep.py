"""`tandem sweep`: train one spec with several seeds or values, one run after the other; a sweep can be resumed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tandem.build import sight
from tandem.build.this_machine import this_machine
from tandem.errors import DataError, RunError, SpecError
from tandem.io import atomic_write
from tandem.obs.live_view import LiveView, OutlivedConsole
from tandem.obs.run_history import read_status
from tandem.recipes import resume, run
from tandem.runs.run import Run
from tandem.runs.sweep import (
    SeedResult,
    Sweep,
    combine,
    conclusion,
    label,
    member_name,
    picture,
    read_seed,
    summarise,
    table,
)
from tandem.spec.load import AnySpec, as_spec, parse_spec, to_toml, with_values
from tandem.spec.run import RunSpec
from tandem.spec.sweep import SweepSpec, combinations

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Member:
    """One run of the sweep."""

    spec: RunSpec
    values: Mapping[str, Any]
    place: Path
    whole: str
    """Its spec.toml, with what is chosen for this machine."""
    label: str
    is_alone: bool
    """Whether its values are no other run's: what is wrong with them is no reason to end the sweep."""


def sweep(
    spec: AnySpec,
    seeds: Sequence[int] | None = None,
    directory: str | Path | None = None,
    *,
    over: Mapping[str, Any] | None = None,
    random: int | None = None,
    root: str | Path = "runs",
    console: Console | None = None,
) -> Sweep:
    """Run `spec` with each seed, and with each combination of the values in `over`, in a directory of its own below
    `directory`, and write the combined result (sweep.json, sweep.md, sweep.svg).

    `over`: for each setting a list of values, as in {"train.lr": [1e-5, 3e-5]}, or a range such as "1e-6..1e-4".
    `random`: draw so many combinations; None or 0: take all of them. What is left out is that of the spec's `[sweep]`.

    A run that already succeeded is not run again. An interrupted one is resumed. A failed one is moved aside and run
    again. A failed run does not end the sweep.
    """
    spec = as_spec(spec)
    asked = _asked(spec, seeds, over, random)
    named = None if directory else Run.new_directory(Path(root), f"{spec.name}-sweep")
    directory = Path(directory) if directory else named
    assert directory is not None
    console = console or OutlivedConsole(highlight=False)
    groups = _members(spec, asked, directory)
    # Before the first run, so that a directory of another spec is refused at once.
    done = {member.place: _succeeded(member) for members in groups for member in members}
    results: dict[Path, tuple[SeedResult, Mapping[str, Any]]] = {}
    for members in groups:
        for member in members:
            place, number = member.place, f"{len(results) + 1} of {len(done)}"
            console.print(
                f"{member.label} ({number}): {'done already, ' if done[place] else ''}{place}",
                markup=False,
                soft_wrap=True,
            )
            try:
                error = "" if done[place] else _run_member(member, console)
            except (KeyboardInterrupt, SystemExit):
                console.print(
                    f"\nthe sweep was interrupted; to resume it, give the same command with --dir {directory}",
                    soft_wrap=True,
                )
                raise
            if (place / "status.json").exists():
                results[place] = read_seed(place, member.spec.seed)
            else:  # it failed before it had a run directory
                results[place] = SeedResult(member.spec.seed, place.name, "failed", error=error), {}
            # after each run, in case of an interrupt
            _write(_combined(directory, groups, results, spec.eval.confidence), spec.name)
    found = _combined(directory, groups, results, spec.eval.confidence)
    console.print(f"\nsweep {directory}\n\n{table(found)}", soft_wrap=True, markup=False)
    return found


def _asked(spec: RunSpec, seeds: Sequence[int] | None, over: Mapping[str, Any] | None, random: int | None) -> SweepSpec:
    """Return what to sweep: the arguments, and for those left out the spec's `[sweep]`."""
    written = spec.sweep or SweepSpec()
    given = {"seeds": seeds, "over": over, "random": random}
    told = written.model_dump() | {name: value for name, value in given.items() if value is not None}
    base = spec.model_dump(mode="json", exclude_none=True)
    asked = parse_spec({**base, "sweep": {**told, "seeds": list(told["seeds"])}}).sweep
    assert asked is not None
    if seeds is not None and (not seeds or len(set(seeds)) < len(seeds)):
        raise SpecError(f"seeds = {list(seeds)}: give one or more different seeds, as in 0, 1, 2")
    if not asked.seeds and not asked.over:
        raise SpecError("sweep: nothing varies; give --seeds 0,1,2 or --over train.lr=1e-5,3e-5, or add [sweep]")
    return asked


def _members(spec: RunSpec, asked: SweepSpec, directory: Path) -> list[list[_Member]]:
    """Return the runs of each combination of values. SpecError if one of them is a wrong spec."""
    try:
        several = combinations(asked, spec.seed)
    except ValueError as error:
        raise SpecError(f"sweep.over: {error}") from error
    spec = spec.model_copy(update={"sweep": None})
    machine = this_machine(spec.device)
    seeds = asked.seeds or (spec.seed,)

    def member(values: Mapping[str, Any], seed: int) -> _Member:
        its = with_values(spec, {**values, "seed": seed}).in_place()
        several_seeds = bool(asked.seeds)
        name = member_name(values, seed if several_seeds else None)
        text = ", ".join(filter(None, [label(values), f"seed {seed}" if several_seeds else ""]))
        whole = to_toml(sight.choose(its, machine)[0])
        return _Member(its, values, directory / name, whole, text, bool(values))

    return [[member(values, seed) for seed in seeds] for values in several]


def _combined(
    directory: Path,
    groups: Sequence[Sequence[_Member]],
    results: Mapping[Path, tuple[SeedResult, Mapping[str, Any]]],
    confidence: float,
) -> Sweep:
    """Combine the results that there are, group by group."""
    settings: list[Sweep] = []
    for members in groups:
        found = [results[member.place] for member in members if member.place in results]
        if found:
            statuses = [status for result, status in found if result.state == "succeeded"]
            seeds = [result for result, _ in found]
            settings.append(summarise(directory, seeds, statuses, confidence, members[0].values))
    return combine(directory, settings) if groups[0][0].values else settings[0]


def _succeeded(member: _Member) -> bool:
    """Return whether a member's run succeeded; RunError if it did so with another spec."""
    place = member.place
    if not (place / "status.json").exists():
        return False
    if read_seed(place, member.spec.seed)[0].state != "succeeded":
        return False
    if (place / "spec.toml").read_text(encoding="utf-8") != member.whole:
        raise RunError(f"{place}: succeeded with another spec than this one; choose another directory with --dir")
    return True


def _run_member(member: _Member, console: Console) -> str:
    """Run or resume one member; return the error, or empty if it succeeded. A spec that is wrong for every seed raises;
    values that are wrong for this member are its failure."""
    view = LiveView(f"{member.spec.name} {member.label}", console)
    place = member.place
    try:
        if _was_interrupted(member):
            resume(place, view=view)
            return ""
        if place.exists() and any(place.iterdir()):
            place.rename(_failed_name(place))
        run(member.spec, place, view=view)
        return ""
    except Exception as error:
        if isinstance(error, SpecError | DataError) and not member.is_alone:
            raise
        _log.warning("%s failed: %s: %s", member.label, type(error).__name__, error)
        return f"{type(error).__name__}: {error}"
    finally:
        gc.collect()  # frees the model of a failed run, which the frames of its traceback keep in cycles


def _was_interrupted(member: _Member) -> bool:
    """Return whether a run was begun with this spec and neither succeeded nor failed."""
    begun = member.place / "spec.toml"
    if not begun.exists() or begun.read_text(encoding="utf-8") != member.whole:
        return False
    return read_status(member.place).get("state", "queued") not in ("succeeded", "failed")


def _failed_name(place: Path) -> Path:
    """Return a free name for the directory of a failed run."""
    names = (place.with_name(f"{place.name}-failed-{number}") for number in range(1, 1000))
    return next(path for path in names if not path.exists())


def _write(found: Sweep, name: str) -> None:
    """Write sweep.json, sweep.md and sweep.svg."""
    found.directory.mkdir(parents=True, exist_ok=True)
    content = _row(found) | {"directory": str(found.directory), "conclusion": conclusion(found)}
    atomic_write.write_json(found.directory / "sweep.json", content)
    atomic_write.write_text(found.directory / "sweep.md", table(found))
    atomic_write.write_bytes(found.directory / "sweep.svg", picture(found, f"{name}: {len(found.seeds)} runs"))


def _row(found: Sweep) -> dict[str, Any]:
    seeds = [asdict(each) | {"difference": each.difference} for each in found.seeds]
    settings = [_row(each) for each in found.settings]
    own = {key: value for key, value in asdict(found).items() if key not in ("directory", "settings")}
    return own | {"seeds": seeds} | ({"settings": settings} if settings else {})
