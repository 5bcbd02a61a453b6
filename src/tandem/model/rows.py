"""A module whose rows are on several ranks, by torch's FSDP2, with sums in the order of train/gradient_tree.py.

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

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor, Shard

from tandem.model.hosts import Hosts
from tandem.model.policy import Inside
from tandem.ops.leaf_sum import LeafSum
from tandem.ops.module_parts import layers_of
from tandem.ops.named_tensors import move_in
from tandem.ops.parts import Box, Cut, box_of_rank, rows_and_cols

Tree = Callable[[Sequence[Tensor]], Tensor]
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
        running: bool = False,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        """`keeps`: gathered weights stay until `settle`, instead of until their layer is computed. `adds`: a round may
        have several micro-batches, whose gradients are added up before they are sent. `running`: a round is added to
        the sums of those before it. `cuts`: of each parameter, where an engine's workers say it (engine_cuts.py);
        otherwise each rank holds rows of all."""
        self.rank, self.hosts, self.device, self.keeps, self.adds = hosts.rank, hosts, device, keeps, adds
        self.running = running
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
        self._earlier: dict[str, Tensor] = {}
        """Sums of the rounds before, of trained tensors that are on every rank."""
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
        self._units = [*layers_of(module), module]
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

    def begin(self, present: Sequence[bool], *, first: bool) -> None:
        self._tick()
        of_hosts = self.hosts.apart(present)
        self._present = of_hosts[self.hosts.number]
        self._hosts_present = [any(each) for each in of_hosts]
        if first or not self.running:
            self._forget_sums()
        self._leaf.forget()

    def _forget_sums(self) -> None:
        self._earlier = {}
        for each in self._sums:
            each.kept = None

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

    def end(self, *, last: bool) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for unit, sums in zip(self._units, self._sums, strict=True):
            if sums.kept is not None:
                found |= self._taken_apart(unit, sums.kept)
            for parameter in _fsdp_params(unit):  # or FSDP2 keeps them, and adds the next round's
                parameter.sharded_param.grad = None
        for name, each in (self.sum_of_whole() if self.whole else {}).items():
            found[name] = self._earlier[name].add_(each) if name in self._earlier else each
        self._earlier = {name: found[name] for name, _ in self.whole}
        if last or not self.running:
            self._forget_sums()
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
        self._made: Tensor | None = None
        """This host's sum of a round."""
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
            self._made = received.new_empty(received.numel() // group.size(), dtype=torch.float32)
        dist.all_to_all_single(received, input_tensor, group=group)
        parts = list(received.view(group.size(), -1))
        for into, *those in zip(*(each.split(_AT_ONCE) for each in (self._made, *parts)), strict=True):
            into.copy_(self._rows.added([part.float() for part in those]))
        if received.is_cuda:
            received.record_stream(torch.cuda.current_stream())
        if self._rows.hosts.count == 1:
            self._keep(self._made)

    def between_hosts(self, output_tensor: Tensor) -> None:
        """FSDP2 calls it after the above; with one rank on a host, instead of it, with this rank's gradients."""
        made = output_tensor.float() if self._made is None else self._made
        self._rows.add_hosts(made)
        self._keep(made)

    def _keep(self, made: Tensor) -> None:
        self._made = None
        if self.kept is None:
            self.kept = made
            return
        self.kept.add_(made)
        if made.is_cuda:
            made.record_stream(torch.cuda.current_stream())


def _call(module: Any, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _fsdp_params(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group, named _fsdp_param_group
    (group,) = [state._fsdp_param_group] if groups is None else groups
    return group.fsdp_params
