"""Check whether a run's files prove that its engines served the trainer's weights: `tandem sync audit`.

It works long after the run. `sync.jsonl` has a proof per version; `metrics.jsonl` says which versions sampled the
trained tokens. A rule is a function from this evidence to findings.
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
    """failure: some version has no sound proof. note: worth knowing."""
    rule: str
    text: str
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AuditedStep:
    """An optimizer step on sampled tokens. It made `version` from the previous version."""

    version: int
    lag: int | None
    """Lag of its oldest token, in versions; None if the row does not say."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The files of a run, as the rules read them."""

    directory: Path
    proofs: Sequence[Proof]
    """In the order of writing."""
    lines: Sequence[int]
    """Line of each proof in sync.jsonl."""
    made: Sequence[int]
    """The version that each row of metrics.jsonl made, in any stage."""
    moved: frozenset[int]
    """The versions whose step changed the served weights."""
    steps: Sequence[AuditedStep]
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
    steps: Sequence[AuditedStep]
    findings: Sequence[AuditFinding]

    @property
    def proven(self) -> bool:
        return not any(finding.severity == "failure" for finding in self.findings)


def audit_sync(run_dir: str | Path) -> Audit:
    """Audit a run from its directory. RunError if this is not a run directory."""
    evidence = read_evidence(Path(run_dir))
    found = [*evidence.damage, *(finding for rule in RULES for finding in rule(evidence))]
    found.sort(key=lambda finding: finding.severity != "failure")
    return Audit(evidence.directory, evidence.status, evidence.proofs, evidence.steps, found)


def read_evidence(run_dir: Path) -> Evidence:
    status = read_status(run_dir)
    # Metrics first: if the run is still going, the proof of a step's version is written before the step's row.
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
    """Return the proofs by line number, from 1, and findings about lines that are no proof."""
    proofs: dict[int, Proof] = {}
    odd: list[AuditFinding] = []
    for line, row in ledger.rows.items():
        try:
            proofs[line] = proof_of(row)
        except ValueError as error:
            odd.append(AuditFinding("failure", "damaged", f"sync.jsonl:{line} is not a row of a ledger: {error}"))
    return proofs, odd


def proof_of(row: Row) -> Proof:
    """Read a proof. ValueError names a missing or invalid field. A number that was not finite was written as null."""
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


def _step(row: Row) -> AuditedStep | None:
    """Return a step, or None if it trained on recordings, without an engine."""
    lag = number(row.get("lag/max"))
    if row.get("stage") != "rl" and lag is None:
        return None
    return AuditedStep(int(row["step"]), None if lag is None else round(lag))


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
        yield AuditFinding("note", "torn", f"{name}: the last line is incomplete, and is ignored")


# --- rules


def _unproven(run: Evidence) -> Iterator[AuditFinding]:
    """Find versions without a proof. The version of a step's oldest token certainly sampled tokens. The version that
    was trained from, or the last one published before it, may have."""
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
    """Return whether any version lies in a range. It does not loop over the range, which a damaged row may make
    huge."""
    upto = bisect_right(in_order, last)
    return upto > 0 and in_order[upto - 1] >= first


def _within(every: int) -> str:
    return "" if every == 1 else f", nor has any of the {every - 1} before it (sync.every = {every})"


def _last_unproven(run: Evidence) -> Iterator[AuditFinding]:
    """A run that succeeded must have published its last version."""
    last = max((step.version for step in run.steps), default=None)
    if last is None or run.status.get("state") != "succeeded":
        return
    if last not in {proof.version for proof in run.proofs}:
        yield AuditFinding("failure", "unproven", f"version {last} is the run's last, and has no proof", (last,))


def _steps_missing(run: Evidence) -> Iterator[AuditFinding]:
    """Find missing rows of metrics.jsonl."""
    if not run.proofs and not run.steps and run.status.get("recipe") != "rl":
        return  # nothing was sampled
    for before, after in pairwise(run.made):
        if after > before + 1:
            gap = _span(before + 1, after - 1)
            yield AuditFinding(
                "failure", "steps_missing", f"metrics.jsonl lacks {gap}: their tokens' versions are unknown"
            )
    done, last = int(number(run.status.get("steps_done")) or 0), max(run.made, default=0)
    if done > last:
        text = f"status.json counts {done} steps, and metrics.jsonl lacks {_span(last + 1, done)}"
        yield AuditFinding("failure", "steps_missing", f"{text}: their tokens' versions are unknown")


