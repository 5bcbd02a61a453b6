"""Build the parts of an online server: the trainer process's parts, and the server process's engine and prompts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.build import built_model, optimizers, run_engines, standalone_engines, training
from tandem.data.conversation import Conversation
from tandem.engine.restartable import RestartableEngine, Under
from tandem.errors import SpecError
from tandem.online.messages import Teaching
from tandem.online.ordinary_prompts import OrdinaryPrompts
from tandem.online.self_distillation import JudgedAnswers
from tandem.online.trainer_worker import CanaryPrompt, TrainerParts
from tandem.ops.byte_sizes import shares_never
from tandem.protocols import Algorithm, Engine, Trainer
from tandem.publish import Publisher
from tandem.rollout.recorded_producer import record
from tandem.spec.data import FileData
from tandem.spec.engine import ServerEngineSpec
from tandem.spec.model import ModelSpec, PathModel, PresetModel
from tandem.spec.online import OnlineSpec
from tandem.spec.precision import Bfloat16Precision, Float32Precision
from tandem.spec.preference import DpoSpec
from tandem.types import Batch, Group, Trajectory

if TYPE_CHECKING:
    from tandem.bridge.shared.adapter_base import BorrowedBase
    from tandem.protocols import WeightBridge

_BUCKET_BYTES = 64 * 2**20  # the trainer process keeps two of these in GPU memory

ALGORITHMS = ("sft", "self_distill", "dpo", "reward", "group")
"""Algorithms of a job, by its samples: demonstrations (sft, self_distill), pairs (dpo), single samples with a reward
(reward), groups with rewards (group)."""


# --- the trainer process


def parts(spec: OnlineSpec, engine: Engine) -> TrainerParts:
    """Build everything that the trainer process uses. `engine`: its link to the serving engine."""
    import torch

    torch.set_num_threads(spec.trainer_threads)
    torch.manual_seed(spec.seed)
    device = built_model.pick_device(spec.device)
    model = built_model.model(spec.model, spec.precision, spec.seed, device, trains=True)
    trained = choose_trained(spec, model)
    optimizer = optimizers.optimizer(
        model.policy.trainable(),
        spec.optimizer,
        master=model.master,
        tables=model.policy.tables(),
        lora_plus=1.0,
        seed=spec.seed,
    )

    def trainer(algorithm: Algorithm, teaching: Teaching, version: int) -> Trainer:
        from tandem.train.trainer import PolicyTrainer

        model.policy.context_grad = teaching.context_grad == "full"
        return PolicyTrainer(
            model.policy,
            algorithm,
            optimizer,
            lr=lambda step: teaching.lr,
            clip_norm=spec.train.clip_norm,
            version=version,
            max_idle_steps=teaching.steps + 1,
        )

    def make_batch(groups: list[Group], algorithm: Algorithm, version: int) -> Batch:
        from tandem.train.batch_packing import make_batch

        # Without a gradient in the context, every sequence needs its own copy of the prompt.
        shares = model.shares if model.policy.context_grad else shares_never
        return make_batch(
            groups, algorithm, micro_tokens=spec.train.micro_tokens, version=version, shares=shares, device=device
        )

    def score(ids: Sequence[int], first: int) -> list[float]:
        from tandem.train.batch_packing import plain_row

        return model.policy.score(plain_row(ids, first, device), 1.0).tolist()

    @torch.no_grad()
    def greedy(prompt: Sequence[int], count: int) -> list[int]:
        answer: list[int] = []
        for _ in range(count):
            ids = torch.tensor([[*prompt, *answer]], device=device)
            hidden = model.policy.head.hidden(ids, torch.arange(ids.shape[1], device=device)[None], None)
            answer.append(int(model.policy.head.logits(hidden[:, -1]).argmax()))
        return answer

    bridge, base = _bridge(spec, device, model)
    return TrainerParts(
        model.policy,
        optimizer,
        trainer,
        algorithm,
        make_batch,
        score,
        training.scorer(model, spec.train.micro_tokens),
        greedy,
        Publisher(
            bridge,
            engine,
            deadline_s=spec.publish_deadline_s,
            retries=1,
            canary=run_engines.canary(model),
            on_attached=(lambda attachment: base.attached(attachment["engines"]))
            if base
            else (lambda attachment: None),
        ),
        lambda keep: model.policy.keep_reference() if keep else model.policy.drop_reference(),
        trained,
        _frozen_norm(model),
        base.state if base else dict,
        _held_out(spec, model),
        _canaries(spec, model),
    )


def choose_trained(spec: OnlineSpec, model: built_model.BuiltModel) -> dict[str, Any]:
    """Enable gradients only for the weights of `train.parts`; return what was requested, what is engaged, and why."""
    requested, named = spec.train.parts, dict(model.policy.trainable())
    if spec.model.lora is not None:
        why_not = "" if requested == "auto" else "model.lora is set"
        return {"requested": requested, "engaged": "adapters", "why_not": why_not}
    layers = model.policy.module.config.get_text_config().num_hidden_layers
    middle = {str(layer) for layer in range(round(layers / 8), layers * 4 // 5)}
    down = {name for name in named if name.endswith("down_proj.weight") and middle.intersection(name.split("."))}
    why_not = "a model made from scratch" if spec.from_scratch else "" if down else "no layer is called down_proj"
    if requested == "all" or (requested == "auto" and why_not):
        return {"requested": requested, "engaged": "all", "why_not": why_not if requested == "auto" else ""}
    if not down:
        raise SpecError(f"train.parts = 'down': {why_not} in this model; use 'all', or model.lora")
    for name, tensor in named.items():
        tensor.requires_grad_(name in down)
    return {"requested": requested, "engaged": "down", "why_not": ""}


def _frozen_norm(model: built_model.BuiltModel) -> float:
    """Return the norm of all weights that are not trained."""
    frozen = [tensor for tensor in model.policy.module.parameters() if not tensor.requires_grad]
    return sum(tensor.detach().float().square().sum().item() for tensor in frozen) ** 0.5


def algorithm(teaching: Teaching, judge: JudgedAnswers | None) -> Algorithm:
    """Build the algorithm of a job. `judge`: scores of the answers, which self_distill needs."""
    from tandem.algo import reward_weighted, self_distill
    from tandem.spec.algorithm import DrGrpoSpec

    match teaching.algorithm:
        case "sft":
            made = training.sft_algorithm()
        case "self_distill":
            assert judge is not None, "self_distill needs a judge"
            made = self_distill.make(judge)
        case "dpo":
            made = training.preference_algorithm(DpoSpec())
        case "reward":
            made = reward_weighted.make(DrGrpoSpec())
        case "group":
            made = training.algorithm(DrGrpoSpec(), 0)
        case unknown:
            raise SpecError(f"algorithm = '{unknown}': must be one of {', '.join(ALGORITHMS)}")
    if not teaching.kl_coef:
        return made
    from tandem.algo.reference_anchor import anchored

    return anchored(made, teaching.kl_coef)


def _bridge(spec: OnlineSpec, device: Any, model: built_model.BuiltModel) -> tuple[WeightBridge, BorrowedBase | None]:
    """Build the bridge to the engine, which sends a copy of every version. With adapters, also the link to the engine's
    base weights, which the trainer process reads on the engine's GPU instead of holding its own."""
    if spec.model.lora is not None:
        from tandem.model.lora import check_only_linear

        check_only_linear(model.policy.module, spec.model.lora)
    if spec.model.lora is not None and not isinstance(spec.engine, ServerEngineSpec):
        from tandem.bridge.collective.sender import AdapterBroadcastBridge
        from tandem.bridge.shared.adapter_base import BorrowedBase

        base = BorrowedBase(device, model.policy.base_in)
        return AdapterBroadcastBridge(device, deadline_s=spec.publish_deadline_s, base_wanted=True), base
    from tandem.bridge.collective.sender import BroadcastBridge

    backend = "ipc" if device.type == "cpu" else "auto"
    bucket = _BUCKET_BYTES if device.type == "cuda" else 0
    return BroadcastBridge(
        device, bucket_bytes=bucket, deadline_s=spec.publish_deadline_s, backend=backend, roomy=True
    ), None


