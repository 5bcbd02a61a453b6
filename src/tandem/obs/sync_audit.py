"""Why a run's engines served the trainer's weights, or where there is no saying so: `tandem sync audit`.

Read from what the run left behind, long after it: `sync.jsonl` has a proof a version, `metrics.jsonl` says which
versions made the tokens that were trained on. A rule is a function from that evidence to findings.
"""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from tandem.io.jsonl import Row, Salvage, salvage_jsonl
from tandem.obs.run_history import number, read_status
from tandem.types import Proof

_ENDED_BY_SYNC = {"SyncError", "SyncTimeout", "EngineError", "EngineLost", "EngineSilent", "LogprobGap"}


@dataclass(frozen=True, slots=True)
class AuditFinding:
    severity: Literal["failure", "note"]
    """failure: for some version nothing shows that the trainer's weights were served. note: worth knowing."""
    rule: str
    text: str
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step on tokens that an engine sampled. It made `version`, from the one before."""

    version: int
    lag: int | None
    """Of its oldest token, in versions; None if the row does not say."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a run left behind."""

    directory: Path
    proofs: Sequence[Proof]
    """In the order in which they were written."""
    lines: Sequence[int]
    """Of sync.jsonl: where each of them stands."""
    made: Sequence[int]
    """The version that each row of metrics.jsonl made, of whatever stage."""
    moved: frozenset[int]
    """Those with a change in the weights as they are served."""
    steps: Sequence[Step]
    status: Mapping[str, Any]
    events: Sequence[Row]
    every: int
    """sync.every of the spec."""
    damage: Sequence[AuditFinding]


@dataclass(frozen=True, slots=True)
class Audit:
    directory: Path
    status: Mapping[str, Any]
    proofs: Sequence[Proof]
    steps: Sequence[Step]
    findings: Sequence[AuditFinding]

    @property
    def proven(self) -> bool:
        return not any(finding.severity == "failure" for finding in self.findings)


def audit_sync(run_dir: str | Path) -> Audit:
    """Explain a run from its directory alone; RunError for what is no run directory."""
    evidence = read_evidence(Path(run_dir))
    found = [*evidence.damage, *(finding for rule in RULES for finding in rule(evidence))]
    found.sort(key=lambda finding: finding.severity != "failure")
    return Audit(evidence.directory, evidence.status, evidence.proofs, evidence.steps, found)


def read_evidence(run_dir: Path) -> Evidence:
    status = read_status(run_dir)
    # Metrics first: of a run that goes on meanwhile, the proof of a step's version is written before its row.
    metrics, events = salvage_jsonl(run_dir / "metrics.jsonl"), salvage_jsonl(run_dir / "events.jsonl")
    ledger = salvage_jsonl(run_dir / "sync.jsonl")
    proofs, damage = proofs_of(ledger)
    damage += [*_damage("sync.jsonl", ledger), *_damage("metrics.jsonl", metrics)]
    rows = [row for row in metrics.rows.values() if number(row.get("step")) is not None]
    return Evidence(
        run_dir,
        list(proofs.values()),
        list(proofs),
        [int(row["step"]) for row in rows],
        frozenset(int(row["step"]) for row in rows if (number(row.get("update/served_fraction")) or 0.0) > 0),
        [step for row in rows if (step := _step(row)) is not None],
        status,
        list(events.rows.values()),
        _sync_every(run_dir / "spec.toml"),
        damage,
    )


# --- reading


def proofs_of(ledger: Salvage) -> tuple[dict[int, Proof], list[AuditFinding]]:
    """By line, counted from 1; and what is no proof."""
    proofs: dict[int, Proof] = {}
    odd: list[AuditFinding] = []
    for line, row in ledger.rows.items():
        try:
            proofs[line] = proof_of(row)
        except ValueError as error:
            odd.append(AuditFinding("failure", "damaged", f"sync.jsonl:{line} is no row of a ledger: {error}"))
    return proofs, odd


