"""Find which version sampled each token of a posted sequence, by looking up a gateway's recorded turns.

consumes: turns as they are made and forgotten     waits for: nothing
produces: versions (and logprobs) for sequences that were sampled here and posted elsewhere without them

A turn proves a token of a sequence if the sequence has the same ids up to that token, the turn's prompt included, and
the same logprob at each trained token of the turn. So a sequence that was cut, padded, masked or partly edited is
proven as far as it matches. Where several turns match equally well but have different versions, nothing is proven.
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
    """What the record proves about one sequence, token by token."""

    versions: list[int]
    """UNKNOWN_VERSION where no turn proves one, NO_VERSION where the token is not trained."""
    logprobs: list[float] | None
    """For a sequence posted without logprobs; None if a trained token was not sampled here."""
    samplings: set[tuple[float, float, int]] = field(default_factory=set[tuple[float, float, int]])
    """Temperature, top_p and top_k of the matching turns."""


class SessionRecord:
    def __init__(self) -> None:
        self.turns: dict[bytes, list[TurnNode]] = {}
        """Turns by the digest of their prompt, oldest first."""
        self.sizes = Sizes()
        """Sizes of prompts in bytes."""

    def add(self, turn: TurnNode) -> None:
        prompt = array("i", turn.opening())
        size = len(prompt) * _ID_BYTES
        ((_, digest),) = starts("", "ids", prompt.tobytes(), [size])
        turn.found_by = (size, digest)
        self.turns.setdefault(digest, []).append(turn)
        self.sizes.add(size)

    def remove(self, turn: TurnNode) -> None:
        size, digest = turn.found_by
        left = [each for each in self.turns[digest] if each is not turn]
        if left:
            self.turns[digest] = left
        else:
            del self.turns[digest]
        self.sizes.remove(size)

    def prove(self, ids: Sequence[int], trained: Sequence[bool], logprobs: Sequence[float] | None) -> Proven:
        """Look up the versions of a sequence. `logprobs`: None if it came without; then ids alone decide."""
        ids_T, trained_T = np.asarray(ids, np.int32), np.asarray(trained, bool)
        given_T = None if logprobs is None else np.asarray(logprobs, np.float32)
        versions_T = np.where(trained_T, UNKNOWN_VERSION, NO_VERSION)
        found_T, sampled_T = np.zeros(len(ids_T)), np.zeros(len(ids_T), bool)
        proven = Proven([], None)
        for start, turns in self._prompt_ends(ids_T):
            for turn, count in _longest(
                turns, ids_T[start:], trained_T[start:], None if given_T is None else given_T[start:]
            ):
                here = slice(start, start + count)
                turn_versions = np.repeat([span.version for span in turn.spans], [span.count for span in turn.spans])[
                    :count
                ]
                agree = ~sampled_T[here] | (versions_T[here] == turn_versions)
                versions_T[here] = np.where(
                    trained_T[here], np.where(agree, turn_versions, UNKNOWN_VERSION), NO_VERSION
                )
                found_T[here], sampled_T[here] = turn.logprobs[:count], True
                proven.samplings.add(turn.sampling)
        proven.versions = versions_T.tolist()
        if given_T is None and sampled_T[trained_T].all():
            proven.logprobs = np.where(trained_T, found_T, 0.0).tolist()
        return proven

    def _prompt_ends(self, ids_T: Array) -> Iterator[tuple[int, list[TurnNode]]]:
        """Yield each position where a recorded prompt ends, and the turns with that prompt."""
        for size, digest in starts("", "ids", ids_T.tobytes(), self.sizes.in_order):
            if size < ids_T.nbytes and (turns := self.turns.get(digest)):
                yield size // _ID_BYTES, turns


def _longest(
    turns: list[TurnNode], ids_T: Array, trained_T: Array, given_T: Array | None
) -> list[tuple[TurnNode, int]]:
    """Return the turns with the most matching tokens, and that number."""
    matches: list[tuple[TurnNode, int]] = []
    for turn in turns:
        count = min(len(turn.ids), len(ids_T))
        same = np.asarray(turn.ids, np.int32)[:count] == ids_T[:count]
        if given_T is not None:
            recorded = np.minimum(np.asarray(turn.logprobs, np.float32)[:count], 0)
            same &= ~trained_T[:count] | (recorded == given_T[:count])
        count = count if same.all() else int(same.argmin())
        if trained_T[:count].any():
            matches.append((turn, count))
    most = max((count for _, count in matches), default=0)
    return [(turn, count) for turn, count in matches if count == most]
