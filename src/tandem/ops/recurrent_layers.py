"""Layers that read their row from its left, where a row holds several sequences.

A gated delta net, a Mamba layer and a short convolution take no mask, so a second sequence of a row would depend on the
first one. Here each gets its input gathered again: a row for each sequence, which begins with its prompt and is padded
on the right. Its output goes back to where the input was. All other layers compute the shared rows as they are.

The classes of transformers are changed for the whole process; without `sequences` they do as before.

Shapes: P positions of all rows, S sequences of a call, W positions of its longest, H hidden.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from functools import partial, wraps
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.ops.attention_masks import num_recurrent
from tandem.ops.module_parts import layers_of
from tandem.ops.row_packing import micro_batches
from tandem.types import PackedRows

_PADDING = 256
"""Most positions of padding in a call of sequences that have a row each; one more call costs about as much."""
_NAMES = ("linear_attn", "mamba", "conv")
"""What the layers of transformers' models call their recurrent part."""
_DELTA_RULE = "torch_chunk_gated_delta_rule"
"""A function in transformers' modules. It calls the kernel of a package where there is one, and wraps torch's own."""


def why_in_torch(module: Any) -> str:
    """Let torch compute gated delta nets, in the whole process, if a package's kernel computes no gradient here. Return
    what that says; empty if nothing changed.

    The gradient by flash-linear-attention's kernels is wrong with some versions of Triton: they refuse it, and only in
    training."""
    config, why = module.config.get_text_config(), ""
    for modeling in {sys.modules.get(type(part).__module__) for part in module.modules()}:
        function = getattr(modeling, _DELTA_RULE, None)
        if function is None or (in_torch := unwrap(function)) is function or not hasattr(config, "linear_key_head_dim"):
            continue
        key, value = ((1, 64, 1, size) for size in (config.linear_key_head_dim, config.linear_value_head_dim))
        begin = partial(torch.ones, device=module.device, dtype=module.dtype)
        values, decay, strength = begin(value, requires_grad=True), -begin(1, 64, 1).float(), begin(1, 64, 1)
        try:
            with torch.enable_grad():
                made, _ = function(begin(key), begin(key), values, g=decay, beta=strength, use_qk_l2norm_in_kernel=True)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 - asked by a model, it may answer all the same
            continue
        try:
            torch.autograd.grad(made.float().sum(), values)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a compiler may run here, and torch's own is there for all else
            why = f"{type(error).__name__}: {str(error)[:500]}"
            setattr(modeling, _DELTA_RULE, in_torch)
    return why


class Sequences(NamedTuple):
    """Where the sequences of a micro-batch lie among its positions."""

    calls: list[Tensor]
    """By call, [S, W]: the position of each token."""
    places_P: Tensor
    """The way back: of each position, its place in the outputs of all calls, one behind the other."""


_now: ContextVar[Sequences | None] = ContextVar("sequences of the layer that is computed now", default=None)
_num_gathered: ContextVar[list[int] | None] = ContextVar("number of parts that gathered", default=None)
_changed: set[type] = set()
_MARK = "_tandem_shares_rows"


def share_rows(module: Any) -> bool:
    """Return whether this model, or one that it was copied from, computes rows of several sequences (`engage`)."""
    return getattr(module.base_model, _MARK, False)


def engage(module: Any, num_layers: int, trial: Callable[[], Any]) -> str:
    """Let the module's forward accept `sequences`. Return why it cannot; empty if it can.

    `trial` runs the forward with them: each of the model's `num_layers` recurrent layers must get them.
    """
    for layer, parts in _layers(module):
        _change(type(layer), _with_sequences)
        for part in parts:
            _change(type(part), _gathering)
    number = [0]
    before = _num_gathered.set(number)
    try:
        trial()
    finally:
        _num_gathered.reset(before)
    if number[0] != num_layers:
        return f"{number[0]} of its {num_layers} recurrent layers can compute rows of several sequences"
    setattr(module.base_model, _MARK, True)
    return ""


