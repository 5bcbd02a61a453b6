"""Read from vLLM's layers where each tensor of a checkpoint lies in the served memory.

vLLM fuses (q, k, v; gate, up), pads (the vocabulary), shards (tensor parallel) and wraps (adapters). Each class of
layer has a reader here; an unknown class is refused, because a wrong guess would serve wrong weights.

Rows are the first dimension, columns all others together; a vector is one column. L latent numbers, N heads, P and V
numbers of a head's key and value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem.errors import SyncError
from tandem.ops.named_tensors import whereabouts
from tandem.ops.parts import rows_and_cols
from tandem.vllm_worker.checkpoint_names import CheckpointNames
from tandem.vllm_worker.derived_tensors import Constant, Derived, OtherForm, Rotary
from tandem.vllm_worker.unpacked_cpu_weights import COPY_OF_PACKED, computes_with_plain_experts, plain_linear

_WRAPPED = ".base_layer"
_NORMS = (
    "RMSNorm", "GemmaRMSNorm", "LayerNorm", "RMSNormGated", "TPAwareRMSNorm", "TPAwareGemmaRMSNorm",
    "Mixer2RMSNormGated",
)  # fmt: skip
_GEMMAS = (
    "GemmaModel", "Gemma2Model", "Gemma3Model", "Gemma4Model", "Gemma4SelfDecoderLayers", "Gemma4DecoderLayer",
)  # fmt: skip
_CONSTANTS = {
    "normalizer": "embed_tokens.embed_scale",
    "embed_scale_per_layer": "embed_tokens_per_layer.embed_scale",
    "per_layer_input_scale": "",
    "per_layer_projection_scale": "",
    "layer_scalar": "layer_scalar",
}
"""Buffers of Gemma's models that no step trains, and a trainer's names of them; empty: it has none."""
_ONE_WORKER = "layout: '{}': {} cut between {} workers, in a way not known; set engine.tensor_parallel = 1"
_FUSED = {"Glm4ForCausalLM": ("gate_up_proj",)}
"""Layers that are one tensor in the checkpoint, though vLLM names parts of them."""
_USE_SERVER = "set engine.kind = 'server' for it"
_LATENT_ATTENTION = ("DeepseekV3ForCausalLM",)
"""Models with latent attention (MLA) whose settings fixed_settings.py has looked at."""
_TRANSPOSED_EXPERTS, _BY_TURNS = ("GptOssForCausalLM",), "swigluoai"
"""Models whose experts have inputs as rows, and gate and up by turns; vLLM's name of what computes with the latter."""
_ROUTING_BIAS = "e_score_correction_bias"
_PLAIN_EXPERTS = ("TRITON", "BATCHED_TRITON")
"""vLLM's kernels for experts that compute with gate and up, and down, in a checkpoint's order."""


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
        if tensor.ndim > 2:  # cut by rows alone
            return tensor[top:bottom]
        rows = tensor[top:bottom]
        return rows if tensor.ndim == 1 else rows[:, left:right]


@dataclass
class LayoutWalk:
    """What the walk over the modules has found so far."""

    names: CheckpointNames
    model: str = ""
    """The name of its class."""
    pieces: dict[str, list[TensorPiece]] = field(default_factory=dict[str, list[TensorPiece]])
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    scales: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    owners: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    """By identity of a parameter: the path where it was found first, and the name of (the first part of) its
    content."""
    alias_paths: set[str] = field(default_factory=set[str])
    held: dict[str, int] = field(default_factory=dict[str, int])
    """How many elements of a parameter are accounted for."""
    derived: dict[str, Derived] = field(default_factory=dict[str, Derived])
    """Rotary tables by the trainer's name of their module, and the kind of the layers that use it; others by path."""
    derived_paths: set[str] = field(default_factory=set[str])
    kinds: Sequence[str] = ()
    """Of the layers, if each kind has a rotary table of its own."""
    rope_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the model's configuration."""