def proof_of(row: Row) -> Proof:
    """ValueError names the field that is missing or odd. A number that was not finite was written as null."""
    known = {field.name for field in fields(Proof)}
    values = {name: value for name, value in row.items() if name in known}
    for name in ("version", "tensors", "bytes_moved"):
        if not _is_whole(values.get(name)):
            raise ValueError(f"{name} = {values.get(name)!r}")
    for name in ("cache_epoch", "canary_tokens", "lent_bytes", "attempts"):
        if name in values and not _is_whole(values[name]):
            raise ValueError(f"{name} = {values[name]!r}")
    for name in ("mode", "verified"):
        if not isinstance(values.get(name), str):
            raise ValueError(f"{name} = {values.get(name)!r}")
    if not isinstance(values.setdefault("digest", ""), str):
        raise ValueError(f"digest = {values['digest']!r}")
    for name in ("logprob_gap", "gap_limit"):
        values[name] = _or_nan(values.get(name))
    seconds = values.get("seconds")
    if not isinstance(seconds, Mapping):
        raise ValueError(f"seconds = {seconds!r}")
    values["seconds"] = {str(phase): _or_nan(took) for phase, took in seconds.items()}
    transport, engines = values.get("transport") or {}, values.get("engines") or ()
    if not isinstance(transport, Mapping):
        raise ValueError(f"transport = {transport!r}")
    if not isinstance(engines, list | tuple):
        raise ValueError(f"engines = {engines!r}")
    values["transport"], values["engines"] = dict(transport), tuple(str(engine) for engine in engines)
    return Proof(**values)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _whole_or_none(value: Any) -> int | None:
    return value if _is_whole(value) else None


def _or_nan(value: Any) -> float:
    found = number(value)
    return math.nan if found is None else found


def _step(row: Row) -> Step | None:
    """None for steps that train on recordings: no engine has a part in them."""
    lag = number(row.get("lag/max"))
    if row.get("stage") != "rl" and lag is None:
        return None
    return Step(int(row["step"]), None if lag is None else round(lag))


