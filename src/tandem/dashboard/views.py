"""What the pages show of runs, as JSON: read by the readers behind `tandem runs`, `watch`, `explain` and `compare`.

What a run, its model or its environment wrote is text of others: it leaves here cut and without control characters, as
JSON strings, and the pages show it as text.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from tandem.errors import NotKnown
from tandem.io.kept_samples import first_and_last_step, sample_tokens, samples
from tandem.io.log_lines import LOGS, read_log
from tandem.obs.claims import headline, printable
from tandem.obs.report import result_of
from tandem.obs.run_history import History, Row, evaluations, number, read_history
from tandem.obs.sync_audit import audit_sync
from tandem.obs.sync_report import verdict as sync_verdict
from tandem.runs.compare import compare_json, compare_runs, pairing_text
from tandem.runs.explain import explain_run
from tandem.runs.liveness import Observer
from tandem.runs.run_list import list_runs
from tandem.runs.watch import look
from tandem.types import text_of

Found = dict[str, Any]

MOST_POINTS = 100_000
"""Of a series; of a longer run, means over equal numbers of steps."""
MOST_ANSWERS, MOST_VERSIONS, MOST_LINES, MOST_TOKENS = 200, 2000, 1000, 8000
_LONGEST_TEXT, _LONGEST_WHY, _LONGEST_LINE, _LONGEST_NAME = 20_000, 2000, 2000, 200
_GONE = "Its process is gone, and it has not ended: step {step} of {steps_total}."
_NO_RUN = "there is no run of this name in the directory; the list of runs says which there are"


class Runs:
    """The runs of a directory, each called by its name there. No other path is read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._observers: dict[str, Observer] = {}

    def place(self, name: str) -> Path:
        if name != Path(name).name or name.startswith(".") or not (self.directory / name / "spec.toml").is_file():
            raise NotKnown(_NO_RUN)
        return self.directory / name

    def all(self) -> Found:
        rows = [row for row in list_runs(self.directory) if not Path(row["run"]).name.startswith(".")]
        return {"directory": str(self.directory), "runs": [self._row(row) for row in reversed(rows)]}

    def _row(self, row: Found) -> Found:
        name = Path(row["run"]).name
        if row["state"] == "running":
            sight = self.sight(name)
            row = {**row, "step": sight["step"], "liveness": sight["liveness"], "stage": sight["stage"]}
        return plain({**row, "run": name, "title": name, "error": first_line(str(row.get("error", "")))})

    def sight(self, name: str) -> Found:
        """Return how a run stands. Only from the second look on can it say whether the run makes progress."""
        return look(self.place(name), self._observers.setdefault(name, Observer()))

    def stands(self, name: str) -> Found:
        """Return how a run stands, in few words: for a page that follows it."""
        sight = self.sight(name)
        return plain({key: sight[key] for key in ("state", "stage", "step", "steps_total", "liveness", "verdict")})

    def explained(self, name: str, rows: Sequence[Row]) -> Found:
        """Return why a run ended so, and what to do next. `rows`: of its metrics."""
        return explain_run(self.place(name), name=name, rows=rows)

    def history(self, name: str) -> History:
        return read_history(self.place(name))

    def overview(self, name: str) -> Found:
        sight, stands = self.sight(name), self.stands(name)
        history = self.history(name)
        explained = self.explained(name, history.rows)
        result = result_of(history)
        return plain(
            {
                **result,
                "headline": result["headline"] if stands["liveness"] != "gone" else _GONE.format(**stands),
                "error": "",
                "run": name,
                "title": name,
                "stands": stands,
                "last": sight["metrics"],
                "events": sight["events"],
                "attempts": sight["attempts"],
                "why": explained["why"][:_LONGEST_WHY],
                "failure": explained["failure"],
                "bad_step": explained["bad_step"],
                "next": explained["next"],
                "proof": {key: value for key, value in self.versions(name).items() if key in ("proven", "verdict")},
                "metrics": metric_names(history.rows),
                "answers_of_steps": first_and_last_step(self.place(name)),
                "spec": history.spec,
                "server": None,
            }
        )

    def curves(self, name: str, names: Sequence[str]) -> Found:
        """Return columns of the metrics whose name fits one of `names`, and the evaluations."""
        history = self.history(name)
        wanted = [key for key in metric_names(history.rows) if any(fnmatch.fnmatchcase(key, each) for each in names)]
        series = {key: column(history.rows, key) for key in wanted}
        held_out = [[each.step, each.value] for each in evaluations(history)]
        return {"run": name, "measure": history.measure, "series": series, "evaluations": held_out}

    def answers(self, name: str, **wanted: Any) -> Found:
        """Return the answers of one step's tasks, siblings together; or those that fit, the newest first."""
        place = self.place(name)
        steps = first_and_last_step(place)
        found = samples(place, **wanted, limit=MOST_ANSWERS) if steps else []
        found.sort(key=lambda row: (-row["step"], row["group"]))
        for row in found:
            row["messages"] = [{**each, "content": text_of(each.get("content"))} for each in row["messages"]]
        return plain({"run": name, "steps": steps, "answers": found})

    def tokens(self, name: str, sample: int) -> Found:
        """Return what is known of each token of an answer: its text, its logprob and the version that sampled it."""
        place = self.place(name)
        turns = sample_tokens(place, sample) if first_and_last_step(place) else []
        found = [[[each.text, each.logprob, each.version] for each in turn[:MOST_TOKENS]] for turn in turns]
        return plain({"run": name, "sample": sample, "turns": found})

    def versions(self, name: str) -> Found:
        """Return each version's proof, the newest first, and what is wrong."""
        audit = audit_sync(self.place(name))
        proofs = [asdict(proof) for proof in islice(reversed(audit.proofs), MOST_VERSIONS)]
        findings = [asdict(finding) for finding in islice(audit.findings, MOST_LINES)]
        made = {"proven": audit.proven, "verdict": sync_verdict(audit), "versions": proofs, "count": len(audit.proofs)}
        return plain({"run": name, **made, "findings": findings})

    def log(self, name: str, file: str, before: int) -> Found:
        place = self.place(name)
        there = sorted(str(path.relative_to(place)) for each in LOGS for path in place.glob(each))
        if file not in there:
            return {"run": name, "file": file, "files": there, "lines": []}
        lines = read_log(place, file, MOST_LINES, before).lines
        cut = [{"line": each["line"], "text": str(each["text"])[:_LONGEST_LINE]} for each in lines]
        return plain({"run": name, "file": file, "files": there, "lines": cut})

    def compare(self, names: Sequence[str]) -> Found:
        compared = compare_runs([self.place(name) for name in names])
        found = compare_json(compared) | {"said": [pairing_text(each) for each in compared.pairings]}
        heads = [headline(read_history(self.place(name)).status) for name in names]
        return plain({**found, "runs": [*names], "headlines": heads})