Reader = Callable[[LayoutWalk, str, Any, Mapping[str, list[str]]], None]
"""Arguments: the walk, the layer's path, the layer, and the checkpoint's names of fused layers."""


def checkpoints_names(model: Any) -> Mapping[str, list[str]]:
    """Return, by fused layer of vLLM, the names of its parts in the checkpoint."""
    told: Mapping[str, Any] = getattr(model, "packed_modules_mapping", None) or {}
    fused = _FUSED.get(type(model).__name__, ())
    return {key: [key] if key in fused else list(names) for key, names in told.items()}


def walk_of(model: Any) -> LayoutWalk:
    """Return a walk over this model that has found nothing yet."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    settings: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    return LayoutWalk(
        CheckpointNames(model),
        type(model).__name__,
        kinds=kinds if set(kinds) & set(settings) else (),
        rope_settings=settings,
    )


def reader_of(path: str, module: Any) -> Reader | None:
    """Return what reads a layer; None if it has nothing of its own. SyncError for a class that is not known."""
    reader = _READERS.get(type(module).__name__)
    if reader is not None and type(module).__module__.startswith(("vllm.", "torch.nn.")):
        return reader
    if type(module).__module__.startswith("transformers.") and type(module).__name__.endswith("RotaryEmbedding"):
        return _frequencies
    _refuse_unknown(path, module)
    return None


# --- one reader a class


def _qkv(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    head, v_head = layer.head_size, getattr(layer, "v_head_size", layer.head_size)
    kv_rank = layer.tp_rank // layer.num_kv_head_replicas  # several ranks hold the same heads where there are few
    sections = [
        (layer.num_heads * head, layer.tp_rank, layer.total_num_heads * head),
        (layer.num_kv_heads * head, kv_rank, layer.total_num_kv_heads * head),
        (layer.num_kv_heads * v_head, kv_rank, layer.total_num_kv_heads * v_head),
    ]
    _sections(found, path, layer, fused, sections)


def _merged(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    sizes = list(layer.output_sizes)
    if path.endswith(".in_proj_qkvz") and len(sizes) == 4:  # q, k and v are one tensor of the checkpoint
        if layer.tp_size > 1:
            raise SyncError(_ONE_WORKER.format(path, "a gated delta net is", layer.tp_size))
        sizes = [sum(sizes[:3]), sizes[3]]
    sections = [(size // layer.tp_size, layer.tp_rank, size) for size in sizes]
    _sections(found, path, layer, fused, sections)


def _column(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    sections = [(layer.output_size_per_partition, layer.tp_rank, layer.output_size)]
    _sections(found, path, layer, {}, sections)


def _sections(
    found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]], sections: list[tuple[int, int, int]]
) -> None:
    """Add the sections of a fused parameter. Each has: rows on this rank, the rank's number, rows in total."""
    _check_plain(path, layer)
    plain = path.removesuffix(_WRAPPED)
    prefix, _, last = plain.rpartition(".")
    names = [f"{prefix}.{name}" for name in fused.get(last, [last])]
    together = names == [plain]  # one tensor in the checkpoint, too
    if together and all(here == size for here, _, size in sections):
        sections = [(total := sum(size for *_, size in sections), 0, total)]
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


