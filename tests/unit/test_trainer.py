"""What a trainer does with a batch, good or bad, and what it leaves on disk."""

from __future__ import annotations

import asyncio
import copy
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from tandem.algo import dr_grpo
from tandem.engine.hf import EmbeddedEngine
from tandem.errors import CheckpointError, LogprobGap, NonFinite, NothingLearned, SpecError
from tandem.model.policy import CausalPolicy
from tandem.model.precision import narrow
from tandem.optim import master as masters
from tandem.optim.adamw import AdamW
from tandem.optim.optimizer import Optimizer
from tandem.optim.rule import Slot
from tandem.optim.schedule import lr_share
from tandem.protocols import Algorithm
from tandem.spec.algorithm import DrGrpoSpec
from tandem.spec.model import LoraSpec
from tandem.spec.optim import AdamWSpec, CosineSchedule
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.pack import make_batch
from tandem.train.trainer import PolicyTrainer
from tandem.types import MEASURED, Batch, Group, Metrics, MicroBatch, Sampling, TokenLogprobs, Totals, Trajectory

TOKENIZER = byte_tokenizer()
CPU = torch.device("cpu")
LORA = LoraSpec(rank=4)


pytestmark = pytest.mark.usefixtures("one_thread")


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


class PlainDescent:
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
        groups, algorithm or dr_grpo.make(DrGrpoSpec()), micro_tokens=micro_tokens, version=version, hidden_size=0,
        device=CPU,
    )  # fmt: skip


def snapshot(policy: CausalPolicy) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.module.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def logits(module: Any) -> Tensor:
    with torch.no_grad():
        return module(input_ids=torch.arange(40)[None]).logits


# --- a step


def test_a_step_is_a_version_and_says_what_it_did() -> None:
    policy = make_policy()
    trainer, before = make_trainer(policy, version=10), snapshot(policy)
    metrics = trainer.step(make_step(make_group(1), version=10))
    assert trainer.version == 11
    assert not same(before, snapshot(policy))
    assert metrics["train/set_aside"] == 0.0
    assert metrics["lr"] == 1e-2
    assert metrics["tokens/trained"] == sum(trajectory.num_trained for trajectory in make_group(1))
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_learning_rate_follows_the_stages_own_steps() -> None:
    schedule = CosineSchedule(final=0.1, warmup_steps=2)
    policy = make_policy()
    trainer = make_trainer(policy, lr=lambda step: 1e-2 * lr_share(schedule, step, 5), version=30)
    rates = [trainer.step(make_step(make_group(seed)))["lr"] for seed in range(5)]
    assert rates == pytest.approx([1e-2 * share for share in (1 / 3, 2 / 3, 1, 0.55, 0.1)])


@pytest.mark.parametrize("clip_norm", [0.05, 1e9])
def test_the_gradients_global_norm_is_cut_to_clip_norm(clip_norm: float) -> None:
    policy = make_policy()
    optimizer = make_optimizer(policy, PlainDescent())
    trainer = make_trainer(policy, optimizer=optimizer, lr=lambda step: 1.0, clip_norm=clip_norm)
    before = snapshot(policy)
    metrics = trainer.step(make_step(make_group(1), make_group(2), micro_tokens=16))
    moved = math.sqrt(sum((tensor - before[name]).square().sum().item() for name, tensor in snapshot(policy).items()))
    assert metrics["grad/norm"] > 0.05
    assert moved == pytest.approx(min(clip_norm, metrics["grad/norm"]), rel=1e-3)


def test_equal_rewards_make_a_step_that_moves_nothing() -> None:
    policy, group = make_policy(), make_group(1)
    for trajectory in group:
        trajectory.reward = 0.5
    trainer, before = make_trainer(policy), snapshot(policy)
    metrics = trainer.step(make_step(group))
    assert (trainer.version, metrics["loss/total"], metrics["grad/norm"]) == (1, 0.0, 0.0)
    assert same(before, snapshot(policy))


# --- what is not a number never reaches the weights


def spoiled(value: float) -> Batch:
    """Four micro-batches, and one token of one of them has a credit that is no number."""
    batch = make_step(make_group(1), make_group(2), micro_tokens=24)
    assert len(batch.micro) >= 4
    batch.micro[1].credit_N[2] = value
    return batch


