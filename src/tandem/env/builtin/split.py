"""Which tasks are held out, and the check of parameters: what the built-in environments share."""

from __future__ import annotations

import hashlib

from tandem.errors import SpecError

SPLITS = ("train", "eval")


def in_split(split: str, key: str) -> bool:
    """Whether tasks of this key belong to the split. One key in eight is held out: the same ones in every process.

    Tasks that give each other's answer away must have the same key.
    """
    held_out = hashlib.blake2b(key.encode()).digest()[0] % 8 == 0
    if split not in SPLITS:
        raise SpecError(f"split = '{split}': an environment has 'train' and 'eval'")
    return held_out == (split == "eval")


def check_params(environment: object, **ranges: tuple[float, float]) -> None:
    for name, (lowest, highest) in ranges.items():
        value = getattr(environment, name)
        if not lowest <= value <= highest:
            raise SpecError(f"environment.params.{name} = {value}: choose between {lowest} and {highest}")
