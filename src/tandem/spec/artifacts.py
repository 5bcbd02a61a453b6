"""`[artifacts]`: copies of a run on another disk or in an object store."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.spec.base import LocalPath, Spec

What = Literal["export", "results", "checkpoints"]


class ArtifactsSpec(Spec):
    """Upload verified copies to another disk or an object store. A failed upload never fails the run."""

    url: Annotated[str, LocalPath("always")] = Field(min_length=1)
    """A directory, or a URL that fsspec supports: `s3://bucket/prefix`, `gs://bucket/prefix`,
    `hf://user/repository/prefix`. Credentials come from the environment, never from the spec."""
    endpoint: str = ""
    """URL of an S3-compatible server (`http://127.0.0.1:9000`) or of another hub. Empty: Amazon's, or the Hugging Face
    hub."""
    what: Annotated[tuple[What, ...], Field(min_length=1, strict=False)] = ("export", "results")
    """export: the model. results: spec, status, events, metrics, evaluations, report and log. checkpoints: during the
    run as time allows, and the ones that the run kept."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for all uploads together, after the run. `tandem artifacts push` uploads what is still missing."""
