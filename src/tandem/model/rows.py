"""A policy whose rows are on several ranks, by torch's FSDP2, with sums in the order of train/gradient_tree.py.

Each decoder layer is a unit. The rest of the module (embeddings, norm, head) is one more unit, so that tied weights are
in the same unit. A unit's weights are all-gathered before use and freed afterwards; gradients go to the ranks that hold
the rows. Adapters (layout `whole`) are on every rank, and their gradients are summed in the same order. On several
hosts (hosts.py) this happens within each host, and then the hosts' sums are added.

Private parts of FSDP2 are used in this file only:

- its reduce-scatter is replaced: pieces are sent to the rank that holds the rows, and added there as a tree;
- gradients travel as backward left them, or with `adds` as FSDP2's own float32 sums of several micro-batches, and their
  float32 sum is kept here: FSDP2 would round it to bf16 for bf16 weights;
- a computation is a forward pass of the whole module (`inside`), because the head and the loss read weights, too.
"""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor, Shard

from tandem.errors import SpecError, SyncError
from tandem.model import served_weights
from tandem.model.export_copy import Deployer
from tandem.model.export_rows import MergedExport, RowDeployer
from tandem.model.hosts import Hosts
from tandem.model.load_rows import RowsOf
from tandem.model.policy import CausalPolicy, Inside
from tandem.ops.leaf_sum import LeafSum
from tandem.ops.lm_head import Head
from tandem.ops.named_tensors import move_in
from tandem.ops.parts import Box, Cut, box_of_rank, rows_and_cols
from tandem.ops.unseen_bits import with_unseen_bits
from tandem.types import Part, TokenLogprobs, WeightKind, Weights

Tree = Callable[[Sequence[Tensor]], Tensor]
Adopt = Callable[[str, Tensor], Tensor]
_INSIDE = "_tandem_inside"
_AT_ONCE = 1 << 24
"""Numbers that are in float32 at once for each rank, while gradients are added."""


class Local(NamedTuple):
    """This rank's rows or columns of a parameter: the memory that FSDP2 gathers from."""

    name: str
    tensor: Tensor
    row_start: int
    col_start: int
    full_shape: tuple[int, ...]


