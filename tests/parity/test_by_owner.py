"""Optimizers that need whole tensors, over ranks with some rows each: every number is that of one process."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from tandem.build import optimizers
from tandem.ops.owner_rounds import num_holders, rounds_of_owners
from tandem.ops.parts import rows_of
from tandem.optim import master_weights
from tandem.optim.by_owner import RankGroup
from tandem.spec.optim import AdafactorSpec, ApolloMiniSpec, ApolloSpec, MuonSpec

RANKS, STEPS = 3, 5
SPECS: dict[str, Any] = {
    "muon": MuonSpec(weight_decay=0.1),
    "apollo": ApolloSpec(rank=4, refresh_every=3, weight_decay=0.1),
    "apollo_mini": ApolloMiniSpec(refresh_every=3, weight_decay=0.1),
    "adafactor": AdafactorSpec(weight_decay=0.1),
}
SHAPES = {
    "table": (6, 16), "wide": (5, 48), "tall": (130, 16), "square": (32, 32), "stack": (4, 24, 16), "row": (1, 32),
    "two rows": (2, 48), "norm": (96,),
}  # fmt: skip
"""Some have fewer rows than ranks, or rows on two of three."""


def draws(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    """One is missing at times, one is zero at times, one is not."""
    found = draws(100 + step)
    if step % 2:
        del found["tall"]
    found["square"] *= step != 2
    return found


def mine(tensors: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    cuts = {name: slice(*rows_of(len(tensor), rank, ranks)) for name, tensor in tensors.items()}
    return {name: tensor[cuts[name]].clone() for name, tensor in tensors.items() if len(tensor[cuts[name]])}


def trained(spec: Any, rank: int, ranks: int, *, narrow: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return values, state and what became of the updates; and where the state is."""
    master = master_weights.SplitMaster() if narrow else master_weights.Float32()
    values = mine(draws(0), rank, ranks)
    live = {name: master.adopt(name, value) for name, value in values.items()}
    group = RankGroup(rank, ranks, torch.device("cpu"), dist.group.WORLD, lambda: None) if ranks > 1 else None
    optimizer: Any = optimizers.optimizer(
        list(live.items()), spec, master=master, tables={"table"}, lora_plus=1.0, seed=0, shapes=SHAPES, ranks=group,
        by_row=True,
    )  # fmt: skip
    for step in range(STEPS):
        optimizer.update(mine(gradients(step), rank, ranks), lr=0.01, scale=0.5)
    sums = torch.tensor(optimizer.drain_sums())
    return live | optimizer.state() | {"sums": sums}, optimizer.cut()


def one_rank(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    for kind, spec in SPECS.items():
        for narrow in (False, True):
            found, cut = trained(spec, rank, RANKS, narrow=narrow)
            starts = {f"{name}#": torch.tensor(cut[name][0]) for name in cut}
            save_file(found | starts, directory / f"{kind}-{narrow}-{rank}.safetensors")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    running: Any = spawn(one_rank, args=(directory,), nprocs=RANKS, join=False)
    while not running.join(timeout=60):
        pass
    return directory


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", SPECS)
def test_rows_of_three_ranks_are_those_of_one_process(parts: Path, kind: str, narrow: bool) -> None:
    whole, _ = trained(SPECS[kind], 0, 1, narrow=narrow)
    found = [load_file(parts / f"{kind}-{narrow}-{rank}.safetensors") for rank in range(RANKS)]
    for name, tensor in whole.items():
        pieces = [each[name] for each in found if name in each]
        if name == "sums":
            torch.testing.assert_close(torch.stack(pieces).sum(0), tensor, rtol=1e-6, atol=1e-9)
        elif tensor.ndim == 0:
            assert all(torch.equal(piece, tensor) for piece in pieces), name
        else:
            assert torch.equal(torch.cat(pieces), tensor), name
            starts = [int(each[f"{name}#"]) for each in found if {name, f"{name}#"} <= each.keys()]
            if starts:
                assert starts == [sum(len(piece) for piece in pieces[:rank]) for rank in range(len(pieces))], name


def test_scalars_of_the_state_are_on_one_rank(parts: Path) -> None:
    found = [load_file(parts / f"apollo-False-{rank}.safetensors") for rank in range(RANKS)]
    assert ["wide|norm" in each for each in found] == [True, False, False]


def test_tensors_are_dealt_by_cost_to_ranks_that_have_rows_of_them() -> None:
    shapes = {f"layer {n}": (64, 64) for n in range(8)} | {"large": (512, 64), "row": (1, 64), "norm": (64,)}
    rounds = rounds_of_owners(shapes, 4)
    assert rounds == rounds_of_owners(dict(reversed(shapes.items())), 4)
    names = [name for names in rounds for name in names if name]
    assert sorted(names) == sorted(shapes)
    assert rounds[0][0] == "large"
    owned = [[names[rank] for names in rounds if names[rank]] for rank in range(4)]
    assert [sum(name.startswith("layer") for name in each) for each in owned] == [0, 3, 3, 2]
    assert "row" in owned[0], "no other rank has rows of it"
    assert [num_holders(shape, 4) for shape in ((1, 8), (5, 8), (8, 8))] == [1, 3, 4]
