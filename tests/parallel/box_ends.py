"""A rank of a trainer, or a worker of a tensor-parallel engine, in a process of its own: a line of JSON in, one out.

The model, its rows and its shards follow from numbers, so no process sends them to another.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.bridge.collective.process_group import Group, Message
from tandem.bridge.collective.rank_senders import RankSender
from tandem.bridge.common import places
from tandem.ops import digest
from tandem.ops.parts import Box, box_of_rank, rows_and_cols
from tandem.types import Part, Weights
from tandem.vllm_worker.weight_sources import open_source

WIDTH, LAYERS = 96, 3
SERVED = torch.bfloat16
"""The trainer has float32, and engines serve this."""


def model(version: int) -> dict[str, Tensor]:
    """A small transformer whose vocabulary no number of ranks divides; its rotary table stays as it is."""
    drawn = torch.Generator().manual_seed(version)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn)

    tensors = {"embed": matrix(259, WIDTH)}
    for layer in range(LAYERS):
        tensors |= {f"{name} {layer}": matrix(WIDTH, WIDTH) for name in ("q", "k", "v", "o down")}
        tensors |= {f"{name} {layer}": matrix(4 * WIDTH, WIDTH) for name in ("gate", "up")}
        tensors |= {f"down {layer}": matrix(WIDTH, 4 * WIDTH), f"norm {layer}": matrix(WIDTH)}
    return tensors | {"rotary": torch.arange(8, dtype=torch.float32)}


def layout() -> dict[str, Any]:
    return {
        name: ["float32" if name == "rotary" else str(SERVED).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in model(0).items()
    }


def as_served(version: int) -> dict[str, Tensor]:
    return {name: tensor if name == "rotary" else tensor.to(SERVED) for name, tensor in model(version).items()}


def boxes_of_worker(worker: int, num_workers: int) -> list[list[Any]]:
    """As vLLM cuts: by rows, `down` by columns, vectors not at all; one head of keys and values for two workers."""
    found: list[list[Any]] = []
    for name, tensor in model(0).items():
        rows, cols = rows_and_cols(tensor.shape)
        if tensor.ndim == 1:
            found.append([name, 0, rows, 0, cols])
        elif "down" in name:
            found.append([name, 0, rows, worker * cols // num_workers, (worker + 1) * cols // num_workers])
        else:
            found.append([name, worker * rows // num_workers, (worker + 1) * rows // num_workers, 0, cols])
    return found


def rows_of_rank(version: int, rank: int, num_shards: int) -> Iterator[Part]:
    """As FSDP2 cuts. The rotary table is a buffer, and rank 0 yields it."""
    for name, tensor in model(version).items():
        if name == "rotary":
            if rank == 0:
                yield Part(name, tensor, 0, 0, tuple(tensor.shape))
            continue
        box = box_of_rank(tensor.shape, rank % num_shards, num_shards)
        if box.num_elements:
            yield Part(name, tensor[box.top : box.bottom], box.top, 0, tuple(tensor.shape))


# --- faults of a rank


def _in_transfer_only(wrong: Callable[[Part], Part | None]) -> Callable[[int, Part], Iterator[Part]]:
    """The digests are right, and what is sent later is not."""

    def spoil(passes: int, part: Part) -> Iterator[Part]:
        found = wrong(part) if passes > 1 else part
        if found is not None:
            yield found

    return spoil


def _always(*wrong: Callable[[Part], Part | None]) -> Callable[[int, Part], Iterator[Part]]:
    def spoil(_: int, part: Part) -> Iterator[Part]:
        yield from (found for each in wrong if (found := each(part)) is not None)

    return spoil


def _of(name: str, change: Callable[[Part], Part | None]) -> Callable[[Part], Part | None]:
    return lambda part: change(part) if part.name == name else part


FAULTS: dict[str, Callable[[int, Part], Iterator[Part]]] = {
    "rows of an older version": _in_transfer_only(lambda part: part._replace(tensor=part.tensor - 0.5)),
    "swapped rows": _in_transfer_only(_of("q 1", lambda part: part._replace(tensor=part.tensor.flip(0)))),
    "a part gone": _in_transfer_only(_of("q 1", lambda part: None)),
    "a part left out": _always(_of("q 1", lambda part: None)),
    "a part twice": _always(lambda part: part, lambda part: part if part.name == "q 1" else None),
    "another's rows": _always(_of("q 1", lambda part: part._replace(row_start=0))),
    "off by one": _always(_of("q 1", lambda part: part._replace(row_start=part.row_start - 1))),
    "columns for rows": _always(
        _of("q 1", lambda part: part._replace(tensor=part.tensor.t(), row_start=0, col_start=part.row_start))
    ),
    "another shape": _always(_of("q 1", lambda part: part._replace(full_shape=(WIDTH, WIDTH + 1)))),
    "unknown": _always(_of("q 1", lambda part: part._replace(name="q 100"))),
    "no number": _always(_of("q 1", lambda part: part._replace(tensor=part.tensor / 0))),
}


def weights_of(version: int, rank: int, num_ranks: int, fault: str = "", hosts: int = 1) -> Weights:
    """`hosts`: each has all rows. `fault`: one of FAULTS; or `stale`, rows of the version before under this version's
    number; or `replicas`, and `replicas differ`: every rank holds norms whole."""
    passes = 0

    def rows() -> Iterator[Part]:
        nonlocal passes
        passes += 1
        for part in rows_of_rank(version - (fault == "stale"), rank, num_ranks // hosts):
            if fault.startswith("replicas") and part.name.startswith("norm"):
                whole = model(version)[part.name] + (0.5 if "differ" in fault and part.name == "norm 1" else 0)
                yield Part(part.name, whole, 0, 0, part.full_shape)
            elif fault in FAULTS:
                first_pass = 1 + (rank == 0)  # rank 0 looks at the names first
                yield from FAULTS[fault](passes - first_pass + 1, part)
            else:
                yield part

    if num_ranks == 1:
        return Weights(version, "full", lambda: ((part.name, part.tensor) for part in rows()))
    return Weights(version, "full", lambda: iter(()), rows=rows)


class Counted:
    """Bytes that this process has sent and received as messages to one other."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        whole = Group.exchange

        def exchange(group: Group, sent: Sequence[Message], received: Sequence[Message], deadline: Any) -> Any:
            self.sent += sum(each.buffer.nbytes for each in sent)
            self.received += sum(each.buffer.nbytes for each in received)
            return whole(group, sent, received, deadline)

        Group.exchange = exchange  # pyright: ignore[reportAttributeAccessIssue]

    def take(self) -> dict[str, int]:
        found = {"sent_bytes": self.sent, "received_bytes": self.received}
        self.sent = self.received = 0
        return found