def root_of_zero(off: float = 0.0) -> Algorithm:
    """A finite loss whose gradient is not; or, of a number that is off zero, one that is zero."""

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, Metrics]:
        return ((scored.logprobs_N * 0).sum() + off).sqrt(), {}

    whole = dr_grpo.make(DrGrpoSpec())
    return Algorithm("root_of_zero", whole.keep, whole.credit, loss)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "gradient"])
def test_what_is_not_finite_never_reaches_weights_optimizer_or_clock(bad: Any) -> None:
    policy, twin = make_policy(), make_policy()
    trainer, undisturbed = make_trainer(policy), make_trainer(twin)
    for each in (trainer, undisturbed):
        each.step(make_step(make_group(7)))
    before, ours = snapshot(policy), trainer._algorithm
    if bad == "gradient":
        trainer._algorithm = root_of_zero()
        batch = make_step(make_group(1), make_group(2))
    else:
        batch = spoiled(bad)
    metrics = trainer.step(batch)
    trainer._algorithm = ours
    assert metrics["train/set_aside"] == 1.0
    assert trainer.version == 1
    assert trainer.set_aside == [[f"task-{seed}-{index}" for seed in (1, 2) for index in range(4)]]
    assert same(before, snapshot(policy))
    for each in (trainer, undisturbed):
        each.step(make_step(make_group(8)))
    assert same(snapshot(policy), snapshot(twin)), "as if the bad batch had never come"


def test_three_bad_batches_in_a_row_end_the_run_and_a_good_one_forgives() -> None:
    policy = make_policy()
    trainer = make_trainer(policy)
    for _ in range(2):
        trainer.step(spoiled(math.nan))
    trainer.step(make_step(make_group(3)))
    before = snapshot(policy)
    for _ in range(2):
        trainer.step(spoiled(math.nan))
    with pytest.raises(NonFinite, match=r"3 batches in a row.*task-1-0"):
        trainer.step(spoiled(math.nan))
    assert len(trainer.set_aside) == 5
    assert same(before, snapshot(policy))


# --- engine and trainer must agree


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


@pytest.mark.parametrize("off_by", [0.03, -0.03])
def test_logprobs_of_this_version_that_are_off_end_the_run(off_by: float) -> None:
    policy = make_policy()
    trainer, before = make_trainer(policy, version=4, max_logprob_gap=0.02), snapshot(policy)
    batch = make_step(on_policy(policy, make_group(1), off_by=off_by, version=4), version=4)
    with pytest.raises(LogprobGap, match=r"differ by 0\.0300 nats"):
        trainer.step(batch)
    assert same(before, snapshot(policy))


@pytest.mark.parametrize(("off_by", "version", "gap"), [(0.0, 4, 0.0), (0.01, 4, 0.01), (0.5, 3, None)])
def test_a_small_gap_is_reported_and_older_tokens_may_differ(off_by: float, version: int, gap: float | None) -> None:
    policy = make_policy()
    trainer = make_trainer(policy, version=4, max_logprob_gap=0.02)
    metrics = trainer.step(make_step(on_policy(policy, make_group(1), off_by=off_by, version=version), version=4))
    if gap is None:
        assert "sync/logprob_gap" not in metrics
    else:
        assert metrics["sync/logprob_gap"] == pytest.approx(gap, abs=1e-5)
        assert metrics["sync/logprob_gap_max"] == pytest.approx(gap, abs=1e-5)


def test_the_temperature_of_the_rollouts_is_the_trainers() -> None:
    """Tokens that the embedded engine samples at 0.7 are no gap for a trainer at 0.7, and one for a trainer at 1."""
    policy = make_policy()

    async def sample() -> Any:
        engine = EmbeddedEngine(policy.module, num_ids=len(TOKENIZER), end_ids=frozenset(), decode=TOKENIZER.decode)
        sampling = [Sampling(max_tokens=12, temperature=0.7, seed=seed) for seed in range(4)]
        try:
            return await asyncio.gather(*(engine.generate([1, 2, 3], s) for s in sampling))
        finally:
            await engine.close()

    group = [
        Trajectory([1, 2, 3, *c.ids], [False] * 3 + [True] * 12, [0.0] * 3 + c.logprobs, [-1] * 3 + [0] * 12, reward=r)
        for r, c in enumerate(asyncio.run(sample()))
    ]
    right = make_trainer(make_policy(), temperature=0.7, max_logprob_gap=0.02)
    assert right.step(make_step(group))["sync/logprob_gap"] < 1e-5
    with pytest.raises(LogprobGap):
        make_trainer(make_policy(), temperature=1.0, max_logprob_gap=0.02).step(make_step(group))


