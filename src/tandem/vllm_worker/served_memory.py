"""Map each tensor of a checkpoint to the memory that vLLM serves it from; overwrite and digest that memory.

vLLM fuses (q, k, v; gate, up), pads (the vocabulary), shards (tensor parallel) and wraps (adapters). The layout is read
from its layer classes. An unknown class is refused, because a wrong guess would serve wrong weights. Every element of
every parameter and buffer must be accounted for, or the model is refused.

The tables of rotary embeddings are derived, so they are recomputed and compared. vLLM keeps cosines and sines by
position, a trainer the frequencies that they come from. A version brings the trainer's frequencies; they must be this
engine's own. A model that sees has two such tables: of its text, and of its vision tower.

Rows are the first dimension, columns all others together; a vector is one column. P positions, F frequencies.

A full version is copied over the served weights in place, because captured graphs point at that memory. Everything is
checked before the first write, and every write is complete: no fused parameter ever holds parts of two versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from tandem.errors import SyncError
from tandem.ops import digest
from tandem.ops.batched_launches import copy_all
from tandem.ops.parts import rows_and_cols
from tandem.types import Part
from tandem.vllm_worker.checkpoint_names import CheckpointNames
from tandem.vllm_worker.unpacked_cpu_weights import plain_linear

_WRAPPED = ".base_layer"
_NORMS = ("RMSNorm", "GemmaRMSNorm", "LayerNorm")
_SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
_NEAR = 1e-6  # relative; two builds of one formula differ in the last bit, two settings of it by far more


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A rectangle of one checkpoint tensor, and the memory that it is served from."""

    name: str
    param: str
    """vLLM's name of the parameter that contains it."""
    view: Tensor
    row_start: int
    col_start: int
    full_shape: tuple[int, ...]

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Rows from and to, columns from and to."""
        rows, cols = rows_and_cols(self.view.shape)
        return self.row_start, self.row_start + rows, self.col_start, self.col_start + cols

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the part of the whole tensor that belongs here."""
        top, bottom, left, right = self.box
        rows = tensor[top:bottom]
        return rows if tensor.ndim == 1 else rows[:, left:right]


class Rotary:
    """A rotary table of a model, checked against its frequencies."""

    CLASSES: ClassVar = ("RotaryEmbedding", "Llama3RotaryEmbedding", "MRotaryEmbedding")
    """Classes whose table is the cosine and sine of position times frequency, and nothing else."""

    def __init__(self, path: str, layer: Any, name: str) -> None:
        """`name`: the trainer's, of the module that has the frequencies."""
        self._path, self._layer = path, layer
        self.names = (f"{name}.inv_freq", f"{name}.original_inv_freq")
        if type(layer).__name__ == "MRotaryEmbedding" and layer.scaling_factor is not None:
            raise SyncError(f"rotary: '{path}' scales its positions (YaRN) in three axes, in a way not known")
        with torch.device("cpu"):  # where a trainer computes its frequencies
            self.inv_freq: Tensor = layer._compute_inv_freq(layer.base).float()
        self._compare()
        self._digest = self._table_digest()

    def is_of(self, layer: Any) -> bool:
        return layer is self._layer  # vLLM shares one between layers of the same settings

    def buffers(self) -> Iterator[Tensor]:
        return self._layer.buffers(recurse=False)

    def table(self) -> tuple[str, Tensor, Callable[[], int]]:
        """Return its name, its memory, and a function that gives the digest it must have."""
        return self._path, self._layer.cos_sin_cache, lambda: self._digest

    def check_received(self, name: str, inv_freq: Tensor) -> None:
        theirs = inv_freq.detach().cpu().float()
        if theirs.shape != self.inv_freq.shape or not torch.allclose(theirs, self.inv_freq, rtol=_NEAR, atol=0.0):
            raise SyncError(
                f"rotary: '{name}' is not what this engine computes from its configuration (base {self._layer.base}): "
                "trainer and engine were given different rotary settings, and would compute different models"
            )

    def adopt(self, inv_freq: Tensor) -> None:
        """Compute the table from exactly these frequencies from now on."""
        theirs = inv_freq.detach().cpu().float()
        if not torch.equal(theirs, self.inv_freq):
            self.inv_freq = theirs.clone()
            self._layer.cos_sin_cache.copy_(self._table())
            self._digest = self._table_digest()

    def _table(self) -> Tensor:
        positions_P = torch.arange(self._layer.cos_sin_cache.shape[0], dtype=torch.float32)
        angles_PF = torch.outer(positions_P, self.inv_freq)
        return torch.cat((angles_PF.cos(), angles_PF.sin()), dim=-1)

    def _compare(self) -> None:
        table, ours = self._layer.cos_sin_cache, self._table()
        if ours.shape != table.shape:
            raise SyncError(f"rotary: '{self._path}' has a table of {list(table.shape)}, not {list(ours.shape)}")
        # The served type rounds, and a large angle has few bits left after the point.
        slack = torch.finfo(table.dtype).eps + 4 * torch.finfo(torch.float32).eps * len(ours)
        gap = (table.detach().cpu().float() - ours).abs().max().item()
        if not gap <= slack:
            raise SyncError(f"rotary: the table of '{self._path}' is {gap:.2g} away from what its frequencies give")

    def _table_digest(self) -> int:
        return digest.piece(self._layer.cos_sin_cache, self._path)


