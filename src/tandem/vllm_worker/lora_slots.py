"""Put adapters into vLLM's slots without a file, and read them back for the digest.

vLLM takes adapters by path alone. An adapter that arrived here has the path `tandem:<name>`. vLLM's own manager loads
it (its `_load_adapter` is the one private method that is replaced), packs, pads and shards it, and gives it a slot.
That takes hundreds of launches. So a later version overwrites an earlier one that no request uses: in its slot, and in
the tensors that vLLM keeps for it. If vLLM pushes it out of its slot and loads it again, it loads the new values.

The name then belongs to another version. vLLM's cache cannot mix them up: each version has its own cache salt. R rank,
I inputs, O outputs of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.bridge.common.manifest import name_of
from tandem.errors import SyncError
from tandem.ops import digest
from tandem.ops.batched_launches import Copying, same
from tandem.types import Fingerprints
from tandem.vllm_worker.checkpoint_names import CheckpointNames
from tandem.vllm_worker.served_memory import PieceDigest, TensorLayout, TensorPiece

SCHEME = "tandem:"
_PREFIX = "base_model.model."


_Part = tuple[str, Tensor, int, int, int, int]
"""The name of an adapter's tensor, its view of a slot, rows from and to, columns from and to."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """The slice of a possibly fused layer that is one linear layer of a checkpoint."""

    layer: Any
    index: int
    base: TensorPiece


class _Reading(NamedTuple):
    """The parts of an adapter in its slot, the digests of them and of the padding, and which parts are whole
    tensors."""

    parts: list[_Part]
    digests: digest.RepeatedDigest
    whole: list[tuple[int, str]]


@dataclass(slots=True)
class _StagedAdapter:
    name: str
    rank: int
    tensors: Mapping[str, Tensor]
    is_theirs: bool = False
    """vLLM keeps these tensors themselves, and would load a slot from them again."""
    reading: dict[int, _Reading] = field(default_factory=dict[int, "_Reading"])
    """By slot."""
    writing: tuple[int, list[Tensor], Copying] | None = None
    """The last copy: its slot, its source tensors, and the copy itself."""


