"""The tables of real.py in Markdown, as docs/PERFORMANCE.md has them, and what docs/make_pictures.py draws of them.

Seeds are put together question by question: the share of seeds that answer a question right, in pairs before and after,
or of Tandem and TRL. Intervals over questions are those of the runs' own verdicts (a bootstrap): they say how these
models differ. The one over seeds says how the two trainers do: Welch's, of the accuracies of the seeds. "Sooner"
compares when each side's mean curve came to the accuracy with which TRL's ends; a side's seeds need not all come there.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tandem.runs.verdict import judge, t_quantile

NAMES = {"all": "Tandem, all weights", "lora": "Tandem, LoRA", "trl": "TRL, all weights"}
RESULTS = "real.jsonl"
NEARLY = 0.9
"""Share of TRL's gain: a curve is steep there, so its last points do not decide."""
Row = Mapping[str, Any]


def rows_of(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Results by the names of their jobs; of two, the later. Failures are none."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for file in sorted(path.rglob(RESULTS)) if path.is_dir() else [path] if path.exists() else []:
            rows = (json.loads(line) for line in file.read_text().splitlines())
            found |= {row["name"]: row for row in rows if "error" not in row}
    return found


def share(right: str) -> float:
    return right.count("1") / len(right)


def told(row: Row) -> str:
    shares = [share(each["right"]) for each in row["curve"]]
    points = ", ".join(f"{each['seconds']:.0f} s {of:.1%}" for each, of in zip(row["curve"], shares, strict=True))
    return (
        f"{row['name']}: {shares[0]:.1%} -> {shares[-1]:.1%} of {len(row['curve'][0]['right'])}, trained in "
        f"{row['train_s']:.0f} s, {row['tokens'] / row['train_s']:,.0f} tokens/s, {row['start_s']:.0f} s before, "
        f"{row['whole_s']:.0f} s with all, {row['took_s']:.0f} s with the questions; {points}"
    )


def of_seeds(rows: Sequence[Row], point: int) -> list[float]:
    """Of each question, the share of seeds that are right."""
    return [
        statistics.fmean(float(each) for each in bits)
        for bits in zip(*(row["curve"][point]["right"] for row in rows), strict=True)
    ]


def change(before: Sequence[float], after: Sequence[float]) -> str:
    low, high = judge(before, after, confidence=0.95, measure="accuracy").interval
    return between(low, high)


def over_seeds(*sides: Sequence[float]) -> str:
    """Welch's interval of the second mean less the first; empty where one side has one seed."""
    if min(map(len, sides)) < 2:
        return ""
    parts = [statistics.variance(side) / len(side) for side in sides]
    if not sum(parts):
        return between(*[statistics.fmean(sides[1]) - statistics.fmean(sides[0])] * 2)
    free = sum(parts) ** 2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, sides, strict=True))
    half = t_quantile(0.975, max(1, math.floor(free))) * math.sqrt(sum(parts))
    middle = statistics.fmean(sides[1]) - statistics.fmean(sides[0])
    return between(middle - half, middle + half)


def last(rows: Sequence[Row]) -> list[float]:
    return [share(row["curve"][-1]["right"]) for row in rows]


def between(low: float, high: float) -> str:
    return f"{100 * low:+.1f} to {100 * high:+.1f}".replace("-", "−")


def mean_curve(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Seconds and held-out accuracy after the same steps, in the mean of the seeds."""
    return [
        (statistics.fmean(at["seconds"] for at in points), statistics.fmean(share(at["right"]) for at in points))
        for points in zip(*(row["curve"] for row in rows), strict=True)
    ]


def reached(points: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """Seconds at which a curve came to an accuracy, between two points in a straight line; None if it never did."""
    for (x, low), (next_x, high) in pairwise(points):
        if high >= wanted > low:
            return x + (next_x - x) * (wanted - low) / (high - low)
    return None


def spread(numbers: Sequence[float], form: str) -> str:
    """The mean, with the least and the most."""
    mean = f"{statistics.fmean(numbers):{form}}"
    return f"{mean} ({min(numbers):{form}} to {max(numbers):{form}})" if len(numbers) > 1 else mean


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns that no row has; empty without rows."""
    if not rows:
        return ""
    filled = [n for n in range(len(head)) if any(row[n] for row in rows)]
    lines = [[line[n] for n in filled] for line in (head, ["---"] * len(head), *rows)]
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("| --- ", "|---").replace("--- |", "---|")
    )


