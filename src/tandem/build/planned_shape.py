"""The shape that a run is planned with: by formulas for families whose layers are known, otherwise counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeVar

from tandem.errors import SpecError, TandemError
from tandem.ops.byte_sizes import Dims
from tandem.ops.counted_shape import CountedShape, PassCount, Shape
from tandem.ops.module_parts import layers_of
from tandem.runs.planner.model_shape import NoPlan, is_known, kind_of, read_run, shape_of
from tandem.spec.model import LoraSpec
from tandem.spec.run import RunSpec

R = TypeVar("R")
_MOST_LAYERS = 1000


def of_run(spec: RunSpec, *, on_gpu: bool) -> Shape:
    """Return the shape of a run's model. NoPlan where it cannot be counted."""
    return read_run(spec, partial(of_config, on_gpu=on_gpu))


def of_config(config: Mapping[str, Any], name: str, *, on_gpu: bool) -> Shape:
    """Return the shape of a model with this config. Models that a formula describes are planned without torch."""
    return shape_of(config, name) if is_known(config) else counted(json.dumps(dict(config)), name, on_gpu)


@cache
def counted(config_json: str, name: str, on_gpu: bool) -> CountedShape:
    config = json.loads(config_json)
    if (layers := (config.get("text_config") or config).get("num_hidden_layers") or 0) > _MOST_LAYERS:
        raise NoPlan(f"'{name}': num_hidden_layers = {layers}: up to {_MOST_LAYERS:,} layers are counted")

    def asked(what: str, ask: Callable[[Any, Any], R], *adapted: Any) -> R:
        """Ask model/meta_count.py of a model without weights, whose code runs here. `adapted`: how it is changed."""
        from tandem.model import meta_count

        try:
            module = meta_count.meta_model(json.loads(config_json), name)
            return ask(meta_count, meta_count.with_adapters(module, *adapted) if adapted else module)
        except (TandemError, AssertionError, ModuleNotFoundError):
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {str(error)[:300]}"
            raise NoPlan(
                f"'{name}': the layers of '{kind_of(config)}' are not known to the planner, and {what} cannot be "
                f"counted from its config: {why}"
            ) from error

    @cache
    def trained(lora: LoraSpec | None) -> list[tuple[Dims, bool]]:
        return asked("trained tensors", lambda meta_count, module: meta_count.trained_of(module), 4, lora)

    @cache
    def count(width: int, lora: LoraSpec | None) -> PassCount:
        return asked("a forward pass", lambda meta_count, module: meta_count.count_pass(module, on_gpu), width, lora)

    @cache
    def cached(width: int) -> tuple[int, int]:
        return asked("keys and values", _cached_bytes, width, None)

    return asked("the layers", partial(_shape, trained=trained, count=count, cached=cached, on_gpu=on_gpu))


def _shape(meta_count: Any, module: Any, *, trained: Any, count: Any, cached: Any, on_gpu: bool) -> CountedShape:
    from torch import nn

    from tandem.ops import attention_masks, packed_attention

    config, layers = module.config.get_text_config(), layers_of(module)
    in_layers = {id(each) for layer in layers for each in layer.parameters()}
    numbers: Counter[str] = Counter()
    for name, tensor in module.named_parameters():
        numbers[meta_count.component_of(module, name, tensor)] += tensor.numel()
    head = module.get_output_embeddings()
    linear = (part for part in module.modules() if isinstance(part, nn.Linear) and part is not head)
    latent = bool(getattr(config, "kv_lora_rank", None))  # keys and values are computed from what is cached
    return CountedShape(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        context=getattr(config, "max_position_embeddings", 0) or 0,
        numbers=dict(numbers),
        each_layer=[[tuple(each.shape) for each in layer.parameters()] for layer in layers],
        root=[tuple(each.shape) for each in module.parameters() if id(each) not in in_layers],
        linear_numbers=sum(part.weight.numel() for part in linear),
        recurrent=attention_masks.num_recurrent(config) > 0,
        masks=not attention_masks.plainly_causal(module.config) or (latent and not on_gpu),
        packs=config._attn_implementation == "sdpa" and not latent and not packed_attention.why_not_heads(config),
        trained=trained,
        count=count,
        cached=cached,
        why_not_rows=_why_not_rows(module),
    )


def _why_not_rows(module: Any) -> str:
    from tandem.model.load_rows import refuse_converted

    try:
        refuse_converted(module, "", "model.path")
    except SpecError as error:
        return str(error).partition(": ")[2]
    return ""


def _cached_bytes(meta_count: Any, module: Any) -> tuple[int, int]:
    """Return the bytes of keys and values of a position, and of a sequence's states, as the embedded engine keeps
    them."""
    import torch

    from tandem.engine.hf.kv_cache import KvCache
    from tandem.engine.hf.recurrent_cache import RecurrentCacheLayer

    order = layers_of(module, repeated=True)
    cache = KvCache(len(order), 2**16, RecurrentCacheLayer, max_rows=1)
    cache.targets, cache.copies = slice(1), torch.zeros(1, dtype=torch.long, device="meta")
    cache.view = row = cache.length_held
    meta_count.CountedRow(module, row).run(past_key_values=cache, use_cache=True)
    layers: list[Any] = [cache.layers[order.index(layer)] for layer in order]  # a shared layer writes as its first one
    held = [each for layer in layers for each in (layer.keys, layer.values) if each is not None]
    positions = sum(each.numel() * each.element_size() for each in held) // row
    return positions, sum(layer.state_bytes() for layer in layers)
