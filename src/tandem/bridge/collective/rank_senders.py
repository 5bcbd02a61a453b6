"""The ranks of a trainer as senders of one version: rank 0 asks, the others say what they hold, and all send.

The order of messages between rank 0 (T) and every other rank (R), on a control channel of their own. receiver.py has
the messages between rank 0 and the receivers, which come between the second and the third line:

    T  <n>/manifest        version, kind, and the checksums of the placement and of the boxes that receivers serve;
                           `latest` = n. Or only why nothing is sent
    R  <n>/held/<rank>     the boxes that it holds, their digests and those of every cut; or why it cannot send
    T  <n>/go              the checksum of all boxes, the transport and the number of the announcement, once every
                           receiver takes part; or why not
    *  every rank sends its cuts to the receivers, over one group
    R  <n>/sent/<rank>     "" (all of its cuts are taken), or why not; the connection then ends
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from tandem.bridge.collective.boxes import BoxTable, BoxTables, SentWeights, forms_of
from tandem.bridge.collective.control_channel import (
    BROKEN,
    CLOSING_S,
    WAY_OUT,
    ChannelAddress,
    ControlChannel,
    as_sync_errors,
    reported,
)
from tandem.bridge.collective.process_group import Group
from tandem.bridge.common.deadline import Deadline
from tandem.bridge.common.held_weights import Held
from tandem.bridge.common.manifest import Placement
from tandem.bridge.common.packer import Form
from tandem.bridge.common.places import distinct
from tandem.errors import SyncError
from tandem.ops.device_names import device_name
from tandem.ops.phase_timer import Phases
from tandem.types import Weights


def channel_of_ranks(address: ChannelAddress, store: Store, *, mine: bool) -> ControlChannel:
    return ControlChannel(address, PrefixStore("ranks", store), mine=mine)


def _accepted(text: str, failed: str) -> dict[str, Any]:
    """Return what rank 0 says. SyncError if it says why the version does not travel."""
    content: dict[str, Any] = json.loads(text)
    if why := content.get("refused"):
        raise SyncError(f"{failed}: {why}")
    return content


class OtherRanks:
    """What rank 0 says to the other ranks, and hears. With one rank it does nothing."""

    def __init__(self, address: ChannelAddress, store: Store) -> None:
        self._address = address
        self._channel = channel_of_ranks(address, store, mine=True)
        self._number = 0
        self._state: Literal["idle", "ordered", "asked"] = "idle"
        """ordered: they wait for the question. asked: they wait for `go`."""
        self._refused = ""
        """Why the last version does not travel. A rank that comes late reads it where the connection is closed."""

    @property
    def numbers(self) -> range:
        return range(1, self._address.senders)

    def begin(self) -> None:
        """The others were ordered to send."""
        if self.numbers:
            self._state, self._refused = "ordered", ""

    def ask(self, content: Mapping[str, Any], deadline: Deadline) -> None:
        if self.numbers:
            self._number += 1
            text = json.dumps(content)
            self._channel.announce(self._number, text, "the other ranks were not asked", deadline, claimable=False)
            self._state = "idle" if "refused" in content else "asked"
            self._delete_old(self._number - 2)

    def held(self, forms: Mapping[str, Form], version: int, deadline: Deadline) -> list[tuple[Held, str]]:
        """Return what each of the others holds, and its device. SyncError, with the rank, if one cannot send."""
        found: list[tuple[Held, str]] = []
        for rank in self.numbers:
            failed = f"of version {version}, rank {rank} of the trainer did not say what it holds"
            text = self._channel.read(f"{self._number}/held/{rank}", failed, deadline)
            content = json.loads(text)
            if why := content.get("error"):
                raise SyncError(f"{self._address.mode}: rank {rank} of the trainer: {why}")
            try:
                found.append((Held.from_json(content, forms), str(content["device"])))
            except (LookupError, TypeError, ValueError) as error:
                raise SyncError(
                    f"{self._address.mode}: rank {rank} of the trainer says what no release writes: {error}"
                ) from error
        return found

    def go(self, content: Mapping[str, Any], deadline: Deadline) -> None:
        if self.numbers:
            self._state = "idle"
            self._channel.write(f"{self._number}/go", json.dumps(content), deadline)

    def refuse(self, why: str) -> None:
        """Tell the others that the version does not travel, if they wait."""
        tell = {"idle": None, "ordered": self.ask, "asked": self.go}[self._state]
        if tell is not None:
            self._refused = why
            with suppress(SyncError):
                tell({"refused": why}, Deadline(self._address.mode, CLOSING_S))

    def close(self, why: str) -> None:
        if self.numbers:
            self.refuse(why)
            self._channel.close(
                self._number,
                f"{why}; {self._refused}" if self._refused else why,
                Deadline(self._address.mode, CLOSING_S),
            )

    def _delete_old(self, number: int) -> None:
        of_ranks = [f"{number}/held/{rank}" for rank in self.numbers]
        for key in (f"{number}/manifest", f"{number}/go", *of_ranks):
            self._channel.store.delete_key(key)


class RankSender:
    """The bridge's end at a rank other than 0. It sends its part of each version when rank 0 does."""

    def __init__(self, rank: int, device: torch.device | str) -> None:
        """`device`: where this rank's tensors are."""
        self._rank, self._device = rank, torch.device(device)
        self._connection: _RankConnection | None = None

    def send(self, link: Mapping[str, Any], weights: Weights) -> None:
        """Send this rank's part; call it when rank 0 calls `send` of its bridge. `link`: `rank_link` of that bridge.
        SyncError, as at rank 0, if the version does not travel."""
        if self._connection is None or self._connection.link != link:
            self.close()
            self._connection = _RankConnection(link, self._rank, self._device)
        self._connection.send(weights)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _RankConnection:
    def __init__(self, link: Mapping[str, Any], rank: int, device: torch.device) -> None:
        self.link = dict(link)
        self._address = ChannelAddress.from_link(self.link)
        self._rank, self._device = rank, device
        self._given_up = threading.Event()
        self._channels: tuple[ControlChannel, ControlChannel] | None = None
        self._group: Group | None = None
        self._placement: Placement | None = None
        self._tables = BoxTables(self._address.mode)
        self._seen, self._ended = 0, ""

    def send(self, weights: Weights) -> None:
        mode = self._address.mode
        deadline = Deadline(mode, self._address.deadline_s, self._given_up)
        failed = f"rank {self._rank}: version {weights.version} was not sent"
        if self._ended:
            raise SyncError(f"{mode}: this connection has ended: {self._ended}; {WAY_OUT}")
        ranks, channel = self._connected(failed, deadline)
        number, text = ranks.newest(self._seen, failed, deadline)
        if number < 0:
            self._end(text, broken=False)
            raise SyncError(f"{mode}: {failed}: {text}; {WAY_OUT}")
        self._seen = number
        asked = _accepted(text, f"{mode}: {failed}")
        held = self._answer(asked, weights, ranks, channel, deadline)
        go = _accepted(ranks.read(f"{number}/go", failed, deadline), f"{mode}: {failed}")
        self._move(go, held, channel, weights.version, deadline)

    def close(self) -> None:
        self._given_up.set()
        self._end("it was closed", broken=False)

    def _connected(self, failed: str, deadline: Deadline) -> tuple[ControlChannel, ControlChannel]:
        if self._channels is None:
            with as_sync_errors(self._address.mode, failed, deadline):
                store = deadline.call(self._address.connect, failed)
            ranks = channel_of_ranks(self._address, store, mine=False)
            self._channels = ranks, ControlChannel(self._address, store, mine=False)
        return self._channels

    def _answer(
        self,
        asked: Mapping[str, Any],
        weights: Weights,
        ranks: ControlChannel,
        channel: ControlChannel,
        deadline: Deadline,
    ) -> SentWeights:
        """Say what this rank holds. It says its error, too: rank 0 waits."""
        key = f"{self._seen}/held/{self._rank}"

        def tell(why: str) -> None:
            with suppress(SyncError):
                ranks.write(key, json.dumps({"error": why}), Deadline(self._address.mode, CLOSING_S))

        with reported(self._address.mode, f"version {weights.version} was not sent", tell):
            if (weights.version, weights.kind) != (asked["version"], asked["kind"]):
                raise SyncError(
                    f"it holds version {weights.version} of '{weights.kind}' weights, and version {asked['version']} "
                    f"of '{asked['kind']}' weights is to be sent"
                )
            forms = self._forms(asked["places"], channel, deadline)
            served = self._box_table(asked["boxes"], forms, channel, deadline).served
            held = SentWeights(weights, forms, self._address.mode)
            content = held.digest(distinct(served), Phases()).to_json(forms)
            ranks.write(key, json.dumps({**content, "device": device_name(self._device)}), deadline)
        return held

    def _move(
        self, go: Mapping[str, Any], held: SentWeights, channel: ControlChannel, version: int, deadline: Deadline
    ) -> None:
        sequence, failed = go["sequence"], f"version {version} was not sent completely"

        def break_off(why: str) -> None:
            with suppress(SyncError):
                told = Deadline(self._address.mode, CLOSING_S)
                channel.write(
                    f"{sequence}/sent/{self._rank}", f"{BROKEN}: {self._address.member(self._rank)}: {why}", told
                )
            self._end(why, broken=True)

        with reported(self._address.mode, failed, break_off):
            assert self._placement is not None
            plan = self._box_table(go["boxes"], forms_of(self._placement), channel, deadline).plan
            device = self._device if go["way"] == "nccl" else torch.device("cpu")
            if self._group is None:
                self._group = Group(self._address, self._rank, channel, device, deadline)
            self._group.listen([f"{sequence}/broken"])
            with self._group.aside():
                held.send(plan, self._rank, self._address.senders, self._group, deadline)
        channel.write(f"{sequence}/sent/{self._rank}", "", deadline)

    def _forms(self, checksum: str, channel: ControlChannel, deadline: Deadline) -> dict[str, Form]:
        if self._placement is None or self._placement.checksum != checksum:
            text = channel.read(f"places/{checksum}", "the placement of tensors did not come", deadline)
            self._placement = Placement.from_text(text, checksum, self._address.mode)
        return forms_of(self._placement)

    def _box_table(
        self, checksum: str, forms: Mapping[str, Form], channel: ControlChannel, deadline: Deadline
    ) -> BoxTable:
        return self._tables.read(checksum, forms, channel, "the table of boxes did not come", deadline)

    def _end(self, why: str, *, broken: bool) -> None:
        group, self._group, self._ended = self._group, None, self._ended or why
        if group is not None:
            group.close(broken=broken)
