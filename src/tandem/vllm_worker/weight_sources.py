"""Open the engine's end of a bridge from its link, the plain data that the trainer sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from tandem.errors import SyncError
from tandem.protocols import WeightSource
from tandem.spec.bridges import traits_of

if TYPE_CHECKING:
    import torch


class EngineEnd(WeightSource, Protocol):
    @property
    def reply(self) -> Mapping[str, Any]: ...  # the reply given to `attached`, with the handles that this end adds
    def reuse_buffer(self) -> bool: ...
    def verify_where_served(self) -> bool: ...
    def prefetch(self, rank: int = 0) -> None: ...


def open_source(link: Mapping[str, Any], device: torch.device | None = None) -> EngineEnd:
    """Open the engine's end of a bridge. `device`: where versions arrive; without one, the bridge's own choice."""
    traits = traits_of(link)
    if traits is not None and traits.engine_end == "memory":
        from tandem.bridge.shared.receiver import SharedEnd

        return SharedEnd(link)
    if traits is not None and traits.engine_end == "group":
        from tandem.bridge.collective.receiver import GroupSource

        return GroupSource(link, traits.name, traits.carries, device)
    # Under restart, too: its engine reports what it serves, and each version comes by a new start.
    if traits is not None and traits.engine_end == "files":
        from tandem.bridge.files.reader import FilesSource

        return FilesSource(link, traits.name, traits.carries, device)
    raise SyncError(f"link.mode = {link.get('mode')!r}: this engine knows no such bridge")