class Rows:
    """The rows of one module on this rank. `tree` adds the parts of ranks; `tick` is called to show progress."""

    def __init__(
        self,
        hosts: Hosts,
        device: torch.device,
        *,
        tree: Tree,
        tick: Callable[[], None],
        keeps: bool = False,
        adds: bool = False,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        """`keeps`: gathered weights stay until `settle`, instead of until their layer is computed. `adds`: a round may
        have several micro-batches, whose gradients are added up before they are sent. `cuts`: of each parameter, where
        an engine's workers say it (engine_cuts.py); otherwise each rank holds rows of all."""
        self.rank, self.hosts, self.device, self.keeps, self.adds = hosts.rank, hosts, device, keeps, adds
        self._tree, self._tick = tree, tick
        self._cuts: dict[str, Cut] = dict(cuts or {})
        self._module: Any = None
        self._units: list[Any] = []
        self._sums: list[_OrderedSum] = []
        self._names: dict[int, str] = {}
        self._present: list[bool] = []
        """Which ranks of this host have a micro-batch."""
        self._hosts_present: list[bool] = []
        self.local: list[Local] = []
        self.whole: list[tuple[str, Tensor]] = []
        """Trained tensors that are on every rank."""
        self._leaf = LeafSum(())
        self._unread: Tensor | None = None

    def another(self) -> Rows:
        """For a second module on the same ranks."""
        return Rows(self.hosts, self.device, tree=self._tree, tick=self._tick, cuts=self._cuts)

    def shard(self, module: Any, values: Callable[[str, Box], Tensor]) -> Inside:
        """Shard a module whose parameters, except adapters, are on the meta device. `values(name, box)` returns a
        rectangle in the parameter's type. Return how to run the module."""
        self._make_whole(module, values)
        whole = {each for name, each in module.named_parameters() if not each.is_meta}
        for each in [*whole, *module.buffers()]:
            each.data = each.data.to(self.device)
        self.whole = [(name, each) for name, each in module.named_parameters() if each in whole]
        self._leaf = LeafSum(self.whole)
        options: dict[str, Any] = {
            "mesh": self.hosts.mesh,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32 if self.adds else None),
            "ignored_params": whole,
        }
        if by_columns := {id(each) for name, each in module.named_parameters() if self._cuts.get(name) == "cols"}:
            options["shard_placement_fn"] = lambda parameter: Shard(1 if id(parameter) in by_columns else 0)
        self._units = [*_layers(module), module]
        for unit in self._units[:-1]:
            fully_shard(unit, reshard_after_forward=not self.keeps, **options)
        fully_shard(module, reshard_after_forward=False, **options)  # the head's backward pass needs it at once
        module.set_reshard_after_backward(not self.keeps)
        module._apply(lambda each: torch.empty_like(each, device=self.device) if each.is_meta else each)
        self._module = module
        for unit in self._units:
            self._sums.append(_OrderedSum(self))
            unit.set_custom_reduce_scatter(self._sums[-1])
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if self.hosts.count > 1:
                unit.set_all_reduce_hook(self._sums[-1].between_hosts)
        self._fill(module, values)
        setattr(module, _INSIDE, types.MethodType(_call, module))
        register_fsdp_forward_method(module, _INSIDE)
        return self.inside

    def inside(self, function: Callable[..., Any], *args: Any) -> Any:
        self._tick()
        done = getattr(self._module, _INSIDE)(function, *args)
        if not torch.is_grad_enabled():
            self.settle()
        return done

    def settle(self) -> None:
        """Free gathered weights, because the rows may change now. Those of a frozen base do not, and may be kept."""
        if not self.keeps:
            self._module.reshard()
        elif not self.held_by_all:
            for unit in self._units:
                unit.reshard()

    # --- gradients, for train/gradient_tree.py

    def begin(self, present: Sequence[bool]) -> None:
        self._tick()
        of_hosts = self.hosts.apart(present)
        self._present = of_hosts[self.hosts.number]
        self._hosts_present = [any(each) for each in of_hosts]
        for each in self._sums:
            each.kept = None
        self._leaf.forget()

    def before(self, *, last: bool) -> None:
        if self.adds:
            self._module.set_requires_gradient_sync(last)

    def after(self, *, counts: bool) -> None:
        if counts or not self.adds:
            self._leaf.take()
            return
        self._leaf.forget()
        for parameter in (each for unit in self._units for each in _fsdp_params(unit)):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

    def end(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for unit, sums in zip(self._units, self._sums, strict=True):
            if sums.kept is not None:
                found |= self._taken_apart(unit, sums.kept)
                sums.kept = None
            for parameter in _fsdp_params(unit):  # or FSDP2 keeps them, and adds the next round's
                parameter.sharded_param.grad = None
        if self.whole:
            found |= self.sum_of_whole()
        return found

    @property
    def held_by_all(self) -> bool:
        """Whether all ranks hold the same gradients: of adapters."""
        return bool(self.whole) and not self._cuts

    def added(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum over the ranks of this host that have a micro-batch. The parts are overwritten."""
        there = [part for part, is_there in zip(parts, self._present, strict=True) if is_there]
        return self._tree(there) if there else torch.zeros_like(parts[0])

    def add_hosts(self, of_this_host: Tensor) -> None:
        """Replace this host's sum by the sum over the hosts that have a micro-batch."""
        self._tick()
        self.hosts.add_up(of_this_host, self._hosts_present, self._tree)

    def unread(self, count: int, device: torch.device) -> Tensor:
        """Return memory for what FSDP2 takes for its own sums, of any unit: nothing writes or reads it."""
        if self._unread is None or len(self._unread) < count:
            dtype = self.local[0].tensor.dtype  # with another one FSDP2 would make a copy
            self._unread = torch.empty(count, dtype=dtype, device=device)
        return self._unread[:count]

    def sum_of_whole(self) -> dict[str, Tensor]:
        taken = self._leaf.sums()
        flat = torch.cat([taken.get(name, torch.zeros_like(each)).float().flatten() for name, each in self.whole])
        del taken
        received = flat.new_empty(self.hosts.row_shards, flat.numel())
        dist.all_gather_into_tensor(received.view(-1), flat, group=self.hosts.mesh.get_group())
        del flat
        total = self.added(list(received))
        self.add_hosts(total)
        pieces = total.split([tensor.numel() for _, tensor in self.whole])
        # Copies: a view would keep the parts of all ranks until the step ends.
        return {
            name: piece.view(tensor.shape).clone() for (name, tensor), piece in zip(self.whole, pieces, strict=True)
        }

    def _taken_apart(self, unit: Any, flat: Tensor) -> dict[str, Tensor]:
        """Split a flat sum into parameters: it has the rows of each, padded to the same number of rows."""
        if flat.is_cuda:
            flat.record_stream(torch.cuda.current_stream())
        found: dict[str, Tensor] = {}
        at = 0
        for parameter in _fsdp_params(unit):
            if parameter.sharded_param.requires_grad:
                count = parameter.sharded_size.numel()
                if count:
                    rows = flat[at : at + count].view(parameter.sharded_size)
                    found[self._names[id(parameter.sharded_param)]] = rows
                at += parameter._sharded_param_data.numel()
        assert at == flat.numel(), f"FSDP2 reduced {flat.numel()} numbers, and its parameters have {at}"
        return found

    # --- weights

    @torch.no_grad()
    def _make_whole(self, module: Any, values: Callable[[str, Box], Tensor]) -> None:
        """Give each parameter that every rank holds its values."""
        for name, parameter in [*module.named_parameters()]:
            if parameter.is_meta and self._cuts.get(name) == "whole":
                value = values(name, box_of_rank(parameter.shape, 0, 1)).clone()
                owner, _, key = name.rpartition(".")
                made = nn.Parameter(value, requires_grad=parameter.requires_grad)
                module.get_submodule(owner)._parameters[key] = made

    @torch.no_grad()
    def live_in(self, storage: Mapping[str, Tensor]) -> None:
        """Move what this rank holds into this memory, with its values. From then on FSDP2 gathers from there, and what
        an optimizer writes is written there."""
        for unit in self._units:
            unit.reshard()
        mine = {each.name: each.tensor for each in self.local}
        move_in([*mine.items(), *self.whole], storage)
        for parameter in (each for unit in self._units for each in _fsdp_params(unit)):
            parameter.sharded_param._local_tensor = mine[self._names[id(parameter.sharded_param)]]
            parameter._sharded_param_data = parameter.sharded_param._local_tensor.view(-1)
            parameter.reset_sharded_param()

    @torch.no_grad()
    def _fill(self, module: Any, values: Callable[[str, Box], Tensor]) -> None:
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                continue
            self._names[id(parameter)] = name
            shape = tuple(parameter.shape)
            box = box_of_rank(shape, self.hosts.row_shard, self.hosts.row_shards, self._cuts.get(name, "rows"))
            local = parameter.to_local().detach()
            held = (box.bottom - box.top, box.right - box.left)
            assert rows_and_cols(local.shape) == held, f"FSDP2 cuts '{name}' otherwise than ops/parts.py"
            if box.num_elements:
                local.copy_(values(name, box))
                self.local.append(Local(name, local, box.top, box.left, shape))
            self._tick()

    def gathered(self, name: str) -> Tensor:
        """Return a whole tensor, on every rank. All ranks must call this."""
        parameter = dict(self._module.named_parameters())[name].detach()
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


class _OrderedSum(ReduceScatter):
    """Sends each rank its rows, and adds the received parts in the order of ranks, so that the sum is reproducible.

    FSDP2 runs it on a stream of its own, and memory that is allocated there serves that stream alone: gradients that
    have been sent would leave room that the sums cannot use, and on a GPU that is nearly full the allocator would give
    all of it back to the driver in every step. So the sums take memory of the stream that computes.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.kept: Tensor | None = None
        self._asked = 0
        self._computes: Any = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for what is sent, where gradients are computed; then for its own sum, which nothing reads."""
        count = math.prod(size)
        if not self._asked:
            self._asked = count
            self._computes = torch.cuda.current_stream(device) if device.type == "cuda" else None
            return torch.empty(*size, dtype=dtype, device=device)
        assert count * self._rows.hosts.row_shards == self._asked, "FSDP2 asks for memory otherwise than for two sums"
        self._asked = 0
        if self._rows.hosts.row_shards == 1:  # then it is what this rank has (between_hosts)
            return torch.empty(*size, dtype=dtype, device=device)
        return self._rows.unread(count, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._rows._tick()
        with torch.cuda.stream(self._computes):  # it has done what used that memory before: FSDP2 has waited for it
            received = torch.empty_like(input_tensor)
            self.kept = received.new_empty(received.numel() // group.size(), dtype=torch.float32)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = list(received.view(group.size(), -1))
        for into, *those in zip(*(each.split(_AT_ONCE) for each in (self.kept, *parts)), strict=True):
            into.copy_(self._rows.added([part.float() for part in those]))
        if received.is_cuda:
            received.record_stream(torch.cuda.current_stream())

    def between_hosts(self, output_tensor: Tensor) -> None:
        """FSDP2 calls it after the above; with one rank on a host, instead of it, with this rank's gradients."""
        if self.kept is None:
            self.kept = output_tensor.float()
        self._rows.add_hosts(self.kept)


def _call(module: Any, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _layers(module: Any) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


def _fsdp_params(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group, named _fsdp_param_group
    (group,) = [state._fsdp_param_group] if groups is None else groups
    return group.fsdp_params


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
