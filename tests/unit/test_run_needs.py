"""What a run asks of its machine, from its spec and what the provider has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.errors import ProviderRefused
from tandem.job_types import Need, Offer
from tandem.recipes.run_needs import need_of
from tandem.spec.load import parse_spec, to_toml

TABLES: dict[str, Any] = {
    "recipe": "rl",
    "model": {"preset": "tiny"},
    "environment": {"name": "sort"},
    "train": {"steps": 1, "lr": 1e-3, "groups_per_step": 2, "group_size": 2},
}
SERVER: dict[str, Any] = {"engine": {"kind": "server"}, "sync": {"bridge": "broadcast"}}
VLLM: dict[str, Any] = {"engine": {"kind": "vllm", "gpus": [1, 2], "replicas": 2}, "sync": {"bridge": "disk"}}


class Has:
    """A provider that has as many GPUs."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus

    async def offers(self, need: Need) -> list[Offer]:
        return [Offer("box", gpus=self.gpus, fits=need.gpus <= self.gpus)]


def asked(gpus: int, **more: Any) -> Need:
    provider: Any = Has(gpus)
    return asyncio.run(need_of(to_toml(parse_spec({**TABLES, **more})), provider))


def test_a_run_takes_a_gpu_where_there_is_one() -> None:
    assert asked(8) == Need(gpus=1, cpus=4)
    assert asked(0) == Need()
    assert asked(8, device="cpu") == Need()
    assert asked(0, device="cuda") == Need(gpus=1, cpus=4)  # and its launch is refused, with the reason


def test_ranks_and_engines_on_gpus_of_their_own_are_counted() -> None:
    assert asked(8, parallel={"ranks": 4}, **SERVER).gpus == 4
    assert asked(8, parallel={"ranks": 4, "hosts": 2}, **SERVER) == Need(gpus=2, cpus=8, hosts=2)
    assert asked(8, device="cuda", **VLLM).gpus == 3
    split = {"engine": {"kind": "vllm", "tensor_parallel": 2}, "sync": {"bridge": "disk"}}
    assert asked(8, device="cuda", **split).gpus == 2


def test_a_server_of_its_model_takes_one_gpu_however_many_trained_it() -> None:
    for more in ({"parallel": {"ranks": 4}, **SERVER}, {"parallel": {"ranks": 4, "hosts": 2}, **SERVER}, VLLM):
        spec = to_toml(parse_spec({**TABLES, "device": "cuda", **more}))
        provider: Any = Has(8)
        assert asyncio.run(need_of(spec, provider, serves=True)) == Need(gpus=1, cpus=4)


def test_what_cannot_be_started_is_refused_by_name() -> None:
    provider: Any = Has(8)
    with pytest.raises(ProviderRefused, match="refuses the run's spec"):
        asyncio.run(need_of('recipe = "rl"\nno_such_field = 1\n', provider))
