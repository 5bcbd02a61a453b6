"""Add low-rank adapters, with peft."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable
from typing import Any

from tandem.errors import SpecError
from tandem.ops.vision import TOWER, sees
from tandem.spec.model import LoraSpec


def quiet_bitsandbytes() -> None:
    """Silence bitsandbytes, which peft imports if it is installed, and which warns about kernels that are not used."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def add_lora(module: Any, spec: LoraSpec) -> Any:
    """Add LoRA layers inside `module`; return peft's view of it."""
    quiet_bitsandbytes()
    from peft import LoraConfig

    targets = spec.targets if isinstance(spec.targets, str) else list(spec.targets)
    if tables := on_tables(module, spec.targets):
        raise SpecError(
            f"model.lora.targets = {targets}: {', '.join(tables)}: adapters are for linear layers, not for "
            "embeddings or the output head, whose weights a model may share; leave them out, use 'all-linear', "
            "or leave [model.lora] out to train every weight"
        )
    if unknown := _unknown(module, spec.targets):  # peft ignores unknown names if it knows another one
        raise SpecError(
            f"model.lora.targets = {targets}: this model has no {', '.join(unknown)}; name its modules, or use "
            "'all-linear'"
        )
    alpha: Any = spec.alpha  # peft's annotation says int, but any number works
    config = LoraConfig(
        r=spec.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM",
        exclude_modules=TOWER if sees(module.config) else None,
    )  # fmt: skip
    try:
        return attach(module, config)
    except ValueError as error:
        way = "name modules of this model" + (", or use 'all-linear'" if targets != "all-linear" else "")
        raise SpecError(f"model.lora.targets = {targets}: {error}; {way}") from error


def _unknown(module: Any, targets: str | Iterable[str]) -> list[str]:
    names = [f".{name}" for name, _ in module.named_modules(remove_duplicate=False)]
    wanted = [] if isinstance(targets, str) else targets
    return [target for target in wanted if not any(name.endswith(f".{target}") for name in names)]


def on_tables(module: Any, targets: str | Iterable[str]) -> list[str]:
    """Return the targets that name an embedding or the output head.

    The two often share one weight: a merged adapter changes both, but before merging it changes one.
    """
    from torch import nn

    head = module.get_output_embeddings()
    named = module.named_modules(remove_duplicate=False)
    tables = [name for name, part in named if isinstance(part, nn.Embedding) or part is head]
    wanted = [] if isinstance(targets, str) else targets  # all-linear excludes them
    return [target for target in wanted if any(f".{name}".endswith(f".{target}") for name in tables)]


def check_only_linear(module: Any, spec: LoraSpec) -> None:
    """Raise SpecError if an adapter is on something else than a linear layer: on stacked experts, one tensor for all
    experts of a layer, or on their router. The embedded engine shares the trainer's module, so it serves those, too;
    engines in other processes do not."""
    odd, linear = beside_experts(module)
    if not odd:
        return
    targets = spec.targets if isinstance(spec.targets, str) else list(spec.targets)
    raise SpecError(
        f"model.lora.targets = {targets}: {len(odd)} adapters are on stacked experts or their router, the first on "
        f"'{odd[0]}', and no engine in another process serves those; adapt linear layers only: "
        + (f"model.lora.targets = {json.dumps(linear)}" if linear else "name those of the attention")
    )


def beside_experts(module: Any) -> tuple[list[str], list[str]]:
    """Return what is adapted that is no linear layer, and the targets of the attention alone."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper  # it adapts a parameter that is of no linear layer

    adapted = {name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)}
    odd = [name for name, part in adapted.items() if isinstance(part, ParamWrapper)]
    # Of the attention alone: a "down_proj" of other layers may be a name of stacked experts, too.
    return odd, sorted({name.rpartition(".")[2] for name in adapted if "attn" in name and name not in odd})


def attach(module: Any, config: Any) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings():
        # peft uses a name that transformers 5.23 deprecates.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # Its own ranks for stacked experts, where these have no adapters.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        return get_peft_model(module, config)
