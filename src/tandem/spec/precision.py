"""`[precision]`: how many bits the weights have, and where the rest of each is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.spec.base import Spec


class Float32Precision(Spec):
    """Weights, gradients and arithmetic in 32 bits. Nothing can be lost; for small models, and for a CPU."""

    weights: Literal["float32"] = "float32"
    """What lives in memory and is served."""


class Bfloat16Precision(Spec):
    """The weights that compute and are served have 16 bits; gradients and updates are worked out in 32."""

    weights: Literal["bfloat16"] = "bfloat16"
    """What lives in memory and is served."""
    master: Literal["split", "fp32", "stochastic", "none"] = "split"
    """split: the missing 16 bits beside each weight, 4 bytes in all. fp32: a whole copy beside it, 6 bytes, the same
    numbers. stochastic: rounds up or down by chance, 2 bytes. none: rounds in place, and loses most of a small update.
    """


PrecisionSpec = Annotated[Float32Precision | Bfloat16Precision, Field(discriminator="weights")]