def _row(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    _check_plain(path, layer)
    name = path.removesuffix(_WRAPPED)
    here = layer.input_size_per_partition
    shape = (layer.weight.shape[0], layer.input_size)
    _add(found, f"{name}.weight", f"{path}.weight", layer.weight, layer.weight.data, 0, layer.tp_rank * here, shape)
    if getattr(layer, "bias", None) is not None:  # whole on every rank; the first alone adds it
        _whole(found, f"{name}.bias", f"{path}.bias", layer.bias)


def _replicated(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    _column(found, path, _AsOneRank(layer), fused)


def _gate(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    _replicated(found, path, layer, fused)
    if (bias := getattr(layer, _ROUTING_BIAS, None)) is not None:
        _whole(found, f"{path}.{_ROUTING_BIAS}", f"{path}.{_ROUTING_BIAS}", bias)


class _AsOneRank:
    """A replicated layer seen as a column-parallel one of a single rank."""

    tp_rank = 0

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.output_size_per_partition = layer.output_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _vocabulary(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
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


def _as_it_is(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    for kind in ("weight", "bias"):
        param = getattr(layer, kind, None)
        if isinstance(param, torch.nn.Parameter):
            _whole(found, f"{path}.{kind}", f"{path}.{kind}", param)


def _attention(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    found.scales |= {f"{path}.{name}": buffer for name, buffer in layer.named_buffers(recurse=False)}


def _tower_attention(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    if layer.fp8_enabled:
        raise SyncError(f"layout: '{path}' is quantised attention (fp8); start vLLM without --mm-encoder-attn-dtype")


def _rotary(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    before, of_layer, within = found.names.original(path).partition(".layers.")  # a trainer has one for all layers
    name = f"{before}.rotary_emb" if of_layer else before
    number = within.partition(".")[0]
    if of_layer and found.kinds and not (number.isdecimal() and int(number) < len(found.kinds)):
        raise SyncError(f"layout: '{path}' belongs to a layer whose kind is not known")
    kind = found.kinds[int(number)] if of_layer and found.kinds else ""
    known = found.derived.get(f"{name} {kind}")
    if known is None:
        settings = found.rope_settings.get(kind, {}) if kind else found.rope_settings
        found.derived[f"{name} {kind}"] = Rotary(path, layer, name, kind, settings)
    elif not isinstance(known, Rotary) or not known.is_of(layer):
        raise SyncError(f"layout: '{path}' is a second rotary embedding; only one for all layers is known")
    found.derived_paths |= {f"{path}.{name}" for name, _ in layer.named_buffers(recurse=False)}


def _frequencies(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    for key, buffer in layer.named_buffers(recurse=False):
        _constant(found, f"{path}.{key}", buffer, found.names.original(f"{path}.{key}"))


def _constants(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    for key, buffer in layer.named_buffers(recurse=False):
        if key not in _CONSTANTS:
            raise SyncError(f"layout: the buffer '{path}.{key}' is not known")
        # vLLM computes a part of Gemma 4's layers in a module of its own, which has the whole model's constants.
        before = path.removesuffix(".self_decoder")
        theirs = found.names.original(f"{before}.{_CONSTANTS[key]}") if _CONSTANTS[key] else ""
        _constant(found, f"{path}.{key}", buffer, theirs)


def _constant(found: LayoutWalk, path: str, buffer: Tensor, name: str) -> None:
    found.derived[path] = Constant(path, buffer, name)
    found.derived_paths.add(path)


def _delta_net(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    if layer.tp_size > 1:  # vLLM cuts the rows of q, k and v of the convolution apart
        raise SyncError(_ONE_WORKER.format(path, "a gated delta net is", layer.tp_size))
    _whole(found, f"{path}.dt_bias", f"{path}.dt_bias", layer.dt_bias)
    if layer.A_log.dtype == layer.dt_bias.dtype:
        _whole(found, f"{path}.A_log", f"{path}.A_log", layer.A_log)
    else:
        _other_form(found, f"{path}.A_log", layer.A_log, f"{path}.A_log", layer.dt_bias.dtype, is_decay=False)


def _short_convolution(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    if layer.conv.tp_size > 1:
        raise SyncError(_ONE_WORKER.format(path, "a short convolution is", layer.conv.tp_size))


def _mamba(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    """A Mamba layer of the first or second kind, but for its linear layers and norms."""
    if layer.conv1d.tp_size > 1:  # vLLM cuts the parts of the convolution and of the first projection apart
        raise SyncError(_ONE_WORKER.format(path, "a Mamba layer is", layer.conv1d.tp_size))
    for key in ("D", "dt_bias"):
        if (param := getattr(layer, key, None)) is not None:
            _whole(found, f"{path}.{key}", f"{path}.{key}", param)
    _other_form(found, f"{path}.A", layer.A, f"{path}.A_log", layer.D.dtype, is_decay=True)
    again = getattr(layer, "conv_weights", None)
    if again is not None:
        if again.data_ptr() != layer.conv1d.weight.data_ptr():
            raise SyncError(f"layout: '{path}' computes with a copy of its convolution, which cannot be written")
        found.derived_paths.add(f"{path}.conv_weights")


def _other_form(found: LayoutWalk, path: str, served: Tensor, name: str, dtype: torch.dtype, *, is_decay: bool) -> None:
    found.derived[path] = OtherForm(path, served.data, found.names.original(name), dtype, is_decay=is_decay)
    found.held[path] = served.numel()


def _falcon_scales(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    """Scales of the parts of the first projection; a trainer has them within the Mamba layer, with one axis more."""
    _constant(found, f"{path}.mup_vector", layer.mup_vector[None], found.names.original(f"{path}.mamba.mup_vector"))


def _experts(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    """The experts of a layer lie in two stacks: gate and up, and down; a trainer has the same."""
    method, parallel = layer.quant_method, layer.moe_config.moe_parallel_config
    if type(method).__name__ != "UnquantizedFusedMoEMethod":
        raise SyncError(f"layout: '{path}' is served by {type(method).__name__}; only unquantised weights are known")
    if parallel.tp_size > 1 or parallel.use_ep:
        raise SyncError(_ONE_WORKER.format(path, "experts are", parallel.tp_size))
    kernels = method.unquantized_backend.name
    if kernels not in _PLAIN_EXPERTS and not computes_with_plain_experts(method):
        raise SyncError(f"layout: '{path}' is served by {kernels}, which reorders weights in a way not known")
    is_transposed = found.model in _TRANSPOSED_EXPERTS
    if (layer.activation.value == _BY_TURNS) != is_transposed:
        raise SyncError(
            f"layout: '{path}' computes {layer.activation.value}, which is not known of this model; {_USE_SERVER}"
        )
    name = path.removesuffix(".routed_experts")
    for number, ours in (("13", "gate_up_proj"), ("2", "down_proj")):
        param = getattr(layer, f"w{number}_weight")
        view = param.data.transpose(1, 2) if is_transposed else param.data
        _add(found, f"{name}.{ours}", f"{path}.w{number}_weight", param, view, 0, 0, tuple(view.shape))
        if (bias := getattr(layer, f"w{number}_bias", None)) is not None:
            used = getattr(method.moe_quant_config, f"w{number[0]}_bias", None)
            _check_used(f"{path}.w{number}_bias", bias, used)
            _whole(found, f"{name}.{ours}_bias", f"{path}.w{number}_bias", bias)
    if (bias := getattr(layer, _ROUTING_BIAS, None)) is not None:  # the gate's
        _whole(found, f"{name}.{_ROUTING_BIAS}", f"{path}.{_ROUTING_BIAS}", bias)


def _latent_attention(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    """vLLM also computes with two parts of `kv_b_proj`, as views by head of the same memory."""
    if found.model not in _LATENT_ATTENTION:
        raise SyncError(f"layout: '{path}' is latent attention, which is not known of {found.model}; {_USE_SERVER}")
    _attention(found, path, layer, fused)
    weight, name = getattr(layer.kv_b_proj, "base_layer", layer.kv_b_proj).weight, f"{path}.kv_b_proj.weight"
    sizes = [layer.qk_nope_head_dim, layer.v_head_dim]
    keys_LNP, values_LNV = weight.data.T.view(layer.kv_lora_rank, layer.num_heads, sum(sizes)).split(sizes, dim=-1)
    for part, view in (("W_UK_T", keys_LNP.permute(1, 2, 0)), ("W_UV", values_LNV.transpose(0, 1))):
        _check_used(name, view, getattr(layer, part, None))
        found.alias_paths.add(f"{path}.{part}")


def _sinks(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    """Logits that each head adds to its scores, and which its kernel reads."""
    sinks, heads = layer.sinks, layer.num_attention_heads
    if len(sinks) != heads:
        raise SyncError(_ONE_WORKER.format(path, "attention sinks are", heads // len(sinks)))
    if sinks.dtype not in (torch.bfloat16, torch.float32):  # on a CPU the first request makes the copy
        raise SyncError(
            f"layout: '{path}.sinks' is {sinks.dtype}; vLLM may compute with a copy; serve bfloat16 or float32"
        )
    _check_used(f"{path}.sinks", sinks, getattr(layer.attn.impl, "sinks", None))
    _whole(found, f"{path}.sinks", f"{path}.sinks", sinks)


def _check_used(path: str, param: Tensor, used: Tensor | None) -> None:
    """Refuse a parameter of which the kernel has another copy: that would stay as it is."""
    if used is None or whereabouts(used) != whereabouts(param):
        raise SyncError(
            f"layout: vLLM's kernel does not compute with '{path}' itself but with a copy of it, if at all; start vLLM "
            "with another backend, or on a GPU"
        )


def _nothing(found: LayoutWalk, path: str, layer: Any, fused: Mapping[str, list[str]]) -> None:
    """A module that derives nothing from weights but what `_experts` has looked at."""


def _whole(found: LayoutWalk, name: str, path: str, param: Tensor) -> None:
    _add(found, name, path, param, param.data, 0, 0, tuple(param.shape))


def _add(
    found: LayoutWalk,
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
    if hasattr(layer, COPY_OF_PACKED):
        raise SyncError(
            f"layout: the convolution '{path}' is packed for this CPU's bfloat16; use a GPU, or float32 "
            "(precision.weights)"
        )
    linear = getattr(layer, "cpu_linear", None)
    if linear not in (None, plain_linear, torch.nn.functional.linear):
        raise SyncError(f"layout: '{path}' computes with a packed copy of its weight, which cannot be read back")


def _refuse_unknown(path: str, module: Any) -> None:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    if own:
        kind = type(module).__name__
        what = "a mixture of experts" if "MoE" in kind or "Expert" in kind else "a layer of a class"
        raise SyncError(f"layout: '{path}.{own[0][0]}' belongs to {what} that is not known: {kind}")
    if hasattr(module, "process_weights_after_loading"):
        raise SyncError(f"layout: '{path}' ({type(module).__name__}) derives weights of its own, in a way not known")


_READERS: Mapping[str, Reader] = {
    "QKVParallelLinear": _qkv,
    **dict.fromkeys(("MergedColumnParallelLinear", "DeepSeekV2FusedQkvAProjLinear"), _merged),
    "ColumnParallelLinear": _column,
    "RowParallelLinear": _row,
    "ReplicatedLinear": _replicated,
    "GateLinear": _gate,
    "VocabParallelEmbedding": _vocabulary,
    "ParallelLMHead": _vocabulary,
    "Attention": _attention,
    "MMEncoderAttention": _tower_attention,
    "QwenGatedDeltaNetAttention": _delta_net,
    "ShortConv": _short_convolution,
    "FalconH1SSMDecoderLayer": _falcon_scales,
    "OAIAttention": _sinks,
    "MLAAttention": _latent_attention,
    **dict.fromkeys(("RoutedExperts", "GptOssRoutedExperts"), _experts),
    "UnquantizedFusedMoEMethod": _nothing,
    **dict.fromkeys((*_NORMS, "Conv3dLayer", "Embedding"), _as_it_is),
    **dict.fromkeys(_GEMMAS, _constants),
    **dict.fromkeys(("MambaMixer", "MambaMixer2"), _mamba),
    **dict.fromkeys(Rotary.CLASSES, _rotary),
}
