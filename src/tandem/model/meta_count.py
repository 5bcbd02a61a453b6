"""Count what a model's forward pass saves and computes, without its weights.

The module is on torch's meta device, where tensors have a shape and no values. One row is computed as the trainer
computes it, layer by layer, and what autograd saves is counted, each storage once, as train/memory_accounting.py does.
Attention is recorded as a kernel saves it, for choosing a kernel needs a device. Layers that are made alike are one
module here, which is computed twice: the first of them alone saves what they share, such as a mask.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

import torch
from peft.tuners.lora import layer as lora_layer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations import hub_kernels, moe
from transformers.masking_utils import sdpa_mask

from tandem.model.cast_precision import narrow
from tandem.model.load_checkpoint import refuse_other_images, supported_attention
from tandem.model.lora import add_lora, beside_experts
from tandem.ops import attention_masks
from tandem.ops.byte_sizes import Dims
from tandem.ops.counted_shape import LayerCount, PassCount, Size
from tandem.ops.module_parts import layers_of, tables_of
from tandem.spec.model import LoraSpec

_NAME = "tandem_counted"
_META = torch.device("meta")
_ROW = 256
"""Positions of the row, a multiple of the chunks in which recurrent layers compute."""
_PRODUCTS = {
    "aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2),
}  # fmt: skip
"""Products of matrices, and which of their arguments are multiplied."""
_NOT_TOLD = ("layer_idx", "config", "_modules")
"""Of a module: its layer's index, what is the model's, and its parts, which are told after it."""


def meta_model(config: Mapping[str, Any], name: str) -> Any:
    """Build a model on the meta device as the trainer would load it. ValueError or KeyError if transformers does not
    know it; SpecError if the trainer refuses it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind: Any = CONFIG_MAPPING[config["model_type"]]
    made = kind.from_dict(kind._decode_special_floats(dict(config)))
    refuse_other_images(made, name, "model.path")
    attention = supported_attention(made, "sdpa")
    made.get_text_config().pad_token_id = None  # with one, old families look for it among the ids
    with _META:
        module: Any = AutoModelForCausalLM.from_config(
            made, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
        )
    return module.eval()


def trained_of(module: Any) -> list[tuple[Dims, bool]]:
    """Return the dimensions of each trained tensor, and whether a matrix's optimizer updates it."""
    tables, tied = tables_of(module, module.get_output_embeddings()), module.all_tied_weights_keys
    every = module.named_parameters(remove_duplicate=False)  # of shared layers each
    named = [(name, tensor) for name, tensor in every if tensor.requires_grad and name not in tied]
    return [(tuple(tensor.shape), tensor.ndim >= 2 and name not in tables) for name, tensor in named]


def component_of(module: Any, name: str, tensor: Tensor) -> str:
    """Return what a parameter is counted as in a plan."""
    parts = name.split(".")
    if isinstance(module.get_submodule(".".join(parts[:-1])), nn.Embedding):
        return "embedding"
    if tensor is module.get_output_embeddings().weight:
        return "head"
    if tensor.ndim < 2:
        return "norms and biases"
    if "experts" in parts:
        return "experts"
    if any(part in ("gate", "router", "shared_expert_gate") for part in parts[-2:-1]):
        return "routers"
    if any(part in ("linear_attn", "mamba", "conv", "short_conv") for part in parts):
        return "recurrent layers"
    return "attention" if any("attn" in part or "attention" in part for part in parts) else "mlp"


def share_equal_layers(module: Any) -> None:
    """Replace layers by the first one that is made alike, with the same entries in the config's lists."""
    layers = layers_of(module)
    if max(Counter(id(each) for layer in layers for each in layer.parameters()).values(), default=0) > 1:
        return  # the first of those that share tensors has them alone, so each is counted by itself
    lists = [each for each in module.config.get_text_config().to_dict().values() if isinstance(each, list)]
    for found in [part for part in module.modules() if isinstance(part, nn.ModuleList) and {*part} & {*layers}]:
        alike: dict[str, Any] = {}
        for number, layer in enumerate(found):
            entries = [each[number] for each in lists if len(each) == len(found)]
            found[number] = alike.setdefault(f"{entries} {_made_of(layer)}", layer)


def _made_of(layer: Any) -> list[Any]:
    """Return what a layer's modules have, but for its index. A tensor without values is told by its shape, another
    object by its address: where that is not the same, neither are the layers."""
    named = [(name, type(part), vars(part)) for name, part in layer.named_modules()]
    return [(*of, {key: each for key, each in own.items() if key not in _NOT_TOLD}) for *of, own in named]


def with_adapters(module: Any, width: int, lora: LoraSpec | None) -> Any:
    """Narrow the module to `width` bytes a number, and add the adapters, as build/built_model.py does. Equal layers
    are shared, unless a target names a layer by its number."""
    targets = () if lora is None or lora.targets == "all-linear" else lora.targets
    if not any(part.isdigit() for target in targets for part in target.split(".")):
        share_equal_layers(module)
    if width == 2:
        narrow(module, _META, None)
    if lora is not None:
        with _META:
            add_lora(module, lora)
    return module