def _span(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _out_of_order(run: Evidence) -> Iterator[AuditFinding]:
    """Find versions out of order. Within one process versions only grow; a resumed run begins again at its checkpoint,
    so a lower version is allowed at a boot only."""
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
    """Return the number of ledger rows before each boot. For boots after the first without that number, also return the
    step that they resumed from, or None if that is missing, too."""
    boots: list[tuple[int | None, int | None]] = []
    for event in events:
        if event.get("stage") == "boot":
            boots.append((_whole_or_none(event.get("proofs")), None))
        elif event.get("stage") == "resume" and boots:
            boots[-1] = boots[-1][0], _whole_or_none(event.get("step"))
    places: list[int] = []
    for place, _ in boots:
        if place is not None:
            places = [*(each for each in places if each < place), place]  # later rows were cut off
    return places, [step for place, step in boots[1:] if place is None] if boots else [None]


def _twice_and_different(run: Evidence) -> Iterator[AuditFinding]:
    """Find versions with two digests. A version may be published again, for example before an evaluation. Only digests
    are compared: other fingerprints name the memory, which changes when an engine is attached again."""
    first: dict[tuple[int, str], Proof] = {}
    for proof in run.proofs:
        if proof.verified != "digest":
            continue
        before = first.setdefault((proof.version, proof.mode), proof)
        if before.digest != proof.digest:
            text = f"version {proof.version} was published twice, as {before.digest} and as {proof.digest}"
            yield AuditFinding("failure", "twice_and_different", text, (proof.version,))


def _stale(run: Evidence) -> Iterator[AuditFinding]:
    """Find versions whose bytes did not change although a step changed the weights: both sides agree on old weights."""
    moved = sorted(run.moved)
    for before, after in pairwise(run.proofs):
        between = _any_within(moved, before.version + 1, after.version)
        if "digest" == before.verified == after.verified and before.digest == after.digest and between:
            text = f"version {after.version} has the same digest as version {before.version}, but the weights changed"
            yield AuditFinding("failure", "stale", text, (after.version,))


def _not_verified(run: Evidence) -> Iterator[AuditFinding]:
    for proof in run.proofs:
        if proof.verified not in ("digest", "identity", "canary"):
            text = f"version {proof.version} was sent, but nothing was compared (verified = '{proof.verified}')"
            yield AuditFinding("failure", "not_verified", text, (proof.version,))
        elif not proof.digest or proof.tensors <= 0:
            text = f"version {proof.version}: its proof covers {proof.tensors} tensors, digest '{proof.digest}'"
            yield AuditFinding("failure", "not_verified", text, (proof.version,))


def _gap(run: Evidence) -> Iterator[AuditFinding]:
    for proof in run.proofs:
        if proof.verified == "none":
            continue  # reported already
        if not proof.canary_tokens:
            text = f"version {proof.version}: the canary was not sampled; equal weights alone do not prove equal models"
            yield AuditFinding("failure", "canary_missing", text, (proof.version,))
        elif not proof.logprob_gap <= proof.gap_limit:  # so that NaN fails
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
    """Find changes in the number of tensors, within a mode: an adapter has other tensors than the whole model."""
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
            text = f"from version {after.version} on, weights were sent by {after.mode} instead of {before.mode}"
            yield AuditFinding("note", "mode_changed", text, (after.version,))


def _engine_changed(run: Evidence) -> Iterator[AuditFinding]:
    changed = tuple(after.version for before, after in pairwise(run.proofs) if before.engines != after.engines)
    if changed:
        text = f"another engine answered from {_listed(changed)} on: it was restarted, or another engine was attached"
        yield AuditFinding("note", "engine_changed", text, changed)


def _attempts(run: Evidence) -> Iterator[AuditFinding]:
    again = tuple(proof.version for proof in run.proofs if proof.attempts > 1)
    if again:
        text = f"{_listed(again)} took more than one attempt: an engine was lost, and attached again"
        yield AuditFinding("note", "attempts", text, again)


def _ended_by_sync(run: Evidence) -> Iterator[AuditFinding]:
    """Note a run that a sync ended: the proofs work, because nothing unproven was trained on."""
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
