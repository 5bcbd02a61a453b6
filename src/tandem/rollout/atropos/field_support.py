"""What of an Atropos post a trainer of ours trains on, what it must refuse, and what it leaves unused and counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

from tandem.errors import GroupRefused
from tandem.rollout.atropos.codec import ScoredData

SampledAt: TypeAlias = frozenset[tuple[Any, ...]]
"""Temperature, top_p and top_k of a group's tokens; None where nothing says."""

NO_LOGPROBS = (
    "is missing, and a trainer of Tandem needs it: let the environment post what the server reported "
    "(managed_server() does), or sample from the gateway that `tandem rollouts serve --gateway` names and post exactly "
    "the ids that it sampled"
)

_REFUSED = {
    "images": "the trainer of this run reads text alone, and would train on half a prompt; use a text environment",
    "distill_token_ids": "the trainer of this run distils from a teacher of its own: set algorithm.kind = 'distill' "
    "and algorithm.teacher in its spec, and leave distill_token_ids and distill_logprobs out",
}
_UNUSED = ("ref_logprobs",)
_SAMPLING = ("temperature", "top_p", "top_k")
_NEUTRAL = {"temperature": (1.0,), "top_p": (1.0,), "top_k": (0, -1)}


def check(data: ScoredData, place: str) -> None:
    """GroupRefused where a trainer of ours would learn something else than the environment meant."""
    for name, why in _REFUSED.items():
        if getattr(data, name):
            raise GroupRefused(f"{place}{name}", why)


def unused(data: ScoredData) -> Iterator[str]:
    """Fields that say something and change nothing here."""
    return (name for name in _UNUSED if getattr(data, name))


def samplings_said(data: ScoredData) -> SampledAt:
    """How the group was sampled, where the post itself says so."""
    each = [data.generation_params, data.group_overrides, *(data.overrides or ())]
    said = [tuple(params.get(name) for name in _SAMPLING) for params in each if params]
    return frozenset(one for one in said if any(value is not None for value in one))


def check_samplings(samplings: SampledAt, trainer: Mapping[str, Any], place: str) -> None:
    """The trainer computes logprobs again, under its own sampling: those of another one cannot be compared with it.
    `trainer`: what it registered beside its spec."""
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