@dataclass(frozen=True)
class TensorLayout:
    pieces: Mapping[str, list[TensorPiece]]
    aliases: Mapping[str, str]
    """Other names of the same memory (tied weights): they are neither sent nor written."""
    rotary: Sequence[Rotary]
    scales: Mapping[str, Tensor]
    """Of quantised attention. Here it is not quantised: each is 1."""

    def __iter__(self) -> Iterator[TensorPiece]:
        return (piece for pieces in self.pieces.values() for piece in pieces)

    def forms(self) -> dict[str, tuple[str, list[int]]]:
        """Return dtype and shape by name of everything that a full version contains."""
        forms = {
            name: (str(parts[0].view.dtype).removeprefix("torch."), list(parts[0].full_shape))
            for name, parts in self.pieces.items()
        }
        return forms | {name: ("float32", list(tensor.shape)) for name, tensor in self.tables().items()}

    def boxes(self) -> list[tuple[str, int, int, int, int]]:
        """Return name, rows from and to, columns from and to of everything that this worker needs of a full version."""
        tables = [(name, 0, len(tensor), 0, 1) for name, tensor in self.tables().items()]
        return [*dict.fromkeys((piece.name, *piece.box) for piece in self), *tables]

    def tables(self) -> dict[str, Tensor]:
        """Return the tensors that the engine computes itself, under the trainer's names."""
        return {name: rotary.inv_freq for rotary in self.rotary for name in rotary.names}

    def derived(self) -> list[tuple[str, Tensor, Callable[[], int]]]:
        """Return the tensors that are never sent: name, memory, and a function that gives the digest it must have."""
        found = [(name, scale, partial(_digest_of_ones, name, scale.shape)) for name, scale in self.scales.items()]
        return [*found, *(rotary.table() for rotary in self.rotary)]


@dataclass
class _LayoutWalk:
    """What the walk over the modules has found so far."""

    names: CheckpointNames
    pieces: dict[str, list[TensorPiece]] = field(default_factory=dict[str, list[TensorPiece]])
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    scales: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    owners: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    """By identity of a parameter: the path where it was found first, and the name of (the first part of) its
    content."""
    alias_paths: set[str] = field(default_factory=set[str])
    held: dict[str, int] = field(default_factory=dict[str, int])
    """How many elements of a parameter are accounted for."""
    rotary: dict[str, Rotary] = field(default_factory=dict[str, Rotary])
    """By the trainer's name."""
    rotary_paths: set[str] = field(default_factory=set[str])