def metric_names(rows: Sequence[Row]) -> list[str]:
    return sorted({key for row in rows for key, value in row.items() if number(value) is not None} - {"step"})


def column(rows: Sequence[Row], key: str) -> list[list[float]]:
    """Return steps and values, with at most MOST_POINTS of each."""
    found = [(float(row["step"]), value) for row in rows if (value := number(row.get(key))) is not None]
    size = -(-len(found) // MOST_POINTS) or 1
    if size == 1:
        return [[step for step, _ in found], [value for _, value in found]]
    parts = [found[at : at + size] for at in range(0, len(found), size)]
    return [[part[-1][0] for part in parts], [sum(value for _, value in part) / len(part) for part in parts]]


def first_line(text: str) -> str:
    return text.split("\n", 1)[0][:_LONGEST_NAME]


def plain(value: Any) -> Any:
    """Return a value for a page: texts cut and without control characters, null for numbers that are not finite."""
    if isinstance(value, str):
        left_out = len(value) - _LONGEST_TEXT
        text = "\n".join(printable(line) for line in value[:_LONGEST_TEXT].split("\n"))
        return text if left_out <= 0 else f"{text}\n… {left_out:,} more characters"
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if number(value) is not None else None
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key)[:_LONGEST_NAME]: plain(each) for key, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in cast("Sequence[Any]", value)]
    return value
