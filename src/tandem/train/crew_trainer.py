"""The trainer of a crew: every rank has one, and rank 0's is what the loop calls.

A call on rank 0 is an order: all ranks do it, and rank 0 decides on the answers of all. A step:

    rank 0                                     every rank
    KTO: sends each its mismatched answers      -> gains over the reference; rank 0 takes their mean
    backward: sends each rank its micro-batches -> forward and backward in rounds, sums over ranks
                                               <- reports of its micro-batches, the squared norm of its rows' gradients
    decides: set aside, or by what to scale
    update: scale                              -> the optimizer on its own rows
                                               <- what became of the update, as sums
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.errors import CheckpointError, RanksDiverged
from tandem.io import atomic_write, row_file
from tandem.ops import digest
from tandem.ops.parts import rows_and_cols
from tandem.ops.row_packing import cost
from tandem.protocols import Policy
from tandem.train import balance, micro_wire
from tandem.train.batch_packing import plain_row
from tandem.train.crew import Crew
from tandem.train.gradient_tree import largest_of, norm_of, row_squares, sum_in_steps
from tandem.train.kl_estimate import gain, give_kl
from tandem.train.memory_accounting import size_bytes
from tandem.train.row_save import FileParts, RowSave
from tandem.train.tree_trainer import TreeTrainer, computed_tokens
from tandem.types import Batch, Metrics, MicroBatch, Part, Totals, WeightKind, Weights


class PolicyOnRanks(Policy, Protocol):
    """A policy of which every rank holds some rows."""

    def trained_parts(self) -> list[Part]: ...  # of this rank; what all hold is rank 0's
    def full_shapes(self) -> Mapping[str, tuple[int, ...]]: ...  # of what is trained here, by name
    def uncounted(self) -> Collection[str]: ...  # what another rank has, too, and counts in sums over ranks
    def replicas(self) -> Iterator[tuple[str, Tensor]]: ...  # what every rank holds
    def parts(self) -> Iterator[Part]: ...  # of the module, on this rank; what all hold is rank 0's
    def row_deployer(self) -> Any: ...  # model/export_rows.py
    def settle(self) -> None: ...  # rows were written: forget what was gathered of them


class CrewTrainer(TreeTrainer):
    """Built on all ranks alike. The methods of a Trainer are called on rank 0; the others follow."""

    def __init__(self, crew: Crew, policy: PolicyOnRanks, *args: Any, held_by_all: bool, **options: Any) -> None:
        """`held_by_all`: every rank has all that is trained."""
        super().__init__(policy, *args, **options)
        self._crew, self._ours, self._held_by_all = crew, policy, held_by_all
        self._to_send: list[Tensor] = []
        self._row_save, self._saves = RowSave(crew), 0
        self._copied_weights: Mapping[str, Tensor] = {}
        self._deployer: Any = None
        for name, handler in {
            "gains": self._do_gains, "backward": self._do_backward, "update": self._do_update,
            "fingerprint": self._do_fingerprint, "state": self._do_state, "score": self._do_score,
            "base": self._do_base, "snapshot": self._do_snapshot, "load": self._do_load,
        }.items():  # fmt: skip
            crew.handle(name, handler)

    # --- a step

    def _whole_step(self, batch: Batch, lr: float) -> Metrics | None:
        crew = self._crew
        if self._algorithm.needs_kl:
            mismatched = balance.leaves(batch.mismatched, crew.ranks, by_step=False)
            gains = crew.order("gains", sizes=self._dealt(balance.dealt(mismatched, crew.ranks)))
            give_kl([batch], [each for answer in gains for each in answer])
        leaves = balance.leaves(batch.micro, self._shares, by_step=self._by_step)
        rounds = balance.dealt(leaves, crew.ranks)
        present = [[leaf is not None for leaf in each] for each in rounds]
        totals = [batch.totals.tokens, batch.totals.sequences]
        sizes = self._dealt(rounds)
        answers = crew.order(
            "backward", sizes=sizes, widths=balance.widths(rounds), present=present, totals=totals,
            computed=computed_tokens(batch), version=self.version,
        )  # fmt: skip
        of_ranks = [iter(answer["reports"]) for answer in answers]
        reports = [next(of_ranks[number % crew.ranks]) for number, leaf in enumerate(leaves) for _ in leaf]
        steps = sum(answer["steps"] for answer in self._counted(answers))
        metrics, scale = self._decided(batch, reports, norm_of(steps, answers[0]["largest"]))
        memory = self._memory.metrics(size_bytes(self._gradients.values()), len(rounds))
        moved = crew.order("update", lr=lr, scale=scale, version=self.version + (scale >= 0))
        if scale < 0:
            return None
        sums = [math.fsum(each) for each in zip(*filter(None, self._counted(moved)), strict=True)]
        costs = [sum(cost(*micro.ids_BT.shape) for micro in leaf) for leaf in leaves]
        spread = {"parallel/imbalance": balance.imbalance(costs, crew.ranks)}
        return {**metrics, **memory, **self._moved(sums), **spread}

    def _do_backward(
        self,
        sizes: Sequence[int],
        widths: Sequence[int],
        present: Sequence[Sequence[bool]],
        totals: Sequence[int],
        computed: int,
        version: int,
    ) -> dict[str, Any]:
        crew = self._crew
        self._check_version(version)
        reports = self.backward(self._mine(sizes), widths, present, Totals(*totals), computed)
        counted = {name: each for name, each in self._gradients.items() if name not in self._ours.uncounted()}
        squares = row_squares(counted, self._ours.full_shapes())
        of_ranks = crew.gather(largest_of(squares))
        largest = max(of_ranks) if all(map(math.isfinite, of_ranks)) else math.nan
        return {"reports": reports, "largest": largest, "steps": sum_in_steps(squares, largest)}

    def _dealt(self, rounds: Sequence[Sequence[Sequence[MicroBatch] | None]]) -> list[int]:
        """Keep what `_mine` sends to each rank; return the sizes in bytes."""
        self._to_send = [micro_wire.pack(balance.of_rank(rounds, rank)) for rank in range(self._crew.ranks)]
        return [data.numel() for data in self._to_send]

    def _mine(self, sizes: Sequence[int]) -> list[MicroBatch | None]:
        """Return this rank's micro-batches, round by round, as rank 0 sends them."""
        crew = self._crew
        if crew.rank == 0:
            for rank in range(1, crew.ranks):
                dist.send(self._to_send[rank], rank, group=crew.group)
            data, self._to_send = self._to_send[0], []
        else:
            data = torch.empty(sizes[crew.rank], dtype=torch.uint8)
            dist.recv(data, 0, group=crew.group)
        return micro_wire.unpack(data, crew.device)

    def _do_gains(self, sizes: Sequence[int]) -> list[float]:
        """Return the gains of this rank's mismatched answers. Without a micro-batch it takes part in the gathering."""
        nothing = plain_row([0, 0], 1, self._crew.device)
        micros = self._mine(sizes)
        gains = [gain(self._policy, micro or nothing, **self._sampling) for micro in micros]
        return [each for each, micro in zip(gains, micros, strict=True) if micro is not None]

    def _do_update(self, lr: float, scale: float, version: int) -> list[float]:
        sums = self.conclude(lr, scale)
        if self._crew.rank:
            self.version = version
        return sums

    def _counted(self, answers: Sequence[Any]) -> Sequence[Any]:
        """Return the answers of ranks that together hold every row once."""
        return answers[: 1 if self._held_by_all else self._crew.row_shards]

    def _check_version(self, version: int) -> None:
        if version != self.version:
            raise RanksDiverged(f"rank {self._crew.rank} has version {self.version}, and rank 0 has {version}")

    # --- what goes to an engine

    def export(self, kind: WeightKind) -> Weights:
        """What several ranks hold is compared before every version that leaves the trainer."""
        self._compared(rows=self._crew.row_shards < self._crew.ranks)
        return super().export(kind)

    def fingerprints(self) -> dict[str, str]:
        """The digests of whole tensors, of the rows that each rank holds. RanksDiverged if ranks that must hold the
        same do not."""
        answers = self._compared(rows=True)
        of_once = [answers[0]["replicas"], *(each["rows"] for each in answers[: self._crew.row_shards])]
        numbers = ((name, int(number)) for each in of_once for name, number in each.items())
        return {name: digest.text(number) for name, number in digest.combine(numbers).items()}

    def _compared(self, *, rows: bool) -> Sequence[Mapping[str, Any]]:
        """Return each rank's digests, with `rows` also of those that it alone holds on its host."""
        answers = self._crew.order("fingerprint", rows=rows)
        by_rank, row_shards = list(enumerate(answers)), self._crew.row_shards
        compare_replicas({rank: {"version": str(each["version"]), **each["replicas"]} for rank, each in by_rank})
        for shard in range(row_shards):
            compare_replicas({rank: each["rows"] for rank, each in by_rank[shard::row_shards]})
        return answers

    def _do_fingerprint(self, *, rows: bool) -> dict[str, Any]:
        replicas = {name: (name, tensor, 0, 0) for name, tensor in self._ours.replicas()}
        parts = [part for part in self._ours.parts() if part.name not in replicas] if rows else []
        mine = {part.name: (part.name, part.tensor, part.row_start, part.col_start) for part in parts}
        numbers = list(map(str, digest.pieces([*mine.values(), *replicas.values()])))
        return {
            "version": self.version,
            "rows": dict(zip(mine, numbers, strict=False)),
            "replicas": dict(zip(replicas, numbers[len(mine) :], strict=True)),
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
        """Rank 0's part; the other ranks did so when they mapped their workers' memory (train/crew_memory.py)."""
        self._ours.live_in(storage)

    # --- checkpoints

    def save(self, path: Path) -> None:
        with atomic_write.directory(path) as directory:
            self._snapshot(deploy=False)(directory)

    def snapshot(self) -> Callable[[Path], None]:
        return self._snapshot(deploy=True)

    def local_parts(self) -> dict[str, list[Part]]:
        """What this rank writes of `weights` and of `optimizer`. What all ranks hold is rank 0's, and rows that every
        host holds are the first host's."""
        if self._crew.rank >= self._crew.row_shards:
            return {"weights": [], "optimizer": []}
        mine = self._crew.rank == 0
        return {
            file: [part for part in parts if mine or tuple(part.tensor.shape) != part.full_shape]
            for file, parts in self._parts().items()
        }

    def _parts(self) -> dict[str, list[Part]]:
        """All that this rank has of both."""
        shapes = self._ours.full_shapes()
        starts = {part.name: (part.row_start, part.col_start) for part in self._ours.trained_parts()}
        weights = {
            name: Part(name, tensor.detach(), *starts.get(name, (0, 0)), shapes[name])
            for name, tensor in self._parameters
        }
        state: list[Part] = []
        cut = self._optimizer.cut()
        for key, tensor in self._optimizer.state().items():
            part = weights[key.rpartition("|")[0]]
            if key in cut:
                state.append(Part(key, tensor, cut[key][0], 0, cut[key][1]))
            elif tensor.ndim > 0 and len(tensor) == len(part.tensor):
                state.append(_cut_alike(key, tensor, part))
            else:
                state.append(Part(key, tensor, 0, 0, tuple(tensor.shape)))
        return {"weights": list(weights.values()), "optimizer": state}

    def _snapshot(self, *, deploy: bool) -> Callable[[Path], None]:
        """Every rank copies what it holds; what is returned has all of them write."""
        self._compare_unwritten()
        self._saves += 1
        number, clock = self._saves, self._clock()
        self._crew.order("snapshot", number=number, deploy=deploy)
        whole = self._copied_weights if deploy and self._held_by_all else {}

        def write(directory: Path) -> None:
            self._row_save.write(number, directory)
            if deploy:
                self._write_deployed(directory / "deploy", whole)
            (directory / "trainer.json").write_text(json.dumps(clock))

        return write

    def _compare_unwritten(self) -> None:
        """RanksDiverged where a rank holds other weights or optimizer state than the rank that writes them for it."""
        row_shards, ranks = 1 if self._held_by_all else self._crew.row_shards, self._crew.ranks
        if row_shards == ranks:
            return
        self.fingerprints()
        answers = list(enumerate(self._crew.order("state")))
        for shard in range(row_shards):
            compare_replicas(dict(answers[shard::row_shards]))

    def _do_state(self) -> dict[str, str]:
        """Return the digest of each tensor of the optimizer's state that this rank has."""
        pieces = [(key, tensor, 0, 0) for key, tensor in self._optimizer.state().items()]
        return {key: str(number) for (key, *_), number in zip(pieces, digest.pieces(pieces), strict=True)}

    def _do_snapshot(self, number: int, *, deploy: bool) -> None:
        self._row_save.free()
        files: dict[str, FileParts] = {}
        for file, parts in self.local_parts().items():
            copies = self._copies[file].of({part.name: part.tensor for part in parts})
            files[f"{file}.safetensors"] = FileParts([part._replace(tensor=copies[part.name]) for part in parts])
        trained = files["weights.safetensors"].parts
        self._copied_weights = {part.name: part.tensor for part in trained}
        if deploy and not self._held_by_all:
            self._deployer = self._deployer or self._ours.row_deployer()
            for name, parts in self._deployer.files(trained, self._crew.rank).items():
                files[f"deploy/{name}"] = FileParts(parts, {"format": "pt"})
        self._row_save.hold(number, files)

    def _write_deployed(self, directory: Path, whole: Mapping[str, Tensor]) -> None:
        """Of a deployable copy, what rank 0 writes alone. `whole`: adapters, which it has."""
        if not self._held_by_all:
            self._deployer.write_companions(directory)
            return
        self._deploy = self._deploy or self._ours.deployer()
        self._deploy(whole, directory)

    def load(self, path: Path) -> None:
        self._crew.order("load", path=str(Path(path).absolute()))

    @torch.no_grad()
    def _do_load(self, path: str) -> None:
        """All of it or nothing, on each rank: everything is looked at before anything is written."""
        clock = json.loads((Path(path) / "trainer.json").read_text())
        parts = self._parts()
        with ExitStack() as stack:
            files = {file: stack.enter_context(row_file.opened(Path(path) / f"{file}.safetensors")) for file in parts}
            for file, those in parts.items():
                self._check(path, file, files[file], those)
            for file, those in parts.items():
                for part in those:
                    self._crew.tick()
                    files[file].read_part(part)
        # Moments and missing bits are in their places: what is left is how many steps there were.
        self._optimizer.load({part.name: part.tensor for part in parts["optimizer"]})
        self._ours.settle()
        self._take_clock(clock)

    def _check(self, path: str, file: str, saved: row_file.RowFile, parts: Sequence[Part]) -> None:
        what = f"{path}: the saved {file} belongs to another model, optimizer or precision"
        names = {part.name for part in parts}
        if self._crew.rank == 0 and (odd := sorted(names ^ saved.tensors.keys())):
            raise CheckpointError(f"{what}: {len(odd)} entries are on one side only, as '{odd[0]}'")
        for part in parts:
            try:
                saved.check(part)
            except CheckpointError as error:
                raise CheckpointError(f"{what}: {error}") from error


def compare_replicas(answers: Mapping[int, Mapping[str, str]]) -> None:
    """RanksDiverged, with the tensor and the ranks, where these ranks hold different values of what all of them hold.
    `answers`: of each rank."""
    names = {name for answer in answers.values() for name in answer}
    for name in sorted(names):
        values = [answer.get(name, "") for answer in answers.values()]
        if len(set(values)) > 1:
            usual = max(set(values), key=lambda value: (values.count(value), value == values[0]))
            odd, others = (
                [str(rank) for rank, value in zip(answers, values, strict=True) if (value == usual) is same]
                for same in (False, True)
            )
            raise RanksDiverged(
                f"'{name}' differs on {_ranks(odd)} from {_ranks(others)}: all of them must hold the same; the run "
                "ends before an engine is given either, or a checkpoint is written; go on from the last checkpoint"
            )


def _ranks(numbers: Sequence[str]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def _cut_alike(key: str, tensor: Tensor, part: Part) -> Part:
    """Return state that has the parameter's rows, and its columns or blocks of them, as a part of all ranks' state."""
    mine, whole = (rows_and_cols(shape)[1] for shape in (part.tensor.shape, part.full_shape))
    if mine == whole:
        return Part(key, tensor, part.row_start, 0, (part.full_shape[0], *tensor.shape[1:]))
    cols = tensor.shape[1]
    return Part(
        key, tensor, part.row_start, part.col_start * cols // mine, (part.full_shape[0], cols * (whole // mine))
    )


def _none(items: Iterator[Any]) -> Iterator[Any]:
    """Go through all, and keep none."""
    for _ in items:
        pass
    return iter(())
