"""Offers, from what SkyPilot may use and the rows of its catalogue."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.job_types import Need, Offer

_OWNED = ("slurm", "kubernetes", "ssh")
"""Where SkyPilot knows no prices, and needs none."""


def offered(
    need: Need, told: Mapping[str, Any], infra: Sequence[str], usd_per_hour: float
) -> list[tuple[Offer, dict[str, Any]]]:
    """Return the offers of `infra`, the cheapest first, each with what SkyPilot calls its resources."""
    found = _with_gpus(need, told["gpus"], infra, usd_per_hour) if need.gpus else []
    if not need.gpus:
        found = [_without(need, each, usd_per_hour) for each in told["infra"] if _wanted(each, infra)]
    return sorted(found, key=lambda each: (each[0].usd_per_hour, each[0].gpus))


def _without(need: Need, infra: str, usd_per_hour: float) -> tuple[Offer, dict[str, Any]]:
    """Return the offer of a machine without GPUs. SkyPilot tells no price of one, but keeps to a highest price."""
    offer = Offer(infra, 0, "", 0.0, max(1, need.cpus), need.memory_gib, 1, usd_per_hour)
    why = _why_not(offer, need)
    if not usd_per_hour and infra.split("/")[0] not in _OWNED:
        why = "SkyPilot tells no price of machines without GPUs; write usd_per_hour, which it will not exceed"
    highest = {"max_hourly_cost": usd_per_hour} if usd_per_hour else {}
    return _not_if(offer, why), {"infra": infra, **_sizes(need), **_disk(need), **highest}


def _with_gpus(
    need: Need, rows: Sequence[Sequence[Any]], infra: Sequence[str], usd_per_hour: float
) -> list[tuple[Offer, dict[str, Any]]]:
    """Return an offer for each cloud and number of a GPU: the cheapest that meets the need, else the cheapest."""
    found: dict[str, tuple[Offer, dict[str, Any]]] = {}
    for cloud, region, instance, gpu, count, gpu_gib, cpus, gib, price in sorted(
        rows, key=lambda row: row[8] if row[8] >= 0 else math.inf
    ):
        where, gpus = f"{cloud}/{region}" if region else cloud, f"{gpu}:{int(count)}"
        if count < 1 or not _wanted(where, infra):
            continue
        offer = Offer(
            f"{where}/{instance or gpu}:{int(count)}", int(count), gpu, max(0.0, gpu_gib), max(0, int(cpus)),
            max(0.0, gib), 1, price if price > 0 else usd_per_hour,
        )  # fmt: skip
        why = _why_not(offer, need) or ("" if price >= 0 else "SkyPilot's catalogue has no price of it")
        machine = {"instance_type": instance} if instance else _sizes(need)
        same = found.get(f"{cloud}/{gpus}")
        if same is None or (not same[0].fits and not why):
            resources = {"infra": where, "accelerators": gpus, **machine, **_disk(need)}
            found[f"{cloud}/{gpus}"] = _not_if(offer, why), resources
    return list(found.values())


def _wanted(where: str, infra: Sequence[str]) -> bool:
    return not infra or any(where == each or where.startswith(f"{each}/") for each in infra)


def _sizes(need: Need) -> dict[str, str]:
    memory = {"memory": f"{need.memory_gib:g}+"} if need.memory_gib else {}
    return {"cpus": f"{max(1, need.cpus)}+", **memory}


def _disk(need: Need) -> dict[str, int]:
    return {"disk_size": math.ceil(need.disk_gib) + 32} if need.disk_gib else {}  # 32: the system


def _not_if(offer: Offer, why: str) -> Offer:
    return replace(offer, fits=False, now=False, why_not=why) if why else offer


def _why_not(offer: Offer, need: Need) -> str:
    if need.hosts > 1:
        return "a job of this target is one host"
    if need.gpus > offer.gpus:
        return f"it has {offer.gpus} GPUs"
    if need.gpus and need.gpu.lower() not in offer.gpu.lower():
        return f"its GPUs are '{offer.gpu}'"
    if need.gpus and need.gpu_memory_gib > offer.gpu_memory_gib:
        known = f"its GPUs have {offer.gpu_memory_gib:g} GiB" if offer.gpu_memory_gib else ""
        return known or "SkyPilot does not know the memory of its GPUs"
    if need.cpus > offer.cpus > 0 or need.memory_gib > offer.memory_gib > 0:
        return f"it has {offer.cpus} CPUs and {offer.memory_gib:g} GiB"
    return ""
