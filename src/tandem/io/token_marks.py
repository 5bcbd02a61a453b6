"""Which version sampled each token of an answer, and how likely it was then: about a byte a token.

A span is what the policy sampled in one turn. Its text is that of the turn's message, where the message is found in it,
with what stands before and after (special tokens, thoughts). A token is a number of its characters; its logprob is
rounded to 6 % of 1 + |logprob|, its version is one of few runs of equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from tandem.types import Message, Trajectory

_LETTERS = "".join(chr(code) for code in range(35, 127) if code != 92)  # JSON writes each as one byte
_CODES = np.array([ord(each) for each in _LETTERS], np.uint8)
_PER_DOUBLING = 12
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class MarkedToken:
    text: str
    logprob: float
    version: int


class Spelling:
    """The text of each token id. `decode`: the text of ids, special tokens too."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._texts: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return what each token adds to the text. A character of several tokens is the first one's."""
        for each in set(ids).difference(self._texts):
            alone, twice = self._decode([each]), self._decode([each, each])
            self._texts[each] = twice[len(alone) :]  # with the space that the first of a text loses
        found = [*map(self._texts.__getitem__, ids)]
        broken = [at for at, each in enumerate(found) if _BROKEN in each] if _BROKEN in "".join(found) else []
        for _, those in groupby(enumerate(broken), lambda each: each[1] - each[0]):  # which follow each other
            places = [place for _, place in those]
            start, end = places[0], places[-1] + 1
            found[start:end] = [self._decode(ids[start:end]), *[""] * (end - start - 1)]
        return found


def marks(trajectory: Trajectory, turns: Sequence[Message], spelling: Spelling) -> list[dict[str, Any]]:
    """Return what JSON keeps of the sampled tokens, a span after the other. `turns`: the messages of the answer."""
    found: list[dict[str, Any]] = []
    turn = 0
    for start, end in _spans(trajectory.trained):
        texts = spelling.texts(trajectory.ids[start:end])
        text = "".join(texts)
        here = next((at for at in range(turn, len(turns)) if _said(turns[at]) and _said(turns[at]) in text), -1)
        before, after = text, ""
        if here >= 0:
            turn = here + 1
            before, _, after = text.partition(_said(turns[here]))
        found.append(
            {
                "turn": here, "before": before, "after": after,
                "lengths": _written(np.fromiter(map(len, texts), np.int64, len(texts))),
                "logprobs": _written(_rounded(trajectory.logprobs[start:end])),
                "versions": _runs(trajectory.versions[start:end]),
            }
        )  # fmt: skip
    return found


def tokens_of(mark: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> list[MarkedToken]:
    """Return the tokens of a span."""
    at: int = mark["turn"]
    message = _said(turns[at]) if at >= 0 else ""
    text = f"{mark['before']}{message}{mark['after']}"
    lengths, rounded = _read(mark["lengths"]), _read(mark["logprobs"])
    versions = [version for version, count in mark["versions"] for _ in range(count)]
    ends = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    logprobs = (1.0 - 2.0 ** (rounded / _PER_DOUBLING)).tolist()
    return [
        MarkedToken(text[start:end], round(logprob, 3) + 0.0, version)
        for (start, end), logprob, version in zip(pairwise(ends), logprobs, versions, strict=True)
    ]


def _said(message: Mapping[str, Any]) -> str:
    return str(message.get("content") or "") if message.get("role") == "assistant" else ""


def _spans(trained: Sequence[bool]) -> Iterator[tuple[int, int]]:
    flags = np.concatenate([[False], np.asarray(trained, bool), [False]])
    edges = np.flatnonzero(flags[1:] != flags[:-1]).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def _rounded(logprobs: Sequence[float]) -> np.ndarray:
    sizes = np.nan_to_num(np.abs(np.asarray(logprobs, np.float64)), nan=0.0, posinf=1e6)
    return np.rint(_PER_DOUBLING * np.log2(1.0 + sizes)).astype(np.int64)


def _runs(versions: Sequence[int]) -> list[list[int]]:
    all_of_them = np.asarray(versions, np.int64)
    starts = np.flatnonzero(np.concatenate([[True], all_of_them[1:] != all_of_them[:-1]]))
    counts = np.diff(np.concatenate([starts, [len(all_of_them)]]))
    return [list(each) for each in zip(all_of_them[starts].tolist(), counts.tolist(), strict=True)]


def _written(numbers: np.ndarray) -> str:
    """Return a letter for each number below the last letter's, and for a larger one the last letter and the rest."""
    most = len(_LETTERS) - 1
    if numbers.size and int(numbers.max()) >= most:
        numbers = np.array([part for each in numbers.tolist() for part in (*[most] * (each // most), each % most)])
    return _CODES[numbers].tobytes().decode("ascii")


def _read(text: str) -> np.ndarray:
    places = np.searchsorted(_CODES, np.frombuffer(text.encode("ascii"), np.uint8)).astype(np.int64)
    most = len(_LETTERS) - 1
    if not (places == most).any():
        return places
    ends = np.flatnonzero(places != most)
    sums = np.cumsum(places)[ends]
    return np.diff(np.concatenate([[0], sums]))
