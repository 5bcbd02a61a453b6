"""`[environment]`: the source of tasks and rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.spec.base import LocalPath, Spec


class NoJudge(Spec):
    """The environment uses no judge model."""

    kind: Literal["none"] = "none"


class EngineJudgeSpec(Spec):
    """The run's own engine, with greedy decoding: the current policy judges itself."""

    kind: Literal["engine"] = "engine"
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for a judge's answer; a slower one fails the episode."""


class HttpJudgeSpec(Spec):
    """A model on an OpenAI-compatible server. The API key stays in the run's own process."""

    kind: Literal["http"] = "http"
    url: str = Field(pattern=r"^https?://")
    """Base URL, ending in /v1."""
    model: str = Field(min_length=1)
    """Name of the model on the server."""
    key_env: str = ""
    """Environment variable with the API key; empty: no key."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for a judge's answer, retries included; a slower one fails the episode."""


JudgeSpec = Annotated[NoJudge | EngineJudgeSpec | HttpJudgeSpec, Field(discriminator="kind")]


class EnvironmentSpec(Spec):
    """An environment by name, with the parameters of its class."""

    name: Annotated[str, LocalPath("file:Class")] = Field(min_length=1)
    """arithmetic, sort or guess; your own: package.module:Class, or a file (path/to/env.py:Class), which is looked for
    beside the spec's file first; or another library's: gsm8k, math, gymnasium:ID, verifiers:ID, openenv:URL
    (docs/adapters.md)."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the environment's class; unknown ones are refused."""
    episode_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for one episode, without its waits for the engine; a slower one drops its group."""
    max_failed_share: float = Field(default=0.2, ge=0, le=1)
    """The run ends when more than this share of the last 100 groups failed."""
    workers: int = Field(default=0, ge=0, le=1024)
    """Number of worker processes, each of which plays one episode at a time; 0: play all in the run's process."""
    worker_memory_gib: float = Field(default=8.0, gt=0)
    """GiB of address space for each worker, on top of what loading the environment took."""
    pass_env: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Environment variables to pass to workers, besides the harmless ones (PATH, HOME, HF_HOME, ...)."""
    judge: JudgeSpec = NoJudge()
    """The model that `chat.judge(messages)` asks."""
