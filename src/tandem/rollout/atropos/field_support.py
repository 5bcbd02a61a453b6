"""Which fields of an Atropos post a native trainer uses, which it refuses, and which it ignores and counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

from tandem.errors import GroupRefused
from tandem.rollout.atropos.codec import ScoredData

SampledAt: TypeAlias = frozenset[tuple[Any, ...]]
"""Temperature, top_p and top_k of a group's tokens; None where the post does not say."""

NO_LOGPROBS = (
    "is missing, and a trainer of Tandem needs it: let the environment post what the server reported "
    "(managed_server() does), or sample from the gateway that `tandem rollouts serve --gateway` names and post exactly "
    "the ids that it sampled"
)

_REFUSED = {
    "images": "the trainer of this run reads only text, and would train on half a prompt; use a text environment",
    "distill_token_ids": "the trainer of this run distils from its own teacher: set algorithm.kind = 'distill' "
    "and algorithm.teacher in its spec, and leave distill_token_ids and distill_logprobs out",
}
_UNUSED = ("ref_logprobs",)
_SAMPLING = ("temperature", "top_p", "top_k")
_NEUTRAL = {"temperature": (1.0,), "top_p": (1.0,), "top_k": (0, -1)}


def check(data: ScoredData, place: str) -> None:
    """Raise GroupRefused if a native trainer would learn something else than the environment intended."""
    for name, why in _REFUSED.items():
        if getattr(data, name):
            raise GroupRefused(f"{place}{name}", why)


def unused(data: ScoredData) -> Iterator[str]:
    """Yield the fields that are set but have no effect here."""
    return (name for name in _UNUSED if getattr(data, name))


def posted_samplings(data: ScoredData) -> SampledAt:
    """Return how the group was sampled, as far as the post says."""
    each = [data.generation_params, data.group_overrides, *(data.overrides or ())]
    posted = [tuple(params.get(name) for name in _SAMPLING) for params in each if params]
    return frozenset(one for one in posted if any(value is not None for value in one))


def check_samplings(samplings: SampledAt, trainer: Mapping[str, Any], place: str) -> None:
    """Raise GroupRefused if the group was sampled otherwise than the trainer samples. The trainer recomputes logprobs
    under its own sampling, and those of another cannot be compared. `trainer`: its registered `extra`."""
    if not isinstance(own := cast("dict[str, float] | None", trainer.get("sampling")), dict):
        return
    for sampling in samplings:
        for name, value in zip(_SAMPLING, sampling, strict=True):
            wanted = own.get(name, _NEUTRAL[name][0])
            if value is not None and value != wanted and not {value, wanted} <= set(_NEUTRAL[name]):
                spec = f"set train.{name} = {value:g} in the trainer's spec, or " if name != "top_k" else ""
                raise GroupRefused(
                    f"{place}generation_params.{name}",
                    f"the group was sampled with {name} = {value:g}, and the trainer computes its logprobs with "
                    f"{wanted:g}: {spec}let the environment sample with {name} = {wanted:g}",
                )