def _layers(module: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Return each decoder layer with its recurrent parts."""
    for layer in layers_of(module):
        named = [part for name, part in layer.named_children() if name in _NAMES]
        yield layer, [part for part in named if not type(part).__module__.startswith("torch.")]


@torch.no_grad()
def why_padding_enters(module: Any, like: Tensor) -> str:
    """Return how padding before a sequence, under a mask, changes what a recurrent part computes of it; empty if no
    part does. A copy of each in float32 is asked, as 16 bits hide a small change; kernels without float32 are asked as
    they are. `like`: a tensor with the model's type and device."""
    config = module.config.get_text_config()
    hidden_2TH = torch.randn(2, 12, config.hidden_size, generator=torch.Generator().manual_seed(0)).to(like.device)
    parts = [part for _, parts in _layers(module) for part in parts]
    if len(parts) < num_recurrent(config):
        return f"{len(parts)} of its {num_recurrent(config)} recurrent layers can be asked what padding does"
    for part in parts:
        try:
            exact = part if like.dtype == torch.float32 else deepcopy(part).float()
            off, most = _padding_taken_in(exact, hidden_2TH), 1e-4
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 - of a kernel
            off, most = _padding_taken_in(part, hidden_2TH.to(like.dtype)), 2e-2
        if not off <= most:
            return f"padding before a prompt changes what {type(part).__name__} computes ({off:.1g} of the norm)"
    return ""


def _padding_taken_in(part: Any, hidden_2TH: Tensor) -> float:
    """Return how far the second row is off for its padding, of its norm."""
    real_2T = torch.arange(hidden_2TH.shape[1], device=hidden_2TH.device) >= hidden_2TH.new_tensor([[0], [7]])
    padded_TH, alone_TH = part(hidden_2TH, attention_mask=real_2T)[1, 7:], part(hidden_2TH[1:, 7:])[0]
    return float((padded_TH - alone_TH).norm() / alone_TH.norm().clamp_min(1e-12))


def sequences_of(packed: PackedRows, num_positions: int, *, is_flat: bool) -> Sequences:
    """`num_positions`: most of a call, padding included, or one sequence. `is_flat`: the forward gets the packed tokens
    as one row, not the micro-batch's own rows."""
    begins, begins_k, _, _, keys_K = packed.spans
    own, whole = begins.diff().tolist(), begins_k.diff().tolist()  # tokens of each sequence; and with its prompt
    among_K = torch.arange(len(packed.tokens_T), device=begins.device) if keys_K is None else keys_K
    positions = (among_K if is_flat else packed.tokens_T[among_K]).split(whole)
    calls: list[Tensor] = []
    places = [among_K] * len(own)
    start = 0
    for now in micro_batches(whole, num_positions, _PADDING):
        calls.append(torch.nn.utils.rnn.pad_sequence([positions[each] for each in now], batch_first=True))
        width = whole[now[0]]
        for row, each in enumerate(now):
            end = start + row * width + whole[each]
            places[each] = torch.arange(end - own[each], end, device=begins.device)
        start += len(now) * width
    places_T = torch.cat(places)
    return Sequences(calls, places_T if is_flat else places_T[packed.place_of])


@contextmanager
def _computing(sequences: Sequences | None) -> Iterator[None]:
    before = _now.set(sequences)
    try:
        yield
    finally:
        _now.reset(before)


def _change(kind: Any, how: Callable[[Any], Any]) -> None:
    if kind not in _changed:
        kind.forward = how(kind.forward)
        if hasattr(kind, "gradient_checkpointing"):  # transformers recomputes a layer only by its outermost wrapper
            kind.__init_subclass__()
        _changed.add(kind)


def _with_sequences(theirs: Any) -> Any:
    """The forward of a decoder layer. As an argument `sequences` is there when the layer is recomputed, too."""

    @wraps(theirs)
    def forward(self: Any, *args: Any, sequences: Sequences | None = None, **given: Any) -> Any:
        with _computing(sequences):
            return theirs(self, *args, **given)

    return forward


def _gathering(theirs: Any) -> Any:
    """The forward of a layer's recurrent part."""

    @wraps(theirs)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        sequences = _now.get()
        if sequences is None:
            return theirs(self, hidden_states, *args, **given)
        if (number := _num_gathered.get()) is not None:
            number[0] += 1
        flat_PH = hidden_states.flatten(0, 1)
        found = [theirs(self, flat_PH[each_SW]).flatten(0, 1) for each_SW in sequences.calls]
        return torch.cat(found)[sequences.places_P].view(*hidden_states.shape[:2], -1)

    return forward
