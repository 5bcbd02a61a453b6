"""A real trainer, bridge, engine and publisher, all small; and where in them a mistake is planted."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tandem.algo import dr_grpo
from tandem.bridge.collective.sender import AdapterBroadcastBridge, BroadcastBridge
from tandem.bridge.files.adapter import AdapterBridge
from tandem.bridge.files.checkpoint import DiskBridge
from tandem.bridge.inproc import InprocBridge
from tandem.bridge.shared.receiver import SharedEnd
from tandem.bridge.shared.sender import SharedBridge
from tandem.engine.hf.engine import EmbeddedEngine
from tandem.errors import SyncError
from tandem.model.policy import CausalPolicy
from tandem.ops.byte_sizes import shares_never
from tandem.ops.digest import fingerprints
from tandem.ops.named_tensors import live_tensors
from tandem.optim import master_weights
from tandem.optim.adamw import AdamW
from tandem.optim.optimizer import Optimizer
from tandem.protocols import WeightBridge
from tandem.publish import Canary, Publisher
from tandem.spec.algorithm import DrGrpoSpec
from tandem.spec.model import LoraSpec
from tandem.spec.optim import AdamWSpec
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.train.trainer import PolicyTrainer
from tandem.types import Group, Proof, Sampling, Served, Trajectory, Weights

TOKENIZER = byte_tokenizer()
NUM_IDS = len(TOKENIZER)
LORA = LoraSpec(rank=4, alpha=8.0)
CANARY = Canary(tuple(random.Random("canary").randrange(NUM_IDS) for _ in range(33)), floor=1e-4, ceiling=1e-2)
PROMPT = [7, 77, 177, 3]
STAGED = ("disk", "broadcast", "adapter", "adapter_broadcast")
MODES = (*STAGED, "shared", "inproc")
LAYER = "model.layers.0.self_attn."
Tensors = dict[str, Tensor]


# --- what trains and serves


def llama(**changed: Any) -> Any:
    """Four projections of one square shape, a tied head, and weights so large that attention decides what comes."""
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 48, "max_position_embeddings": 96, "initializer_range": 0.2, "tie_word_embeddings": True,
    }  # fmt: skip
    special = {"bos_token_id": None, "eos_token_id": TOKENIZER.eos_token_id, "pad_token_id": TOKENIZER.pad_token_id}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=NUM_IDS, dtype="float32", **(sizes | special | changed))
    return transformers.LlamaForCausalLM(config).eval()


def make_trainer(module: Any, lora: LoraSpec | None = None, **options: Any) -> PolicyTrainer:
    torch.manual_seed(1)
    policy = CausalPolicy(module, TOKENIZER, lora=lora)
    named = policy.trainable()
    optimizer = Optimizer(
        named, {name: AdamW(AdamWSpec()) for name, _ in named}, master_weights.Float32(), weight_decay=0.0
    )
    algorithm = dr_grpo.make(DrGrpoSpec())
    return PolicyTrainer(policy, algorithm, optimizer, lr=lambda step: 3e-2, clip_norm=1.0, **options)


def make_engine(module: Any, kind: type[EmbeddedEngine] = EmbeddedEngine, **options: Any) -> Any:
    """No token ends an answer: the canary's is always as long as it was asked for."""
    decode: Callable[[list[int]], str] = lambda ids: ""  # noqa: E731 - nothing here stops at words
    return kind(module, num_ids=NUM_IDS, end_ids=frozenset(), decode=decode, **({"inline": False} | options))


def make_group(seed: int, version: int) -> Group:
    rng = random.Random(seed)
    prompt = [rng.randrange(256) for _ in range(5)]
    group: Group = []
    for _ in range(4):
        spoken = [rng.randrange(256) for _ in range(6)]
        group.append(
            Trajectory(
                ids=[*prompt, *spoken],
                trained=[False] * 5 + [True] * 6,
                logprobs=[0.0] * 5 + [-5.0] * 6,
                versions=[-1] * 5 + [version] * 6,
                reward=rng.random(),
            )
        )
    return group


def batch_of(groups: list[Group], version: int) -> Any:
    algorithm = dr_grpo.make(DrGrpoSpec())
    device = torch.device("cpu")
    return make_batch(groups, algorithm, micro_tokens=96, version=version, shares=shares_never, device=device)


# --- bridges


class SharedHere(SharedBridge):
    """Both ends of the single copy in one process; handles go through JSON, as they do between two."""

    def source(self, num_receivers: int = 1) -> Any:
        return _BothEnds(super().source(num_receivers))


class _BothEnds:
    carries = "live"

    def __init__(self, source: Any) -> None:
        self._source, self._end = source, SharedEnd(source.link)
        self.link, self.memory_for, self.receive = source.link, self._end.memory_for, self._end.receive

    def attached(self, reply: Mapping[str, Any]) -> None:
        self._end.attached(reply)
        self._source.attached(json.loads(json.dumps(self._end.reply)))

    def close(self) -> None:
        self._source.close()
        self._end.close()


