"""The last message that each member of a group sends about one version that travels as boxes.

A rank of the trainer says that its boxes are taken, a receiver that its boxes are right; or why not. A member that
breaks off says so, and rank 0 then tells the others, which may wait for it.
"""

from __future__ import annotations

from contextlib import suppress

from tandem.bridge.collective.control_channel import BROKEN, CLOSING_S, ChannelAddress, ControlChannel
from tandem.bridge.common.deadline import Deadline
from tandem.errors import SyncTimeout


class LastMessages:
    def __init__(self, address: ChannelAddress, channel: ControlChannel, sequence: int) -> None:
        self._address, self._channel = address, channel
        members = range(1, address.world_size)
        self.keys = {rank: f"{sequence}/{'sent' if rank < address.senders else 'done'}/{rank}" for rank in members}
        """By rank in the group, of all but rank 0."""

    def read(self, failed: str, deadline: Deadline) -> dict[int, str]:
        """Return the messages, by rank. As soon as one member broke off, return what there is. `failed`: a clause with
        a place for who is late."""
        found: dict[int, str] = {}

        def ended() -> bool:
            for rank, key in self.keys.items():
                if rank not in found and self._channel.has(key):
                    found[rank] = self._channel.read(key, failed, deadline)
            return len(found) == len(self.keys) or any(text.startswith(BROKEN) for text in found.values())

        try:
            deadline.until(ended, failed)
        except SyncTimeout:
            late = ", ".join(self._address.member(rank) for rank in self.keys if rank not in found)
            raise deadline.missed(failed.format(late)) from None
        return dict(sorted(found.items()))

    def silent(self) -> list[str]:
        """Return who says nothing although the transfer was broken off. Those who only waited for them have said so."""
        with suppress(SyncTimeout):
            said = Deadline(self._address.mode, CLOSING_S)
            said.until(lambda: all(self._channel.has(key) for key in self.keys.values()), "some said nothing")
        return [self._address.member(rank) for rank, key in self.keys.items() if not self._channel.has(key)]
