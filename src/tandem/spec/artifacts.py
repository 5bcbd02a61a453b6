"""`[artifacts]`: what outlives the run's machine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.spec.base import LocalPath, Spec

What = Literal["export", "results", "checkpoints"]


class ArtifactsSpec(Spec):
    """Verified copies on another disk or in an object store. An upload that fails never fails the run."""

    url: Annotated[str, LocalPath("always")] = Field(min_length=1)
    """A directory, or what fsspec has a file system for: `s3://bucket/prefix`, `gs://bucket/prefix`,
    `hf://user/repository/prefix`. Secrets come from the environment, never from here."""
    endpoint: str = ""
    """Of an S3-compatible server that is not Amazon's, as in `http://127.0.0.1:9000`; of another hub."""
    what: Annotated[tuple[What, ...], Field(min_length=1, strict=False)] = ("export", "results")
    """export: the model. results: spec, status, events, metrics, evaluations, report and log. checkpoints: each
    while the run goes on, as far as there is time, and those that the run kept."""
    timeout_s: float = Field(default=600.0, gt=0)
    """For all uploads together, after the run; what is not there by then is reported, and can be pushed again."""
