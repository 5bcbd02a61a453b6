"""Build the training side of a run from its spec: environment, algorithm, trainer, batches and data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tandem.build import optimizers
from tandem.build.built_model import BuiltModel
from tandem.errors import SpecError
from tandem.ops.byte_sizes import shares_never
from tandem.protocols import Algorithm, Credit, Environment, Trainer
from tandem.publish import Call, on_this_thread
from tandem.spec.algorithm import AlgorithmSpec, DrGrpoSpec
from tandem.spec.data import DatasetData, FileData
from tandem.spec.environment import EnvironmentSpec
from tandem.spec.load import AnySpec, as_spec
from tandem.spec.optim import OwnOptimizerSpec
from tandem.spec.own import OwnAlgorithmSpec
from tandem.spec.preference import DpoSpec, PreferenceAlgorithm
from tandem.spec.run import PreferenceSpec, RlSpec, RunSpec
from tandem.spec.train import RlStage, SftStage, Stage, WarmupStage
from tandem.types import Batch, Group, Metrics, Trajectory

if TYPE_CHECKING:
    from tandem.data.conversation import Conversation
    from tandem.data.load import DataSplit, KeepImages
    from tandem.data.preference_pairs import Pair
    from tandem.data.rated_answers import Rated
    from tandem.env.installed import InstalledPackages
    from tandem.train.logprob_gap import CalibratedLimit

# Imports stand inside the functions, so that a run loads only what its spec needs, and wrong specs fail before torch.


def environment(spec: EnvironmentSpec, installed: InstalledPackages | None = None) -> Environment:
    """Load the environment. With workers, its code runs only in worker processes; the caller must call `close`."""
    from tandem.env.load import load_environment

    if not spec.workers:
        assert spec.sandbox == "off", "EnvironmentSpec refuses a sandbox without workers"
        return load_environment(spec.name, spec.params)
    from tandem.rollout.workers.forkserver_client import Order
    from tandem.rollout.workers.pool import WorkerEnvironment

    return WorkerEnvironment(Order.of(spec, installed), spec.workers)


def its_spec(spec: RlSpec) -> EnvironmentSpec:
    """Return the `[environment]` of a run; SpecError if the spec has none."""
    if spec.environment is None:
        raise SpecError("environment: is missing, so there are no tasks to play; add [environment]")
    return spec.environment


def read_environment(source: AnySpec, params: Mapping[str, Any] | None) -> tuple[RlSpec | None, EnvironmentSpec]:
    """Return the spec, if `source` is one, and its `[environment]`; else the environment of that name and `params`."""
    if isinstance(source, str) and not source.endswith(".toml"):
        return None, EnvironmentSpec(name=source, params=dict(params or {}))
    spec = as_spec(source)
    if not isinstance(spec, RlSpec):
        raise SpecError(f"recipe = '{spec.recipe}': has no environment; give a spec with recipe = 'rl'")
    return spec, its_spec(spec)


def close(environment: Environment | None) -> None:
    """End the environment's worker processes, if it has any. Calling it again does nothing."""
    from tandem.rollout.workers.pool import WorkerEnvironment

    if isinstance(environment, WorkerEnvironment):
        environment.close()


def algorithm(spec: AlgorithmSpec, max_tokens: int) -> Algorithm:
    """Build the RL algorithm. `max_tokens`: most tokens of one assistant turn."""
    from tandem.algo import cispo, dapo, distill, dr_grpo, grpo, gspo, own, ppo, reinforce_pp, rejection_sampling, rloo

    match spec.kind:
        case "dr_grpo":
            return dr_grpo.make(spec)
        case "grpo":
            return grpo.make(spec)
        case "rloo":
            return rloo.make(spec)
        case "dapo":
            return dapo.make(spec, max_tokens)
        case "gspo":
            return gspo.make(spec)
        case "cispo":
            return cispo.make(spec)
        case "reinforce_pp":
            return reinforce_pp.make(spec)
        case "ppo":
            return ppo.make(spec)
        case "rejection_sampling":
            return rejection_sampling.make(spec)
        case "distill":
            return distill.make(spec)
        case "own":
            return own.make(spec, dr_grpo.make(DrGrpoSpec()))


def check_own_code(spec: RunSpec) -> None:
    """Load the user's own algorithm and optimizers, and check how they can be called."""
    if isinstance(spec.algorithm, OwnAlgorithmSpec):
        algorithm_of(spec)
    for stage in (spec.train, spec.warmup if isinstance(spec, RlSpec) else None):
        if stage is not None and isinstance(stage.optimizer, OwnOptimizerSpec):
            optimizers.rules(stage.optimizer, spec.seed)


