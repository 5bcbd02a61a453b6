"""Translate between vLLM's names of weights and a trainer's. They differ in the first part, or in a part that is known.

A name that this module gets wrong is no name of the version that arrives, and that is refused. So a rule of vLLM's that
concerns no weight of this model, because it drops what it names, need not be known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tandem.errors import SyncError


class _Rules(NamedTuple):
    """How the names of a class differ, though it has rules of its own."""

    prefix: bool = True
    """Whether its rules for the first part are those by which a trainer's names differ, too."""
    parts: Mapping[str, str] = {}
    """vLLM's and the trainer's part of a name."""
    again: Mapping[str, str] = {}
    """Of paths by which vLLM names a module once more: the part, and that of the trainer's name."""


_KNOWN: Mapping[str, _Rules] = {
    "Qwen3VLForConditionalGeneration": _Rules(),
    "GptOssForCausalLM": _Rules(parts={".attn.": ".self_attn.", ".embedding.": ".embed_tokens."}),
    "MixtralForCausalLM": _Rules(parts={".block_sparse_moe.": ".mlp."}),
    "GraniteMoeHybridForCausalLM": _Rules(parts={".block_sparse_moe.gate.": ".block_sparse_moe.router."}),
    "Lfm2ForCausalLM": _Rules(parts={".short_conv.": ".conv."}),
    "FalconH1ForCausalLM": _Rules(parts={".mamba.mamba.": ".mamba."}),
    "JambaForCausalLM": _Rules(parts={f".{name}_proj.": f".self_attn.{name}_proj." for name in "qkvo"}),
    # vLLM's model of transformers' own classes. Its rules are those by which transformers reads old checkpoints.
    "TransformersForCausalLM": _Rules(),
    # Their rules are for checkpoints that see; those of text alone have the trainer's names.
    "Gemma4ForCausalLM": _Rules(prefix=False, again={".self_decoder.decoder_layers.": ".layers."}),
    "Qwen3_5ForCausalLM": _Rules(prefix=False),
    "Qwen3_5MoeForCausalLM": _Rules(prefix=False),
}
"""Classes of vLLM that have rules for names, and which are known."""


class CheckpointNames:
    def __init__(self, model: Any) -> None:
        """SyncError if this model's names differ in a way that is not known."""
        kind, mapper = type(model).__name__, getattr(model, "hf_to_vllm_mapper", None)
        for way in ("renaming", "regex", "substr", "prefix", "suffix"):
            rules = getattr(mapper, f"orig_to_new_{way}", None) or {}
            drops = isinstance(rules, dict) and all(new is None for new in rules.values())
            if rules and not drops and kind not in _KNOWN:
                raise SyncError(
                    f"layout: {kind} names its weights otherwise than its checkpoint does (by {way}); "
                    "such models are not known"
                )
        prefixes: dict[str, str | None] = dict(getattr(mapper, "orig_to_new_prefix", None) or {})
        known = _KNOWN.get(kind, _Rules())
        self._prefixes = {theirs: ours for theirs, ours in prefixes.items() if ours is not None and known.prefix}
        self._parts, self._again = known.parts, known.again

    def served(self, name: str) -> str:
        """Return vLLM's name of a weight or layer, given the trainer's."""
        for ours, theirs in self._parts.items():
            name = name.replace(theirs, ours)
        return self._with_prefix(name)

    def original(self, path: str) -> str:
        """Return the trainer's name, given vLLM's. SyncError if no single name leads there."""
        found = [theirs + path.removeprefix(ours) for theirs, ours in self._prefixes.items() if path.startswith(ours)]
        names = [name for name in found or [path] if self._with_prefix(name) == path]
        if len(names) != 1:
            raise SyncError(f"layout: '{path}' has {len(names)} possible names in the checkpoint: {names}")
        (name,) = names
        for ours, theirs in (*self._parts.items(), *self._again.items()):
            name = name.replace(ours, theirs)
        return name

    def _with_prefix(self, name: str) -> str:
        for theirs, ours in self._prefixes.items():  # in vLLM's order: one after the other
            name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
        return name
