"""Helpers of the environments: choose held-out tasks, and check parameter ranges."""

from __future__ import annotations

import hashlib

from tandem.errors import SpecError

SPLITS = ("train", "eval")


def in_split(split: str, key: str) -> bool:
    """Return whether tasks with this key belong to the split. One key in eight is held out, the same in every
    process.

    Tasks that reveal each other's answer must have the same key.
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
