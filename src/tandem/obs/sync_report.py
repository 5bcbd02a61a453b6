"""Print the ledger: the texts of `tandem sync audit` and `tandem sync status`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tandem.io.jsonl import finite
from tandem.obs.claims import printable
from tandem.obs.sync_audit import Audit, AuditFinding, proof_of
from tandem.obs.sync_status import MAP_FILE, TOLD
from tandem.types import Proof

AT_THE_TRAINER = ("gather", "hash", "meet", "move", "confirm")
"""The trainer's phases; the engine waits meanwhile."""
AROUND = ("arrive", "load", "paused")
"""Phases of an engine with workers: until the version is staged; until it is served; while requests waited. They
contain other phases."""
ONE_AFTER_THE_OTHER = (
    "wake", "wait", "verify", "check", "stage", "pause", "apply", "digest", "prove", "resume", "canary",
)  # fmt: skip
"""The engine's other phases, and the canary."""
PHASES = (*AT_THE_TRAINER, *AROUND, *ONE_AFTER_THE_OTHER)
_SHOWN_ROWS, _SHOWN_A_RULE = 12, 4
_HEAD = (
    "version",
    "mode",
    "verified",
    "tensors",
    "bytes",
    "ms",
    "by phase",
    "digest",
    "gap / limit",
    "tries",
    "engine",
)


def audit_json(audit: Audit) -> dict[str, Any]:
    return finite(
        {
            "run": str(audit.directory),
            "proven": audit.proven,
            "verdict": verdict(audit),
            "state": audit.status.get("state", "unknown"),
            "findings": [asdict(finding) for finding in audit.findings],
            "versions": [asdict(proof) for proof in audit.proofs],
        }
    )


def audit_text(audit: Audit) -> str:
    lines = [verdict(audit), _how_it_ended(audit)]
    for severity, title in (("failure", "Failures"), ("note", "Notes")):
        if found := [finding for finding in audit.findings if finding.severity == severity]:
            lines += ["", f"{title}:", *_findings(found)]
    if audit.proofs:
        odd = {version for each in audit.findings if each.severity == "failure" for version in each.versions}
        lines += ["", *_ledger(audit.proofs, odd)]
    return "\n".join(printable(line) for line in lines)


def verdict(audit: Audit) -> str:
    failures = [finding for finding in audit.findings if finding.severity == "failure"]
    versions = sorted({proof.version for proof in audit.proofs})
    if failures:
        odd = sorted({version for finding in failures for version in finding.versions})
        which = f"no sound proof of {_spans(odd)}" if odd else "rows are missing or damaged"
        return f"NOT PROVEN: {which} ({len(failures)} finding{'s' if len(failures) > 1 else ''})."
    if not versions:
        return "Nothing to prove: no engine sampled in this run."
    modes = Counter(proof.mode for proof in audit.proofs)
    return f"Every version has its proof: {len(versions)} versions ({_spans(versions)}), by {', '.join(sorted(modes))}."


