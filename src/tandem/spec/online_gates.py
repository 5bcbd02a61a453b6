"""What a job must pass before it is served, what takes it back, what keeps the rest from being forgotten."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.spec.base import Spec


class CanarySpec(Spec):
    """A question whose answer must not change."""

    prompt: str
    """What the user says."""
    expected: str
    """What the assistant answers."""
    exact: bool = True
    """The greedy answer is this text, to the token; false: only that this text does not become much less likely."""


class GateSpec(Spec):
    """`[gates]`: a job's weights are served only if all of these are passed."""

    held_out: str = ""
    """A .jsonl file of conversations that are never trained on; empty: nothing is held out, and this gate is passed."""
    held_out_samples: int = Field(default=64, ge=1)
    """Conversations of it that are scored."""
    held_out_rise: float = Field(default=0.05, ge=0)
    """Their loss may rise by so many nats a token: the mean over the conversations."""
    kl: float = Field(default=0.5, gt=0)
    """How far the answers to ordinary prompts may have moved: the KL divergence between the version before and the new
    one, in nats a token. The job's own prompts are not among them: a lesson has to change those answers."""
    kl_prompts: int = Field(default=16, ge=0)
    """Ordinary prompts that are sampled for it; 0 leaves the gate out."""
    canaries: tuple[CanarySpec, ...] = Field(default=(), strict=False)
    """Questions whose answers must stay as they are."""
    canary_drop: float = Field(default=1.0, ge=0)
    """The logprob of a canary's answer may fall by so many nats in all."""
    update_norm: float = Field(default=0.05, gt=0)
    """The norm of everything that changed, over the norm of the weights."""


class WatchSpec(Spec):
    """`[watch]`: a served metric (a reward, a rating) that falls takes a version back."""

    metric: str = ""
    """The feedback that is watched, by its name; empty watches nothing."""
    better: Literal["higher", "lower"] = "higher"
    """Which way is up."""
    window: int = Field(default=64, ge=2)
    """The newest so many values before the version, and as many of the version, are compared by their means."""
    min_samples: int = Field(default=16, ge=2)
    """Nothing is said of fewer, on either side."""
    fall: float = Field(default=0.1, ge=0)
    """How far the mean may fall."""
    sigmas: float = Field(default=2.0, ge=0)
    """By so many standard errors it must have fallen too: chance alone takes nothing back."""


class ReplaySpec(Spec):
    """`[replay]`: samples of earlier jobs in each batch, against forgetting them."""

    share: float = Field(default=0.25, ge=0, lt=1)
    """Of a batch, as soon as there is anything to replay; 0 replays nothing."""
    capacity: int = Field(default=4096, ge=1)
    """Samples that are kept to draw from: of all that were trained on, each as likely as any other."""
    per_source: float = Field(default=0.5, gt=0, le=1)
    """Of these, one source may have at most this share, so that no source fills the memory."""


class OrdinarySpec(Spec):
    """`[ordinary]`: prompts outside of every lesson, whose answers are to stay as they are."""

    prompts: str = ""
    """A text file with one prompt a line; empty: the 64 short English ones that come with Tandem. Every fourth is for
    the KL gate alone."""
    written: int = Field(default=128, ge=0)
    """So many more prompts are written by the model itself, before its first lesson."""
    per_step: int = Field(default=32, ge=0)
    """Each step of an `sft` job holds the model's own answers to so many of them; 0: none. A model made from scratch
    (`model.preset`) has no answers that are worth keeping, and holds none."""
    weight: float = Field(default=1.0, gt=0)
    """Of what holds them: the KL divergence from the version before, over the whole vocabulary, at each of their
    tokens. The lesson's loss has weight 1."""
    max_tokens: int = Field(default=40, ge=1)
    """Tokens of such an answer, at most. They are sampled once, before the first lesson."""


class UpdatesSpec(Spec):
    """`[updates]`: what is written for each version."""

    anchor_every: int = Field(default=16, ge=1)
    """After so many updates a version is written whole, with master weights and optimizer."""
    anchor_share: float = Field(default=0.5, gt=0)
    """Sooner, if the updates since then have so many bytes, as a share of the whole weights'."""
    keep: int = Field(default=64, ge=1)
    """Newest versions that can be gone back to; others go when none of these needs them."""