def layout_of(model: Any) -> TensorLayout:
    """Return the layout of `model`. SyncError, with its name, for any part that is unknown."""
    fused = {key: list(names) for key, names in (getattr(model, "packed_modules_mapping", None) or {}).items()}
    found, readers = _LayoutWalk(CheckpointNames(model)), _readers()
    for path, module in model.named_modules(remove_duplicate=False):
        own = list(module.named_parameters(recurse=False)) + list(module.named_buffers(recurse=False))
        reader = readers.get(type(module).__name__)
        if reader is None or not _is_vllms(module):
            _refuse_unknown(path, module, own)
            continue
        reader(found, path, module, fused)
    _check_whole(model, found)
    _check_scales(found)
    return TensorLayout(found.pieces, found.aliases, list(found.rotary.values()), found.scales)


# --- one reader a class


def _readers() -> dict[str, Callable[[_LayoutWalk, str, Any, Mapping[str, list[str]]], None]]:
    return {
        "QKVParallelLinear": _qkv,
        "MergedColumnParallelLinear": _merged,
        "ColumnParallelLinear": _column,
        "RowParallelLinear": _row,
        "ReplicatedLinear": _replicated,
        "VocabParallelEmbedding": _vocabulary,
        "ParallelLMHead": _vocabulary,
        "Attention": _attention,
        "MMEncoderAttention": _tower_attention,
        **dict.fromkeys((*_NORMS, "Conv3dLayer", "Embedding"), _as_it_is),
        **dict.fromkeys(Rotary.CLASSES, _rotary),
    }


def _is_vllms(module: Any) -> bool:
    return type(module).__module__.startswith(("vllm.", "torch.nn."))