# --- saving and loading


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
    "split": lambda **options: make_narrow(masters.Split(), **options),
    "fp32 copy": lambda **options: make_narrow(masters.Fp32Copy(), **options),
    "stochastic": lambda **options: make_narrow(masters.Stochastic(3), **options),
    "in place": lambda **options: make_narrow(masters.InPlace(), **options),
    "lora on bf16": lambda **options: make_narrow(masters.Float32(), LORA, **options),
    "split, released": lambda **options: make_narrow(masters.Split(), release=True, **options),
}


@pytest.mark.parametrize("make", TRAINERS.values(), ids=TRAINERS)
def test_three_steps_and_three_after_a_load_are_six_to_the_bit(
    make: Callable[..., PolicyTrainer], tmp_path: Path
) -> None:
    def lr(step: int) -> float:
        return 1e-2 * lr_share(CosineSchedule(warmup_steps=2), step, 6)

    def run(trainer: PolicyTrainer, seeds: Sequence[int]) -> list[Metrics]:
        micro_tokens = 10**6 if trainer._released else 32
        steps = [trainer.step(make_step(make_group(seed), micro_tokens=micro_tokens)) for seed in seeds]
        return [{key: value for key, value in step.items() if not key.startswith(MEASURED)} for step in steps]

    straight = make(lr=lr, version=5)
    expected = run(straight, range(6))
    first = make(lr=lr, version=5)
    found = run(first, range(3))
    first.save(tmp_path / "step-8")
    second = make(lr=lr)
    with torch.no_grad():
        for _, tensor in second._policy.trainable():
            tensor.zero_()  # whatever it was, it comes from the checkpoint
    second.load(tmp_path / "step-8")
    assert second.version == 8
    found += run(second, range(3, 6))
    assert found == expected
    assert second.version == straight.version == 11
    assert same(snapshot(second._policy), snapshot(straight._policy))  # pyright: ignore[reportArgumentType]
    assert same(second._optimizer.state(), straight._optimizer.state())


def test_split_and_a_float32_copy_train_a_language_model_to_the_same_bits() -> None:
    split, copied = (
        make_narrow(masters.Split(), lr=lambda step: 1e-4),
        make_narrow(masters.Fp32Copy(), lr=lambda step: 1e-4),
    )
    for seed in range(5):
        ours, theirs = (each.step(make_step(make_group(seed), micro_tokens=32)) for each in (split, copied))
        assert {**ours, "memory/master": 0, "memory/accounted": 0} == {
            **theirs,
            "memory/master": 0,
            "memory/accounted": 0,
        }
        assert ours["update/lost_energy"] == 0
        assert ours["memory/master"] == pytest.approx(ours["memory/weights"], rel=0.01)
        assert theirs["memory/master"] == pytest.approx(2 * theirs["memory/weights"], rel=0.01)
    assert same(snapshot(split._policy), snapshot(copied._policy))  # pyright: ignore[reportArgumentType]


def test_release_wants_a_whole_step_in_one_micro_batch() -> None:
    with pytest.raises(SpecError, match=r"train.gradient_release.* this one is \d+; raise train.micro_tokens"):
        make_trainer(make_policy(), release=True).step(make_step(make_group(1), make_group(2), micro_tokens=16))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_under_release_a_loss_that_is_not_finite_moves_nothing(bad: float) -> None:
    policy = make_policy()
    trainer, before = make_trainer(policy, release=True), snapshot(policy)
    batch = make_step(make_group(1), micro_tokens=10**6)
    batch.micro[0].credit_N[2] = bad
    assert trainer.step(batch)["train/set_aside"] == 1.0
    assert same(before, snapshot(policy))
    assert trainer.version == 0


# --- training that trains nothing


def equal_rewards() -> Group:
    group = make_group(1)
    for trajectory in group:
        trajectory.reward = 0.5
    return group