def count_pass(module: Any, on_gpu: bool) -> PassCount:
    """Count a forward pass. The module can compute nothing else afterwards."""
    config = module.config.get_text_config()
    # A CPU has no kernel for values that are narrower than keys.
    by_kernel = config._attn_implementation == "sdpa" and (on_gpu or not getattr(config, "kv_lora_rank", None))
    if by_kernel:
        config._attn_implementation = _NAME
        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
    # All is for each token, but for attention's weights, and for adapted experts, whose sums are as large as they are.
    adapted = any(".lora_" in name for name, _ in module.named_parameters())
    plain = by_kernel and not (adapted and beside_experts(module)[0])
    counts = [CountedRow(module, row) for row in ((_ROW,) if plain else (_ROW, 2 * _ROW, 4 * _ROW))]
    for each in counts:
        each.run()
    *layers, root = [_layer(same) for same in zip(*(each.units() for each in counts), strict=True)]
    products = [sum(unit.products for unit in each.units()) for each in counts]
    return PassCount(layers, root, _fit(products).token, sum(unit.heads for unit in counts[0].units()))


def _layer(same: Sequence[_Unit]) -> LayerCount:
    """`same`: a layer, by the row."""
    return LayerCount(
        saved=_fit([sum(each.saved.values()) for each in same]),
        repeated=_fit([each.repeated for each in same]),
        attends=same[0].attends,
        products=_fit([sum((each.outputs | each.attended).values()) for each in same]),
        compiled=_fit([sum((each.outputs | each.attention | each.inputs).values()) for each in same]),
        compiled_least=_fit([sum((each.outputs | each.attention).values()) for each in same]),
        widest=_fit([max(each.saved.values(), default=0) for each in same]),
    )


def _fit(numbers: Sequence[float]) -> Size:
    """Return what goes through the numbers of one row, or of three, of which each is twice as long as the one
    before."""
    if len(numbers) == 1:
        return Size(token=numbers[0] / _ROW)
    first, second, third = numbers
    pair = max(0.0, (third - second) / 2 - (second - first)) / 3
    token = max(0.0, second - first - 3 * pair)
    return Size(max(0.0, first - token - pair), token / _ROW, pair / _ROW**2)


class _Unit:
    """One layer's forward pass: its storages, and their bytes."""

    def __init__(self, had_gradient: bool = False) -> None:
        self.had_gradient = had_gradient
        self.made: Any = None
        self.saved: dict[int, int] = {}
        self.outputs: dict[int, int] = {}
        self.inputs: dict[int, int] = {}
        self.attention: dict[int, int] = {}
        self.attended: dict[int, int] = {}
        self.repeated, self.attends = 0, False
        self.products, self.heads = 0, 0.0


class CountedRow(TorchDispatchMode):
    """Runs one row, and notes what autograd saves, by layer, and every product."""

    def __init__(self, module: Any, row: int) -> None:
        super().__init__()
        self._module, self._row = module, row
        self._weights = {_storage(each) for each in (*module.parameters(), *module.buffers())}
        self._layers = layers_of(module, repeated=True)
        self._calls: dict[Any, list[_Unit]] = defaultdict(list)
        self._root = self.now = _Unit()
        self._alive: list[Tensor] = []
        """A storage that is freed could give its place to another."""
        self._seen: set[int] = set()

    def run(self, **more: Any) -> None:
        """`more`: what the model is given beside its tokens."""
        token, times = _counting.set(self), Counter(self._layers)
        for layer in times:
            layer.forward = partial(self._call, self._calls[layer], times[layer] > 1, layer.forward)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor), self:
                hidden = _hidden_of(self._module, self._row, **more)
        finally:
            _counting.reset(token)
            for layer in times:
                del layer.forward
        self._root.saved.setdefault(_storage(hidden), hidden.untyped_storage().nbytes())  # the head keeps it

    def units(self) -> list[_Unit]:
        """Return those of all layers in their order, and what is beside them."""
        calls = {layer: iter(made) for layer, made in self._calls.items()}
        return [*(next(calls[layer], _Unit()) for layer in self._layers), self._root]

    def _call(
        self, calls: list[_Unit], is_shared: bool, forward: Any, hidden_states: Tensor, *more: Any, **named: Any
    ) -> Any:
        """Compute a layer; of those that share a module two, and two more behind the first adapter."""
        had_gradient = hidden_states.requires_grad
        same = [each for each in calls if each.had_gradient == had_gradient]
        if is_shared and len(same) > 1:
            calls.append(same[1])
            return hidden_states if isinstance(same[1].made, Tensor) else (hidden_states, *same[1].made[1:])
        before, self.now = self.now, calls[0] if calls and not is_shared else _Unit(had_gradient)
        calls.append(self.now)
        made = self.now.made = forward(hidden_states, *more, **named)
        self.now = before
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if (places := _PRODUCTS.get(func._schema.name)) is not None:
            left, right = (args[place] for place in places)
            self.product(left, right, made)
        return made

    def product(self, left: Tensor, right: Tensor, made: Tensor) -> None:
        self.now.products += made.numel() * left.shape[-1]
        self._note(self.now.outputs, made)
        self._note(self.now.inputs, *(one for one, by in ((left, right), (right, left)) if by.requires_grad))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        now, heads = self.now, query.shape[1]
        now.attends = True
        now.repeated += sum(each.numel() // each.shape[1] * (heads - each.shape[1]) for each in (key, value)) * (
            query.element_size()
        )
        now.heads += heads * (query.shape[-1] + value.shape[-1]) / 2
        made, sums = _Attention.apply(query, key, value)
        self._note(now.attention, query, key, value, made, sums)
        self._note(now.attended, made, sums)
        return made

    def _pack(self, tensor: Tensor) -> Tensor:
        if (place := _storage(tensor)) not in self._seen:
            self._seen.add(place)
            self._note(self.now.saved, tensor)
        return tensor

    def _note(self, where: dict[int, int], *tensors: Tensor) -> None:
        for each in tensors:
            if (place := _storage(each)) not in self._weights:
                where[place] = each.untyped_storage().nbytes()
                self._alive.append(each)


