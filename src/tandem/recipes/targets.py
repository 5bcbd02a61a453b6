"""Say what each configured target offers now."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.build.targets import AnyTarget, open_provider, read_targets
from tandem.errors import ProviderError
from tandem.job_types import Need, Offer


@dataclass(frozen=True)
class TargetOffers:
    """What a target offers for a need."""

    target: str
    kind: str
    offers: list[Offer]
    error: str = ""
    """Why there is no answer; empty if there is one."""


def list_targets(need: Need | None = None, *, file: str | Path | None = None) -> list[TargetOffers]:
    """Return what each target of `file` offers now for `need`, its price and why not. Nothing is started."""
    return asyncio.run(ask_targets(read_targets(Path(file) if file is not None else None), need or Need()))


async def ask_targets(targets: Mapping[str, AnyTarget], need: Need) -> list[TargetOffers]:
    """Ask all targets at once what they offer now."""
    return list(await asyncio.gather(*(_asked(name, each, need) for name, each in targets.items())))


async def _asked(name: str, settings: AnyTarget, need: Need) -> TargetOffers:
    try:
        return TargetOffers(name, settings.kind, await open_provider(settings).offers(need))
    except ProviderError as error:
        return TargetOffers(name, settings.kind, [], str(error))
