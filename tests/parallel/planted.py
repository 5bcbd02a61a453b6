"""`python planted.py DIRECTORY`: a crew of two ranks, in which wrong weights are planted one after the other.

Rank 0 starts rank 1, which is this program, too. Each fault is planted on rank 1, tried, and taken back.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from crew_cases import recorded_group
from safetensors.torch import load_file
from worker_memory import Worker, reply_of, served

from tandem.build import crew as build
from tandem.errors import TandemError
from tandem.ops import digest
from tandem.spec.load import parse_spec
from tandem.train.crew import Crew

SPEC: dict[str, Any] = {
    "recipe": "rl", "model": {"preset": "tiny"}, "environment": {"name": "sort"}, "engine": {"kind": "server"},
    "algorithm": {"kind": "grpo", "kl_coef": 0.05}, "sync": {"bridge": "broadcast"},
    "train": {"steps": 9, "lr": 1e-3, "groups_per_step": 2, "group_size": 4, "micro_tokens": 128},
    "parallel": {"ranks": 2, "deadline_s": 60.0},
}  # fmt: skip
ON_TWO_HOSTS = {**SPEC, "parallel": {**SPEC["parallel"], "hosts": 2}}
IN_ENGINE = {**SPEC, "engine": {"kind": "vllm", "tensor_parallel": 2}, "sync": {"bridge": "shared", "digest": True}}
LORA = {**SPEC, "model": {"preset": "tiny", "lora": {"rank": 4}}, "sync": {"bridge": "adapter"}}


class Planter:
    def __init__(self, crew: Crew, member: build.Member) -> None:
        self.crew, self.member = crew, member
        crew.handle("plant", self.plant)

    @torch.no_grad()
    def plant(self, what: str, *, back: bool) -> None:
        if what == "optimizer state of a host that differs":
            for key, tensor in self.member.made._optimizer.state().items() if self.crew.rank else ():
                if key.endswith("|exp_avg"):
                    tensor.mul_(0.5 if back else 2.0)  # exact, both ways
            return
        rows = self.member.built.policy.inner.rows  # pyright: ignore[reportAttributeAccessIssue]
        if what == "rows swapped between ranks":
            mine = next(each.tensor for each in rows.local if each.name.endswith("q_proj.weight"))
            theirs = torch.empty_like(mine)
            work = dist.isend(mine.clone(), 1 - self.crew.rank)
            dist.recv(theirs, 1 - self.crew.rank)
            work.wait()
            mine.copy_(theirs)
        if what == "a matrix that is written where it is served":
            next(each.tensor for each in rows.local if each.name.endswith("up_proj.weight")).mul_(0.5 if back else 2.0)
        if self.crew.rank == 0:
            return
        if what == "weights that are elsewhere again":
            name = "model.layers.1.mlp.down_proj.weight"
            mine = next(each for each in rows.local if each.name == name).tensor
            if not back:
                self.home = mine.data
            mine.data = self.home if back else mine.clone()
        if what == "a norm that differs":
            dict(rows.whole)["model.layers.0.input_layernorm.weight"].mul_(0.5 if back else 2.0)  # exact, both ways
        if what == "an adapter that differs":
            rows.whole[3][1].view(-1)[5] += -0.25 if back else 0.25
        if what == "rows of a host that differ":
            rows.local[3].tensor.mul_(0.5 if back else 2.0)  # exact, both ways
        if what == "a rotary table that differs":
            next(rows._module.buffers())[1] += -0.25 if back else 0.25
        if what == "a rank that is a version behind":
            self.member.made.version += 1 if back else -1


def lead(home: Path) -> dict[str, Any]:
    from tandem import recipes  # noqa: F401 - as a run does
    from tandem.recipes.crew import own_store
    from tandem.runs.rank_processes import RankProcesses, loopback_only

    os.environ.update(loopback_only())
    processes = RankProcesses(2, home, command=[sys.executable, __file__, str(home)])
    found: dict[str, Any] = {}
    crew: Crew | None = None
    try:
        store = own_store(processes)
        crew = Crew(store, 0, 2, device=torch.device("cpu"), deadline_s=60.0, children=processes)
        member = build.Member(crew)
        crew.handle("begin", member.begin)
        Planter(crew, member)
        for spec in (LORA, ON_TWO_HOSTS, SPEC):
            found |= tried(crew, spec, home)
        found |= in_engine(crew, home)
    finally:
        if crew is not None:
            crew.close()
        processes.close(5.0)
    return found


def trainer_of(crew: Any, tables: dict[str, Any]) -> tuple[Any, Any, Callable[[], None]]:
    """Begin with a spec on all ranks; return the trainer, its model, and what takes a step."""
    import random

    from tandem.build import built_model, training

    crew.order("begin", spec=tables)
    spec = parse_spec(tables)
    model = built_model.run_model(spec, crew)
    algorithm = training.algorithm(spec.algorithm, 8)
    model.policy.keep_reference()
    trainer = training.trainer(spec.train, model, algorithm, 0, 0)
    make, rng = training.batches(spec.train, model, algorithm), random.Random(1)

    def step() -> None:
        trainer.step(make([recorded_group(rng, 4, trainer.version) for _ in range(2)], trainer.version))

    return trainer, model, step


def tried(crew: Any, tables: dict[str, Any], home: Path) -> dict[str, Any]:
    trainer, model, step = trainer_of(crew, tables)
    spec = parse_spec(tables)
    home = home / f"{spec.sync.bridge}-{spec.parallel.hosts}"
    found: dict[str, Any] = {}
    lora, on_hosts = spec.model.lora is not None, spec.parallel.hosts > 1
    if lora:
        found["whole gradients keep no more than their bytes"] = kept_alone(model.policy.inner.rows)
    step()
    faults = ["a rotary table that differs", "a rank that is a version behind"] + ["an adapter that differs"] * lora
    faults += ["rows of a host that differ"] * on_hosts
    for what in faults:
        trainer.export("adapter" if lora else "live")
        crew.order("plant", what=what, back=False)
        try:
            trainer.export("adapter" if lora else "live")
            found[what] = "served"
        except TandemError as error:
            found[what] = f"{type(error).__name__}: {error}"
        if on_hosts:
            found[f"saved: {what}"] = saved(trainer, home / "diverged")
        crew.order("plant", what=what, back=True)
    if on_hosts:
        known = set(map(id, crew.groups))
        found["groups that no loss aborts"] = [str(group) for group in c10d._world.pg_map if id(group) not in known]
        what = "optimizer state of a host that differs"
        crew.order("plant", what=what, back=False)
        found[f"saved: {what}"] = saved(trainer, home / "diverged")
        crew.order("plant", what=what, back=True)
        found["saved after all"] = saved(trainer, home / "equal")
        trainer.export("live")
        digests = trainer.fingerprints()
        model.policy.write_trained(home)
        whole = digest.fingerprints(load_file(home / "weights.safetensors"))
        found["digests of one host are those of whole tensors"] = all(digests[name] == whole[name] for name in whole)
    elif not lora:
        digests = trainer.fingerprints()
        model.policy.write_trained(home)
        whole = digest.fingerprints(load_file(home / "weights.safetensors"))
        found["digests of rows are those of whole tensors"] = all(digests[name] == whole[name] for name in whole)
        crew.order("plant", what="rows swapped between ranks", back=False)
        found["swapped rows"] = [name for name, said in trainer.fingerprints().items() if said != digests[name]]
        crew.order("plant", what="rows swapped between ranks", back=True)
        found["rows are back"] = trainer.fingerprints() == digests
        ids = list(range(2, 40))
        before = trainer.score(ids, 20)
        trainer.save(home / "saved")
        step()
        moved = trainer.score(ids, 20)
        trainer.load(home / "saved")
        found["scores"] = {
            "moved": moved != before,
            "back": trainer.score(ids, 20) == before,
            "version": trainer.version,
        }
    return found


def in_engine(crew: Crew, home: Path) -> dict[str, Any]:
    """Two ranks that train in the memory of two workers. Their tensors are where a worker serves them."""
    from test_equal_bytes import write_model

    from tandem.bridge.shared.sender import SharedBridge
    from tandem.ops.digest import side_by_side
    from tandem.train.crew_memory import CrewMemory

    write_model(home / "model")
    trainer, model, step = trainer_of(crew, {**IN_ENGINE, "model": {"path": str(home / "model")}})
    shapes = model.policy.full_shapes()
    derived = [name for name, _ in model.policy.module.named_buffers()]
    bridge = SharedBridge(5.0, digest=True, ranks=2)
    through = CrewMemory(crew, bridge)
    found: dict[str, Any] = {}

    def attach(order: tuple[int, int]) -> list[Worker]:
        source = bridge.source(2)
        workers = [Worker(source.link, shapes, number, 2) for number in range(2)]
        source.attached(reply_of([workers[each] for each in order], derived))
        storage = through.storage()
        assert storage is not None
        trainer.live_in(storage)
        return workers

    def publish(workers: list[Worker]) -> str:
        try:
            sent = through.send(trainer.export("live"))
            proofs = [worker.end.receive(trainer.version).expected for worker in workers]
        except TandemError as error:
            return f"{type(error).__name__}: {error}"
        theirs = side_by_side(proofs)
        odd = [name for name in theirs | sent.fingerprints if theirs.get(name) != sent.fingerprints.get(name)]
        return f"proven {sent.bytes_moved}" if not odd else f"differs: {odd}"

    before = trainer.fingerprints()
    try:
        attach((1, 0))
    except TandemError as error:
        found["swapped workers"] = f"{type(error).__name__}: {error}"
    workers = attach((0, 1))
    found["in the engine: the values moved with them"] = served(workers, shapes) == without(trainer, derived) == {
        name: each for name, each in before.items() if name not in derived
    }  # fmt: skip
    found["in the engine: published"] = [publish(workers)]
    for _ in range(2):
        step()
        found["in the engine: published"].append(publish(workers))
    found["in the engine: what is served"] = served(workers, shapes) == without(trainer, derived) != before
    model.policy.write_trained(home)
    whole = digest.fingerprints(load_file(home / "weights.safetensors"))
    found["in the engine: the digests of one rank"] = served(workers, shapes) == whole
    trainer.save(home / "in-engine")
    ids = list(range(2, 40))
    then, scores = served(workers, shapes), trainer.score(ids, 20)
    step()
    moved = served(workers, shapes) != then and trainer.score(ids, 20) != scores
    trainer.load(home / "in-engine")
    found["in the engine: loaded"] = moved and served(workers, shapes) == then and trainer.score(ids, 20) == scores
    found["in the engine: published after that"] = publish(workers)
    crew.order("plant", what="a matrix that is written where it is served", back=False)
    others = trainer.score(ids, 20)
    crew.order("plant", what="a matrix that is written where it is served", back=True)
    found["in the engine: computed with what is there"] = others != scores and trainer.score(ids, 20) == scores
    for what in ("weights that are elsewhere again", "a norm that differs"):
        crew.order("plant", what=what, back=False)
        found[what] = publish(workers)
        crew.order("plant", what=what, back=True)
    name = "model.layers.1.mlp.up_proj.weight"
    workers[1].end._tensors = {**workers[1].end._tensors, name: workers[1].tensors[name].clone()}
    workers[1].end._digests = None
    step()
    found["a worker that serves an older piece"] = publish(workers)
    return found


def without(trainer: Any, names: list[str]) -> dict[str, str]:
    return {name: said for name, said in trainer.fingerprints().items() if name not in names}


def kept_alone(rows: Any) -> list[bool]:
    """Of each sum to come: whether its tensors keep no memory but their own."""
    summed, found = rows.sum_of_whole, list[bool]()

    def watched() -> dict[str, Any]:
        made = summed()
        found.append(all(each.untyped_storage().nbytes() == each.nbytes for each in made.values()))
        return made

    rows.sum_of_whole = watched
    return found


def saved(trainer: Any, path: Path) -> str:
    try:
        trainer.save(path)
    except TandemError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


if __name__ == "__main__":
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(lead(Path(sys.argv[1]))), flush=True)
    else:
        from tandem.recipes.crew import given_store

        crew = Crew(given_store(), 1, 2, device=torch.device("cpu"), deadline_s=60.0)
        member = build.Member(crew)
        crew.handle("begin", member.begin)
        Planter(crew, member)
        try:
            crew.follow()
        except BaseException as error:  # noqa: BLE001 - as build/crew.py has it
            crew.fail(error)