def held_out_rows(spec: OnlineSpec) -> Sequence[Conversation]:
    """Load the held-out conversations of the gate; none if the spec names no file."""
    if not spec.gates.held_out:
        return []
    data = FileData(path=spec.gates.held_out, eval_share=0.0, max_examples=spec.gates.held_out_samples)
    if not (found := training.rows(data, "gates.held_out").train):
        raise SpecError(f"gates.held_out = '{spec.gates.held_out}': contains no conversation")
    return found


def _held_out(spec: OnlineSpec, model: built_model.BuiltModel) -> list[Trajectory]:
    if not (rows := held_out_rows(spec)):
        return []
    found = [record(model.renderer, row.messages, f"{row.source}:{row.row}") for row in rows]
    if max(len(each.ids) for each in found) > model.context:
        raise SpecError(
            f"gates.held_out = '{spec.gates.held_out}': a conversation has more than {model.context} tokens, the "
            "model's context; shorten or remove it"
        )
    return found


def _canaries(spec: OnlineSpec, model: built_model.BuiltModel) -> list[CanaryPrompt]:
    found: list[CanaryPrompt] = []
    for number, each in enumerate(spec.gates.canaries):
        prompt = model.renderer.prompt([{"role": "user", "content": each.prompt}])
        expected = [*model.renderer.encode(each.expected), model.renderer.end_id]
        found.append(CanaryPrompt(f"canary {number}", prompt, expected, each.exact))
    return found


