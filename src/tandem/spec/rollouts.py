"""`[rollouts]`: where episodes are played: in this run, by a rollout service's environments, or by Atropos."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.spec.base import LocalPath, Spec


class LocalRollouts(Spec):
    """The run plays its own environment."""

    kind: Literal["local"] = "local"


class ServiceRollouts(Spec):
    """Environments on any machine send groups to a rollout service (`tandem rollouts serve`), and this run trains on
    them. The run's own `[environment]` is used for evaluation only, and may be left out."""

    kind: Literal["service"]
    url: str = Field(pattern=r"^https?://.+")
    """URL of the rollout service."""
    token_file: Annotated[str, LocalPath()] = Field(min_length=1)
    """File with the service's token."""
    run_id: str = Field(default="", max_length=256)
    """Id of this run at the service; a resumed run must have the same. Empty: the run's name and a random id, kept in
    the run directory."""
    fresh: bool = False
    """true: drop groups of another run from the queue once that run's trainer is gone. false: refuse to start if there
    are any."""
    lease_s: float = Field(default=600.0, ge=1.0)
    """Seconds of silence from this process after which its batch returns to the queue."""


class AtroposRollouts(Spec):
    """Unmodified Atropos environments play. `tandem atropos SPEC` starts them, the services that they need, and the
    trainer."""

    kind: Literal["atropos"]
    environments: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """One command line per environment, as in "python my_env.py serve --env.group_size 8". Tandem adds the options for
    URLs, key, server type, tokenizer and model name."""
    server_type: Literal["vllm", "sglang", "openai"] = "vllm"
    """The server type of atroposlib that environments use to sample from the gateway."""
    lease_s: float = Field(default=600.0, ge=1.0)
    """Seconds of silence from the trainer after which its batch returns to the queue."""


RolloutsSpec = Annotated[LocalRollouts | ServiceRollouts | AtroposRollouts, Field(discriminator="kind")]
