"""The results of `tandem sync bench` as data, table and picture. matplotlib is imported only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from typing import Any

from tandem.io.jsonl import finite
from tandem.obs.claims import printable
from tandem.obs.sync_report import PHASES, size, table

_COLORS = {
    "wake": "#495057",
    "wait": "#7aa6f7",
    "verify": "#0d7a6f",
    "check": "#94d82d",
    "stage": "#e599f7",
    "pause": "#f0b429",
    "apply": "#d9480f",
    "digest": "#0b7285",
    "prove": "#4fd1c0",
    "resume": "#8d99ae",
    "canary": "#b197fc",
    "rest": "#dde2e7",
}


@dataclass(frozen=True, slots=True)
class BenchRow:
    """The results of one bridge. Times are of the median round, in the units of their names."""

    bridge: str
    engine: str
    verified: bool = False
    """Whether every round was proven by fingerprints, cache epoch and canary, and all digests differ."""
    how: str = ""
    """The kind of fingerprints: digest, identity, canary."""
    rounds: int = 0
    tensors: int = 0
    bytes: int = 0
    ms: float = 0.0
    phases: dict[str, float] = field(default_factory=dict[str, float])
    """Milliseconds by phase, from the proofs. The trainer's phases pass while the engine waits."""
    rest_ms: float = 0.0
    """`ms` without the engine's phases and the canary: messages and the comparison of fingerprints. Below 0: a phase
    was counted twice."""
    gb_s: float | None = None
    """Bytes divided by `ms` without the canary; None if no bytes move."""
    link_share: float | None = None
    extra_mib: float | None = None
    """Additional peak memory of both processes; `ops/memory_meter.py` says how it is measured."""
    gap: float = 0.0
    skipped: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Bench:
    device: str
    shape: str
    parameters: int
    link: str
    """What `link_gb_s` measures."""
    link_gb_s: float
    rows: tuple[BenchRow, ...]

    @property
    def failed(self) -> bool:
        return any(not row.verified and not row.skipped for row in self.rows)


def bench_json(bench: Bench) -> dict[str, Any]:
    """Return the results as JSON. A row has the reason in `skipped` or `error` if it did not run or failed."""
    rows = [{key: value for key, value in asdict(row).items() if value != ""} for row in bench.rows]
    return finite({**asdict(bench), "rows": rows})


def bench_text(bench: Bench) -> str:
    had = [row for row in bench.rows if row.rounds]
    phases = [phase for phase in PHASES if any(row.phases.get(phase, 0.0) >= 0.05 for row in had)]
    head = ("bridge", "proof", "rounds", "bytes", "ms", *phases, "rest", "GB/s", "of link", "memory +")
    cells = [
        (
            row.bridge,
            row.how if row.verified else "NONE",
            str(row.rounds),
            size(row.bytes),
            f"{row.ms:.1f}",
            *(f"{row.phases[phase]:.1f}" if phase in row.phases else "" for phase in phases),
            f"{row.rest_ms:.1f}",
            "" if row.gb_s is None else f"{row.gb_s:.3g}",
            "" if row.link_share is None else f"{row.link_share:.1%}",
            "?" if row.extra_mib is None else size(row.extra_mib * 2**20),
        )
        for row in had
    ]
    lines = [
        f"{bench.shape}, {bench.parameters:,} parameters, on {bench.device}",
        f"link: {bench.link_gb_s:.1f} GB/s, {bench.link}",
        "",
        *table(head, cells, left=("bridge", "proof")),
    ]
    lines += [f"{row.bridge}: skipped: {row.skipped}" for row in bench.rows if row.skipped]
    lines += [f"{row.bridge}: FAILED: {row.error}" for row in bench.rows if row.error]
    return "\n".join(printable(line) for line in lines)


def bench_png(bench: Bench) -> bytes:
    """Draw a bar per bridge, of consecutive parts: the engine's phases, the canary, the rest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [row for row in bench.rows if row.rounds]
    figure = Figure(figsize=(10.5, 1.8 + 0.55 * max(len(rows), 1)), dpi=144, facecolor="#ffffff", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = _width(rows)
    for place, row in enumerate(rows):
        start, parts = 0.0, {**row.phases, "rest": row.rest_ms}
        for phase, color in _COLORS.items():
            axes.barh(place, parts.get(phase, 0.0), left=start, height=0.62, color=color)
            start += parts.get(phase, 0.0)
        axes.text(min(start, width), place, _said(row, start > width), va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [row.bridge for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, width)
    axes.set_xlabel("milliseconds per version, median")
    axes.set_title(f"{bench.shape}, {bench.parameters:,} parameters, {bench.device}", loc="left", fontsize=11)
    handles = [Patch(color=color, label=phase) for phase, color in _COLORS.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower left", frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _width(rows: Sequence[BenchRow]) -> float:
    """Return the width of the axis. A bar that is far longer than the others (a process start) is cut, and marked."""
    longest = sorted(row.ms for row in rows) or [1.0]
    far = len(longest) > 1 and longest[-1] > 5 * longest[-2]
    return 1.05 * (longest[-2] if far else longest[-1])


def _said(row: BenchRow, cut: bool) -> str:
    speed = "" if row.gb_s is None else f", {row.gb_s:.2g} GB/s"
    return f"  {'→ ' if cut else ''}{row.ms:.1f} ms{speed}{'' if row.verified else ', NOT PROVEN'}"