def make_bridge(mode: str, module: Any, at: Path, deadline_s: float) -> WeightBridge:
    match mode:
        case "disk":
            module.config.save_pretrained(at / "model")
            saved = module.state_dict().keys()
            buffers = [name for name, _ in module.named_buffers() if name not in saved]
            return DiskBridge(at / "versions", at / "model", buffers=buffers, deadline_s=deadline_s)
        case "broadcast":
            return BroadcastBridge(deadline_s=deadline_s)
        case "adapter":
            return AdapterBridge(at / "adapters", deadline_s=deadline_s)
        case "adapter_broadcast":
            return AdapterBroadcastBridge(deadline_s=deadline_s)
        case "adapter_broadcast by memory":
            return AdapterBroadcastBridge(deadline_s=deadline_s, backend="ipc")
        case "shared":
            return SharedHere(deadline_s)
        case _:
            return InprocBridge(deadline_s)


# --- all together


class Rig:
    """`theirs` and `engine`, where they are not what the mode would have."""

    def __init__(
        self,
        mode: str,
        at: Path,
        *,
        ours: Any = None,
        theirs: Any = None,
        engine: Any = None,
        deadline_s: float = 10.0,
        retries: int = 0,
        canary: Canary | None = CANARY,
        **trainer: Any,
    ) -> None:
        module = llama() if ours is None else ours
        theirs = (module if mode == "inproc" else copy.deepcopy(module)) if theirs is None else theirs
        self.mode, self.bridge = mode, make_bridge(mode, module, at, deadline_s)
        self.trainer = make_trainer(module, LORA if mode.startswith("adapter") else None, **trainer)
        self.engine = engine or make_engine(theirs)
        self.served = theirs
        """The module that the engine computes with, unless `engine` was given."""
        self.source: Any = None
        """The engine's end of the bridge, once it is attached."""
        self._watch_attach()
        self.publisher = self.make_publisher(deadline_s=deadline_s, retries=retries, canary=canary)
        self.module = module
        self.proven: Any = None
        """The trainer's module as it was when it was published last."""
        self.version = -1

    def _watch_attach(self) -> None:
        attach = self.engine.attach

        async def attached(source: Any) -> None:
            self.source = source
            await attach(source)

        self.engine.attach = attached

    def make_publisher(self, **options: Any) -> Publisher:
        return Publisher(self.bridge, self.engine, **options)

    def play(self, scenario: Callable[[], Awaitable[Any]]) -> Any:
        async def go() -> Any:
            try:
                return await asyncio.wait_for(scenario(), 60)
            finally:
                self.bridge.close()
                await self.engine.close()

        return asyncio.run(go())

    async def publish(self) -> Proof:
        proof = await self.publisher.publish(self.trainer)
        self.proven, self.version = copy.deepcopy(self.module), proof.version
        return proof

    def step(self) -> None:
        """A real one, of which every logprob hears."""
        self.trainer.step(batch_of([make_group(self.trainer.version, self.trainer.version)], self.trainer.version))

    async def begin(self) -> None:
        """The first two versions are in order: what is refused afterwards, is for what was planted."""
        await self.publish()
        self.step()
        await self.publish()

    async def refused(self, kind: type[Exception], *words: str) -> str:
        """The next version is not published, and nothing that is sampled under it would be trained on."""
        self.step()
        with pytest.raises(kind) as caught:
            await self.publish()
        assert caught.type is kind, caught.value
        for word in words:
            assert word in str(caught.value)
        with pytest.raises(SyncError, match=f"tokens of version {self.trainer.version}, and nothing proves"):
            self.publisher.check([make_group(0, self.trainer.version)])
        return str(caught.value)

    async def answer(self) -> Any:
        return await self.engine.generate(PROMPT, Sampling(max_tokens=6, temperature=0.0))

    async def serves_the_proven_one(self) -> None:
        """To the logprob, and under its own version."""
        answer = await self.answer()
        assert set(answer.versions) == {self.version}
        assert answer.logprobs == pytest.approx(logprobs(self.proven, answer.ids), abs=1e-5)

    async def recovers(self) -> None:
        """The fault is gone, and the next attempt goes well: neither end has to be restarted."""
        assert (await self.publish()).version == self.trainer.version
        await self.serves_the_proven_one()


@torch.no_grad()
def logprobs(module: Any, ids: list[int], prompt: Sequence[int] = PROMPT) -> list[float]:
    """The slow, right way: of what follows the prompt, from one pass over all of it."""
    rows_TV = module(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return rows_TV.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1).tolist()


# --- where mistakes are planted


def arriving(rig: Rig, change: Callable[[Tensors], Tensors], *, lying: bool = False) -> None:
    """What the engine's end hands on is changed. `lying`: and it says that it was sent so."""
    source = rig.source
    right = source.receive

    def receive(version: int, rank: int = 0) -> Weights:
        weights = right(version, rank)
        tensors = change({name: tensor.clone() for name, tensor in weights.tensors()})
        expected = fingerprints(tensors) if lying else weights.expected
        return replace(weights, tensors=lambda: iter(tensors.items()), expected=expected)

    source.receive = receive


def leaving(rig: Rig, change: Callable[[Tensors], Tensors]) -> None:
    """What the trainer exports is changed."""
    right = rig.trainer.export

    def export(kind: Any) -> Weights:
        weights = right(kind)
        return replace(weights, tensors=lambda: iter(change(dict(weights.tensors())).items()))

    rig.trainer.export = export


def saying(rig: Rig, change: Callable[[Served], Served]) -> None:
    """What the engine says of a version that it took is changed."""
    right = rig.engine.load

    async def load(version: int) -> Served:
        return change(await right(version))

    rig.engine.load = load


def served_memory(rig: Rig) -> Tensors:
    return dict(live_tensors(rig.served))