class Ends:
    def __init__(self) -> None:
        self._counted = Counted()
        self._rank, self._sender = 0, RankSender(0, "cpu")

    def open(self, link: dict[str, Any]) -> dict[str, Any]:
        self._source = open_source(link)
        return {}

    def receive(self, wanted: list[Any]) -> dict[str, Any]:
        version, worker, strike = wanted
        if strike:
            strike_in_the_middle(strike)
        weights = self._source.receive(version, worker)
        pieces = []
        for part in weights.parts():
            box = places.place_of(part).box
            raw = part.tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            number = digest.piece(places.matrix(part.tensor), part.name, part.row_start, part.col_start)
            pieces.append([part.name, *box, number, hashlib.sha256(raw).hexdigest()])
        return {"pieces": pieces, **self._counted.take()}

    def send(self, wanted: list[Any]) -> dict[str, Any]:
        link, version, rank, num_ranks, fault, strike, hosts = wanted
        if self._rank != rank:
            self._rank, self._sender = rank, RankSender(rank, "cpu")
        if strike:
            strike_in_the_middle(strike)
        older = fault == "an older version"
        self._sender.send(link, weights_of(version - older, rank, num_ranks, fault, hosts))
        return self._counted.take()


def strike_in_the_middle(strike: int) -> None:
    """This process gets that signal when it exchanges its second bucket."""
    whole, calls = Group.exchange, 0

    def exchange(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            time.sleep(0.2)
            os.kill(os.getpid(), strike)
            time.sleep(0.5)  # until it is delivered
        return whole(*arguments)

    Group.exchange = exchange  # pyright: ignore[reportAttributeAccessIssue]


def piece_hash(tensor: Tensor, box: Box) -> str:
    """Of a rectangle of the whole tensor, without any code of the bridge."""
    values = tensor if tensor.ndim < 2 else tensor[:, box.left : box.right]
    raw = values[box.top : box.bottom].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    ends = Ends()
    verbs: dict[str, Callable[[Any], dict[str, Any]]] = {"open": ends.open, "receive": ends.receive, "send": ends.send}
    for line in sys.stdin:
        verb, argument = json.loads(line)
        started = time.monotonic()
        try:
            answer = verbs[verb](argument)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test wants to see it
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps({**answer, "seconds": time.monotonic() - started}), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
