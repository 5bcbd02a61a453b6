"""What `[parallel]` refuses, by field and with the way out, before anything is loaded."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest

from tandem.errors import SpecError
from tandem.recipes.crew import as_launched
from tandem.spec.load import parse_spec
from tandem.spec.ranks import on_ranks

SFT: dict[str, Any] = {
    "recipe": "sft", "model": {"preset": "tiny"}, "data": {"kind": "file", "path": "rows.jsonl"},
    "train": {"steps": 2, "lr": 1e-3}, "parallel": {"ranks": 2},
}  # fmt: skip
RL: dict[str, Any] = {
    "recipe": "rl", "model": {"preset": "tiny"}, "environment": {"name": "sort"},
    "train": {"steps": 2, "lr": 1e-3, "groups_per_step": 2, "group_size": 2}, "engine": {"kind": "server"},
    "sync": {"bridge": "broadcast"}, "parallel": {"ranks": 2},
}  # fmt: skip
REFUSED = {
    "parallel.shares = 1: fewer micro-batches than parallel.ranks = 2": (SFT, {"parallel": {"shares": 1}}),
    "parallel.hosts = 2: does not divide parallel.ranks = 3": (SFT, {"parallel": {"ranks": 3, "hosts": 2}}),
    "parallel.layout = 'whole': is for adapters": (SFT, {"parallel": {"layout": "whole"}}),
    "parallel.layout = 'rows': adapters are held whole": (
        SFT, {"parallel": {"layout": "rows"}, "model": {"lora": {"rank": 4}}},
    ),
    "model.activations = 'offload': does not go with parallel.ranks = 2": (SFT, {"model": {"activations": "offload"}}),
    "train.gradient_release = true: with parallel.shares = 2": (SFT, {"train": {"gradient_release": True}}),
    "engine.kind = 'hf': runs inside one process": (RL, {"engine": {"kind": "hf"}, "sync": {"bridge": "inproc"}}),
    "sync.bridge = 'broadcast': with parallel.ranks = 2 adapters are sent": (RL, {"model": {"lora": {"rank": 4}}}),
    "algorithm.kind = 'distill': its teacher": (RL, {"algorithm": {"kind": "distill", "teacher": "x"}}),
}  # fmt: skip

WORKERS = {"engine": {"kind": "vllm", "tensor_parallel": 2}, "sync": {"bridge": "shared"}}
REFUSED_IN_ENGINE = {
    "sync.bridge = 'shared': with parallel.ranks = 2 each rank": {"engine": {"kind": "server"}},
    "engine.tensor_parallel = 1: under sync.bridge = 'shared' each rank": {"engine": {"tensor_parallel": 1}},
    "engine.tensor_parallel = 4: under sync.bridge = 'shared' each rank": {"engine": {"tensor_parallel": 4}},
    "engine.gpus = [1, 0]: under sync.bridge = 'shared' the one copy": {"engine": {"gpus": [1, 0]}},
    "parallel.hosts = 2: under sync.bridge = 'shared' all ranks are on": {"parallel": {"hosts": 2}},
    "train.optimizer.kind = 'muon': under sync.bridge = 'shared'": {"train": {"optimizer": {"kind": "muon"}}},
    "engine.replicas = 2: bridge = 'shared' is one copy": {"engine": {"replicas": 2}},
}


def changed(spec: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(spec)
    for table, values in changes.items():
        found[table] = {**found.get(table, {}), **values}
    return found


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_with_several_ranks_is_refused_by_name(message):
    spec, changes = REFUSED[message]
    with pytest.raises(SpecError) as refused:
        parse_spec(changed(spec, changes))
    assert message in str(refused.value)
    assert ";" in str(refused.value), "a refusal names the way out"


@pytest.mark.parametrize("message", REFUSED)
def test_one_rank_takes_the_same(message):
    spec, changes = REFUSED[message]
    alone = changed(spec, changes)
    alone["parallel"] = {key: value for key, value in alone["parallel"].items() if key == "layout"}
    parse_spec(alone)


@pytest.mark.parametrize("message", REFUSED_IN_ENGINE)
def test_what_does_not_go_with_ranks_in_an_engine_s_memory_is_refused_by_name(message):
    changes = REFUSED_IN_ENGINE[message]
    spec = changed(RL, WORKERS)
    parse_spec(spec)
    if changes.get("engine", {}).get("kind"):
        del spec["engine"]["tensor_parallel"]  # of vLLM alone
    with pytest.raises(SpecError) as refused:
        parse_spec(changed(spec, changes))
    assert message in str(refused.value)
    assert ";" in str(refused.value), "a refusal names the way out"


def test_muon_goes_with_adapters_that_every_rank_holds():
    parse_spec(changed(SFT, {"model": {"lora": {"rank": 4}}, "train": {"optimizer": {"kind": "muon"}}}))


def test_a_launcher_says_how_many_ranks_there_are(monkeypatch):
    spec = parse_spec(changed(SFT, {"parallel": {"ranks": 4}}))
    assert as_launched(spec) is spec
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert as_launched(spec).parallel.ranks == 2
    assert as_launched(spec).parallel.num_shares == 4, "fewer ranks go on to the same bytes"


def launched(monkeypatch, rank: int, agent: int, agents: int, of_agent: int, ranks: int) -> None:
    told = {"RANK": rank, "GROUP_RANK": agent, "GROUP_WORLD_SIZE": agents, "LOCAL_WORLD_SIZE": of_agent}
    for name, value in {**told, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("stated", "hosts", "shards"), [(0, 2, 2), (1, 1, 4), (2, 2, 2)])
def test_a_launcher_says_how_many_hosts_there_are(monkeypatch, stated, hosts, shards):
    launched(monkeypatch, rank=3, agent=1, agents=2, of_agent=2, ranks=4)
    parallel = as_launched(parse_spec(changed(SFT, {"parallel": {"ranks": 2, "hosts": stated}}))).parallel
    assert (parallel.ranks, parallel.hosts, parallel.row_shards) == (4, hosts, shards)


def test_hosts_that_are_not_those_of_the_launcher_are_refused(monkeypatch):
    launched(monkeypatch, rank=3, agent=1, agents=2, of_agent=2, ranks=4)
    with pytest.raises(SpecError, match=r"parallel.hosts = 4: the launcher has 2 agents, .*; leave hosts out, or set"):
        as_launched(parse_spec(changed(SFT, {"parallel": {"ranks": 4, "hosts": 4}})))


@pytest.mark.parametrize("where", [{"rank": 3, "of_agent": 3}, {"rank": 1, "of_agent": 2}], ids=["uneven", "mixed"])
def test_hosts_of_uneven_or_mixed_ranks_are_refused(monkeypatch, where):
    launched(monkeypatch, agent=1, agents=2, ranks=4, **where)
    spec = parse_spec(changed(SFT, {"parallel": {"ranks": 4}}))
    with pytest.raises(
        SpecError, match=rf"agent 1 of 2 has {where['of_agent']} of 4 ranks, .*; start as many with each"
    ):
        as_launched(spec)
    assert as_launched(parse_spec(changed(SFT, {"parallel": {"ranks": 4, "hosts": 1}}))).parallel.hosts == 1


def test_another_number_of_ranks_leaves_hosts_out_that_were_not_said():
    spec = parse_spec(changed(SFT, {"parallel": {"ranks": 4, "hosts": 2, "shares": 4}}))
    assert on_ranks(spec, 4).parallel.hosts == 0  # on this host
    assert on_ranks(spec, 4, 2) is spec
    assert on_ranks(spec, 1).parallel.hosts == 0
    assert (on_ranks(spec, 4, 4).parallel.hosts, on_ranks(spec, 4, 4).parallel.shares) == (4, 4)


def test_a_run_that_goes_on_keeps_shares_that_were_not_said_and_a_plan_counts_them_again():
    spec = parse_spec(changed(SFT, {"parallel": {"ranks": 4}}))
    assert [on_ranks(spec, ranks).parallel.num_shares for ranks in (2, 8)] == [4, 8]
    assert [on_ranks(spec, ranks, goes_on=False).parallel.num_shares for ranks in (2, 8)] == [2, 8]


def test_more_ranks_than_shares_are_refused_where_shares_were_said():
    spec = parse_spec(changed(SFT, {"parallel": {"ranks": 2, "shares": 2}}))
    assert on_ranks(spec, 2) is spec
    with pytest.raises(SpecError, match=r"parallel.shares = 2: fewer micro-batches than parallel.ranks = 4"):
        on_ranks(spec, 4)


def test_one_rank_loads_nothing_of_a_crew(tmp_path):
    rows = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": rows}) + "\n") * 30)
    script = f"""
import json, sys, tandem
spec = {SFT!r} | {{"parallel": {{}}, "data": {{"kind": "file", "path": {str(tmp_path / "rows.jsonl")!r}}}}}
tandem.run(spec, {str(tmp_path / "run")!r})
import torch
ours = [name for name in sys.modules if name.startswith("tandem.") and ("crew" in name or "model.rows" in name)]
print(json.dumps([sorted(ours), torch.distributed.is_initialized()]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [["tandem.recipes.crew"], False]
