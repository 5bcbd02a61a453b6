"""`[precision]`: bits of the weights, and how the bits that they lack are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.spec.base import Spec


class Float32Precision(Spec):
    """Weights, gradients and arithmetic in 32 bits: no update is lost. For small models and for CPUs."""

    weights: Literal["float32"] = "float32"
    """Type of the weights in memory and in the engine."""


class Bfloat16Precision(Spec):
    """Weights in 16 bits, in the trainer and in the engine; gradients and updates are computed in 32 bits."""

    weights: Literal["bfloat16"] = "bfloat16"
    """Type of the weights in memory and in the engine."""
    master: Literal["split", "fp32", "stochastic", "none"] = "split"
    """How the full-precision weights are kept. split: the missing 16 bits beside each weight, 4 bytes per weight. fp32:
    a full copy, 6 bytes, with the same results. stochastic: rounds each update up or down at random, 2 bytes. none:
    rounds to nearest, 2 bytes, and loses most small updates."""


PrecisionSpec = Annotated[Float32Precision | Bfloat16Precision, Field(discriminator="weights")]
