"""Low-rank adapters, by peft."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from typing import Any

from tandem.errors import SpecError
from tandem.spec.model import LoraSpec


def quiet_bitsandbytes() -> None:
    """peft imports it wherever it is installed, and it then misses kernels that are not called here."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def add_lora(module: Any, spec: LoraSpec) -> Any:
    """LoRA layers inside `module`, and peft's view of it."""
    quiet_bitsandbytes()
    from peft import LoraConfig

    targets = spec.targets if isinstance(spec.targets, str) else list(spec.targets)
    if tables := on_tables(module, spec.targets):
        raise SpecError(
            f"model.lora.targets = {targets}: {', '.join(tables)}: adapters are for linear layers, and neither for "
            "embeddings nor for the output head, whose weights a model may share; leave them out or use 'all-linear', "
            "or leave [model.lora] out and every weight is trained"
        )
    if unknown := _unknown(module, spec.targets):  # peft leaves them out in silence, if it knows another one
        raise SpecError(
            f"model.lora.targets = {targets}: this model has no {', '.join(unknown)}; name modules of it, or use "
            "'all-linear'"
        )
    alpha: Any = spec.alpha  # peft's annotation says int, its arithmetic takes any number
    config = LoraConfig(r=spec.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM")
    try:
        return attach(module, config)
    except ValueError as error:
        raise SpecError(
            f"model.lora.targets = {targets}: {error}; name modules of this model, or use 'all-linear'"
        ) from error


def _unknown(module: Any, targets: str | Iterable[str]) -> list[str]:
    names = [f".{name}" for name, _ in module.named_modules(remove_duplicate=False)]
    wanted = [] if isinstance(targets, str) else targets
    return [target for target in wanted if not any(name.endswith(f".{target}") for name in names)]


def on_tables(module: Any, targets: str | Iterable[str]) -> list[str]:
    """Those of `targets` that name an embedding or the output head.

    The two are often one weight: an adapter on either is on both once it is merged, and on one before.
    """
    from torch import nn

    head = module.get_output_embeddings()
    named = module.named_modules(remove_duplicate=False)
    tables = [name for name, part in named if isinstance(part, nn.Embedding) or part is head]
    wanted = [] if isinstance(targets, str) else targets  # all-linear leaves them out itself
    return [target for target in wanted if any(f".{name}".endswith(f".{target}") for name in tables)]


def attach(module: Any, config: Any) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings():
        # peft asks the model by a name that transformers 5.23 deprecates.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(module, config)
