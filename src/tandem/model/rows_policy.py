"""A policy whose weights are on several ranks: what each of them scores, trains, sends and writes (rows.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem.errors import SpecError, SyncError
from tandem.model import served_weights
from tandem.model.export_copy import Deployer
from tandem.model.export_rows import MergedExport, RowDeployer
from tandem.model.load_rows import RowsOf
from tandem.model.policy import CausalPolicy, Inside
from tandem.model.rows import Local, Rows
from tandem.ops.lm_head import Head
from tandem.ops.named_tensors import move_in
from tandem.ops.parts import Box, rows_and_cols
from tandem.ops.unseen_bits import with_unseen_bits
from tandem.types import Part, TokenLogprobs, WeightKind, Weights

Adopt = Callable[[str, Tensor], Tensor]


class RowsPolicy(CausalPolicy):
    """A CausalPolicy whose weights are on several ranks. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        *,
        rows: Rows,
        adopt: Adopt | None,
        dtype: torch.dtype,
        rows_of: RowsOf | None = None,
        **options: Any,
    ) -> None:
        """`adopt(name, exact)` returns the 16-bit rows for exact rows of a trained parameter, and may keep the missing
        bits. `dtype`: of all weights except adapters. `rows_of` reads the rows of a parameter that is a stand-in
        (load_rows.py)."""
        if options.get("activations") == "offload":
            raise SpecError("model.activations = 'offload': does not go with parallel.ranks > 1; choose 'recompute'")
        self.rows = rows
        self._reference_rows: Rows | None = None
        self._adopt, self._dtype = adopt, dtype
        self._rows_of = rows_of or _cut
        super().__init__(module, tokenizer, place=self._place, **options)
        for _, tensor in module.named_parameters():
            tensor.grad = None  # left by trials
        self._head_shape = _shape_of(self.head)

    def _place(self, module: Any, adapter: Any) -> Inside:
        values = to_meta(module, lambda _: self._dtype)
        # A copy from before sharding, for exports and for a reference.
        self._plain = copy.deepcopy(adapter if adapter is not None else module)

        def of_rows(name: str, box: Box) -> Tensor:
            exact = self._rows_of(values.pop(name), box).to(self.rows.device)
            if self._dtype == exact.dtype:
                return exact
            return (
                exact.to(self._dtype) if self._adopt is None else self._adopt(name, with_unseen_bits(name, exact, box))
            )

        inside = self.rows.shard(module, of_rows)
        if self._dtype == torch.bfloat16:
            module.config.dtype = self._dtype
            self._plain_module().config.dtype = self._dtype
        return inside

    def _plain_module(self) -> Any:
        return self._plain if self._adapter is None else self._plain.base_model.model

    # --- scoring

    def keep_reference(self) -> None:
        if self._adapter is not None:
            super().keep_reference()
            return
        frozen = copy.deepcopy(self._plain).requires_grad_(False).eval()
        now = dict(self.trainable())
        self._reference_rows = self.rows.another()
        self._reference_rows.shard(frozen, lambda name, _: now[name].detach())
        self._reference = Head(frozen, len(self.tokenizer))

    def follow(self, teacher: Any) -> None:
        raise SpecError("algorithm.kind = 'distill': a teacher does not go with parallel.ranks > 1 yet; use one rank")

    def drop_reference(self) -> None:
        super().drop_reference()
        self._reference_rows = None

    def reference_bytes(self) -> int:
        if self._reference_rows is not None:
            local = (each.tensor for each in self._reference_rows.local)
            return sum(tensor.nbytes for tensor in (*local, *(each for _, each in self._reference_rows.whole)))
        return sum(tensor.nbytes for tensor in self._adapter_then)

    def _inside_of(self, head: Head) -> Inside:
        if head is self._reference and self._reference_rows is not None:
            return self._reference_rows.inside
        return self._inside

    def scored_apart(self, micro: Any, temperature: float, top_p: float) -> TokenLogprobs:
        with torch.no_grad():
            return self._score(self.head, micro, temperature, top_p)

    def head_bytes(self, num_tokens: int, top_p: float) -> tuple[int, int]:
        return self._head_shape.buffer_bytes(num_tokens, top_p)

    def why_not_fused(self, top_p: float) -> str:
        return self._head_shape.why_not_fused(top_p)

    def hides_activations(self) -> bool:
        return True  # gathered weights would be counted as activations

    # --- weights

    def trainable(self) -> Sequence[tuple[str, Tensor]]:
        if self._adapter is not None:
            return self.rows.whole
        here = {**{each.name: each.tensor for each in self.rows.local}, **dict(self.rows.whole)}
        return [(name, here[name]) for name, _ in self.module.named_parameters() if name in here]

    def full_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the full shapes of trained tensors by name, also of those of which this rank has no row."""
        if self._adapter is not None:
            return {name: tuple(tensor.shape) for name, tensor in self.rows.whole}
        return {name: tuple(tensor.shape) for name, tensor in self.module.named_parameters()}

    def settle(self) -> None:
        self.rows.settle()

    def trained_parts(self) -> list[Part]:
        """Return this rank's parts of the trained parameters. Tensors that all ranks hold count as rank 0's."""
        whole = self.rows.whole if self.rows.rank == 0 else []
        found = [Part(name, tensor.detach(), 0, 0, tuple(tensor.shape)) for name, tensor in whole]
        return found if self._adapter is not None else [*map(_part, self.rows.local), *found]

    def uncounted(self) -> set[str]:
        """Return the trained parameters that rank 0 has, too, and counts in sums over ranks."""
        return {name for name, _ in self.rows.whole} if self.rows.rank and not self.rows.held_by_all else set()

    def written_parts(self) -> list[Part]:
        """What this rank writes of them. Rows that every host holds are written by the first."""
        return self.trained_parts() if self.rows.hosts.number == 0 else []

    def weights(self, version: int, kind: WeightKind) -> Weights:
        if kind == "adapter":
            return super().weights(version, kind)
        if self._adapter is not None and kind == "full":
            raise SyncError(
                "sync: with parallel.ranks > 1 adapters cannot be merged while training; choose sync.bridge = "
                "'adapter' or 'adapter_broadcast'"
            )
        return Weights(version, kind, _no_whole_tensors, rows=self.held if kind == "live" else self.parts)

    def parts(self) -> Iterator[Part]:
        """Yield this rank's parts of the module. Buffers and adapters are on every rank and count as rank 0's."""
        yield from map(_part, self.rows.local)
        if self.rows.rank == 0:
            yield from self._whole_parts()

    def held(self) -> Iterator[Part]:
        """Yield everything that is here."""
        yield from map(_part, self.rows.local)
        yield from self._whole_parts()

    def _whole_parts(self) -> Iterator[Part]:
        for name, tensor in self.replicas():
            yield Part(name, tensor, 0, 0, tuple(tensor.shape))

    def replicas(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that every rank holds, which must be equal on all."""
        yield from ((name, tensor.detach()) for name, tensor in self.rows.whole)
        yield from self.module.named_buffers()

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors of the base, one at a time, on every rank. All ranks must call this."""
        for name, tensor in served_weights.base_parameters(self.module):
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        for name, tensor in self.module.named_buffers():
            yield name.replace(".base_layer.", "."), tensor

    def live_in(self, storage: Mapping[str, Tensor]) -> None:
        """Move what this rank holds into the memory of the engine's worker on its device."""
        self.rows.live_in(storage)
        move_in(self.module.named_buffers(), storage)

    def base_in(self, storage: Mapping[str, Tensor]) -> int:
        raise SyncError("sync: a shared base does not go with parallel.ranks > 1")

    def export(self, path: Path) -> None:
        raise NotImplementedError("train/crew_policy.py writes it, on all ranks")

    def merged_export(self) -> MergedExport:
        """Return the export of the whole model with merged adapters, which rank 0 writes. All ranks must call this."""
        return MergedExport(self._plain, self.tokenizer, dict(self.rows.whole), self.rows.gathered)

    def row_deployer(self) -> RowDeployer:
        """Return the export of the whole model in Hugging Face format, of which each rank writes its rows."""
        return RowDeployer(self._plain_module(), self.tokenizer)

    def deployer(self) -> Callable[[Mapping[str, Tensor], Path], None]:
        plain = copy.deepcopy(self._plain)
        if self._adapter is None:
            return Deployer(plain, None, self.tokenizer).write
        return Deployer(plain.base_model.model, plain, self.tokenizer).write


