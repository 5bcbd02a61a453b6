"""What a run asks of the machine that it is started on."""

from __future__ import annotations

from dataclasses import replace

from tandem.errors import ProviderRefused, SpecError
from tandem.job_types import Need
from tandem.protocols import Provider
from tandem.spec.load import parse_spec
from tandem.spec.run import RunSpec
from tandem.spec.toml import parse_toml

_CPUS_PER_GPU = 4


async def need_of(spec_toml: str, provider: Provider, *, serves: bool = False) -> Need:
    """Return what the spec's run needs; with `serves`, what a server of its model needs, which is one GPU at most.
    `device = "auto"` takes GPUs where the provider has them, and else none. ProviderRefused if no job can be made of
    it."""
    try:
        spec = parse_spec(parse_toml(spec_toml, "the run's spec"))
    except SpecError as error:
        raise ProviderRefused(f"this release refuses the run's spec: {error}") from error
    without = Need(hosts=1 if serves else max(1, spec.parallel.hosts))
    if spec.device == "cpu":
        return without
    gpus = 1 if serves else num_gpus(spec)
    need = replace(without, gpus=gpus, cpus=_CPUS_PER_GPU * gpus)
    if spec.device == "cuda" or any(offer.fits for offer in await provider.offers(replace(need, cpus=0))):
        return need
    return without


def num_gpus(spec: RunSpec) -> int:
    """Return how many GPUs of each host the run uses: one for each rank there, and those of its engines."""
    numbered = getattr(getattr(spec, "engine", None), "numbered_gpus", ())
    return max(spec.parallel.row_shards, 1 + max(numbered, default=-1))
