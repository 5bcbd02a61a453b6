"""`[rollouts]`: who plays."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.spec.base import LocalPath, Spec


class LocalRollouts(Spec):
    """This run plays its environment itself."""

    kind: Literal["local"] = "local"


class ServiceRollouts(Spec):
    """Environments anywhere play for a rollout service (`tandem rollouts serve`); this run trains on what they post. An
    environment of its own is played to judge itself alone, and may be left out."""

    kind: Literal["service"]
    url: str = Field(pattern=r"^https?://.+")
    """Of the service."""
    token_file: Annotated[str, LocalPath()] = Field(min_length=1)
    """Holds the service's token."""
    run_id: str = Field(default="", max_length=256)
    """Under which the service knows this run, also when it is started again. Empty: its name and an id, kept in its
    directory."""
    fresh: bool = False
    """Groups of another run that are queued there are dropped, once its trainer has gone; otherwise they are a reason
    to refuse this one."""
    lease_s: float = Field(default=600.0, ge=1.0)
    """A batch returns to the queue when this process has been silent for so long."""


class AtroposRollouts(Spec):
    """Environments of Atropos play, unmodified. `tandem atropos SPEC` starts them with all that they need, and the
    trainer beside them."""

    kind: Literal["atropos"]
    environments: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """A command line each, as in "python my_env.py serve --env.group_size 8"; it is given URLs, key, server type,
    tokenizer and model name beyond that."""
    server_type: Literal["vllm", "sglang", "openai"] = "vllm"
    """How environments ask for samples: which of atroposlib's servers they take the gateway for."""
    lease_s: float = Field(default=600.0, ge=1.0)
    """A batch returns to the queue when the trainer has been silent for so long."""


RolloutsSpec = Annotated[LocalRollouts | ServiceRollouts | AtroposRollouts, Field(discriminator="kind")]
