"""Build where groups come from: the store, and the producer that fills it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.build.built_model import BuiltModel
from tandem.build.training import its_spec
from tandem.errors import SpecError
from tandem.protocols import Algorithm, Demonstrator, Environment, Producer, RolloutStore, Trainer
from tandem.spec.rollouts import ServiceRollouts
from tandem.spec.run import RlSpec
from tandem.spec.train import RlStage, SftStage
from tandem.types import Group, Message, Task

if TYPE_CHECKING:
    from tandem.rollout.episode import Setting
    from tandem.rollout.no_reward import RewardWatch
    from tandem.rollout.remote.trainer_store import RemoteStore


def store(stage: RlStage | SftStage) -> RolloutStore:
    """Build the in-memory store; its slots enforce the staleness bound of an RL stage."""
    from tandem.rollout.store import MemoryStore

    if isinstance(stage, SftStage):
        return MemoryStore(stage.batch_size)
    slots = (stage.max_lag + 1) * stage.groups_per_step
    return MemoryStore(slots, max_dropped=stage.max_dropped, take_timeout_s=stage.group_timeout_s)


async def leave(store: RolloutStore) -> None:
    """Close a remote store after its loop ended or failed."""
    from tandem.rollout.remote.trainer_store import RemoteStore

    if isinstance(store, RemoteStore):
        await store.close()


def rollouts(
    spec: RlSpec,
    directory: Path,
    setting: Setting | None,
    algorithm: Algorithm,
    model: BuiltModel,
    trainer: Trainer,
    watch: RewardWatch | None = None,
) -> tuple[RolloutStore, Producer]:
    """Build the store of groups and the producer that fills it. `directory`: the run's. `watch`: sees every group that
    this process plays."""
    if isinstance(spec.rollouts, ServiceRollouts):
        remote = _service(spec, directory, spec.rollouts, model, trainer)
        return remote, remote
    from tandem.rollout.producer import EnvironmentProducer

    assert setting is not None, "a spec without an environment is refused"
    groups = store(spec.train)
    producer = EnvironmentProducer(
        setting,
        groups,
        algorithm.keep,
        group_size=spec.train.group_size,
        seed=spec.seed,
        max_failed_share=its_spec(spec).max_failed_share,
        max_replaced=spec.train.replace_equal_groups,
        watch=watch,
    )
    return groups, producer


def _service(
    spec: RlSpec, directory: Path, rollouts: ServiceRollouts, model: BuiltModel, trainer: Trainer
) -> RemoteStore:
    """Register this run's trainer at a rollout service; return the store that takes groups from it."""
    from tandem.rollout.queue.types import TrainerSpec
    from tandem.rollout.remote.client import ServiceClient
    from tandem.rollout.remote.trainer_store import RemoteStore, run_id_of

    stage = spec.train
    registration = TrainerSpec(
        run_id=rollouts.run_id or run_id_of(directory, spec.name),
        groups_per_step=stage.groups_per_step,
        max_lag=stage.max_lag,
        num_ids=model.num_ids,
        max_tokens=model.context,
        tokenizer=model.renderer.fingerprint,
        max_dropped=stage.max_dropped,
        lease_s=rollouts.lease_s,
        extra={"sampling": {"temperature": stage.temperature, "top_p": stage.top_p}},
    )
    client = ServiceClient(rollouts.url, Path(rollouts.token_file), patience_s=stage.group_timeout_s)
    return RemoteStore(
        client, registration, lambda: trainer.version, take_timeout_s=stage.group_timeout_s, fresh=rollouts.fresh
    )


def recordings(groups: Sequence[Group], store: RolloutStore, seed: int) -> Producer:
    """Build the producer that puts recorded groups into `store`, in an order drawn from `seed`."""
    from tandem.rollout.recorded_producer import RecordedProducer

    return RecordedProducer(groups, store, seed=seed)


def demonstrations(environment: Environment, name: str, count: int, seed: int) -> list[tuple[Task, list[Message]]]:
    """Return `count` training tasks with the environment's demonstration of each, drawn from `seed`."""
    if not isinstance(environment, Demonstrator):
        raise SpecError(
            f"warmup.data.kind = 'demonstrations': environment '{name}' has no method demonstrate(task, rng); add "
            "it, or set warmup.data.kind = 'file'"
        )
    tasks: Sequence[Task] = environment.tasks("train")
    rng = random.Random(f"demonstrations:{seed}")
    chosen = rng.sample(range(len(tasks)), min(count, len(tasks)))
    return [(tasks[index], environment.demonstrate(tasks[index], rng)) for index in chosen]