class Nothing(PlainDescent):
    def update(self, slots: Sequence[Slot]) -> None:
        pass


@pytest.mark.parametrize(
    ("trainer", "group", "why"),
    [
        (lambda **o: make_trainer(make_policy(), **o), equal_rewards, "no token of the batch had any credit"),
        (
            lambda **o: make_trainer(
                policy := make_policy(), root_of_zero(1.0), optimizer=make_optimizer(policy, PlainDescent()), **o
            ),
            lambda: make_group(1),
            "gradient was zero",
        ),
        (lambda **o: make_narrow(masters.InPlace(), lr=lambda step: 1e-12, **o), lambda: make_group(1), "rounded away"),
        (
            lambda **o: make_trainer(policy := make_policy(), optimizer=make_optimizer(policy, Nothing()), **o),
            lambda: make_group(1),
            "a rule that gives nothing",
        ),
    ],
    ids=["no credit", "no gradient", "rounded away", "no update"],
)
def test_steps_in_a_row_that_move_nothing_end_the_run_and_say_why(trainer: Any, group: Any, why: str) -> None:
    idle = trainer(max_idle_steps=3)
    for _ in range(2):
        idle.step(make_step(group()))
    with pytest.raises(NothingLearned, match=rf"2 steps, and none of them moved a weight: .*{why}"):
        idle.finish()
    with pytest.raises(NothingLearned, match=rf"3 steps in a row, up to version 3, learned nothing: .*{why}"):
        idle.step(make_step(group()))


def test_what_the_guards_have_seen_outlives_a_load(tmp_path: Path) -> None:
    before = make_trainer(make_policy(), max_idle_steps=3)
    before.step(make_step(make_group(2)))
    for _ in range(2):
        before.step(make_step(equal_rewards()))
    before.save(tmp_path / "step-3")
    after = make_trainer(make_policy(), max_idle_steps=3)
    after.load(tmp_path / "step-3")
    after.finish()  # an earlier step has moved something
    with pytest.raises(NothingLearned, match="3 steps in a row, up to version 4"):
        after.step(make_step(equal_rewards()))


def test_flat_rewards_are_idle_even_where_a_kl_term_moves_weights() -> None:
    spec = DrGrpoSpec(kl_coef=0.5)
    policy = make_policy()
    policy.keep_reference()
    with torch.no_grad():
        for _, tensor in policy.trainable():
            tensor.add_(torch.randn_like(tensor), alpha=0.01)
    algorithm = dr_grpo.make(spec)
    trainer, before = make_trainer(policy, algorithm, max_idle_steps=2), snapshot(policy)
    trainer.step(make_step(equal_rewards(), algorithm=algorithm))
    assert not same(before, snapshot(policy))
    with pytest.raises(NothingLearned, match=r"2 steps in a row.* any credit"):
        trainer.step(make_step(equal_rewards(), algorithm=algorithm))


def test_under_release_gradients_that_are_not_finite_are_noted_and_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = make_policy()
    trainer = make_trainer(policy, release=True)
    weight = dict(policy.trainable())["model.layers.0.self_attn.v_proj.weight"]
    weight.register_hook(lambda gradient: gradient * math.nan)
    before = snapshot(policy)
    metrics = trainer.step(make_step(make_group(1), micro_tokens=10**6))
    assert metrics["release/skipped"] == 1
    assert trainer.set_aside == [[f"task-1-{index}" for index in range(4)]]
    assert "1 gradients are not finite: their weights are as before, others have moved" in caplog.text
    moved = {name for name, tensor in snapshot(policy).items() if not torch.equal(tensor, before[name])}
    assert moved == before.keys() - {"model.layers.0.self_attn.v_proj.weight"}
    trainer.step(make_step(make_group(2), micro_tokens=10**6))
    with pytest.raises(NonFinite, match="3 batches in a row"):
        trainer.step(make_step(make_group(3), micro_tokens=10**6))


def test_under_release_a_logprob_gap_ends_the_run_before_a_weight_moves() -> None:
    policy = make_policy()
    trainer, before = make_trainer(policy, release=True, max_logprob_gap=0.02), snapshot(policy)
    batch = make_step(on_policy(policy, make_group(1), off_by=0.5, version=0), micro_tokens=10**6)
    with pytest.raises(LogprobGap):
        trainer.step(batch)
    assert same(before, snapshot(policy))