def by_way(rows: Mapping[str, Row]) -> dict[tuple[str, str], list[Row]]:
    """Of each task and way, its seeds."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows.values(), key=lambda row: row["seed"]):
        found.setdefault((row["kind"], row["way"]), []).append(row)
    return found


def summary(kinds: Sequence[str], found: Mapping[tuple[str, str], list[Row]]) -> str:
    head = ["task", "way", "seeds", "before %", "after %", "points, 95 %", "against TRL, 95 %",
            "over seeds, 95 %", "trained s", "with start s", "tokens", "tokens/s", "jobs a GPU", "s to TRL's accuracy",
            "each seed's", "sooner", "to 90 % of its gain"]  # fmt: skip
    lines: list[list[str]] = []
    for kind in kinds:
        for way, name in NAMES.items():
            if not (rows := found.get((kind, way))):
                continue
            peers = [row for row in found.get((kind, "trl"), []) if row["seed"] in {each["seed"] for each in rows}]
            ours = [row for row in rows if row["seed"] in {each["seed"] for each in peers}]
            came, each_seeds, sooner, against, seeds = "", "", ["", ""], "", ""
            jobs = [row["beside"] for row in rows]
            if peers and way != "trl":
                against, seeds = change(of_seeds(peers, -1), of_seeds(ours, -1)), over_seeds(last(peers), last(ours))
            if peers and (theirs := mean_curve(peers))[-1][1] > theirs[0][1]:
                before, wanted, mine = theirs[0][1], theirs[-1][1], mean_curve(ours)
                came = when([reached(mine, wanted)])
                each_seeds = when([reached(mean_curve([row]), wanted) for row in ours])
                if way != "trl":
                    of_gain = (before + part * (wanted - before) for part in (1.0, NEARLY))
                    sooner = [ratio(reached(theirs, each), reached(mine, each)) for each in of_gain]
            lines.append([
                kind, name, str(len(rows)), f"{100 * statistics.fmean(of_seeds(rows, 0)):.1f}",
                spread([100 * each for each in last(rows)], ".1f"),
                change(of_seeds(rows, 0), of_seeds(rows, -1)), against, seeds,
                spread([row["train_s"] for row in rows], ".0f"), spread([row["whole_s"] for row in rows], ".0f"),
                f"{statistics.fmean(row['tokens'] for row in rows):,.0f}",
                spread([row["tokens"] / row["train_s"] for row in rows], ",.0f"),
                " to ".join(map(str, sorted({min(jobs), max(jobs)}))), came, each_seeds, *sooner,
            ])  # fmt: skip
    return markdown(head, lines)


def when(times: Sequence[float | None]) -> str:
    came = [each for each in times if each is not None]
    if not came:
        return "never"
    return spread(came, ".0f") + (f", {len(came)} of {len(times)} seeds" if len(came) < len(times) else "")


def ratio(theirs: float | None, ours: float | None) -> str:
    return f"{theirs / ours:.2f} x" if theirs and ours else ""


def curves(kind: str, found: Mapping[tuple[str, str], list[Row]]) -> str:
    """Means over seeds, by the steps at which weights were kept."""
    ways = [way for way in NAMES if (kind, way) in found]
    head, columns = ["steps"], list[list[str]]()
    steps = [point["step"] for point in found[kind, ways[0]][0]["curve"]]
    for way in ways:
        rows = found[kind, way]
        head += [f"{NAMES[way]}: {unit}" for unit in ("s", "tokens", "%")]
        forms: list[tuple[Callable[[Any], float], str]] = [
            (lambda at: at["seconds"], ".0f"), (lambda at: at["tokens"], ",.0f"),
            (lambda at: 100 * share(at["right"]), ".1f"),
        ]  # fmt: skip
        for read, form in forms:
            means = [statistics.fmean(read(row["curve"][n]) for row in rows) for n in range(len(steps))]
            columns.append([f"{mean:{form}}" for mean in means])
    lines = [[str(step), *(column[n] for column in columns)] for n, step in enumerate(steps)]
    asked = f"<!-- picture: real-{kind.replace('_', '-')}, curves | s | tokens -->"
    return f"{asked}\n\n{markdown(head, lines)}\n\n![The same as curves](pictures/real-{kind.replace('_', '-')}.svg)"


def plans(found: Mapping[tuple[str, str], list[Row]]) -> str:
    """Planned against measured: the trainer's memory and the step. `told`: how long answers are on average; `full`: and
    how many tokens the fullest micro-batch had."""
    head = ["task", "way", "jobs a GPU", "trainer GiB", "planned", "told", "full", "step s", "planned", "told"]
    lines: list[list[str]] = []
    for (kind, way), rows in found.items():
        for row in rows[:1]:
            if "plan" not in row:
                continue
            cells = [kind, NAMES[way], str(row["beside"])]
            memory = ("trainer_gib", "memory/peak", ("untold", "told", "full"))
            for planned, measured, ways in (memory, ("step_s", "time/step_s", ("untold", "told"))):
                was = row["steps"][measured]
                guesses = (row["plan"].get(which, {}).get(planned) for which in ways)
                cells += [
                    f"{was:.3g}",
                    *("" if each is None else f"{each:.3g} ({each / was - 1:+.0%})" for each in guesses),
                ]
            lines.append(cells)
    return markdown(head, lines)


def write_tables(rows: Mapping[str, Row], out: Path) -> None:
    """Write real.md and its pictures, and print the tables."""
    found = by_way(rows)
    kinds = list(dict.fromkeys(kind for kind, _ in found))
    machines = sorted({(row["gpu"], row["beside"], row["warm"]) for row in rows.values()})
    places = [
        f"{gpu}, {beside} jobs at once, vLLM {'' if warm else 'not '}compiled before" for gpu, beside, warm in machines
    ]
    parts = ["; ".join(places), "<!-- no picture: curves are below -->", summary(kinds, found)]
    parts += [*(curves(kind, found) for kind in kinds), "<!-- no picture: few rows -->", plans(found)]
    text = "\n\n".join(parts) + "\n"
    (out / "real.md").write_text(text)
    print(text)
    for name, picture in make_pictures().pictures(text).items():
        (out / f"{name}.svg").write_text(picture)


def make_pictures() -> Any:
    """The program of docs/."""
    path = Path(__file__).parents[2] / "docs" / "make_pictures.py"
    place = importlib.util.spec_from_file_location("make_pictures", path)
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    sys.modules["make_pictures"] = module  # its dataclasses ask for it
    place.loader.exec_module(module)
    return module
