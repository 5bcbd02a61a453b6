"""Scale, softcap and temperature between the language model head's product and softmax."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """Maps the matrix product's result to the softmax's input: `inner * raw`, or `outer * tanh(inner * raw)`.

    Ids from `num_ids` on are not part of the distribution.
    """

    num_ids: int
    inner: float
    outer: float = 0.0  # 0: no softcap

    @classmethod
    def of(cls, num_ids: int, scale: float, softcap: float | None, temperature: float) -> Curve:
        if softcap:
            return cls(num_ids, scale / softcap, softcap / temperature)
        return cls(num_ids, scale / temperature)