def algorithm_of(spec: RunSpec) -> Algorithm:
    """Build the algorithm of a run's own steps; those of a warm-up have `sft_algorithm`."""
    if isinstance(spec, RlSpec):
        return algorithm(spec.algorithm, spec.train.max_tokens)
    return preference_algorithm(spec.algorithm) if isinstance(spec, PreferenceSpec) else sft_algorithm(spec.algorithm)


def sft_algorithm(spec: OwnAlgorithmSpec | None = None) -> Algorithm:
    from tandem.algo import own, sft

    return sft.make() if spec is None else own.make(spec, sft.make())


def preference_algorithm(spec: PreferenceAlgorithm) -> Algorithm:
    from tandem.algo import dpo, kto, orpo, own, reward_model

    match spec.kind:
        case "dpo":
            return dpo.make(spec)
        case "orpo":
            return orpo.make(spec)
        case "kto":
            return kto.make(spec)
        case "reward_model":
            return reward_model.make(spec)
        case "own":
            return own.make(spec, dpo.make(DpoSpec()))


def show_life(trainer: Trainer, tick: Callable[[], None], note_option: Callable[[str, Any, bool, str], None]) -> None:
    """Call `tick` at every micro-batch of a policy trainer; report its limit of the logprob gap once that is known, and
    whether it returns free memory to the system."""
    from tandem.ops import release_host_memory
    from tandem.ops.option_report import AUTO
    from tandem.train.trainer import PolicyTrainer

    if isinstance(trainer, PolicyTrainer):
        trainer.on_micro_batch = tick
        trainer.gap_watch.on_limit = lambda asked, text: note_option("train.max_logprob_gap", asked, True, text)
        if trainer.gives_memory_back:
            why_not = release_host_memory.why_not()
            note_option("free memory given back", AUTO, not why_not, why_not)


def trainer(stage: Stage, model: BuiltModel, algorithm: Algorithm, version: int, seed: int) -> Trainer:
    """Build the trainer of one stage, which starts at `version`."""
    from tandem.optim.optimizer import metrics_of
    from tandem.train.trainer import PolicyTrainer

    options = trainer_options(stage, model, version)
    if model.crew is not None:  # every rank builds its own, from the spec
        return model.crew.order("trainer", stage=options["stage"], version=version)[0]
    by_tree = model.num_shares > 1
    made = optimizers.of_stage(stage, model.policy, model.master, seed, by_row=by_tree)
    if not by_tree:
        lags = isinstance(stage, RlStage) and stage.max_lag > 0 and not stage.gradient_release
        return PolicyTrainer(model.policy, algorithm, made, measure_moves=lags, **options)
    from tandem.train.tree_trainer import TreeTrainer

    # One process that adds up all as it comes has one leaf.
    leaves = {"shares": 1 if model.sums == "running" else model.num_shares, "by_step": model.sums != "round"}
    return TreeTrainer(model.policy, algorithm, made, update_metrics=metrics_of, **leaves, **options)


def gap_limit(stage: RlStage, model: BuiltModel) -> float | CalibratedLimit:
    """Return the limit of the logprob gap: the spec's number, or bounds for a limit that the first batch sets."""
    import torch

    from tandem.model.quantized_base import quantized_parts
    from tandem.train.logprob_gap import limits_for

    if stage.max_logprob_gap != "auto":
        return stage.max_logprob_gap
    module = model.policy.module
    exact = next(module.parameters()).dtype == torch.float32 and not quantized_parts(module)
    return limits_for(exact=exact, layers=getattr(module.config.get_text_config(), "num_hidden_layers", 0))


def trainer_options(stage: Stage, model: BuiltModel, version: int) -> dict[str, Any]:
    """Return what a trainer of this stage is told."""
    from tandem.optim.schedule import lr_share

    on_rollouts = isinstance(stage, RlStage)
    return {
        "lr": lambda step: stage.lr * lr_share(stage.schedule, step, stage.steps),
        "clip_norm": stage.clip_norm,
        "version": version,
        "temperature": stage.temperature if on_rollouts else 1.0,
        "top_p": stage.top_p if on_rollouts else 1.0,
        "max_logprob_gap": gap_limit(stage, model) if on_rollouts else float("inf"),
        "max_idle_steps": stage.max_idle_steps,
        "release": stage.gradient_release,
        "stage": "warmup" if isinstance(stage, WarmupStage) else "train",
    }


def caller(deterministic: bool) -> Call:
    """Return how the loop calls the trainer: on its own thread, which fixes the order, or on another thread."""
    return on_this_thread if deterministic else asyncio.to_thread