def test_one_step_that_moves_something_forgives_idle_ones() -> None:
    trainer = make_trainer(make_policy(), max_idle_steps=3)
    for _ in range(2):
        trainer.step(make_step(equal_rewards()))
    trainer.step(make_step(make_group(2)))
    trainer.finish()
    for _ in range(2):
        trainer.step(make_step(equal_rewards()))


@pytest.mark.parametrize(
    ("saved", "loading"),
    [("split", "fp32 copy"), ("fp32 copy", "split"), ("full", "split"), ("lora", "full"), ("full", "lora")],
)
def test_a_checkpoint_of_another_kind_is_refused_and_changes_nothing(saved: str, loading: str, tmp_path: Path) -> None:
    first, second = TRAINERS[saved](), TRAINERS[loading]()
    for seed, each in enumerate((first, second)):
        each.step(make_step(make_group(seed)))
    first.save(tmp_path / "step-1")
    weights, state = snapshot(second._policy), {name: t.clone() for name, t in second._optimizer.state().items()}  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointError):
        second.load(tmp_path / "step-1")
    assert same(weights, snapshot(second._policy))  # pyright: ignore[reportArgumentType]
    assert same(state, second._optimizer.state())


def test_a_trainer_that_never_stepped_can_be_saved_and_loaded(tmp_path: Path) -> None:
    fresh, other = make_trainer(make_policy(), version=3), make_trainer(make_policy())
    fresh.save(tmp_path / "step-3")
    other.step(make_step(make_group(1)))
    other.load(tmp_path / "step-3")
    assert other.version == 3
    for trainer in (fresh, other):
        trainer.step(make_step(make_group(2)))
    assert same(snapshot(fresh._policy), snapshot(other._policy))  # pyright: ignore[reportArgumentType]


# --- adapters


def test_lora_trains_adapters_and_nothing_else() -> None:
    policy = make_policy(LORA)
    assert {name.split(".")[-3] for name, _ in policy.trainable()} == {"lora_A", "lora_B"}
    assert not any("lm_head" in name for name, _ in policy.trainable())
    before, trainer = snapshot(policy), make_trainer(policy)
    for seed in range(3):
        trainer.step(make_step(make_group(seed)))
    after = snapshot(policy)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name, _ in policy.trainable()}


def test_targets_that_the_model_has_not_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"model.lora.targets = \['no_such_proj'\]"):
        make_policy(LoraSpec(targets=("no_such_proj",)))


def trained_adapters() -> CausalPolicy:
    policy = make_policy(LORA)
    trainer = make_trainer(policy, lr=lambda step: 5e-2)
    for seed in range(3):
        trainer.step(make_step(make_group(seed)))
    assert (logits(policy.module) - logits(llama().eval())).abs().max() > 0.1
    return policy


def test_exported_weights_are_merged_and_give_the_adapted_models_logits(tmp_path: Path) -> None:
    policy = trained_adapters()
    expected = logits(policy.module)
    policy.export(tmp_path)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert merged.state_dict().keys() == llama().state_dict().keys()
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=0)
    assert torch.equal(logits(policy.module), expected), "exporting leaves the policy as it was"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
def test_the_exported_adapter_loads_with_peft(tmp_path: Path) -> None:
    policy = trained_adapters()
    policy.export(tmp_path)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(loaded), logits(policy.module), atol=1e-6, rtol=0)


def test_a_full_export_is_the_model_with_its_tokenizer(tmp_path: Path) -> None:
    policy = make_policy()
    make_trainer(policy).step(make_step(make_group(1)))
    policy.export(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(loaded), logits(policy.module))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("naïve €", add_special_tokens=False) == TOKENIZER.encode(
        "naïve €", add_special_tokens=False
    )
    assert tokenizer.chat_template == TOKENIZER.chat_template


