"""`[samples]`: which answers of the training steps are kept as text."""

from __future__ import annotations

from pydantic import Field

from tandem.spec.base import Spec


class SamplesSpec(Spec):
    """Keep the answers that RL trained on, compressed, in samples/ of the run: `tandem samples RUN` searches them."""

    share: float = Field(default=1.0, ge=0, le=1)
    """Share of the groups to keep, with all of their answers; 0: keep none."""
    max_gib: float = Field(default=2.0, gt=0)
    """Most disk space in GiB. Beyond it the oldest answers are deleted."""
