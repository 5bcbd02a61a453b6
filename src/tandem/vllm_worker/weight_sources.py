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
    match link.get("mode"):
        case "shared":
            from tandem.bridge.shared import receiver as end
        case "broadcast":
            from tandem.bridge.collective import broadcast_source as end
        case "adapter_broadcast":
            from tandem.bridge.collective import adapter_broadcast_source as end
        case "adapter":
            from tandem.bridge.files import adapter_source as end
        case "disk":
            from tandem.bridge.files import disk_source as end
        case "restart":  # tells the trainer what is served; versions come by a new start
            from tandem.bridge.files import restart_source as end
        case unknown:
            raise SyncError(f"link.mode = {unknown!r}: this engine knows no such bridge")
    return end.open(link, device)
