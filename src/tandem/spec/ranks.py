"""The spec of a run on another number of ranks."""

from __future__ import annotations

from tandem.spec.load import parse_spec
from tandem.spec.run import RunSpec


def on_ranks(spec: RunSpec, ranks: int, hosts: int = 0, *, goes_on: bool = True) -> RunSpec:
    """Return the spec with another number of ranks and hosts, checked again; SpecError if it cannot be. `hosts` = 0:
    all ranks are on one host. `goes_on`: a run of several ranks keeps its shares, also those that its spec leaves out,
    and so its bytes."""
    if (ranks, hosts) == (spec.parallel.ranks, spec.parallel.hosts):
        return spec
    shares = spec.parallel.shares
    if goes_on and not shares and spec.parallel.ranks > 1:
        shares = max(spec.parallel.ranks, ranks)
    parallel = {**spec.parallel.model_dump(), "ranks": ranks, "hosts": hosts, "shares": shares}
    return parse_spec({**spec.as_written(), "parallel": parallel})