def to_meta(module: Any, dtype: Callable[[Tensor], torch.dtype]) -> dict[str, Tensor]:
    """Take the values of all parameters except adapters out of a module, and return them by name. Tied parameters stay
    tied."""
    values = {name: each.data for name, each in module.named_parameters() if ".lora_" not in name}
    kept = {id(each) for name, each in module.named_parameters() if ".lora_" in name}
    metas: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is None or id(parameter) in kept:
                continue
            if id(parameter) not in metas:
                shape_only = torch.empty(parameter.shape, dtype=dtype(parameter), device="meta")
                metas[id(parameter)] = nn.Parameter(shape_only, requires_grad=parameter.requires_grad)
            part._parameters[key] = metas[id(parameter)]
    return values


def _cut(whole: Tensor, box: Box) -> Tensor:
    rows = whole[box.top : box.bottom]
    is_cut = rows_and_cols(whole.shape)[1] != box.right - box.left
    return (rows[:, box.left : box.right] if is_cut else rows).clone(memory_format=torch.contiguous_format)


def _part(local: Local) -> Part:
    return Part(local.name, local.tensor, local.row_start, local.col_start, local.full_shape)


def _shape_of(head: Head) -> Head:
    """Return a weight of the head's full shape, without memory, to compute buffer sizes after sharding."""
    weight: Any = head.linear.weight
    shape_only = torch.empty(1, 1, dtype=weight.dtype, device=weight.device).expand(weight.shape)
    found = copy.copy(head)
    found.linear = nn.Linear(1, 1, bias=False, device="meta")
    found.linear.weight = nn.Parameter(shape_only, requires_grad=weight.requires_grad)
    return found


def _no_whole_tensors() -> Iterator[tuple[str, Tensor]]:
    raise SyncError("sync: a trainer of several ranks has no whole tensors to send; choose a bridge that sends rows")
