"""Translate between vLLM's names of weights and their checkpoint's. They differ in the first part, if at all."""

from __future__ import annotations

from typing import Any

from tandem.errors import SyncError

_RENAMED = ("Qwen3VLForConditionalGeneration",)
"""Classes of vLLM whose weights have other first parts than the checkpoint, and which are known otherwise."""


class CheckpointNames:
    def __init__(self, model: Any) -> None:
        """SyncError if this model's names differ in a way that is not known."""
        kind, mapper = type(model).__name__, getattr(model, "hf_to_vllm_mapper", None)
        for way in ("renaming", "regex", "substr", "prefix", "suffix"):
            if getattr(mapper, f"orig_to_new_{way}", None) and (way != "prefix" or kind not in _RENAMED):
                raise SyncError(
                    f"layout: {kind} names its weights otherwise than its checkpoint does (by {way}); "
                    "such models are not known"
                )
        self._prefixes: dict[str, str] = dict(getattr(mapper, "orig_to_new_prefix", None) or {})

    def served(self, name: str) -> str:
        """Return vLLM's name of a weight or layer, given the checkpoint's."""
        for theirs, ours in self._prefixes.items():  # in vLLM's order: one after the other
            name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
        return name

    def original(self, path: str) -> str:
        """Return the checkpoint's name, given vLLM's. SyncError if no single name leads there."""
        found = [theirs + path.removeprefix(ours) for theirs, ours in self._prefixes.items() if path.startswith(ours)]
        names = [name for name in found or [path] if self.served(name) == path]
        if len(names) != 1:
            raise SyncError(f"layout: '{path}' has {len(names)} possible names in the checkpoint: {names}")
        return names[0]
