"""`[model]`: which weights, and how many of them are trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from tandem.spec.base import LocalPath, Spec


class LoraSpec(Spec):
    """`[model.lora]`: train low-rank adapters instead of every weight (peft)."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the update."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is scaled by alpha / rank."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = "all-linear"
    """Module names to adapt; all-linear takes every linear layer except the lm-head."""
    base: Literal["exact", "int8", "nf4"] = "exact"
    """The frozen weights: as they are, or in 8 or 4 bits (bitsandbytes). Only for a model with a path. What is exported
    has all its bits again, the adapter merged into what the few bits stand for."""


class _ModelSpecBase(Spec):
    thinking: bool = False
    """Renders the chat template with thinking on; thoughts are cut before an environment sees the answer, and a thought
    that never ends is no answer: it scores 0."""
    lora: LoraSpec | None = None
    """Train adapters only. Left out: every weight is trained."""
    attention: Literal["sdpa", "eager", "packed"] = "sdpa"
    """sdpa and eager: transformers' own, under a mask where a row holds several sequences. packed: on a GPU, with
    16-bit weights, a kernel that is told where each sequence begins; no mask, no padding."""
    activations: Literal["keep", "selective", "recompute", "offload"] = "keep"
    """What backward needs of forward. keep: all of it. selective: matrix products and attention, the rest is computed
    again. recompute: the input of each layer. offload: all of it, in the host's memory."""
    compile: bool = False
    """With attention = "packed": layers are compiled (torch.compile), which takes up to a minute at the start, and
    seconds again at the first batch without shared prompts, and at the first without a gradient."""
    warm_start: Annotated[str | None, LocalPath()] = None
    """A run's export, any checkpoint of the same shape, or an adapter, to begin with. Left out: the model as it is."""

    @property
    def kernel(self) -> Literal["sdpa", "eager"]:
        """What transformers is told: it does not know of packed rows."""
        return "sdpa" if self.attention == "packed" else self.attention

    @model_validator(mode="after")
    def _compiled_is_packed(self) -> Self:
        if self.compile and self.attention != "packed":
            raise ValueError(
                "compile = true needs attention = 'packed': a layer under masks is compiled for each shape"
            )
        return self


class PresetModel(_ModelSpecBase):
    """A model made from scratch, with a byte-level tokenizer and a chat template of its own."""

    preset: Literal["tiny", "small", "medium"]
    """tiny: 1M parameters; small: 10M; medium: 50M (Qwen3 architecture)."""


class PathModel(_ModelSpecBase):
    """Weights that exist: a directory in Hugging Face format, or a hub id."""

    path: Annotated[str, LocalPath()] = Field(min_length=1)
    """Directory or hub id that AutoModelForCausalLM can load."""
    revision: str = "main"
    """Branch, tag or commit of a hub id."""


def _which_model(value: Any) -> str:
    from_scratch = "preset" in value if isinstance(value, dict) else isinstance(value, PresetModel)
    return "from-scratch" if from_scratch else "existing"


ModelSpec = Annotated[
    Annotated[PresetModel, Tag("from-scratch")] | Annotated[PathModel, Tag("existing")],
    Discriminator(_which_model),
]
