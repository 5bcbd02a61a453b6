"""Many copies in one call give the same as one after the other."""

from __future__ import annotations

import pytest
import torch

from tandem.ops import batched_launches
from tandem.ops.batched_launches import copy_all

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu


def test_every_pair_is_copied_whatever_its_size_type_and_layout() -> None:
    torch.manual_seed(0)
    whole = torch.zeros(64, 48, device=DEVICE)
    sources = [
        torch.randn(16, 48, device=DEVICE),
        torch.randn(16, 48, device=DEVICE).bfloat16(),
        torch.randn(48, 16, device=DEVICE).t(),
        torch.randn(16, 48),
    ]
    pairs = [(whole[16 * n : 16 * n + 16], source) for n, source in enumerate(sources)]
    large = torch.empty(batched_launches._SMALL_BYTES // 2, device=DEVICE)
    pairs.append((large, torch.arange(large.numel(), device=DEVICE, dtype=torch.float32)))
    pairs.append((torch.empty((), dtype=torch.bfloat16, device=DEVICE), torch.tensor(2.5, device=DEVICE)))
    copy_all(pairs)
    for into, source in pairs:
        assert torch.equal(into.float().cpu(), source.float().cpu())


def test_the_same_copies_again_have_the_values_of_then() -> None:
    """On a GPU by a graph, from the second time on."""
    sources = [torch.zeros(300, 7, device=DEVICE), torch.zeros(2 * batched_launches._SMALL_BYTES, device=DEVICE)]
    targets = [torch.empty(300, 7, device=DEVICE, dtype=torch.bfloat16), torch.empty_like(sources[1])]
    again = batched_launches.Copying(zip(targets, sources, strict=True))
    for turn in range(4):
        for source in sources:
            source.fill_(turn + 1)
        again.run()
        assert [float(each.float().mean()) for each in targets] == [turn + 1] * 2
    assert (again._replay._graph is not None) == (DEVICE == "cuda")


def test_copies_between_devices_are_made_one_by_one() -> None:
    source = torch.ones(8)
    again = batched_launches.Copying([(into := torch.zeros(8, device=DEVICE), source)])
    for turn in range(3):
        source.fill_(turn)
        again.run()
        assert into.tolist() == [turn] * 8
    assert again._replay._graph is None


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are for GPUs")
def test_many_graphs_keep_no_more_memory_than_one() -> None:
    """cuBLAS keeps 32 MiB for each stream that it has seen."""
    weight, rows = torch.randn(2048, 2048, device=DEVICE), torch.randn(64, 2048, device=DEVICE)
    into = rows @ weight
    pool, graphs, held = torch.cuda.graph_pool_handle(), list[torch.cuda.CUDAGraph](), list[int]()
    for _ in range(9):
        graphs.append(batched_launches.record_graph(lambda: into.copy_(rows @ weight), weight.device, pool))
        held.append(torch.cuda.memory_allocated())
    assert held[-1] - held[0] < 2**20
    into.zero_()
    graphs[-1].replay()
    torch.testing.assert_close(into, rows @ weight)