class _Attention(torch.autograd.Function):
    """Saves what a kernel saves: its inputs and output, and a sum of each query in fp32."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        made = (
            torch.empty_like(query)
            if value.shape[-1] == query.shape[-1]
            else query.new_empty((*query.shape[:-1], value.shape[-1]))
        )
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, made, sums)
        return made, sums


class _Experts(torch.autograd.Function):
    """The products of tokens with their experts' matrices, which torch has on the meta device in 16 bits alone."""

    @staticmethod
    def forward(ctx: Any, tokens_SI: Tensor, weight_EIO: Tensor) -> Tensor:
        of_tokens, of_weight = ctx.needs_input_grad
        ctx.save_for_backward(tokens_SI if of_weight else None, weight_EIO if of_tokens else None)
        return tokens_SI.new_empty(len(tokens_SI), weight_EIO.shape[2])


_LOCK = Lock()
_counting: ContextVar[CountedRow | None] = ContextVar("the count of the pass that is computed now", default=None)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    count = _counting.get()
    assert count is not None, "attention is counted in a counted pass alone"
    made = count.attend(query, key, value)
    return made.transpose(1, 2).contiguous(), None


def _by_experts(tokens_SI: Tensor, weight_EIO: Tensor, offs: Tensor) -> Tensor:
    made: Any = _Experts.apply(tokens_SI.to(weight_EIO.dtype), weight_EIO)
    if (count := _counting.get()) is not None:
        count.product(tokens_SI, weight_EIO, made)
    return made


def _hidden_of(module: Any, row: int, **more: Any) -> Tensor:
    """Compute one row of a meta model."""
    config = module.config
    positions_T = torch.arange(row, device=_META)
    mask = None
    if config.get_text_config()._attn_implementation == "eager":
        mask = attention_masks.of_prompts(config, positions_T)
    given = {"attention_mask": mask, "use_cache": False, **more}
    ids_1T = torch.zeros(1, row, dtype=torch.long, device=_META)
    with _LOCK, without_values(module):
        return module.base_model(input_ids=ids_1T, position_ids=positions_T[None], **given).last_hidden_state


_Factors: Any = getattr(lora_layer, "_LoraFactorsProxy", nn.Module)


class _Folded(_Factors):
    """Without torch.autocast, which refuses the meta device."""

    def forward(self, W: Any) -> Any:
        return torch.baddbmm(W, self.lhs, self.rhs, alpha=self.scaling) if W.is_meta else super().forward(W)


@contextmanager
def without_values(module: Any) -> Iterator[None]:
    """Replace what asks for values of a tensor or for a kernel, for the meta device alone: other threads may train
    meanwhile."""
    replaced = [
        _on_meta(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None),
        _on_meta(moe, "_grouped_mm", _by_experts),
    ]
    for modeling in {sys.modules[type(part).__module__] for part in module.modules()}:
        for name, function in vars(modeling).items():
            if getattr(function, "__globals__", {}).get("__name__") == hub_kernels.__name__:
                # by torch, where a package has a kernel
                replaced.append(_on_meta(modeling, name, inspect.unwrap(function)))
    if hasattr(lora_layer, "_LoraFactorsProxy"):
        replaced.append((lora_layer, "_LoraFactorsProxy", _Folded))
    theirs = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    _put(replaced)
    try:
        yield
    finally:
        _put(theirs)


def _put(attributes: Sequence[tuple[Any, str, Any]]) -> None:
    for owner, name, value in attributes:
        setattr(owner, name, value)


def _on_meta(owner: Any, name: str, ours: Callable[..., Any]) -> tuple[Any, str, Any]:
    """Return the attribute with a function that calls `ours` for tensors on the meta device."""
    theirs = getattr(owner, name)

    def either(*given: Any, **named: Any) -> Any:
        on_meta = any(each.is_meta for each in (*given, *named.values()) if isinstance(each, Tensor))
        return (ours if on_meta else theirs)(*given, **named)

    return owner, name, either


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
