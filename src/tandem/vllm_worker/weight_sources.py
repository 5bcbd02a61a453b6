"""The engine's end of a bridge, in the engine's process: made from the plain data that the trainer's end sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from tandem.errors import SyncError
from tandem.protocols import WeightSource

if TYPE_CHECKING:
    import torch


class EngineEnd(WeightSource, Protocol):
    @property
    def reply(self) -> Mapping[str, Any]: ...  # what `attached` was told, and what this end adds: handles
    def arrive_in_one_place(self) -> bool: ...
    def looks_itself(self) -> bool: ...
    def look_ahead(self, rank: int = 0) -> None: ...


def open_source(link: Mapping[str, Any], device: torch.device | None = None) -> EngineEnd:
    """`device`: where versions arrive; without one, where that bridge brings them."""
    mode = link.get("mode")
    match mode:
        case "shared":
            from tandem.bridge.shared.receiver import SharedEnd

            return SharedEnd(link)
        case "broadcast" | "adapter_broadcast":
            from tandem.bridge.collective.receiver import GroupSource

            return GroupSource(link, mode, "full" if mode == "broadcast" else "adapter", device)
        case "disk" | "restart" | "adapter":  # restart tells the trainer what is served; versions come by a new start
            from tandem.bridge.files.reader import FilesSource

            return FilesSource(link, mode, "adapter" if mode == "adapter" else "full", device)
        case unknown:
            raise SyncError(f"link.mode = {unknown!r}: this engine knows no such bridge")