def _qkv(found: _LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    head, v_head = layer.head_size, getattr(layer, "v_head_size", layer.head_size)
    kv_rank = layer.tp_rank // layer.num_kv_head_replicas  # several ranks hold the same heads where there are few
    sections = [
        (layer.num_heads * head, layer.tp_rank, layer.total_num_heads * head),
        (layer.num_kv_heads * head, kv_rank, layer.total_num_kv_heads * head),
        (layer.num_kv_heads * v_head, kv_rank, layer.total_num_kv_heads * v_head),
    ]
    _sections(found, path, layer, fused, sections)


def _merged(found: _LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    sections = [(size // layer.tp_size, layer.tp_rank, size) for size in layer.output_sizes]
    _sections(found, path, layer, fused, sections)


def _column(found: _LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    sections = [(layer.output_size_per_partition, layer.tp_rank, layer.output_size)]
    _sections(found, path, layer, {}, sections)


def _sections(
    found: _LayoutWalk,
    path: str,
    layer: Any,
    fused: Mapping[str, list[str]],
    sections: list[tuple[int, int, int]],
) -> None:
    """Add the sections of a fused parameter. Each has: rows on this rank, the rank's number, rows in total."""
    _check_plain(path, layer)
    plain = path.removesuffix(_WRAPPED)
    prefix, _, last = plain.rpartition(".")
    names = [f"{prefix}.{name}" for name in fused.get(last, [last])]
    together = names == [plain]  # one tensor in the checkpoint, too
    if not together and len(names) != len(sections):
        raise SyncError(f"layout: '{path}' has {len(sections)} sections and the checkpoint's names for it are {names}")
    for kind in ("weight", "bias"):
        param = getattr(layer, kind, None)
        if param is None:
            continue
        total = sum(size for *_, size in sections)
        start = begun = 0
        for index, (here, rank, size) in enumerate(sections):
            name, at, rows = (names[0], begun, total) if together else (names[index], 0, size)
            shape = (rows, *param.shape[1:])
            view = param.data[start : start + here]
            _add(found, f"{name}.{kind}", f"{path}.{kind}", param, view, at + rank * here, 0, shape)
            start, begun = start + here, begun + size


def _row(found: _LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    _check_plain(path, layer)
    name = path.removesuffix(_WRAPPED)
    here = layer.input_size_per_partition
    shape = (layer.weight.shape[0], layer.input_size)
    _add(found, f"{name}.weight", f"{path}.weight", layer.weight, layer.weight.data, 0, layer.tp_rank * here, shape)
    if getattr(layer, "bias", None) is not None:  # whole on every rank; the first alone adds it
        _whole(found, f"{name}.bias", f"{path}.bias", layer.bias)


def _replicated(found: _LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    _column(found, path, _AsOneRank(layer), fused)


class _AsOneRank:
    """A replicated layer seen as a column-parallel one of a single rank."""

    tp_rank = 0

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.output_size_per_partition = layer.output_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _vocabulary(found: _LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    name, indices = path.removesuffix(_WRAPPED), layer.shard_indices
    _check_plain(path, layer)
    if indices.added_vocab_end_index > indices.added_vocab_start_index or layer.num_embeddings != layer.org_vocab_size:
        raise SyncError(f"layout: '{path}' has rows that no checkpoint has (added tokens)")
    rows = indices.org_vocab_end_index - indices.org_vocab_start_index
    for kind in ("weight", "bias"):
        param = getattr(layer, kind, None)
        if param is not None:
            shape = (layer.org_vocab_size, *param.shape[1:])
            view = param.data[:rows]
            padding = param.data[rows:].numel()  # which no token reaches
            found.held[f"{path}.{kind}"] = found.held.get(f"{path}.{kind}", 0) + padding
            _add(found, f"{name}.{kind}", f"{path}.{kind}", param, view, indices.org_vocab_start_index, 0, shape)


def _as_it_is(found: _LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    for kind in ("weight", "bias"):
        param = getattr(layer, kind, None)
        if isinstance(param, torch.nn.Parameter):
            _whole(found, f"{path}.{kind}", f"{path}.{kind}", param)


def _attention(found: _LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    found.scales |= {f"{path}.{name}": buffer for name, buffer in layer.named_buffers(recurse=False)}


def _tower_attention(found: _LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    if layer.fp8_enabled:
        raise SyncError(f"layout: '{path}' is quantised attention (fp8); start vLLM without --mm-encoder-attn-dtype")


def _rotary(found: _LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    before, of_layer, _ = found.names.original(path).partition(".layers.")  # a trainer has one for all layers
    name = f"{before}.rotary_emb" if of_layer else before
    if name not in found.rotary:
        found.rotary[name] = Rotary(path, layer, name)
    elif not found.rotary[name].is_of(layer):
        raise SyncError(f"layout: '{path}' is a second rotary embedding; only one for all layers is known")
    found.rotary_paths |= {f"{path}.{name}" for name, _ in layer.named_buffers(recurse=False)}


def _whole(found: _LayoutWalk, name: str, path: str, param: Tensor) -> None:
    _add(found, name, path, param, param.data, 0, 0, tuple(param.shape))


def _add(
    found: _LayoutWalk,
    name: str,
    path: str,
    param: Tensor,
    view: Tensor,
    row_start: int,
    col_start: int,
    shape: tuple[int, ...],
) -> None:
    name = found.names.original(name)
    first_path, first_name = found.owners.setdefault(id(param), (path, name))
    if path != first_path:
        found.aliases[name] = first_name
        found.alias_paths.add(path)
        return
    found.pieces.setdefault(name, []).append(TensorPiece(name, path, view, row_start, col_start, shape))
    found.held[path] = found.held.get(path, 0) + view.numel()


# --- refusals


def _check_plain(path: str, layer: Any) -> None:
    """Refuse a layer that computes with anything but the bytes of its `weight`, such as a repacked copy."""
    method = type(layer.quant_method).__name__
    if method not in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
        raise SyncError(f"layout: '{path}' is served by {method}; only unquantised weights can be exchanged")
    if layer.weight.numel() == 0 or layer.weight.is_meta:
        raise SyncError(
            f"layout: the weight of '{path}' was packed away when it was loaded; start vLLM with Tandem's worker "
            "extension, which keeps weights as they are"
        )
    linear = getattr(layer, "cpu_linear", None)
    if linear is not None and linear is not plain_linear:
        raise SyncError(f"layout: '{path}' computes with a packed copy of its weight, which cannot be read back")


def _refuse_unknown(path: str, module: Any, own: list[tuple[str, Tensor]]) -> None:
    if own:
        kind = type(module).__name__
        what = "a mixture of experts" if "MoE" in kind or "Expert" in kind else "a layer of a class"
        raise SyncError(f"layout: '{path}.{own[0][0]}' belongs to {what} that is not known: {kind}")
    if hasattr(module, "process_weights_after_loading"):
        raise SyncError(f"layout: '{path}' ({type(module).__name__}) derives weights of its own, in a way not known")


def _check_whole(model: Any, found: _LayoutWalk) -> None:
    for path, param in model.named_parameters(remove_duplicate=False):
        if path not in found.alias_paths and found.held.get(path, 0) != param.numel():
            raise SyncError(f"layout: of '{path}' {found.held.get(path, 0)} of {param.numel()} elements are known")
    rotary = {id(buffer) for each in found.rotary.values() for buffer in each.buffers()}
    for path, buffer in model.named_buffers(remove_duplicate=False):
        scale = path in found.scales and path.rpartition(".")[2] in _SCALES
        if not scale and path not in found.rotary_paths and id(buffer) not in rotary:
            raise SyncError(f"layout: the buffer '{path}' is not known")


def _check_scales(found: _LayoutWalk) -> None:
    """Check that all are 1. Later changes are found by their digests (ServedMemory)."""
    scales = [scale.detach().reshape(-1).float() for scale in found.scales.values()]
    if scales and torch.cat(scales).tolist() != [1.0] * len(scales):  # one wait for the GPU
        name, scale = next((n, s.tolist()) for n, s in found.scales.items() if s.numel() != 1 or float(s) != 1.0)
        raise SyncError(f"layout: '{name}' is {scale}, not 1: attention is quantised or damaged")


@cache
def _digest_of_ones(name: str, shape: torch.Size) -> int:
    return digest.piece(torch.ones(shape, dtype=torch.float32), name)


# --- a full version


PieceDigest = tuple[str, int, int, int, int, int]
"""Name, rows from and to, columns from and to, digest."""


def check(layout: TensorLayout, arrived: Mapping[str, Tensor]) -> None:
    """Raise SyncError unless `arrived` has exactly the names, shapes and types that are served."""
    forms = layout.forms()
    if odd := sorted(forms.keys() ^ arrived.keys()):
        side = "did not arrive" if odd[0] in forms else f"is no weight of this model{_hint(layout, odd[0])}"
        raise SyncError(f"apply: '{odd[0]}' {side} ({len(odd)} of {len(forms)} names differ); nothing was written")
    for name, (dtype, shape) in forms.items():
        tensor = arrived[name]
        if (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) != (dtype, shape):
            raise SyncError(
                f"apply: '{name}' arrived as {tensor.dtype} {list(tensor.shape)} and is served as {dtype} {shape}; "
                "nothing was written"
            )
    for rotary in layout.rotary:
        for name in rotary.names:
            rotary.check_received(name, arrived[name])


Moves = list[tuple[Tensor, Tensor]]
"""Pairs of target and source."""


def moves(layout: TensorLayout, arrived: Mapping[str, Tensor]) -> Moves:
    """Return the copies that apply a version. Call after `check`, before the engine is paused."""
    return [(piece.view, piece.cut(arrived[piece.name])) for piece in layout]


def moves_of_parts(layout: TensorLayout, arrived: Sequence[Part]) -> Moves:
    """Return the copies that apply a version of which this worker got its boxes alone. SyncError, before anything is
    written, unless they are exactly those that it serves."""
    forms = layout.forms()
    found: dict[tuple[Any, ...], Tensor] = {}
    for name, tensor, row_start, col_start, full_shape in arrived:
        is_served = forms.get(name, ("nothing", []))
        if (str(tensor.dtype).removeprefix("torch."), list(full_shape)) != (is_served[0], list(is_served[1])):
            raise SyncError(
                f"apply: a box of '{name}' arrived as {tensor.dtype} of {list(full_shape)}, and is served as "
                f"{is_served[0]} {list(is_served[1])}; nothing was written"
            )
        rows, cols = rows_and_cols(tensor.shape)
        found[name, row_start, row_start + rows, col_start, col_start + cols] = tensor
    if odd := sorted(found.keys() ^ set(layout.boxes())):
        side = "is no box of this worker" if odd[0] in found else "did not arrive"
        name, *box = odd[0]
        raise SyncError(
            f"apply: '{name}', rows and columns {box}, {side} ({len(odd)} boxes differ); nothing was written"
        )
    for rotary in layout.rotary:
        for name in rotary.names:
            rotary.check_received(name, next(part.tensor for part in arrived if part.name == name))
    return [(piece.view, found[piece.name, *piece.box].view(piece.view.shape)) for piece in layout]


@torch.no_grad()
def write(layout: TensorLayout, arrived: Mapping[str, Tensor], moves: Moves) -> None:
    copy_all(moves)
    for rotary in layout.rotary:
        for name in rotary.names:
            rotary.adopt(arrived[name])
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the next forward pass may be on another stream


class ServedMemory:
    """Digests the served weights again and again. They never move, because captured graphs point at them."""

    def __init__(self, layout: TensorLayout) -> None:
        self._layout = layout
        self._boxes = [(piece.name, *piece.box) for piece in layout]
        derived = layout.derived()
        self._derived = [(name, right) for name, _, right in derived]
        of_layout: list[digest.Piece] = [(piece.name, piece.view, piece.row_start, piece.col_start) for piece in layout]
        of_derived: list[digest.Piece] = [(name, tensor, 0, 0) for name, tensor, _ in derived]
        self._digests = digest.RepeatedDigest([*of_layout, *of_derived])
        self._derived_digests = digest.RepeatedDigest(of_derived)

    def check_derived(self, numbers: Sequence[int] | None = None) -> None:
        """Raise SyncError if a derived tensor changed. `numbers`: the digests, if they were computed before."""
        found = self._derived_digests.take() if numbers is None else numbers
        for (name, right), number in zip(self._derived, found, strict=True):
            if number != right():
                raise SyncError(f"layout: '{name}' is not what this engine derived: it was overwritten")

    def pieces(self) -> list[PieceDigest]:
        """Compute the digests now, and check derived tensors."""
        numbers = self._digests.take()
        self.check_derived(numbers[len(self._boxes) :])
        found = [(*box, number) for box, number in zip(self._boxes, numbers[: len(self._boxes)], strict=True)]
        tables = [(name, tensor, 0, len(tensor), 0, 1) for name, tensor in self._layout.tables().items()]
        return [*found, *digests_of(tables)]


def digests_of(parts: Sequence[tuple[str, Tensor, int, int, int, int]]) -> list[PieceDigest]:
    """`parts`: name, tensor, rows from and to, columns from and to."""
    numbers = digest.pieces((name, tensor, top, left) for name, tensor, top, _, left, _ in parts)
    boxes = [(name, top, bottom, left, right) for name, _, top, bottom, left, right in parts]
    return [(*box, number) for box, number in zip(boxes, numbers, strict=True)]


def check_served(pieces: Iterable[PieceDigest], expected: Mapping[str, str], shapes: Mapping[str, Any]) -> None:
    """Raise SyncError if a digest that was read back differs from the one sent, for tensors that this worker holds
    whole."""
    whole = [
        (name, number)
        for name, top, bottom, left, right, number in pieces
        if name in expected and (top, left) == (0, 0) and [bottom, right] == _size(shapes[name])
    ]
    for name, number in whole:
        if digest.text(number) != expected[name]:
            raise SyncError(f"apply: '{name}' is served as {digest.text(number)} and was sent as {expected[name]}")


def _size(shape: list[int]) -> list[int]:
    cols = 1
    for length in shape[1:]:
        cols *= length
    return [shape[0], cols]


def _hint(layout: TensorLayout, name: str) -> str:
    return f": it is tied to '{layout.aliases[name]}'" if name in layout.aliases else ""
