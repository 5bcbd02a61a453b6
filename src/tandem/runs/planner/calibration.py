"""What is known of a card by its data sheet and by measuring, and what it costs: three tables beside this file."""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tandem.errors import SpecError


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU, or a CPU with its RAM. cards.toml and calibration.toml say what each number is, and where it is from."""

    kind: str
    memory_gib: float
    usable: float
    context_gib: float
    adapters_gib: float
    ranks_gib: float
    kept_gib: float
    asleep_gib: float
    bandwidth_gb_s: float
    train_flops: float
    attention_flops: float
    passed_gb_s: float
    layer_s: float
    compiled_passed_gb_s: float
    compiled_layer_s: float
    updated_per_s: float
    updated_at_once_per_s: float
    answer_share: float
    decode_step_s: float
    decode_step_lora_s: float
    decode_row_s: float
    episode_s: float
    embedded_episode_s: float
    sequence_s: float
    prefill_flops: float
    link_gb_s: float
    source: str
    sync: dict[str, tuple[float, float]]

    @property
    def limit_gib(self) -> float:
        return self.memory_gib * self.usable

    def process_gib(self, *, adapters: bool, ranks: bool = False) -> float:
        """Return what a process takes that holds nothing yet."""
        return self.context_gib + self.adapters_gib * adapters + self.ranks_gib * ranks

    @property
    def on_gpu(self) -> bool:
        return self.kind != "cpu"

    @property
    def gpu_bytes(self) -> float:
        """A GPU's memory; 0 for a CPU."""
        return self.memory_gib * 2**30 if self.on_gpu else 0.0


_MEASURED = "h200"
"""The card whose constants were measured; those of the others are scaled from them."""
_BY_FLOPS = ("train_flops", "attention_flops", "prefill_flops")
_BY_BANDWIDTH = ("passed_gb_s", "compiled_passed_gb_s", "updated_at_once_per_s")


def machine(kind: str, memory_gib: float = 0.0) -> Machine:
    """Return the constants of a CPU or of a card. `kind`: cpu, or the card's name in cards.toml or from nvidia-smi.
    `memory_gib`: of the card in the machine; 0: as in the data sheet."""
    kind = kind if kind == "cpu" else card_named(kind) or kind
    if kind not in known():
        raise SpecError(f"--gpu {kind}: no figures of it; known are {', '.join(known())}")
    table = _read(Path(__file__).with_name("calibration.toml"))
    found = dict(table["cpu"] if kind == "cpu" else _scaled(table[_MEASURED], cards()[kind], cards()[_MEASURED]))
    if kind not in ("cpu", _MEASURED):
        found["source"] = "the H200's, scaled by the TFLOP/s and the bandwidth of the data sheet: not measured"
    found["memory_gib"] = memory_gib or found["memory_gib"] or ram_gib()[0]
    found["sync"] = {name: (float(pair[0]), float(pair[1])) for name, pair in found["sync"].items()}
    return Machine(kind=kind, **{each.name: found[each.name] for each in fields(Machine) if each.name != "kind"})


def _scaled(measured: dict[str, Any], card: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    flops, bandwidth = (card[name] / base[name] for name in ("bf16_tflops", "bandwidth_gb_s"))
    by = dict.fromkeys(_BY_FLOPS, flops) | dict.fromkeys(_BY_BANDWIDTH, bandwidth)
    return {
        **{name: value * by[name] if name in by else value for name, value in measured.items()},
        "memory_gib": card["memory_gib"],
        "bandwidth_gb_s": card["bandwidth_gb_s"],
        "link_gb_s": card.get("link_gb_s", 0.0),  # 0: not calibrated
    }


def cards() -> dict[str, dict[str, Any]]:
    """Return the cards of cards.toml by name."""
    return _read(Path(__file__).with_name("cards.toml"))


def card_named(text: str) -> str:
    """Return the card with this name, or with this name of nvidia-smi; empty if none has it."""
    wanted = text.lower().removeprefix("nvidia ")
    found = (key for key, card in cards().items() if wanted in (key, *map(str.lower, card["names"])))
    return next(found, "")


def card_within(text: str) -> str:
    """Return the card that a provider's name of a GPU means, such as nvidia_h100_pcie; empty if it names none."""
    return card_named(text) or max((key for key in cards() if key in text.lower()), key=len, default="")


def known() -> list[str]:
    return [*cards(), "cpu"]


def gpus_here() -> list[tuple[str, float, float]]:
    """Return name, total and free GiB of each GPU of this machine, as nvidia-smi tells them; none if it tells none."""
    command = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [[part.strip() for part in line.split(",")] for line in told.splitlines()]
        return [(name, int(total) / 1024, int(free) / 1024) for name, total, free in rows]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def usd_per_hour(kind: str, prices: Path | None = None) -> float | None:
    """Return the price of a card; None if the table has none."""
    path = prices or Path(__file__).with_name("prices.toml")
    price = _read(path).get(kind)
    if price is None:
        return None
    if not isinstance(price, int | float) or isinstance(price, bool) or price < 0:
        raise SpecError(f"{path}: {kind} = {price!r}: a price is a number of dollars an hour")
    return float(price)


def ram_gib() -> tuple[float, float]:
    """Of this machine, or of the control group that holds this process: all, and what is free."""
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines()) if _linux() else {}
    total, free = (int(rows.get(key, "0 kB").split()[0]) / 2**20 for key in ("MemTotal", "MemAvailable"))
    if not total:
        return 8.0, 8.0  # no /proc: a guess that refuses little
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is not None and limit / 2**30 < total:
        total = limit / 2**30
        free = min(free, total - (used or 0) / 2**30)
    return total, free


def _linux() -> bool:
    return Path("/proc/meminfo").exists()


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: neither UTF-8 nor TOML, for two
        raise SpecError(f"{path}: cannot be read: {error}") from error