def _sync_every(spec: Path) -> int:
    try:
        raw = tomllib.loads(spec.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return 1
    sync = raw.get("sync")
    every = sync.get("every") if isinstance(sync, dict) else None
    return every if isinstance(every, int) and every >= 1 else 1


def _damage(name: str, found: Salvage) -> Iterator[AuditFinding]:
    for line, why in found.damaged.items():
        yield AuditFinding("failure", "damaged", f"{name}:{line} cannot be read: {why}")
    if found.torn:
        yield AuditFinding("note", "torn", f"{name}: the last line was cut short as it was written, and is left out")


# --- rules


def _unproven(run: Evidence) -> Iterator[AuditFinding]:
    """The oldest token's version is known to have made tokens; the version that was trained from, or the one published
    last before it, could have."""
    proven = {proof.version for proof in run.proofs}
    in_order = sorted(proven)
    trained_on: dict[int, int] = {}
    trained_from: list[int] = []
    for step in run.steps:
        at = step.version - 1
        oldest = at - (step.lag or 0)
        if oldest not in proven and step.lag is not None:
            trained_on.setdefault(oldest, step.version)
        if not _any_within(in_order, at - run.every + 1, at):
            trained_from.append(at)
    for version, step in sorted(trained_on.items()):
        yield AuditFinding(
            "failure", "unproven", f"step {step} trained on tokens of version {version}, which has no proof", (version,)
        )
    for version in sorted(set(trained_from) - trained_on.keys()):
        yield AuditFinding(
            "failure",
            "unproven",
            f"version {version} was trained from, and has no proof{_within(run.every)}",
            (version,),
        )


def _any_within(in_order: Sequence[int], first: int, last: int) -> bool:
    """Without a walk from one to the other: a damaged row may name any version."""
    upto = bisect_right(in_order, last)
    return upto > 0 and in_order[upto - 1] >= first


def _within(every: int) -> str:
    return "" if every == 1 else f", nor has any of the {every - 1} before it (sync.every = {every})"


def _last_unproven(run: Evidence) -> Iterator[AuditFinding]:
    """A run that ended well published what it made."""
    last = max((step.version for step in run.steps), default=None)
    if last is None or run.status.get("state") != "succeeded":
        return
    if last not in {proof.version for proof in run.proofs}:
        yield AuditFinding("failure", "unproven", f"version {last} is what the run made, and has no proof", (last,))


def _steps_missing(run: Evidence) -> Iterator[AuditFinding]:
    """What cannot be known from metrics.jsonl: rows were lost."""
    if not run.proofs and not run.steps and run.status.get("recipe") != "rl":
        return  # nothing was sampled
    for before, after in pairwise(run.made):
        if after > before + 1:
            gap = _span(before + 1, after - 1)
            yield AuditFinding("failure", "steps_missing", f"metrics.jsonl lacks {gap}: what was trained on is unknown")
    done, last = int(number(run.status.get("steps_done")) or 0), max(run.made, default=0)
    if done > last:
        text = f"status.json counts {done} steps, and metrics.jsonl lacks {_span(last + 1, done)}"
        yield AuditFinding("failure", "steps_missing", f"{text}: what was trained on is unknown")


def _span(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _out_of_order(run: Evidence) -> Iterator[AuditFinding]:
    """A run that was resumed begins again at its checkpoint; within one process versions only grow. Only a step back
    at a boot is free."""
    places, steps = _boots(run.events)
    resumed: list[int] = []
    for (line, before), (next_line, after) in pairwise(zip(run.lines, run.proofs, strict=True)):
        if after.version >= before.version:
            continue
        if any(line <= place < next_line for place in places):
            resumed.append(after.version)
        elif after.version in steps:
            del steps[: steps.index(after.version) + 1]
            resumed.append(after.version)
        else:
            text = f"version {after.version} was published after version {before.version}"
            if None in steps:
                text += "; whether the run was resumed there cannot be told: events.jsonl does not say where it was"
            yield AuditFinding("failure", "out_of_order", text, (after.version,))
    if resumed:
        yield AuditFinding("note", "resumed", f"the run was resumed from {_listed(resumed)}", tuple(resumed))


def _boots(events: Sequence[Row]) -> tuple[list[int], list[int | None]]:
    """After how many rows of the ledger each boot began; and of boots after the first that do not say it, the step that
    they went on from, None where that is not said either."""
    boots: list[tuple[int | None, int | None]] = []
    for event in events:
        if event.get("stage") == "boot":
            boots.append((_whole_or_none(event.get("proofs")), None))
        elif event.get("stage") == "resume" and boots:
            boots[-1] = boots[-1][0], _whole_or_none(event.get("step"))
    places: list[int] = []
    for place, _ in boots:
        if place is not None:
            places = [*(each for each in places if each < place), place]  # what stood after it was cut off
    return places, [step for place, step in boots[1:] if place is None] if boots else [None]


def _twice_and_different(run: Evidence) -> Iterator[AuditFinding]:
    """A version may be published again, before an evaluation for one. Only digests can be compared: the other
    fingerprints say which memory it is, and that is another one after an engine was taken back."""
    first: dict[tuple[int, str], Proof] = {}
    for proof in run.proofs:
        if proof.verified != "digest":
            continue
        before = first.setdefault((proof.version, proof.mode), proof)
        if before.digest != proof.digest:
            text = f"version {proof.version} was published twice, as {before.digest} and as {proof.digest}"
            yield AuditFinding("failure", "twice_and_different", text, (proof.version,))


def _stale(run: Evidence) -> Iterator[AuditFinding]:
    """Steps changed what is served, and yet the same bytes were sent: both sides agree, about old weights."""
    moved = sorted(run.moved)
    for before, after in pairwise(run.proofs):
        between = _any_within(moved, before.version + 1, after.version)
        if "digest" == before.verified == after.verified and before.digest == after.digest and between:
            text = f"version {after.version} has the very digest of version {before.version}, but the weights had moved"
            yield AuditFinding("failure", "stale", text, (after.version,))


def _not_verified(run: Evidence) -> Iterator[AuditFinding]:
    for proof in run.proofs:
        if proof.verified not in ("digest", "identity", "canary"):
            text = f"version {proof.version} was sent, and nothing was compared (verified = '{proof.verified}')"
            yield AuditFinding("failure", "not_verified", text, (proof.version,))
        elif not proof.digest or proof.tensors <= 0:
            text = f"version {proof.version}: its proof covers {proof.tensors} tensors, digest '{proof.digest}'"
            yield AuditFinding("failure", "not_verified", text, (proof.version,))


def _gap(run: Evidence) -> Iterator[AuditFinding]:
    for proof in run.proofs:
        if proof.verified == "none":
            continue  # told already
        if not proof.canary_tokens:
            text = f"version {proof.version}: the canary was not asked; equal weights alone do not show equal models"
            yield AuditFinding("failure", "canary_missing", text, (proof.version,))
        elif not proof.logprob_gap <= proof.gap_limit:  # so that a gap which is not a number fails
            text = f"version {proof.version}: gap {proof.logprob_gap:.2g} nats, limit {proof.gap_limit:.2g}"
            yield AuditFinding("failure", "gap", text, (proof.version,))


def _cache_epoch(run: Evidence) -> Iterator[AuditFinding]:
    last: dict[tuple[str, ...], int] = {}
    for proof in run.proofs:
        before = last.get(proof.engines)
        if before is not None and proof.cache_epoch <= before:
            text = (
                f"version {proof.version}: the engine's cache epoch went from {before} to {proof.cache_epoch}: keys "
                "and values of older weights may have been in use"
            )
            yield AuditFinding("failure", "cache_epoch", text, (proof.version,))
        last[proof.engines] = proof.cache_epoch


def _tensors(run: Evidence) -> Iterator[AuditFinding]:
    """By mode: an adapter has other tensors than the whole model."""
    last: dict[str, Proof] = {}
    for proof in run.proofs:
        before = last.get(proof.mode)
        if before is not None and before.tensors != proof.tensors:
            text = f"version {proof.version} is {proof.tensors} tensors, version {before.version} was {before.tensors}"
            yield AuditFinding("failure", "tensors", text, (proof.version,))
        last[proof.mode] = proof


def _mode_changed(run: Evidence) -> Iterator[AuditFinding]:
    for before, after in pairwise(run.proofs):
        if before.mode != after.mode:
            text = f"from version {after.version} on, weights went by {after.mode} instead of {before.mode}"
            yield AuditFinding("note", "mode_changed", text, (after.version,))


def _engine_changed(run: Evidence) -> Iterator[AuditFinding]:
    changed = tuple(after.version for before, after in pairwise(run.proofs) if before.engines != after.engines)
    if changed:
        text = f"another engine answered from {_listed(changed)} on: it was started again, or another was attached"
        yield AuditFinding("note", "engine_changed", text, changed)


def _attempts(run: Evidence) -> Iterator[AuditFinding]:
    again = tuple(proof.version for proof in run.proofs if proof.attempts > 1)
    if again:
        text = f"{_listed(again)} took more than one attempt: a partner was lost, and taken back"
        yield AuditFinding("note", "attempts", text, again)


def _ended_by_sync(run: Evidence) -> Iterator[AuditFinding]:
    """That is proof at work: what was not proven was not trained on."""
    for event in run.events:
        if event.get("stage") == "error" and str(event.get("kind")) in _ENDED_BY_SYNC:
            yield AuditFinding("note", "ended", f"the run ended with {event['kind']}: {event.get('message', '')}")


def _listed(versions: Sequence[int], most: int = 6) -> str:
    shown = ", ".join(str(version) for version in versions[:most])
    more = len(versions) - most
    return f"version{'s' if len(versions) > 1 else ''} {shown}" + (f" and {more} more" if more > 0 else "")


RULES: tuple[Callable[[Evidence], Iterator[AuditFinding]], ...] = (
    _unproven,
    _last_unproven,
    _steps_missing,
    _not_verified,
    _gap,
    _cache_epoch,
    _out_of_order,
    _twice_and_different,
    _stale,
    _tensors,
    _ended_by_sync,
    _engine_changed,
    _attempts,
    _mode_changed,
)
