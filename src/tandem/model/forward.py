"""Run a model over a micro-batch: with masked rows, or if requested, packed and with compiled layers.

When a model is loaded, a trial checks that its attention obeys `spans`. A sequence's result must not change at all with
another sequence's tokens, must change with its own prompt, and must equal that of masked rows. Another trial compiles
the layers, forward and backward. An option that fails its trial is not used, and the reason is reported.

Shapes: B rows, T positions, N trained tokens, H hidden.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch

from tandem.errors import SpecError
from tandem.ops import attention_masks, packed_attention, recurrent_layers
from tandem.ops.lm_head import Head
from tandem.ops.module_parts import layers_of
from tandem.types import ImageRows, MicroBatch, PackedRows

_log = logging.getLogger(__name__)

_SELECTIVE = 0.85
"""Share of a compiled layer's activations that are kept. Outputs of norms and the input of the last product are
recomputed; attention is not, which would begin between 0.7 and 0.8."""
_NEAR = 0.1
"""Largest relative difference between packed and masked rows, which are both rounded to 16 bits at every operation."""


class Forward:
    """Runs a module, and others with the same config (a reference, a teacher)."""

    def __init__(
        self, module: Any, *, packed: bool, compiled: bool, selective: bool = False, why_not_compiled: str = ""
    ) -> None:
        """`selective`: compiled layers recompute cheap activations. `why_not_compiled`: the caller's reason not to
        compile; empty if there is none."""
        self._num_recurrent = attention_masks.num_recurrent(module.config)
        self.why_alone = why_alone(module)
        """Why each sequence has a row of its own; empty if sequences can share rows."""
        self.why_in_torch = ""
        """Why torch computes the recurrent layers of a model that is trained, in place of a package's kernels."""
        if self.is_recurrent:
            why_not_compiled = why_not_compiled or "recurrent layers gather their sequences, which is not compiled"
        self.why_masked = (
            self.why_alone
            if packed and self.why_alone
            else packed_attention.why_not(module)
            if packed
            else "model.attention is not 'packed'"
        )
        self.why_not_compiled = why_not_compiled or self.why_masked or ("" if compiled else "model.compile = false")
        if self.why_masked:
            return
        theirs = module.config.get_text_config()._attn_implementation
        packed_attention.engage(module)
        self.why_masked = _why_not(lambda: try_spans(module))
        if self.why_masked:
            module.config.get_text_config()._attn_implementation = theirs
            self.why_not_compiled = self.why_masked
        elif not self.why_not_compiled:
            functorch.activation_memory_budget = _SELECTIVE if selective else 1.0  # holds for the whole process
            with without_sigterm():
                self.why_not_compiled = _why_not(lambda: _try_compiled(module))
            if self.why_not_compiled:
                _compile(module, undo=True)

    @property
    def is_recurrent(self) -> bool:
        """Whether the model has layers that get a row for each sequence, beside others that share rows."""
        return not self.why_alone and self._num_recurrent > 0

    @property
    def shares_freely(self) -> bool:
        """Whether samples can share a prompt without an attention mask."""
        return not self.why_masked

    def hidden(self, head: Head, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return hidden states, and for each trained token the index of the one that predicts it."""
        if not self.why_masked and head.config.get_text_config()._attn_implementation == packed_attention.NAME:
            more = _sequences(head.body, micro.packed, micro.segments_BT, is_flat=True)
            hidden_TH = _packed(head.hidden, micro.ids_BT, micro.positions_BT, micro.packed, micro.images, **more)
            return hidden_TH, micro.packed.place_of[micro.source_N]
        if attention_masks.computed_alone(head.config) and not recurrent_layers.share_rows(head.body):
            return _each_alone(head, micro), micro.packed.place_of[micro.source_N]
        more = _sequences(head.body, micro.packed, micro.segments_BT, is_flat=False)
        mask, positions_BT = _mask(head.config, micro.segments_BT, micro.parents_BT, micro.positions_BT)
        hidden_BTH = head.hidden(micro.ids_BT, positions_BT, mask, images=micro.images, **more)
        return hidden_BTH.flatten(0, 1), micro.source_N


def _sequences(body: Any, packed: PackedRows, segments_BT: Tensor, *, is_flat: bool) -> dict[str, Any]:
    """Return the argument of a forward whose recurrent layers need to know where sequences are."""
    if not recurrent_layers.share_rows(body) or (not is_flat and bool((segments_BT <= 0).all())):
        return {}
    return {"sequences": recurrent_layers.sequences_of(packed, segments_BT.numel(), is_flat=is_flat)}


def _each_alone(head: Head, micro: MicroBatch) -> Tensor:
    """Return hidden states of the T tokens of all rows. Each sequence is computed in a row of its own, padded on the
    right.

    A branch of a prompt is computed with its prompt, and so is the prompt itself. Sequences of similar lengths share a
    call, which has no more positions than the micro-batch or the longest sequence, and little padding.
    """
    sequences = recurrent_layers.sequences_of(micro.packed, micro.ids_BT.numel(), is_flat=True)
    ids_T = micro.ids_BT.flatten()[micro.packed.tokens_T]
    found: list[Tensor] = []
    for places_SW in sequences.calls:
        positions_SW = torch.arange(places_SW.shape[1], device=ids_T.device).expand_as(places_SW)
        found.append(head.hidden(ids_T[places_SW], positions_SW, None).flatten(0, 1))
    return torch.cat(found)[sequences.places_P]


def _packed(
    hidden: Callable[..., Tensor],
    ids_BT: Tensor,
    positions_BT: Tensor,
    packed: PackedRows,
    images: ImageRows | None = None,
    **more: Any,
) -> Tensor:
    """`hidden`: as that of a Head, and `more` of its arguments."""
    ids_1T, positions_1T = (each.flatten()[packed.tokens_T][None] for each in (ids_BT, positions_BT))
    if images is not None:
        rotary_31T = images.rotary_3BT.flatten(1)[:, None, packed.tokens_T]
        images = ImageRows(rotary_31T, packed.place_of[images.places_P], images.digests)
    mask = packed_attention.no_mask(ids_1T.device)
    return hidden(ids_1T, positions_1T, mask, images=images, spans=packed.spans, **more)[0]


def _mask(config: Any, segments_BT: Tensor, parents_BT: Tensor, positions_BT: Tensor) -> tuple[Any, Tensor]:
    """Return the attention mask and the positions for it."""
    if attention_masks.plainly_causal(config) and bool(
        (segments_BT <= 0).all()
    ):  # one sequence a row, padding on the right
        # transformers takes restarting positions for new sequences, so padding continues the count to avoid a mask.
        return None, torch.arange(positions_BT.shape[1], device=positions_BT.device).expand_as(positions_BT)
    order_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    keys_B1T = segments_BT[:, None, :]
    seen_BTT = (segments_BT[:, :, None] == keys_B1T) | (parents_BT[:, :, None] == keys_B1T)
    allowed = (seen_BTT & (order_T[:, None] >= order_T))[:, None]
    mask = attention_masks.for_model(config, allowed, positions_BT[:, None, :, None], positions_BT[:, None, None, :])
    return mask, positions_BT


# --- trials


def why_alone(module: Any) -> str:
    """Return why each sequence needs a row of its own; empty if sequences can share rows. Recurrent layers are engaged
    for that, if they can be."""
    why, num_recurrent = attention_masks.computed_alone(module.config), attention_masks.num_recurrent(module.config)
    if not why or not num_recurrent:
        return why
    why_not = _why_not(lambda: _try_sequences(module, num_recurrent))
    return f"{why} ({why_not})" if why_not else ""


def check_gradient(module: Any) -> None:
    """Raise SpecError if recurrent layers compute no gradient here, as packages' kernels do with some versions of
    Triton."""
    trained = [layer for layer in layers_of(module) if any(each.requires_grad for each in layer.parameters())]
    if not trained or not attention_masks.num_recurrent(module.config):
        return
    trial = _Trial(module)
    try:
        with torch.enable_grad(), _leaf_before(trained[0]) as leaf:  # a parameter may be unused, or a rank's rows
            torch.autograd.grad(trial.single().float().sum(), leaf)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise SpecError(
            f"model.path: this model's recurrent layers compute no gradient here: {type(error).__name__}: "
            f"{str(error)[:500]}; without the package of these kernels torch computes the layers, more slowly"
        ) from error


@contextmanager
def _leaf_before(layer: Any) -> Iterator[list[Tensor]]:
    """Cut the graph before a layer. Yields a list, which has the layer's input once it was computed."""
    leaf: list[Tensor] = []

    def cut(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        by_name = "hidden_states" in given
        leaf.append((given["hidden_states"] if by_name else args[0]).detach().requires_grad_())
        return (args, {**given, "hidden_states": leaf[0]}) if by_name else ((leaf[0], *args[1:]), given)

    handle = layer.register_forward_pre_hook(cut, with_kwargs=True)
    try:
        yield leaf
    finally:
        handle.remove()


@torch.no_grad()
def _try_sequences(module: Any, num_recurrent: int) -> str:
    trial = _Trial(module)
    sequences = recurrent_layers.sequences_of(trial.packed, trial.segments_BT.numel(), is_flat=False)
    return recurrent_layers.engage(module, num_recurrent, lambda: trial.masked(sequences=sequences))


def _why_not(trial: Any) -> str:
    try:
        return trial()
    except Exception as error:  # noqa: BLE001 - kernels and a compiler run here; the plain way is there for all else
        _log.warning("the option is not used, its trial failed: %s: %s", type(error).__name__, str(error)[:2000])
        return f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"


class _Trial:
    """Test input: a prompt of 5 tokens with branches of 7 and 4, and a sequence of 6 in another row."""

    def __init__(self, module: Any) -> None:
        device = next(module.parameters()).device
        segments = [[0] * 5 + [1] * 7 + [2] * 4, [0] * 6 + [-1] * 10]
        parents = [[0] * 16, [0] * 6 + [-1] * 10]
        positions = [[*range(5), *range(5, 12), *range(5, 9)], [*range(6)] + [0] * 10]
        made = [torch.tensor(each) for each in (segments, parents, positions)]
        self.packed = packed_attention.pack(made[0], made[1], device)
        self.segments_BT, self.parents_BT, self.positions_BT = (each.to(device) for each in made)
        self.body = module.base_model
        self.vocab = module.config.get_text_config().vocab_size
        self.config = module.config

    def ids(self, changed: slice | None = None) -> Tensor:
        """Return the ids. `changed`: flat positions that get other tokens."""
        ids = (torch.arange(32, device=self.segments_BT.device) * 7 + 1) % self.vocab
        if changed is not None:
            ids[changed] = (ids[changed] + 3) % self.vocab
        return ids.view(2, 16)

    def hidden(self, changed: slice | None = None) -> Tensor:
        more = _sequences(self.body, self.packed, self.segments_BT, is_flat=True)
        return _packed(self._body, self.ids(changed), self.positions_BT, self.packed, **more)

    def masked(self, **more: Any) -> Tensor:
        mask, positions_BT = _mask(self.config, self.segments_BT, self.parents_BT, self.positions_BT)
        more = more or _sequences(self.body, self.packed, self.segments_BT, is_flat=False)
        return self._body(self.ids(), positions_BT, mask, **more).flatten(0, 1)[self.packed.tokens_T]

    def single(self) -> Tensor:
        """Compute each row as one sequence."""
        order_BT = torch.arange(self.segments_BT.shape[1], device=self.segments_BT.device).expand_as(self.segments_BT)
        return self._body(self.ids(), order_BT, None)

    def _body(self, ids_BT: Tensor, positions_BT: Tensor, mask: Any, images: None = None, **more: Any) -> Tensor:
        given = {"attention_mask": mask, "use_cache": False, **more}
        return self.body(input_ids=ids_BT, position_ids=positions_BT, **given).last_hidden_state


@torch.no_grad()
def try_spans(module: Any) -> str:
    trial = _Trial(module)
    plain = trial.hidden()
    prompt, first, second, alone = slice(0, 5), slice(5, 12), slice(12, 16), slice(16, 22)
    for changed, same in ((second, first), (first, second), (alone, first), (first, alone), (first, prompt)):
        if not torch.equal(trial.hidden(changed)[same], plain[same]):
            return "its forward does not pass `spans` to its attention: sequences of one row affect each other"
    if torch.equal(trial.hidden(prompt)[second], plain[second]):
        return "its forward does not pass `spans` to its attention: a branch ignores its prompt"
    off = (plain - trial.masked()).float().norm() / plain.float().norm()
    return "" if off < _NEAR else f"packed rows give another result than masked ones ({float(off):.3f} of the norm)"


def _try_compiled(module: Any) -> str:
    trial, parameters = _Trial(module), [each for each in module.parameters() if each.requires_grad]
    plain = trial.hidden().detach()
    _compile(module)
    for layer in layers_of(module):
        layer.training = layer.gradient_checkpointing
    try:
        hidden_TH = trial.hidden()
        torch.autograd.grad(hidden_TH.float().sum(), parameters, allow_unused=True)
    finally:
        for layer in layers_of(module):
            layer.training = False
    off = (hidden_TH.detach() - plain).float().norm() / plain.float().norm()
    return "" if off < _NEAR else f"compiled layers give another result ({float(off):.3f} of the norm)"


# --- compiled layers


@contextmanager
def without_sigterm() -> Iterator[None]:
    """Hold SIGTERM back, here and in processes that start meanwhile: the compiler's. A service manager sends it to all
    processes of a run, and a step that compiles would wait for ever for workers that have ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Compiled:
    """A layer's call: compiled if `spans` are given, which only training does; otherwise unchanged."""

    def __init__(self, layer: Any) -> None:
        self._plain = layer._call_impl
        self._fast = torch.compile(layer._call_impl, dynamic=True, fullgraph=True)

    def __call__(self, *args: Any, **given: Any) -> Any:
        return (self._plain if given.get("spans") is None else self._fast)(*args, **given)


def _compile(module: Any, *, undo: bool = False) -> None:
    from torch._dynamo import config as dynamo  # here, for they take a second
    from torch._inductor import config as inductor

    # Otherwise the compiler decides by the number of tokens whether it fuses two sums, and compiles a layer once more
    # for each range of it: steps of 8 s among steps of 1.6 s. Holds for the whole process.
    inductor.triton.mix_order_reduction_non_strict_mode = True
    # Otherwise each float of a layer (an epsilon, LoRA's scale) is a tensor on the CPU: a C++ compiler must build its
    # kernels, for minutes on some machines, and each layer's call runs them.
    dynamo.specialize_float = True
    for layer in layers_of(module):
        layer._compiled_call_impl = None if undo else _Compiled(layer)  # torch's attribute, which copies lose
