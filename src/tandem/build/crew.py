"""Build what every rank of a crew has: its rows of the model, and its trainer. Rank 0 orders it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tandem.build import built_model, optimizers, training
from tandem.errors import SpecError, SyncError
from tandem.io import own_code
from tandem.io.file_system import file_system_of
from tandem.io.shared_directory import why_unseen
from tandem.ops.byte_sizes import keeps_gathered, sums_of_ranks
from tandem.protocols import Trainer
from tandem.spec.load import parse_spec
from tandem.spec.model import ModelSpec, PathModel
from tandem.spec.own import own_names
from tandem.spec.parallel import ParallelSpec, settled
from tandem.spec.precision import Bfloat16Precision, PrecisionSpec
from tandem.spec.run import RlSpec, RunSpec
from tandem.spec.train import WarmupStage
from tandem.types import Weights

if TYPE_CHECKING:
    import torch

    from tandem.bridge.files.rank_files import RankFiles
    from tandem.bridge.shared.sender import WorkerMemory
    from tandem.optim.by_owner import RankGroup
    from tandem.optim.master_weights import Master
    from tandem.train.crew import Children, Crew


def device_of(spec: RunSpec, local_rank: int, local_ranks: int) -> torch.device:
    """Return the device of the rank that is number `local_rank` on its host; on a CPU, share its threads."""
    import torch

    device = built_model.pick_device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_ranks))
    return device


def gpu_bytes(device: Any) -> int:
    """Return a GPU's memory; 0 for a CPU."""
    import torch

    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def policy_by_rows(
    spec: ModelSpec,
    module: Any,
    tokenizer: Any,
    precision: PrecisionSpec,
    master: Master,
    crew: Crew,
    parallel: ParallelSpec,
    options: Mapping[str, Any],
    *,
    in_engine: bool = False,
) -> Any:
    """Take this rank's rows of the module, or of the model's files if it is None; return the policy through which rank
    0 reaches all ranks. `in_engine`: cut as the engine's workers cut, because ranks train in their memory."""
    import torch

    from tandem.model.cast_precision import narrow
    from tandem.model.engine_cuts import engine_cuts
    from tandem.model.hosts import Hosts
    from tandem.model.load_rows import opened_model
    from tandem.model.rows import Rows
    from tandem.model.rows_policy import RowsPolicy
    from tandem.train.crew_policy import CrewPolicy
    from tandem.train.gradient_tree import tree

    narrowed = isinstance(precision, Bfloat16Precision)
    dtype = torch.bfloat16 if narrowed else torch.float32
    # Before adapters are made: peft gives them values of the base's type.
    first = dtype if options["lora"] else torch.float32
    with ExitStack() as stack:
        rows_of = None
        if isinstance(spec, PathModel) and module is None:
            files = opened_model(spec.path, spec.revision, spec.kernel, dtype=first)
            module, rows_of = stack.enter_context(files)
        elif first != torch.float32:
            narrow(module, torch.device("cpu"), None)
        hosts = Hosts(crew.rank, crew.ranks, crew.row_shards, crew.device, crew.timeout)
        crew.groups += hosts.groups
        numbers, room = sum(each.numel() for each in module.parameters()), gpu_bytes(crew.device)
        keeps = keeps_gathered(parallel.gather, numbers * dtype.itemsize, room)
        crew.gathers_for = "step" if keeps else "layer"
        crew.sums = sums_of_ranks(parallel.sums, 4 * (0 if options["lora"] else numbers), room)
        cuts = engine_cuts(module, crew.ranks) if in_engine else None
        sums = {"adds": crew.sums == "step", "running": crew.sums == "running"}
        rows = Rows(hosts, crew.device, tree=tree, tick=crew.tick, keeps=keeps, cuts=cuts, **sums)
        adopt = master.adopt if master.keeps_bits else None
        policy = RowsPolicy(module, tokenizer, rows=rows, adopt=adopt, dtype=dtype, rows_of=rows_of, **options)
    return CrewPolicy(crew, policy)