class LoraSlots:
    def __init__(
        self, manager: Any, layout: TensorLayout, fused: Mapping[str, list[str]], names: CheckpointNames
    ) -> None:
        """`manager`: vLLM's LoRA manager of this worker."""
        config = manager.lora_config
        if config.fully_sharded_loras:
            raise SyncError("adapters: --fully-sharded-loras is on; start vLLM without it")
        self._manager = manager
        self._slots, self._max_rank, self._dtype = config.max_loras, config.max_lora_rank, config.lora_dtype
        self._names = names
        self._slices = _slices(manager._adapter_manager.modules, layout, fused, names)
        self._staged: dict[str, _StagedAdapter] = {}
        self.reuses_tensors = False
        """Each adapter arrives in the same tensors, so the checks and copies of them are kept."""
        self._checked: tuple[list[Tensor], Any] = [], None
        """The tensors that passed the last check, and their names and config."""
        self._ids: dict[str, int] = {}
        self._count = 0
        self._from_file = manager._load_adapter
        manager._load_adapter = self._load

    @property
    def dtype(self) -> str:
        return name_of(self._dtype)

    def stage(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], into: str = "") -> str:
        """Stage an adapter after `check`; return the name that requests will use. `into`: an unused adapter; if it has
        the same form, its slot and vLLM's copy are overwritten. Otherwise nothing that is served changes."""
        rank = int(config["r"])
        if into and (old := self._fitting(into, rank, tensors)) is not None:
            self._writing(old, tensors).run()
            return into
        self._count += 1
        name = f"tandem-{self._count}"
        self._staged[SCHEME + name] = _StagedAdapter(
            name, rank, {key: tensor.clone() for key, tensor in tensors.items()}
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the next one may arrive in the same tensors
        # vLLM may push an adapter out of its slot and load it again while a request still uses it.
        for old_name in list(self._staged)[: -2 * self._slots]:
            del self._staged[old_name]
        return name

    def served_pieces(self, name: str) -> list[PieceDigest]:
        """Return the digests of the pieces, read from the slot that requests for `name` use."""
        parts, numbers = self._reading(name).parts, self.served_numbers(name)
        return [
            (key, top, bottom, left, right, number)
            for (key, _, top, bottom, left, right), number in zip(parts, numbers, strict=True)
        ]

    @torch.no_grad()
    def served_numbers(self, name: str) -> list[int]:
        """Return the digests of those pieces alone."""
        parts, digests, _ = self._reading(name)
        numbers = digests.take()
        if any(numbers[len(parts) :]):
            raise SyncError(f"adapters: the slot of '{name}' has values beside its own: the padding is not zero")
        return numbers[: len(parts)]

    def check_served(self, name: str, digests: Sequence[str], expected: Fingerprints) -> None:
        """Raise SyncError if a digest differs from the one sent, for tensors that this worker holds whole."""
        for index, key in self._reading(name).whole:
            _compare(key, digests[index], expected)

    def check_staged(self, name: str, expected: Fingerprints) -> None:
        """Do the same for an adapter that vLLM has not loaded yet; drop it if it differs."""
        tensors = self._staged[SCHEME + name].tensors
        try:
            for key, found in digest.fingerprints(tensors).items():
                _compare(key, found, expected)
        except SyncError:
            self.drop(name)
            raise

    def _fitting(self, name: str, rank: int, tensors: Mapping[str, Tensor]) -> _StagedAdapter | None:
        staged, number = self._staged.get(SCHEME + name), self._ids.get(SCHEME + name)
        if staged is None or not staged.is_theirs or staged.rank != rank:
            return None
        if number is None or number not in self._in_slots():
            return None
        again = staged.writing is not None and same(staged.writing[1], list(tensors.values()))
        return staged if again or _forms(staged.tensors) == _forms(tensors) else None

    def _writing(self, old: _StagedAdapter, tensors: Mapping[str, Tensor]) -> Copying:
        """Return the copy into vLLM's own tensors and into the slot; keep it if adapters arrive in the same tensors."""
        slot, sources = self._slot_of(old.name), list(tensors.values())
        if old.writing is not None and old.writing[0] == slot and same(old.writing[1], sources):
            return old.writing[2]
        parts = self._reading(old.name).parts
        copying = Copying(
            [(old.tensors[name], tensor) for name, tensor in tensors.items()]
            + [(view, tensors[name][top:bottom, left:right]) for name, view, top, bottom, left, right in parts]
        )
        if self.reuses_tensors:
            old.writing = slot, sources, copying
        return copying

    def _reading(self, name: str) -> _Reading:
        staged, slot = self._staged[SCHEME + name], self._slot_of(name)
        if slot not in staged.reading:
            parts, leftovers = self._parts(staged, slot)
            pieces = [(key, view, top, left) for key, view, top, _, left, _ in parts]
            # Runs between two steps of vLLM, on its own thread.
            digests = digest.RepeatedDigest([*pieces, *(each for each in leftovers if each[1].numel())], alone=True)
            sizes = [(bottom - top, right - left) for _, _, top, bottom, left, right in parts]
            whole = [(at, part[0]) for at, part in enumerate(parts) if sizes[at] == staged.tensors[part[0]].shape]
            staged.reading[slot] = _Reading(parts, digests, whole)
        return staged.reading[slot]

    def _parts(self, staged: _StagedAdapter, slot: int) -> tuple[list[_Part], list[digest.Piece]]:
        rank, owners = staged.rank, {_owner(key) for key in staged.tensors}
        parts: list[_Part] = []
        leftovers: list[
            digest.Piece
        ] = []  # must be zeros, whose digest is 0: other values would be added to the output
        for owner, where in self._slices.items():
            a_RI = where.layer.lora_a_stacked[where.index][slot, 0]
            b_OR = where.layer.lora_b_stacked[where.index][slot, 0]
            if owner not in owners:
                leftovers.append((owner, b_OR, 0, 0))  # with B = 0 nothing is added
                continue
            top, bottom, left, right = where.base.box
            leftovers += [(owner, a_RI[rank:], 0, 0), (owner, b_OR[:, rank:], 0, 0)]
            a_name, b_name = (f"{_PREFIX}{owner}.lora_{side}.weight" for side in "AB")
            parts.append((a_name, a_RI[:rank, : right - left], 0, rank, left, right))
            parts.append((b_name, b_OR[: bottom - top, :rank], top, bottom, 0, rank))
        return parts, leftovers

    def shapes(self, name: str) -> dict[str, list[int]]:
        return {key: list(tensor.shape) for key, tensor in self._staged[SCHEME + name].tensors.items()}

    def drop(self, name: str) -> None:
        """Free the slot. No request may be using it."""
        self._staged.pop(SCHEME + name, None)
        if (number := self._ids.pop(SCHEME + name, None)) is not None:
            self._manager.remove_adapter(number)

    def names(self) -> list[str]:
        return [staged.name for staged in self._staged.values()]

    def check(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Raise SyncError unless they are an adapter of this model, with B scaled for serving."""
        if same(self._checked[0], list(tensors.values())) and self._checked[1] == (list(tensors), config):
            return
        rank = int(config.get("r", 0))
        if not tensors:
            raise SyncError("adapters: the one that arrived is empty: only the base would be served")
        if not 0 < rank <= self._max_rank:
            raise SyncError(f"adapters: rank {rank} does not fit --max-lora-rank {self._max_rank}")
        if config.get("lora_alpha") != rank or config.get("use_rslora") or config.get("use_dora"):
            raise SyncError(
                f"adapters: lora_alpha = {config.get('lora_alpha')} with r = {rank}: B must be scaled already"
            )
        owners = {_owner(key) for key in tensors}
        self._check_known(owners)
        for owner in sorted(owners):
            rows, cols = self._slices[owner].base.full_shape
            for side, shape in (("A", (rank, cols)), ("B", (rows, rank))):
                name = f"{_PREFIX}{owner}.lora_{side}.weight"
                tensor = tensors.get(name)
                if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != self._dtype:
                    was = "is missing" if tensor is None else f"arrived as {tensor.dtype} {list(tensor.shape)}"
                    raise SyncError(f"adapters: '{name}' {was}; it must be {self._dtype} {list(shape)}")
        if len(tensors) != 2 * len(owners):
            raise SyncError(f"adapters: {len(tensors)} tensors for {len(owners)} layers: some are of another kind")
        if self.reuses_tensors:
            self._checked = list(tensors.values()), (list(tensors), dict(config))

    def _check_known(self, owners: Set[str]) -> None:
        """Raise SyncError if one of these layers is none that vLLM can adapt."""
        odd = sorted(owners - self._slices.keys())
        if not odd:
            return
        named, others = ({owner.rpartition(".")[2] for owner in each} for each in (odd, owners - set(odd)))
        more = f" ({len(odd)} such layers)" if len(odd) > 1 else ""
        fit = sorted(others - named)
        way_out = f"set model.lora.targets = {json.dumps(fit)}" if fit else "name others in model.lora.targets"
        raise SyncError(f"adapters: '{odd[0]}' is no layer that this engine can adapt{more}; {way_out}")

    def _load(self, request: Any) -> Any:
        """Replace vLLM's reading of an adapter's files."""
        path = request.lora_path
        if not path.startswith(SCHEME):
            return self._from_file(request)
        if (staged := self._staged.get(path)) is None:
            raise SyncError(f"adapters: '{path}' never arrived here, or was dropped")
        from vllm.lora.lora_model import LoRAModel  # pyright: ignore[reportMissingImports]
        from vllm.lora.peft_helper import PEFTHelper  # pyright: ignore[reportMissingImports]

        modules = sorted({_owner(key).rpartition(".")[2] for key in staged.tensors})
        device = str(next(iter(staged.tensors.values())).device)
        model = LoRAModel.from_lora_tensors(
            request.lora_int_id,
            {_PREFIX + self._names.served(name.removeprefix(_PREFIX)): each for name, each in staged.tensors.items()},
            PEFTHelper(r=staged.rank, lora_alpha=staged.rank, target_modules=modules),
            device=device,
            dtype=self._dtype,
        )
        theirs = {each.data_ptr() for layer in model.loras.values() for each in (layer.lora_a, layer.lora_b)}
        staged.is_theirs = theirs == {tensor.data_ptr() for tensor in staged.tensors.values()}
        self._ids[path] = request.lora_int_id
        return model

    def _slot_of(self, name: str) -> int:
        slots = self._in_slots()
        number = self._ids.get(SCHEME + name)
        if number is None or number not in slots:
            raise SyncError(f"adapters: '{name}' is in no slot: vLLM was not asked to load '{SCHEME}{name}'")
        return slots.index(number)

    def _in_slots(self) -> list[int | None]:
        return self._manager._adapter_manager.lora_index_to_id


def _slices(
    modules: Mapping[str, Any], layout: TensorLayout, fused: Mapping[str, list[str]], names: CheckpointNames
) -> dict[str, _Slice]:
    """Return the slices by the checkpoint's name of the linear layer."""
    slices: dict[str, _Slice] = {}
    for path, layer in modules.items():
        if not isinstance(getattr(layer, "lora_a_stacked", None), tuple):
            continue  # skip embeddings and the head: a model may share their weights
        prefix, _, last = path.rpartition(".")
        if last == "kv_b_proj":
            continue  # latent attention decodes with views of the base's weight, without its adapter
        owners = [names.original(f"{prefix}.{name}") for name in fused.get(last, [last])]
        if len(owners) != len(layer.lora_a_stacked):
            continue
        for index, owner in enumerate(owners):
            pieces = layout.pieces.get(f"{owner}.weight", [])
            if len(pieces) == 1:  # otherwise the checkpoint has the layer fused, and its adapters have another form
                slices[owner] = _Slice(layer, index, pieces[0])
    return slices


def _compare(name: str, found: str, expected: Fingerprints) -> None:
    if found != expected.get(name):
        raise SyncError(
            f"adapters: what arrived of '{name}' is not what was sent: its digest is {found} and not "
            f"{expected.get(name)}; the old version stays: send this one again"
        )


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.device]]:
    return {name: (tensor.shape, tensor.device) for name, tensor in tensors.items()}


def _owner(name: str) -> str:
    """Return the linear layer that an adapter's tensor belongs to. SyncError for other names."""
    for side in ("A", "B"):
        if name.startswith(_PREFIX) and name.endswith(f".lora_{side}.weight"):
            return name.removeprefix(_PREFIX).removesuffix(f".lora_{side}.weight")
    raise SyncError(f"adapters: '{name}' is no tensor of a LoRA adapter as PEFT names them")