def status_text(told: Mapping[str, Any]) -> str:
    lines = _engine_lines(told) if told["kind"] == "engine" else _run_lines(told)
    return "\n".join(printable(line) for line in lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> list[str]:
    """Return the lines of a table. `left`: heads of the columns that are aligned left; numbers are aligned right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


# --- audit


def _how_it_ended(audit: Audit) -> str:
    status = audit.status
    steps = f"{len(audit.steps)} steps on sampled tokens" if audit.steps else "no step on sampled tokens"
    lag = max((step.lag for step in audit.steps if step.lag is not None), default=None)
    oldest = "" if lag is None else f", the oldest token {lag} {'version' if lag == 1 else 'versions'} behind"
    return f"{audit.directory}: {status.get('state', 'unknown')}, {steps}{oldest}."


def _findings(found: Sequence[AuditFinding]) -> list[str]:
    lines: list[str] = []
    of_rule = Counter(finding.rule for finding in found)
    for rule, count in of_rule.items():
        lines += [f"  {finding.text}" for finding in found if finding.rule == rule][:_SHOWN_A_RULE]
        if count > _SHOWN_A_RULE:
            lines.append(f"  ... and {count - _SHOWN_A_RULE} more like it ({rule}); --json has all")
    return lines


def _ledger(proofs: Sequence[Proof], odd: set[int]) -> list[str]:
    """Return the newest rows and those with a failure, up to a limit."""
    wanted = [proof for proof in proofs if proof.version in odd][:_SHOWN_ROWS] or list(proofs[-_SHOWN_ROWS:])
    left_out = len(proofs) - len(wanted)
    lines = table(_HEAD, [_row(proof) for proof in wanted], left=("mode", "verified", "by phase", "digest", "engine"))
    return [*lines, f"{left_out} more rows; --json has all"] if left_out else lines


def _row(proof: Proof) -> tuple[str, ...]:
    return (
        str(proof.version),
        proof.mode,
        proof.verified,
        str(proof.tensors),
        size(proof.bytes_moved),
        _ms(proof.seconds.get("total", math.nan)),
        " ".join(f"{phase} {_ms(took)}" for phase in PHASES if (took := proof.seconds.get(phase, 0.0)) >= 5e-5),
        proof.digest,
        f"{proof.logprob_gap:.1e} / {proof.gap_limit:.1e}" if proof.canary_tokens else "not sampled",
        str(proof.attempts),
        ", ".join(engine[:8] for engine in proof.engines),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}" if math.isfinite(seconds) else "?"


def _spans(versions: Sequence[int]) -> str:
    """3, 5 to 9."""
    spans: list[list[int]] = []
    for version in versions:
        if spans and version == spans[-1][1] + 1:
            spans[-1][1] = version
        else:
            spans.append([version, version])
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in spans[:6]]
    return ", ".join(shown) + (f" and {len(spans) - 6} more spans" if len(spans) > 6 else "")


# --- status


def _run_lines(told: Mapping[str, Any]) -> list[str]:
    version, mode = told["version"], told["mode"] or "no bridge yet"
    serves = "no version is served yet" if version is None else f"version {version} was served last"
    lines = [f"{told['directory']}: {told['state']}; {serves}, by {mode}."]
    lines += [f"damaged: {what}" for what in told["damage"]]
    if way := told["transport"]:
        why = f", {way['why']}" if way.get("why") else ""
        lines.append(f"sync.backend = {way.get('requested', '?')}: {way.get('engaged', '?')}{why}")
    for engine in told["engines"]:
        what = "of the base" if engine["is_base"] else "sent"
        share = f", {engine['coverage']:.0%} of the {engine['of']} {what} mapped" if engine["of"] else ""
        workers = f"{engine['workers']} worker{'s' if engine['workers'] != 1 else ''}"
        lines.append(f"engine {engine['boot_id'][:8]}: {workers}, {engine['tensors']} tensors in its layout{share}")
        lines += _joined_lines(engine)
        for part, name in TOLD.items():
            if told_of := engine[part]:
                note = f", {told_of['note']}" if told_of.get("note") else ""
                had = f"engaged{note}" if told_of.get("engaged") else f"not engaged, {told_of.get('why_not', '?')}"
                lines.append(f"  {name} = {told_of.get('requested', '?')}: {had if 'engaged' in told_of else '?'}")
    if not told["engines"] and not any(what.startswith(MAP_FILE) for what in told["damage"]):
        lines.append("no sync-map.json: no engine has been attached")
    elif told["proofs"] and not told["map_is_of_the_last_proof"]:
        lines.append("sync-map.json has other engines than the last proof: an engine is being attached again")
    if told["proofs"]:
        lines += ["", *_ledger([proof_of(row) for row in told["proofs"]], set())]
    return lines


def _joined_lines(engine: Mapping[str, Any]) -> list[str]:
    fused, sharded = engine["fused"], engine["sharded"]
    found: list[str] = []
    if fused:
        param, names = next(iter(fused.items()))
        count = sum(len(each) for each in fused.values())
        found.append(f"  fused: {count} tensors in {len(fused)} parameters, as {param} from {', '.join(names)}")
    if sharded:
        name, count = next(iter(sharded.items()))
        found.append(f"  sharded: {len(sharded)} tensors, as {name} in {count} pieces")
    return found


def _engine_lines(told: Mapping[str, Any]) -> list[str]:
    known = {
        name.replace("_", " "): value
        for name, value in told.items()
        if name not in ("kind", "url", "version", "state", "mapping") and value not in ("", None)
    }
    known |= {f"mapping {name}": value for name, value in (told.get("mapping") or {}).items()}
    lines = [f"{told['url']}: {told.get('state', 'unknown')}, serves version {told.get('version')}"]
    width = max((len(name) for name in known), default=0)
    return lines + [f"  {name:<{width}}  {value}" for name, value in known.items()]
