"""Experts that vLLM does not prepare for adapters, on stand-ins of the parts that Tandem changes there."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.vllm_worker.spared_experts import spare_experts

NAMES = ("lora.utils", "lora.model_manager", "model_executor.layers.fused_moe.config")


class Runner(torch.nn.Module):
    """As vLLM's MoERunner."""


@dataclass
class Settings:
    """As vLLM's FusedMoEConfig."""

    is_lora_enabled: bool = False
    backend: str = ""

    def __post_init__(self) -> None:
        self.backend = "for adapters" if self.is_lora_enabled else "plain"


def as_vllm(monkeypatch: pytest.MonkeyPatch, *parts: Any) -> None:
    for name, part in zip(NAMES, parts, strict=True):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", part)


def test_experts_have_no_adapters_and_plain_kernels(monkeypatch: pytest.MonkeyPatch):
    manager: Any = SimpleNamespace(get_supported_lora_modules=lambda model: ["qkv_proj", "experts", "gate"])
    plain = torch.nn.ModuleDict({"gate": torch.nn.Linear(2, 2)})
    monkeypatch.setattr(Settings, "__post_init__", Settings.__post_init__)
    as_vllm(monkeypatch, SimpleNamespace(MoERunner=Runner), manager, SimpleNamespace(FusedMoEConfig=Settings))
    spare_experts()
    layer = torch.nn.ModuleDict({"experts": Runner(), "gate": torch.nn.Linear(2, 2), "qkv_proj": torch.nn.Linear(2, 2)})
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    assert manager.get_supported_lora_modules(model) == ["qkv_proj"]
    assert manager.get_supported_lora_modules(plain) == ["qkv_proj", "experts", "gate"]
    made = Settings(is_lora_enabled=True)
    assert (made.is_lora_enabled, made.backend) == (False, "plain")


def test_a_vllm_with_other_parts_stays_as_it_is(monkeypatch: pytest.MonkeyPatch):
    manager: Any = SimpleNamespace(get_supported_lora_modules=lambda model: ["experts"])
    as_vllm(monkeypatch, SimpleNamespace(MoERunner=Runner), manager, None)
    spare_experts()
    assert manager.get_supported_lora_modules(Runner()) == ["experts"]
