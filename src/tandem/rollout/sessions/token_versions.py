"""Which version sampled which token: a gateway's open turns, found by the ids that stand before what they sampled.

consumes: turns as they are made and forgotten     waits for: nothing
produces: proofs about sequences that an environment sampled here and posted elsewhere, without a version

A turn proves a token of a sequence if the sequence holds the same ids up to it, the turn's prompt included, and the
same logprob at every trained token of the turn up to it. So a sequence that was cut, padded, masked or partly edited is
proven as far as it is what was sampled. Where several turns fit equally well and are of different versions, nothing is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tandem.rollout.sessions.tree import Sizes, TurnNode, starts
from tandem.types import NO_VERSION, UNKNOWN_VERSION

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_ID_BYTES = 4


@dataclass(slots=True)
class Proven:
    """What the record knows of one sequence, token by token."""

    versions: list[int]
    """UNKNOWN_VERSION where nothing proves one, NO_VERSION where the loss does not count."""
    logprobs: list[float] | None
    """Of a sequence that came without; None if some trained token was not sampled here."""
    samplings: set[tuple[float, float, int]] = field(default_factory=set[tuple[float, float, int]])
    """Temperature, top_p and top_k of the turns that fit."""


class SessionRecord:
    def __init__(self) -> None:
        self._turns: dict[bytes, list[TurnNode]] = {}
        """By the digest of their prompt, oldest first."""
        self._sizes = Sizes()
        """Of prompts, in bytes."""

    def add(self, turn: TurnNode) -> None:
        prompt = array("i", turn.opening())
        size = len(prompt) * _ID_BYTES
        ((_, digest),) = starts("", "ids", prompt.tobytes(), [size])
        turn.found_by = (size, digest)
        self._turns.setdefault(digest, []).append(turn)
        self._sizes.add(size)

    def remove(self, turn: TurnNode) -> None:
        size, digest = turn.found_by
        left = [each for each in self._turns[digest] if each is not turn]
        if left:
            self._turns[digest] = left
        else:
            del self._turns[digest]
        self._sizes.remove(size)

    def prove(self, ids: Sequence[int], trained: Sequence[bool], logprobs: Sequence[float] | None) -> Proven:
        """`logprobs`: None where the sequence came without; ids alone have to tell then."""
        ids_T, trained_T = np.asarray(ids, np.int32), np.asarray(trained, bool)
        given_T = None if logprobs is None else np.asarray(logprobs, np.float32)
        versions_T = np.where(trained_T, UNKNOWN_VERSION, NO_VERSION)
        found_T, sampled_T = np.zeros(len(ids_T)), np.zeros(len(ids_T), bool)
        proven = Proven([], None)
        for start, turns in self._begun(ids_T):
            for turn, count in _longest(
                turns, ids_T[start:], trained_T[start:], None if given_T is None else given_T[start:]
            ):
                here = slice(start, start + count)
                theirs = np.repeat([span.version for span in turn.spans], [span.count for span in turn.spans])[:count]
                agree = ~sampled_T[here] | (versions_T[here] == theirs)
                versions_T[here] = np.where(trained_T[here], np.where(agree, theirs, UNKNOWN_VERSION), NO_VERSION)
                found_T[here], sampled_T[here] = turn.logprobs[:count], True
                proven.samplings.add(turn.sampling)
        proven.versions = versions_T.tolist()
        if given_T is None and sampled_T[trained_T].all():
            proven.logprobs = np.where(trained_T, found_T, 0.0).tolist()
        return proven

    def _begun(self, ids_T: Array) -> Iterator[tuple[int, list[TurnNode]]]:
        """Where in a sequence a turn's prompt ends, and the turns that have it."""
        for size, digest in starts("", "ids", ids_T.tobytes(), self._sizes.in_order):
            if size < ids_T.nbytes and (turns := self._turns.get(digest)):
                yield size // _ID_BYTES, turns


def _longest(
    turns: list[TurnNode], ids_T: Array, trained_T: Array, given_T: Array | None
) -> list[tuple[TurnNode, int]]:
    """The turns that fit furthest, and how many of their tokens do."""
    fits: list[tuple[TurnNode, int]] = []
    for turn in turns:
        count = min(len(turn.ids), len(ids_T))
        same = np.asarray(turn.ids, np.int32)[:count] == ids_T[:count]
        if given_T is not None:
            recorded = np.minimum(np.asarray(turn.logprobs, np.float32)[:count], 0)
            same &= ~trained_T[:count] | (recorded == given_T[:count])
        count = count if same.all() else int(same.argmin())
        if trained_T[:count].any():
            fits.append((turn, count))
    most = max((count for _, count in fits), default=0)
    return [(turn, count) for turn, count in fits if count == most]