def lead(spec: RunSpec, store: Any, *, local_rank: int, local_ranks: int, children: Children | None) -> Crew:
    """Meet the other ranks as rank 0, and tell them the spec."""
    from tandem.train.crew import Crew

    built_model.import_model_code(spec)  # while the other ranks do
    crew = Crew(
        store,
        0,
        spec.parallel.ranks,
        device=device_of(spec, local_rank, local_ranks),
        deadline_s=spec.parallel.deadline_s,
        children=children,
    )
    member = Member(crew)
    crew.handle("begin", member.begin)
    on_all = ("algorithm.", "train.", "warmup.")  # callbacks, trackers and environments are rank 0's alone
    code = {name: own_code.sha256_of(name) for field, name in own_names(spec) if field.startswith(on_all)}
    crew.order("begin", spec=spec.model_dump(mode="json", exclude_none=True), code=code)
    return crew


def follow(
    store: Any,
    rank: int,
    ranks: int,
    spec: RunSpec,
    *,
    local_rank: int,
    local_ranks: int,
    directory: Path | None = None,
    met_others: Callable[[], None] = lambda: None,
) -> None:
    """Meet the other ranks as one of them, and do what rank 0 orders until the run has ended. `directory`: the run's,
    as this rank's own command line names it. `met_others` is called once, when they have met."""
    import signal

    from tandem.train.crew import Crew

    # Rank 0 decides when the run ends, on Ctrl-C and SIGTERM, too. A thread waits for them: the main one is in C++.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    met: list[Crew] = []

    def wait_for_signal() -> None:
        while True:
            if signal.sigwait({signal.SIGTERM, signal.SIGINT}) == signal.SIGTERM:
                if not met:
                    os._exit(128 + signal.SIGTERM)
                met[0].ask_to_end()

    threading.Thread(target=wait_for_signal, name="signals", daemon=True).start()
    device = device_of(spec, local_rank, local_ranks)
    built_model.import_model_code(spec)
    crew = Crew(store, rank, ranks, device=device, deadline_s=spec.parallel.deadline_s)
    met.append(crew)
    met_others()
    member = Member(crew, directory)
    crew.handle("begin", member.begin)
    try:
        with own_code.session():
            crew.follow()
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is told to rank 0
        crew.fail(error)


def call_off(store: Any) -> None:
    """Let the ranks that wait for this one go: there is nothing to train."""
    from tandem.train import crew

    crew.call_off(store)


def refuse(store: Any, rank: int, error: Exception) -> None:
    """Let the ranks that wait for this one end, and say why: it does not come."""
    from tandem.train import crew

    crew.refuse(store, rank, error)


def rank_files(crew: Crew, spec: RlSpec) -> RankFiles:
    """Return this rank's end of versions that travel as files."""
    from tandem.bridge.files.rank_files import RankFiles

    return RankFiles(crew, spec.sync.bridge, crew.row_shards)


def _rank_sender(crew: Crew, spec: RlSpec) -> Callable[[Mapping[str, Any], Weights], object]:
    """Return what another rank than 0 calls for each version."""
    if spec.sync.traits.engine_end == "files":
        from tandem.ops.phase_timer import Phases

        files = rank_files(crew, spec)
        return lambda _, weights: files.write(weights, Phases())
    from tandem.bridge.collective.rank_senders import RankSender

    sender = RankSender(crew.rank, crew.device)

    def send(link: Mapping[str, Any], weights: Weights) -> None:
        """It has deadlines of its own, and may take as long as `sync.deadline_s`."""
        with _ticking(crew):
            sender.send(link, weights)

    return send


