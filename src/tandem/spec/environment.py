"""`[environment]`: where tasks and rewards come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.spec.base import LocalPath, Spec


class NoJudge(Spec):
    """The environment asks no other model."""

    kind: Literal["none"] = "none"


class EngineJudgeSpec(Spec):
    """The run's own engine, greedily: the policy as it is at the moment judges itself."""

    kind: Literal["engine"] = "engine"
    timeout_s: float = Field(default=60.0, gt=0)
    """An answer that takes longer fails the episode."""


class HttpJudgeSpec(Spec):
    """A model behind an OpenAI-compatible server. Its key stays in the run's own process."""

    kind: Literal["http"] = "http"
    url: str = Field(pattern=r"^https?://")
    """Base URL, ending in /v1."""
    model: str = Field(min_length=1)
    """The name that it is served under."""
    key_env: str = ""
    """The environment variable that holds its API key."""
    timeout_s: float = Field(default=60.0, gt=0)
    """An answer that takes longer, retries included, fails the episode."""


JudgeSpec = Annotated[NoJudge | EngineJudgeSpec | HttpJudgeSpec, Field(discriminator="kind")]


class EnvironmentSpec(Spec):
    """An environment by name, with the parameters of its own class."""

    name: Annotated[str, LocalPath("file:Class")] = Field(min_length=1)
    """arithmetic, sort or guess; your own: package.module:Class, or a file path (path/to/env.py:Class); or another
    library's: gsm8k, math, gymnasium:ID, verifiers:ID, openenv:URL (docs/adapters.md)."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's class as keyword arguments; an unknown one is refused."""
    episode_timeout_s: float = Field(default=60.0, gt=0)
    """An episode that takes longer costs its group; its waits for the engine are not counted."""
    max_failed_share: float = Field(default=0.2, ge=0, le=1)
    """The run ends when more than this share of the last 100 groups failed."""
    workers: int = Field(default=0, ge=0, le=1024)
    """Episodes that are played at once, each in a process of its own. 0: all of them in the run's process."""
    worker_memory_gib: float = Field(default=8.0, gt=0)
    """Address space that a worker may take beyond what loading the environment took."""
    pass_env: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Environment variables that workers get besides the harmless ones (PATH, HOME, HF_HOME, ...)."""
    judge: JudgeSpec = NoJudge()
    """Whom `chat.judge(messages)` asks."""