# --- the server process


def ordinary_prompts(spec: OnlineSpec) -> list[str]:
    """Read the ordinary prompts: the spec's file, or the ones that come with Tandem."""
    try:
        if not (name := spec.ordinary.prompts):
            text = resources.files("tandem.online").joinpath("ordinary_prompts.txt").read_text(encoding="utf-8")
        else:
            text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"ordinary.prompts = '{spec.ordinary.prompts}': cannot be read: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def ordinary(spec: OnlineSpec, standalone: standalone_engines.Alone, data_dir: Path) -> OrdinaryPrompts:
    """Build the set of ordinary prompts and the model's answers to them."""
    return OrdinaryPrompts(
        spec.ordinary,
        standalone.renderer,
        ordinary_prompts(spec),
        data_dir / "ordinary.json",
        gate=spec.gates.kl_prompts,
        context=standalone.context,
        why_not="model.preset: a model made from scratch has no answers worth keeping" if spec.from_scratch else "",
    )


def alone(spec: OnlineSpec, data_dir: Path) -> standalone_engines.Alone:
    """Build the serving engine, before the trainer has sent any version."""
    if not isinstance(spec.engine, ServerEngineSpec):
        return _vllm(spec, data_dir)
    import torch

    torch.set_num_threads(spec.engine_threads)
    device = built_model.pick_device(spec.device)
    exact = isinstance(spec.precision, Float32Precision)
    precision = spec.precision if exact else Bfloat16Precision(master="none")  # this process does not train
    model = built_model.model(_plain(spec.model), precision, spec.seed, device, spec.engine.max_context)
    return standalone_engines.embedded_of(spec.engine, model)


def _plain(model: ModelSpec) -> ModelSpec:
    """Return the model without adapters and warm start: the trainer process sends merged weights anyway."""
    return model.model_copy(update={"lora": None, "warm_start": None, "activations": "keep"})


def _vllm(spec: OnlineSpec, data_dir: Path) -> standalone_engines.Alone:
    """Start vLLM in a child process, with a wrapper that can restart it."""
    assert not isinstance(spec.engine, ServerEngineSpec)
    lora = spec.model.lora
    options = standalone_engines.vllm_options(
        spec.engine,
        device=built_model.pick_device(spec.device).type,
        dtype="float32" if isinstance(spec.precision, Float32Precision) else "bfloat16",
        adapter_slots=0 if lora is None else 2,
        max_rank=16 if lora is None else lora.rank,
    )
    engine, start, home = spec.engine, str(starting_model(spec, data_dir)), data_dir / "engine"

    def start_one(under_way: Under) -> standalone_engines.Alone:
        thinking = spec.model.thinking
        return standalone_engines.vllm_alone(
            engine,
            start,
            home,
            options,
            version=0,
            thinking=thinking,
            under_way=lambda process: under_way(process.kill),
        )

    first = start_one(lambda end: None)
    return replace(first, engine=RestartableEngine(first.engine, lambda under_way: start_one(under_way).engine))


def revival(standalone: standalone_engines.Alone) -> Callable[[], Awaitable[None]] | None:
    """Return the function that restarts the engine process; None for an engine in this process."""
    return standalone.engine.start_again if isinstance(standalone.engine, RestartableEngine) else None


def starting_model(spec: OnlineSpec, data_dir: Path) -> Path:
    """Return the directory that vLLM loads before the first version arrives: same architecture and tokenizer."""
    if (directory := run_engines.untouched_directory(spec.model)) is not None:
        return directory
    path = (data_dir / "model").resolve()
    if not path.exists():
        assert isinstance(spec.model, PathModel | PresetModel)
        model = built_model.model(_plain(spec.model), Float32Precision(), spec.seed, built_model.pick_device("cpu"))
        training.export(model, path)
    return path


def past(spec: OnlineSpec, standalone: standalone_engines.Alone, versions: Path) -> Callable[[int], Any] | None:
    """Return a function that builds an engine of an earlier version, next to the serving one; None if unsupported."""
    if spec.model.lora is not None or not isinstance(spec.engine, ServerEngineSpec):
        return None
    from tandem.online.version_store import VersionStore

    return lambda version: standalone.engine.beside(VersionStore(versions).load(version).held.tensors, version)