@contextmanager
def _ticking(crew: Crew) -> Iterator[None]:
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(1.0):
            crew.tick()

    threading.Thread(target=tick, name="send", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class Member:
    """One rank. Its handlers build the same as the other ranks' build."""

    def __init__(self, crew: Crew, directory: Path | None = None) -> None:
        self._crew, self._directory = crew, directory
        self._sender: Callable[[Mapping[str, Any], Weights], object] | None = None
        self._memory: WorkerMemory | None = None

    def begin(self, spec: dict[str, Any], code: Mapping[str, str] | None = None) -> None:
        """`code`: the SHA-256 of each file of the user's own on rank 0; another loss on one rank would be averaged in
        without a sign."""
        self._spec = parse_spec(spec)
        for name, sha256 in (code or {}).items():
            if (mine := own_code.sha256_of(name)) != sha256:
                found = f"has SHA-256 {mine[:12]}" if mine else "is missing"
                raise SpecError(
                    f"{name}: {found} on rank {self._crew.rank} ({self._crew.host}), and {sha256[:12]} on rank 0; put "
                    "the same file there"
                )
        self._crew.row_shards = self._spec.parallel.row_shards
        built_model.settle_torch(self._spec)
        self._crew.handle("see", self._see)
        self._crew.handle("file_system", lambda path: file_system_of(Path(path)))
        self._crew.handle("model", self._model)
        self._crew.handle("trainer", self._trainer)
        self._crew.handle("map", self._map)
        self._crew.handle("send", self._send)  # on rank 0 its bridge takes this order over

    def _see(self, path: str, token: str) -> str:
        """Return why this rank does not see the run's directory, by rank 0's path and by its own; empty if it does."""
        paths = [Path(path), *filter(None, [self._directory])]
        return next(filter(None, (why_unseen(each, token, self._crew.tick) for each in paths)), "")

    def _model(self, max_context: int) -> built_model.BuiltModel | None:
        spec = self._spec
        self.built = built_model.model(
            spec.model, spec.precision, spec.seed, self._crew.device, max_context, crew=self._crew,
            parallel=settled(spec.parallel, deterministic=spec.deterministic),
            in_engine=isinstance(spec, RlSpec) and spec.sync.traits.shares_memory, trains=True,
        )  # fmt: skip
        return self.built if self._crew.rank == 0 else None

    def _trainer(self, stage: str, version: int) -> Trainer | None:
        from tandem.optim.optimizer import metrics_of
        from tandem.train.crew_trainer import CrewTrainer

        spec, built = self._spec, self.built
        its_stage = getattr(spec, stage)
        policy: Any = cast("Any", built.policy).inner
        self.made = CrewTrainer(
            self._crew,
            policy,
            self._algorithm(its_stage),
            optimizers.of_stage(
                its_stage,
                policy,
                built.master,
                spec.seed,
                shapes=policy.full_shapes(),
                ranks=self._ranks(policy.rows),
                uncounted=policy.uncounted(),
            ),
            held_by_all=policy.rows.held_by_all,
            shares=built.num_shares,
            by_step=built.sums == "step",
            rounds=policy.rows,
            update_metrics=metrics_of,
            **training.trainer_options(its_stage, built, version),
        )
        return self.made if self._crew.rank == 0 else None

    def _ranks(self, rows: Any) -> RankGroup | None:
        """Return the ranks that have the other rows of what is trained; None if this rank has all."""
        from tandem.optim.by_owner import RankGroup

        if rows.held_by_all:
            return None
        hosts = rows.hosts
        return RankGroup(hosts.row_shard, hosts.row_shards, self._crew.device, hosts.mesh.get_group(), self._crew.tick)

    def _map(self, handles: Sequence[Mapping[str, Any]]) -> None:
        """Train in the memory of this rank's worker from now on. Rank 0's bridge has mapped that of its own, and the
        publisher moves its weights there."""
        from tandem.bridge.shared.sender import WorkerMemory, check_worker

        policy: Any = cast("Any", self.built.policy).inner
        handle = handles[self._crew.rank]
        check_worker(handle, self._crew.device, policy.held())
        if self._crew.rank:
            self._memory = WorkerMemory(handle)
            policy.live_in(self._memory.tensors)

    def _send(self, link: dict[str, Any]) -> Mapping[str, str] | None:
        """Send this rank's rows when rank 0 sends its own; where they are in a worker's memory, say so."""
        policy: Any = cast("Any", self.built.policy).inner
        if cast("RlSpec", self._spec).sync.traits.shares_memory:
            if self._memory is None:
                raise SyncError("shared: this rank has mapped no memory to train in")
            return self._memory.announce(policy.weights(self.made.version, "live")).fingerprints
        self._sender = self._sender or _rank_sender(self._crew, cast("RlSpec", self._spec))
        self._sender(link, policy.weights(self.made.version, "full"))
        return None

    def _algorithm(self, stage: Any) -> Any:
        if isinstance(stage, WarmupStage):
            return training.sft_algorithm()
        return training.algorithm_of(self._spec)
