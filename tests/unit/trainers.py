"""Small trainers of every kind, and steps for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from tandem.algo import dr_grpo
from tandem.model.cast_precision import narrow
from tandem.model.policy import CausalPolicy
from tandem.ops.byte_sizes import shares_never
from tandem.optim import master_weights as masters
from tandem.optim.adamw import AdamW
from tandem.optim.optimizer import Optimizer
from tandem.optim.update_rule import ByParts, Slot
from tandem.protocols import Algorithm
from tandem.spec.algorithm import DrGrpoSpec
from tandem.spec.model import LoraSpec
from tandem.spec.optim import AdamWSpec
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.train.trainer import PolicyTrainer
from tandem.types import Batch, Group, Metrics, MicroBatch, TokenLogprobs, Totals, Trajectory

TOKENIZER = byte_tokenizer()
CPU = torch.device("cpu")
LORA = LoraSpec(rank=4)


# --- what trains, and on what


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=64, initializer_range=0.2, dtype="float32",
        bos_token_id=None, eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def make_policy(lora: LoraSpec | None = None, **options: Any) -> CausalPolicy:
    torch.manual_seed(1)
    return CausalPolicy(llama(), TOKENIZER, lora=lora, **options)


def make_optimizer(policy: CausalPolicy, rule: Any, master: Any = None, **options: Any) -> Optimizer:
    named = policy.trainable()
    return Optimizer(named, {name: rule for name, _ in named}, master or masters.Float32(), **options)


class PlainDescent(ByParts):
    by_rows = True

    def init(self, name: str, like: Tensor) -> dict[str, Tensor]:
        return {}

    def update(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.value.sub_(slot.grad, alpha=slot.lr)


def make_trainer(
    policy: CausalPolicy,
    algorithm: Algorithm | None = None,
    *,
    optimizer: Optimizer | None = None,
    lr: Callable[[int], float] = lambda step: 1e-2,
    clip_norm: float = 1.0,
    **options: Any,
) -> PolicyTrainer:
    optimizer = optimizer or make_optimizer(policy, AdamW(AdamWSpec()), weight_decay=0.1)
    algorithm = algorithm or dr_grpo.make(DrGrpoSpec())
    return PolicyTrainer(policy, algorithm, optimizer, lr=lr, clip_norm=clip_norm, **options)


def make_group(seed: int, version: int = 0, size: int = 4) -> Group:
    rng = random.Random(seed)
    prompt = [rng.randrange(256) for _ in range(5)]
    group: Group = []
    for index in range(size):
        spoken = [rng.randrange(256) for _ in range(rng.randint(3, 9))]
        group.append(
            Trajectory(
                ids=[*prompt, *spoken],
                trained=[False] * 5 + [True] * len(spoken),
                logprobs=[0.0] * 5 + [-5.0] * len(spoken),
                versions=[-1] * 5 + [version] * len(spoken),
                reward=rng.random(),
                task_id=f"task-{seed}-{index}",
            )
        )
    return group


def make_step(*groups: Group, algorithm: Algorithm | None = None, micro_tokens: int = 64, version: int = 0) -> Batch:
    return make_batch(
        groups, algorithm or dr_grpo.make(DrGrpoSpec()), micro_tokens=micro_tokens, version=version,
        shares=shares_never, device=CPU,
    )  # fmt: skip


def snapshot(policy: CausalPolicy) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.module.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def logits(module: Any) -> Tensor:
    with torch.no_grad():
        return module(input_ids=torch.arange(40)[None]).logits


def root_of_zero(off: float = 0.0) -> Algorithm:
    """A finite loss whose gradient is not; or, of a number that is off zero, one that is zero."""

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        return ((scored.logprobs_N * 0).sum() + off).sqrt(), {}

    whole = dr_grpo.make(DrGrpoSpec())
    return Algorithm("root_of_zero", whole.keep, whole.credit, loss)


def on_policy(policy: CausalPolicy, group: Group, *, off_by: float, version: int) -> Group:
    """What an engine would report if it were off by so much."""
    for trajectory in group:
        ids_T = torch.tensor(trajectory.ids)
        with torch.no_grad():
            logprobs_TV = policy.module(input_ids=ids_T[None]).logits[0, :-1].log_softmax(-1)
        logprobs = [0.0, *logprobs_TV.gather(-1, ids_T[1:, None]).squeeze(-1).tolist()]
        trajectory.logprobs = [
            p + off_by if trained else 0.0 for p, trained in zip(logprobs, trajectory.trained, strict=True)
        ]
        trajectory.versions = [version if trained else -1 for trained in trajectory.trained]
    return group


def make_narrow(master: Any, lora: LoraSpec | None = None, **options: Any) -> PolicyTrainer:
    """In bf16, as the composition root makes it."""
    module = llama()
    narrow(module, CPU, None if lora else master.adopt)
    torch.manual_seed(1)
    policy = CausalPolicy(module, TOKENIZER, lora=lora)
    return make_trainer(policy, optimizer=make_optimizer(policy, AdamW(AdamWSpec()), master), **options)


TRAINERS: dict[str, Callable[..., PolicyTrainer]] = {
    "full": lambda **options: make_trainer(make_policy(), **options),
    "lora": lambda **options: make_trainer(make_policy(LORA), **options),
    "split": lambda **options: make_narrow(masters.SplitMaster(), **options),
    "fp32 copy": lambda **options: make_narrow(masters.Fp32Copy(), **options),
    "stochastic": lambda **options: make_narrow(masters.Stochastic(3), **options),
    "in place": lambda **options: make_narrow(masters.InPlace(), **options),
    "lora on bf16": lambda **options: make_narrow(masters.Float32(), LORA, **options),
    "split, released": lambda **options: make_narrow(masters.SplitMaster(), release=True, **options),
}


def equal_rewards() -> Group:
    group = make_group(1)
    for trajectory in group:
        trajectory.reward = 0.5
    return group