# --- the reference


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("warm_steps", [0, 2])
def test_the_reference_is_the_policy_as_it_was_when_rl_began(lora: LoraSpec | None, warm_steps: int) -> None:
    policy = make_policy(lora)
    (probe,) = make_step(make_group(99), micro_tokens=1000).micro
    from_scratch = policy.score(probe, 1.0)
    warm = make_trainer(policy)
    for seed in range(warm_steps):
        warm.step(make_step(make_group(seed)))
    policy.keep_reference()
    expected = policy.score(probe, 1.0)
    algorithm = dr_grpo.make(DrGrpoSpec(kl_coef=0.1))
    trainer = make_trainer(policy, algorithm, version=warm_steps)
    divergence = [trainer.step(make_step(make_group(9), algorithm=algorithm))["loss/kl"] for _ in range(3)]
    assert torch.equal(policy.reference_logprobs(probe, 1.0), expected)
    assert (policy.score(probe, 1.0) - expected).abs().max() > 1e-2
    assert (warm_steps > 0) == ((from_scratch - expected).abs().max() > 1e-2)
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)
    assert min(divergence[1:]) > 1e-2


def test_the_reference_is_no_part_of_what_trains_or_travels() -> None:
    policy = make_policy()
    policy.keep_reference()
    names = [name for name, _ in policy.module.named_parameters()]
    assert [name for name, _ in policy.trainable()] == names
    buffers = [name for name, _ in policy.module.named_buffers()]
    assert [name for name, _ in policy.weights(3).tensors()] == names + buffers


# --- activations


def gradients(policy: CausalPolicy, batch: Batch) -> dict[str, Tensor]:
    """And leaves none behind."""
    for micro in batch.micro:
        policy.logprobs(micro, 1.0).logprobs_N.sum().backward()
    out = {name: tensor.grad for name, tensor in policy.trainable() if tensor.grad is not None}
    policy.module.zero_grad(set_to_none=True)
    return out


def saved_elements(policy: CausalPolicy, micro: MicroBatch) -> int:
    """What forward keeps for backward."""
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy.logprobs(micro, 1.0)
    return sum(kept)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_activation_checkpointing_keeps_less_and_gives_the_same_gradients(lora: LoraSpec | None) -> None:
    plain, checkpointed = make_policy(lora), make_policy(lora, activations="recompute")
    for policy in (plain, checkpointed):
        torch.manual_seed(3)
        with torch.no_grad():
            for _, tensor in policy.trainable():
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    batch = make_step(make_group(1), make_group(2))
    expected, found = gradients(plain, batch), gradients(checkpointed, batch)
    assert found.keys() == expected.keys() == {name for name, _ in plain.trainable()}
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-5)
    assert saved_elements(checkpointed, batch.micro[0]) < 0.5 * saved_elements(plain, batch.micro[0])


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_an_engine_samples_the_same_from_a_checkpointed_model_between_steps(lora: LoraSpec | None) -> None:
    def sample(policy: CausalPolicy) -> Any:
        async def go() -> Any:
            engine = EmbeddedEngine(policy.module, num_ids=len(TOKENIZER), end_ids=frozenset(), decode=TOKENIZER.decode)
            try:
                return await engine.generate([1, 2, 3], Sampling(max_tokens=20, seed=1))
            finally:
                await engine.close()

        return asyncio.run(go())

    plain, checkpointed = make_policy(lora), make_policy(lora, activations="recompute")
    for policy in (plain, checkpointed):
        make_trainer(policy).step(make_step(make_group(1)))
    expected, found = sample(plain), sample(checkpointed)
    assert found.ids == expected.ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    make_trainer(checkpointed).step(make_step(make_group(2)))


@pytest.mark.parametrize("activations", ["keep", "selective", "recompute"])
def test_dropout_is_never_on(activations: Any) -> None:
    """A policy with dropout would be another one than the engine samples from."""
    config = transformers.GPT2Config(
        vocab_size=len(TOKENIZER), n_embd=32, n_layer=2, n_head=2, n_positions=64, embd_pdrop=0.5, resid_pdrop=0.5,
        attn_pdrop=0.5, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    policy = CausalPolicy(transformers.GPT2LMHeadModel(config), TOKENIZER, activations=activations)
    for micro in make_step(make_group(1)).micro:
        assert torch.equal(policy.logprobs(micro, 1.0).logprobs_N.detach(), policy.score(micro, 1.0))
    batch = make_step(make_group(1))
    first, again = gradients(policy, batch), gradients(copy.deepcopy(policy), batch)
    assert all(torch.equal(first[name], again[name]) for name in first)
