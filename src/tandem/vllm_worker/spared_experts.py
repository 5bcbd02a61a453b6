"""Let vLLM prepare no experts for adapters, nor their routers.

It would replace the class and the kernels of every layer of experts, whose weights could then not be read back. Nothing
is lost: an adapter on experts or a router is refused before a run starts.
"""

from __future__ import annotations

import importlib
from typing import Any

_ROUTERS = ("gate", "router")


def spare_experts() -> None:
    """Do so from now on in this process. Call it before the model is loaded. A vLLM that has other parts stays as it
    is: layer_readers.py refuses experts that were prepared."""
    try:
        runner = importlib.import_module("vllm.lora.utils").MoERunner
        manager: Any = importlib.import_module("vllm.lora.model_manager")
        settings = importlib.import_module("vllm.model_executor.layers.fused_moe.config").FusedMoEConfig
        adapted, settled = manager.get_supported_lora_modules, settings.__post_init__
    except (ImportError, AttributeError):
        return

    def without_experts(model: Any) -> list[str]:
        experts = {path.rpartition(".")[2] for path, part in model.named_modules() if isinstance(part, runner)}
        spared = {*experts, *_ROUTERS} if experts else set[str]()
        return [name for name in adapted(model) if name not in spared]

    def without_adapters(self: Any) -> None:
        self.is_lora_enabled = False  # otherwise kernels that take adapters, which a CPU does not have
        settled(self)

    manager.get_supported_lora_modules = without_experts
    settings.__post_init__ = without_adapters
