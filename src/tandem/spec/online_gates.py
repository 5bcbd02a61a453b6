"""`[gates]`, `[watch]`, `[replay]`, `[ordinary]` and `[updates]` of an online server: checks, rollback, replay."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.spec.base import Spec


class CanarySpec(Spec):
    """A question whose answer must not change."""

    prompt: str
    """The user's message."""
    expected: str
    """The assistant's answer."""
    exact: bool = True
    """true: the greedy answer must be exactly this text. false: the text must not become much less likely."""


class GateSpec(Spec):
    """`[gates]`: checks that a job's weights must all pass before they are served."""

    held_out: str = ""
    """A .jsonl file of conversations that are never trained on; empty: this gate always passes."""
    held_out_samples: int = Field(default=64, ge=1)
    """Number of these conversations to score."""
    held_out_rise: float = Field(default=0.05, ge=0)
    """Largest rise of their loss, in nats per token: the mean over the conversations."""
    kl: float = Field(default=0.5, gt=0)
    """Largest change of the answers to ordinary prompts: the KL divergence between the previous and the new version, in
    nats per token. The job's own prompts are not counted, because the job has to change those answers."""
    kl_prompts: int = Field(default=16, ge=0)
    """Ordinary prompts to sample for the KL gate; 0: no KL gate."""
    canaries: tuple[CanarySpec, ...] = Field(default=(), strict=False)
    """Questions whose answers must not change."""
    canary_drop: float = Field(default=1.0, ge=0)
    """Largest fall of the logprob of a canary's whole answer, in nats."""
    update_norm: float = Field(default=0.05, gt=0)
    """Largest norm of the change, as a share of the norm of the weights."""


class WatchSpec(Spec):
    """`[watch]`: roll a version back when a metric that clients report (a reward, a rating) falls."""

    metric: str = ""
    """Name of the feedback metric to watch; empty: none."""
    better: Literal["higher", "lower"] = "higher"
    """Whether higher or lower values are better."""
    window: int = Field(default=64, ge=2)
    """Most values to compare on each side: the newest before the version, and the newest of the version."""
    min_samples: int = Field(default=16, ge=2)
    """Fewest values on each side for a decision."""
    fall: float = Field(default=0.1, ge=0)
    """Largest fall of the mean, in the metric's unit."""
    sigmas: float = Field(default=2.0, ge=0)
    """A rollback also needs a fall of this many standard errors, so that chance alone causes none."""


class ReplaySpec(Spec):
    """`[replay]`: add samples of earlier jobs to each batch, so that they are not forgotten."""

    share: float = Field(default=0.25, ge=0, lt=1)
    """Share of replayed samples in a batch; 0: no replay."""
    capacity: int = Field(default=4096, ge=1)
    """Samples kept for replay: a uniform random choice of all trained samples."""
    per_source: float = Field(default=0.5, gt=0, le=1)
    """Largest share of one source among the kept samples, so that no source can fill the memory."""


class OrdinarySpec(Spec):
    """`[ordinary]`: prompts unrelated to any job, whose answers should not change."""

    prompts: str = ""
    """Text file with one prompt per line; empty: the 64 short English prompts that come with Tandem. Every fourth is
    used by the KL gate only."""
    written: int = Field(default=128, ge=0)
    """Further prompts that the model itself writes before its first job."""
    per_step: int = Field(default=32, ge=0)
    """Ordinary prompts per step of an `sft` job whose answers the step preserves; 0: none. A model made from scratch
    (`model.preset`) uses none, because its answers are not worth preserving."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of the term that preserves them, relative to the job's loss: the KL divergence from the previous version,
    over the whole vocabulary, at each token of these answers."""
    max_tokens: int = Field(default=40, ge=1)
    """Most tokens of such an answer. The answers are sampled once, before the first job."""


class UpdatesSpec(Spec):
    """`[updates]`: how versions are stored on disk."""

    anchor_every: int = Field(default=16, ge=1)
    """Updates after which a version is written in full, with master weights and optimizer state."""
    anchor_share: float = Field(default=0.5, gt=0)
    """Write a full version earlier, once the updates since the last one exceed this share of the weights' bytes."""
    keep: int = Field(default=64, ge=1)
    """Number of the newest versions to keep for rollback; older ones are deleted once none of these needs them."""
