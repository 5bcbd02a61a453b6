"""Every figure that this project promises for H200s, on one page: `python benchmarks/gpu/table.py`.

Each measurement is a command of this folder, in a process of its own, on GPUs that nobody else of them uses; one after
the other, or, with `--beside`, as many at once as there are GPUs for. What a figure is, is read from what its command
wrote; one of versions that were not all proven is none. Measurements for which there are too few GPUs are told, and not
made. Two hours with one GPU after the other; `--only rollouts step-1.7b` for some.

Outputs and `table.json` are under $OUT. Exit code 1 if a figure is missed, a measurement failed, or was not made.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from figures import MEASUREMENTS, Figure, Measurement

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from common import note, table  # noqa: E402


@dataclass
class Made:
    measurement: Measurement
    seconds: float = 0.0
    found: Any = None
    failed: str = ""


def make(measurement: Measurement, gpus: Sequence[str], out: Path) -> Made:
    place, started = out / measurement.name, time.perf_counter()
    place.mkdir(parents=True, exist_ok=True)
    script, *words = measurement.command.split()
    (place / measurement.wrote).unlink(missing_ok=True)  # of another day
    with open(place / "output.txt", "w") as output:
        code = subprocess.run(
            [sys.executable, str(HERE / script), *words],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "OUT": str(place)},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        ).returncode  # fmt: skip
    made = Made(measurement, time.perf_counter() - started)
    try:
        made.found = json.loads((place / measurement.wrote).read_text())
    except (OSError, ValueError) as error:
        made.failed = f"{type(error).__name__}, see {place / 'output.txt'}"
    if code:
        made.failed = f"exit code {code}, see {place / 'output.txt'}"
    print(f"{measurement.name}: {made.failed or 'made'}, {made.seconds:.0f} s", flush=True)
    return made


def make_all(measurements: Sequence[Measurement], gpus: Sequence[str], out: Path, *, beside: bool) -> Iterator[Made]:
    """Those that need most GPUs first."""
    for count in sorted({each.gpus for each in measurements}, reverse=True):
        alike = [each for each in measurements if each.gpus == count]
        sets = [gpus[first : first + count] for first in range(0, len(gpus) - count + 1, count)]
        if not sets:
            yield from (Made(each, failed=f"needs {count} GPUs") for each in alike)
            continue
        free = SimpleQueue[Sequence[str]]()
        for each in sets if beside else sets[:1]:
            free.put(each)
        with ThreadPoolExecutor(free.qsize()) as threads:
            yield from threads.map(partial(_in_turn, free, out), alike)


def _in_turn(free: SimpleQueue[Sequence[str]], out: Path, measurement: Measurement) -> Made:
    gpus = free.get()
    try:
        return make(measurement, gpus, out)
    finally:
        free.put(gpus)


def told(made: Made, figure: Figure) -> list[str]:
    """A row of the table."""
    bounds = [f"{'>=' if figure.more else '<='} {figure.must:,g} {figure.unit}".strip(), f"{figure.goal:,g}"]
    if made.failed:
        return [figure.what, "none", *bounds, made.failed]
    try:
        value = figure.read(made.found)
    except (ValueError, LookupError, TypeError) as error:  # it wrote something else, or what nobody has proven
        return [figure.what, "none", *bounds, f"{type(error).__name__}: {error}"]
    shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return [figure.what, f"{shown} {figure.unit}".strip(), *bounds, figure.verdict(value)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=[each.name for each in MEASUREMENTS])
    parser.add_argument("--beside", action="store_true", help="as many at once as there are GPUs for")
    arguments = parser.parse_args()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    asked = [each for each in MEASUREMENTS if not arguments.only or each.name in arguments.only]
    out = Path(os.environ.get("OUT", ".")) / "table"
    made = sorted(make_all(asked, gpus, out, beside=arguments.beside), key=lambda each: asked.index(each.measurement))
    note(f"{len(gpus)} x {torch.cuda.get_device_name(0) if gpus else 'no GPU'}, seed 0")
    rows = [told(each, figure) for each in made for figure in each.measurement.figures]
    table(["figure", "measured", "must be", "goal", ""], rows)
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.json").write_text(json.dumps(rows, indent=1))
    if any(row[-1] not in ("met", "goal") for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
