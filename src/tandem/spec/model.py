"""`[model]`: which weights are loaded, and which of them are trained."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Discriminator, Field, Tag, model_validator

from tandem.spec.base import LocalPath, Spec

SEEING = "qwen3_vl"
"""The model type whose images are supported."""
_PINNED = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)@(?P<revision>[\w./-]+)")


class LoraSpec(Spec):
    """`[model.lora]`: train low-rank adapters (peft) instead of every weight."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the update is multiplied by alpha / rank."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = "all-linear"
    """Names of the modules to adapt; all-linear: every linear layer except the lm-head."""
    base: Literal["exact", "int8", "nf4"] = "exact"
    """The frozen weights: unchanged (exact), or quantised to 8 or 4 bits (bitsandbytes; only with model.path). The
    export is not quantised: it merges the adapter into the dequantised weights."""


class _ModelSpecBase(Spec):
    thinking: bool = False
    """Render the chat template with thinking on. The environment sees the answer without the thoughts; an answer whose
    thinking never ends scores 0."""
    lora: LoraSpec | None = None
    """Train adapters only. Left out: every weight is trained."""
    attention: Literal["sdpa", "eager", "packed"] = "sdpa"
    """sdpa and eager: transformers' implementations, with a mask where a row holds several sequences. packed: a kernel
    for packed sequences, without mask or padding; it needs a GPU and 16-bit weights."""
    activations: Literal["keep", "selective", "recompute", "offload"] = "keep"
    """Which activations are kept for the backward pass. keep: all. selective: matrix products and attention; the rest
    is recomputed. recompute: each layer's input only. offload: all, in the host's memory."""
    compile: bool = False
    """With attention = "packed": compile the layers (torch.compile). This takes up to a minute at the start, and a few
    seconds at the first batch without shared prompts and at the first batch without a gradient."""
    warm_start: Annotated[str | None, LocalPath()] = None
    """Weights to start from: a run's export, a checkpoint of the same shape, or an adapter. Left out: the model's own.
    """

    @property
    def kernel(self) -> Literal["sdpa", "eager"]:
        """Return the attention name for transformers, which does not know "packed"."""
        return "sdpa" if self.attention == "packed" else self.attention

    @model_validator(mode="after")
    def _compiled_is_packed(self) -> Self:
        if self.compile and self.attention != "packed":
            raise ValueError(
                "compile = true: needs attention = 'packed', because masked layers are compiled for each shape"
            )
        return self


class PresetModel(_ModelSpecBase):
    """A new model with random weights, a byte-level tokenizer and a chat template."""

    preset: Literal["tiny", "small", "medium"]
    """Size: tiny has 1M parameters, small 10M, medium 50M (Qwen3 architecture)."""


class PathModel(_ModelSpecBase):
    """An existing model: a directory in Hugging Face format, a GGUF file, or a hub id."""

    path: Annotated[str, LocalPath()] = Field(min_length=1)
    """Directory or hub id of a model that AutoModelForCausalLM can load, a GGUF file, or a folder that holds one; or of
    a dense Qwen3-VL, which sees images and whose vision tower is frozen."""
    revision: str = "main"
    """Branch, tag or commit of a hub id. `path = "org/name@revision"` sets it, too."""

    @model_validator(mode="before")
    @classmethod
    def _pinned(cls, raw: Any) -> Any:
        """Take the revision out of a pinned hub id."""
        told = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
        path = told.get("path")
        found = _PINNED.fullmatch(path) if isinstance(path, str) else None
        if found is None or os.path.exists(found[0]):
            return cast("Any", raw)
        named, pinned = told.get("revision", found["revision"]), found["revision"]
        if named != pinned:
            raise ValueError(f"path = '{path}' and revision = '{named}' differ; write one of them")
        return {**told, "path": found["id"], "revision": pinned}


def _which_model(value: Any) -> str:
    from_scratch = "preset" in value if isinstance(value, dict) else isinstance(value, PresetModel)
    return "from-scratch" if from_scratch else "existing"


ModelSpec = Annotated[
    Annotated[PresetModel, Tag("from-scratch")] | Annotated[PathModel, Tag("existing")],
    Discriminator(_which_model),
]
