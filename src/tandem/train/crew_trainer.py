"""The trainer of a crew: every rank has one, and rank 0's is what the loop calls.

A call on rank 0 is an order: all ranks do it, and rank 0 decides on the answers of all. A step:

    rank 0                                     every rank
    backward: sends each rank its micro-batches -> forward and backward in rounds, sums over ranks
                                               <- reports of its micro-batches, squares of its rows' gradients
    decides: set aside, or by what to scale
    update: scale                              -> the optimizer on its own rows
                                               <- what became of the update, as sums
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.errors import CheckpointError, RanksDiverged, SyncError
from tandem.ops import digest
from tandem.protocols import Policy
from tandem.train import balance, micro_wire
from tandem.train.crew import Crew
from tandem.train.memory_accounting import size_bytes
from tandem.train.tree_trainer import Report, TreeTrainer, computed_tokens
from tandem.types import Batch, Metrics, Part, Totals, WeightKind, Weights


class PolicyOnRanks(Policy, Protocol):
    """A policy of which every rank holds some rows."""

    def trained_parts(self) -> list[Part]: ...  # of this rank; what all hold is rank 0's
    def full_shapes(self) -> Mapping[str, tuple[int, ...]]: ...  # of what is trained here, by name
    def replicas(self) -> Iterator[tuple[str, Tensor]]: ...  # what every rank holds
    def parts(self) -> Iterator[Part]: ...  # of the module, on this rank; what all hold is rank 0's
    def settle(self) -> None: ...  # rows were written: forget what was gathered of them


class CrewTrainer(TreeTrainer):
    """Built on all ranks alike. The methods of a Trainer are called on rank 0; the others follow."""

    def __init__(self, crew: Crew, policy: PolicyOnRanks, *args: Any, held_by_all: bool, **options: Any) -> None:
        """`held_by_all`: every rank has all that is trained."""
        super().__init__(policy, *args, **options)
        self._crew, self._ours, self._held_by_all = crew, policy, held_by_all
        self._to_send: list[Tensor] = []
        self._squares: list[Tensor] = []
        for name, handler in {
            "backward": self._do_backward, "update": self._do_update, "fingerprint": self._do_fingerprint,
            "score": self._do_score, "base": self._do_base, "state": self._do_state, "load": self._do_load,
        }.items():  # fmt: skip
            crew.handle(name, handler)

    # --- a step

    def _whole_step(self, batch: Batch, lr: float) -> Metrics | None:
        crew = self._crew
        rounds = balance.dealt(batch.micro, crew.ranks)
        present = [[micro is not None for micro in each] for each in rounds]
        self._to_send = [micro_wire.pack([each[rank] for each in rounds]) for rank in range(crew.ranks)]
        totals = [batch.totals.tokens, batch.totals.sequences]
        sizes = [data.numel() for data in self._to_send]
        answers = crew.order(
            "backward", sizes=sizes, present=present, totals=totals, computed=computed_tokens(batch),
            version=self.version,
        )  # fmt: skip
        reports = [
            answers[rank][index]
            for index, there in enumerate(present)
            for rank, is_there in enumerate(there)
            if is_there
        ]
        metrics, scale = self._decided(batch, reports, self._squares)
        memory = self._memory.metrics(size_bytes(self._gradients.values()), len(rounds))
        moved = crew.order("update", lr=lr, scale=scale, version=self.version + (scale >= 0))
        if scale < 0:
            return None
        sums = [
            math.fsum(each) for each in zip(*(moved[:1] if self._held_by_all else filter(None, moved)), strict=True)
        ]
        costs = [balance.cost(*micro.ids_BT.shape) for micro in batch.micro]
        spread = {"parallel/imbalance": balance.imbalance(costs, crew.ranks)}
        return {**metrics, **memory, **self._moved(sums), **spread}

    def _do_backward(
        self,
        sizes: Sequence[int],
        present: Sequence[Sequence[bool]],
        totals: Sequence[int],
        computed: int,
        version: int,
    ) -> list[Report]:
        crew = self._crew
        self._check_version(version)
        if crew.rank == 0:
            for rank in range(1, crew.ranks):
                dist.send(self._to_send[rank], rank, group=crew.group)
            data = self._to_send[0]
            self._to_send = []
        else:
            data = torch.empty(sizes[crew.rank], dtype=torch.uint8)
            dist.recv(data, 0, group=crew.group)
        reports = self.backward(micro_wire.unpack(data, crew.device), present, Totals(*totals), computed)
        squares = [each.cpu() for each in self.squares()]
        if self._held_by_all:
            self._squares = squares
        else:
            mine = torch.cat(squares) if squares else torch.empty(0, dtype=torch.float64)
            self._squares = crew.gather_tensor(mine)
        return reports

    def _do_update(self, lr: float, scale: float, version: int) -> list[float]:
        self._squares = []
        sums = self.conclude(lr, scale)
        if self._crew.rank:
            self.version = version
        return sums

    def _check_version(self, version: int) -> None:
        if version != self.version:
            raise RanksDiverged(f"rank {self._crew.rank} has version {self.version}, and rank 0 has {version}")

    # --- what goes to an engine

    def export(self, kind: WeightKind) -> Weights:
        """What all ranks hold is compared before every version that leaves the trainer."""
        self.fingerprints()
        return super().export(kind)

    def fingerprints(self) -> dict[str, str]:
        """The digests of whole tensors, of the rows that each rank holds. RanksDiverged if ranks that must hold the
        same do not."""
        answers = self._crew.order("fingerprint", version=self.version)
        combine_replicas([answer["replicas"] for answer in answers])
        rows = ((name, int(number)) for answer in answers for name, number in answer["parts"].items())
        return {name: digest.text(number) for name, number in digest.combine(rows).items()}

    def _do_fingerprint(self, version: int) -> dict[str, Any]:
        self._check_version(version)
        parts = [(part.name, part.tensor, part.row_start, part.col_start) for part in self._ours.parts()]
        replicas = [(name, tensor, 0, 0) for name, tensor in self._ours.replicas()]
        numbers = digest.pieces([*parts, *replicas])
        return {
            "parts": dict(zip([part[0] for part in parts], map(str, numbers), strict=False)),
            "replicas": dict(zip([each[0] for each in replicas], map(str, numbers[len(parts) :]), strict=True)),
        }

    def score(self, ids: Sequence[int], first: int) -> list[float]:
        return self._crew.order("score", ids=list(ids), first=first)[0]

    def _do_score(self, ids: list[int], first: int) -> list[float]:
        return super().score(ids, first)

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """On this host, one tensor after the other."""
        self._crew.order("base")
        yield from self._base.items()
        self._base = {}

    def _do_base(self) -> None:
        found = ((name, tensor.detach().cpu()) for name, tensor in self._ours.base())
        self._base: dict[str, Tensor] = dict(found) if self._crew.rank == 0 else dict(_none(found))

    def live_in(self, storage: Mapping[str, Tensor]) -> None:
        raise SyncError("sync.bridge = 'shared': does not go with parallel.ranks > 1; choose 'broadcast'")

    # --- checkpoints

    def local_parts(self) -> dict[str, list[Part]]:
        """What this rank holds of `weights` and of `optimizer`. What all ranks hold is rank 0's."""
        trained = self._ours.trained_parts()
        by_name = {part.name: part for part in trained}
        state: list[Part] = []
        for key, tensor in self._optimizer.state().items():
            part = by_name.get(key.rpartition("|")[0])
            if part is None:
                continue  # whole, and rank 0's
            if _is_by_rows(tensor, part):
                full = (part.full_shape[0], *tensor.shape[1:])
                state.append(Part(key, tensor, part.row_start, 0, full))
            elif self._crew.rank == 0:
                state.append(Part(key, tensor, 0, 0, tuple(tensor.shape)))
        return {"weights": trained, "optimizer": state}

    def _state(self) -> dict[str, Mapping[str, Tensor]]:
        self._crew.order("state")
        found, self._gathered_state = self._gathered_state, {}
        return found

    def _do_state(self) -> None:
        found = {file: self._crew.gather_parts(parts) for file, parts in self.local_parts().items()}
        self._gathered_state: dict[str, Mapping[str, Tensor]] = found

    def load(self, path: Path) -> None:
        self._crew.order("load", path=str(Path(path).absolute()))

    def _do_load(self, path: str) -> None:
        from safetensors import safe_open

        clock = json.loads((Path(path) / "trainer.json").read_text())
        with (
            safe_open(Path(path) / "weights.safetensors", "pt") as weights,
            safe_open(Path(path) / "optimizer.safetensors", "pt") as optimizer,
        ):
            files = {"weights": weights, "optimizer": optimizer}
            self.load_parts(path, files, clock)

    @torch.no_grad()
    def load_parts(self, path: str, files: Mapping[str, Any], clock: Mapping[str, Any]) -> None:
        """`files`: opened by safetensors. All of it or nothing, on each rank."""
        shapes = self._ours.full_shapes()
        ours = dict(self._parameters)
        saved = set(files["weights"].keys())
        starts = {part.name: part.row_start for part in self._ours.trained_parts()}
        rows = {name: (starts.get(name, 0), len(tensor)) for name, tensor in ours.items()}
        for name in ours:
            if name not in saved or tuple(files["weights"].get_slice(name).get_shape()) != shapes[name]:
                raise CheckpointError(f"{path}: the saved weights belong to another model: '{name}' differs")

        def of(file: str, name: str, key: str, like: Tensor) -> Tensor:
            place = files[file].get_slice(key)
            if not like.ndim:
                return files[file].get_tensor(key)
            start, count = rows[name]
            return place[start : start + count] if len(like) == count else place[:]

        state = {
            key: of("optimizer", key.rpartition("|")[0], key, tensor) for key, tensor in self._optimizer.state().items()
        }
        self._optimizer.load(state)
        for name, tensor in ours.items():
            tensor.copy_(of("weights", name, name, tensor))
        self._ours.settle()
        self._take_clock(clock)


def combine_replicas(answers: Sequence[Mapping[str, str]]) -> None:
    """RanksDiverged, with the tensor and the ranks, where ranks hold different values of what all hold."""
    names = {name for answer in answers for name in answer}
    for name in sorted(names):
        values = [answer.get(name, "") for answer in answers]
        if len(set(values)) > 1:
            usual = max(set(values), key=lambda value: (values.count(value), value == values[0]))
            odd = [rank for rank, value in enumerate(values) if value != usual]
            raise RanksDiverged(
                f"'{name}' differs on rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} from the other ranks: all "
                "must hold the same; the run ends before an engine is given either"
            )


def _is_by_rows(tensor: Tensor, part: Part) -> bool:
    return tensor.ndim > 0 and len(tensor) == len(part.tensor)


def _none(items: Iterator[Any]) -> Iterator[Any]:
    """Go through all, and keep none."""
    for _ in items:
        pass
    return iter(())