def batches(
    stage: RlStage | SftStage,
    model: BuiltModel,
    algorithm: Algorithm,
    seen: Callable[[Sequence[Group], Sequence[Credit]], None] | None = None,
) -> Callable[[list[Group], int], Batch]:
    """Return the function that packs groups into the batch of one step. `seen`: called with the groups of each step and
    their credit."""
    import torch

    from tandem.train.batch_packing import make_batch

    if seen is not None:
        algorithm = replace(algorithm, credit=_seen(algorithm.credit, seen))

    def make(groups: list[Group], version: int) -> Batch:
        return make_batch(
            groups,
            algorithm,
            micro_tokens=stage.micro_tokens,
            version=version,
            shares=model.shares,
            device=model.device if model.crew is None else torch.device("cpu"),  # it is sent to all ranks
            multiple=model.num_shares,
        )

    return make


def _seen(
    credit: Callable[[Sequence[Group]], list[Credit]], seen: Callable[[Sequence[Group], Sequence[Credit]], None]
) -> Callable[[Sequence[Group]], list[Credit]]:
    def credit_and_show(groups: Sequence[Group]) -> list[Credit]:
        credits = credit(groups)
        seen(groups, credits)
        return credits

    return credit_and_show


FileOrDataset = FileData | DatasetData


def rows(spec: FileOrDataset, field: str, keep_images: KeepImages | None = None) -> DataSplit[Conversation]:
    from tandem.data.load import load_rows

    return load_rows(spec, field, keep_images)


def pairs(spec: FileOrDataset, field: str, *, sees: bool = False) -> DataSplit[Pair]:
    from tandem.data.preference_pairs import load_pairs

    return load_pairs(spec, field, sees=sees)


def rated(spec: FileOrDataset, field: str) -> DataSplit[Rated]:
    from tandem.data.rated_answers import load_rated

    return load_rated(spec, field)


def scorer(model: BuiltModel, micro_tokens: int) -> Callable[[Trajectory], list[float]]:
    """Return a function that computes the logprobs of a recording's trained tokens."""
    from tandem.train.batch_packing import make_batch

    algorithm = sft_algorithm()

    def score(recording: Trajectory) -> list[float]:
        batch = make_batch(
            [[recording]], algorithm, micro_tokens=micro_tokens, version=0, shares=shares_never, device=model.device
        )
        return model.policy.score(batch.micro[0], 1.0).tolist()

    return score


def examiner(model: BuiltModel, algorithm: Algorithm, micro_tokens: int) -> Callable[[Sequence[Group]], list[Metrics]]:
    """Return a function that computes loss and metrics of each group, without training. For algorithms whose step may
    be a single group."""
    import torch

    from tandem.train.batch_packing import make_batch
    from tandem.train.kl_estimate import set_kl
    from tandem.train.step_sums import StepSums

    def of_group(batch: Batch) -> Metrics:
        (micro,) = batch.micro
        if algorithm.needs_reference:
            micro.reference_N = model.policy.reference_logprobs(micro, 1.0)
        loss, sums = algorithm.loss(model.policy.logprobs(micro, 1.0), micro, batch.totals)
        found = StepSums()
        found.add({"loss/total": loss})
        found.add(sums, batch.totals.tokens)
        return found.read()

    @torch.no_grad()
    def examine(groups: Sequence[Group]) -> list[Metrics]:
        options: dict[str, Any] = {"micro_tokens": micro_tokens, "shares": model.shares, "device": model.device}
        batches = [make_batch([group], algorithm, version=0, **options) for group in groups]
        if algorithm.needs_kl:
            set_kl(model.policy, batches)
        return [of_group(batch) for batch in batches]

    return examine


def export(model: BuiltModel, path: Path) -> None:
    from tandem.io import atomic_write

    with atomic_write.directory(path) as directory:
        model.policy.export(directory)


def weights_writer(model: BuiltModel) -> Callable[[Path], None]:
    """Return a function that writes the current trained weights into a directory."""

    def write(directory: Path) -> None:
        from safetensors.torch import save_file

        if model.crew is not None:
            policy: Any = model.policy
            policy.write_trained(directory)
            return
        trained = {name: tensor.detach().cpu().contiguous() for name, tensor in model.policy.trainable()}
        save_file(trained, directory / "weights.safetensors")

    return write


def load_weights(model: BuiltModel, directory: Path) -> None:
    """Load the weights that `weights_writer` wrote for the same model."""
    import torch
    from safetensors.torch import load_file

    from tandem.ops.named_tensors import check_alike

    if model.crew is not None:
        cast("Any", model.policy).load_trained(directory)
        return
    saved = load_file(directory / "weights.safetensors")
    check_alike(dict(model.policy.trainable()), saved, f"{directory}: the saved weights belong to another model")
    with torch.no_grad():
        for name, tensor in model.policy.trainable():
            tensor.copy_(saved[name])
