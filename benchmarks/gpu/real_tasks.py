"""Tasks of reasoning-gym for real.py. Tandem plays `RealTask`, an environment; TRL gets its questions and its scores.

The last number of a reply is its answer. The library's rules score it, and the reward is 1 for a full score, else 0.
The questions are small enough that a model of 135M parameters is right sometimes, and so many that one in eight can be
held out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tandem.env.builtin.split import in_split
from tandem.protocols import Chat
from tandem.types import Outcome, Task

NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?"


@dataclass(frozen=True)
class Kind:
    """How a data set of the library is configured, and how long it is trained on."""

    config: dict[str, Any]
    steps: int = 80
    problems: int = 12_000
    """Number of problems made; repeated questions are left out. With fewer, more of them have one digit."""


KINDS = {
    "chain_sum": Kind({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, steps=120),
    "products": Kind({"min_digits": 1, "max_digits": 2}, problems=3000),
    "simple_equations": Kind(
        {"min_terms": 2, "max_terms": 2, "max_value": 10, "operators": ("+", "-"), "operators_weights": [0.5, 0.5]}
    ),
    "number_format": Kind({"max_num_candidates": 3, "min_n": 10, "max_n": 1000, "max_delta": 100}),
    "basic_arithmetic": Kind({
        "min_terms": 2, "max_terms": 2, "max_digits": 2, "operators": ("+", "-", "*"), "allow_parentheses": False,
        "allow_negation": False,
    }),
}  # fmt: skip


OF_THE_MACHINE = ("model", "scratch", "vllm_python", "began")
"""What a job is asked that says nothing of its result."""


@dataclass(frozen=True)
class Asked:
    """What one job is to do."""

    kind: str
    """A name of KINDS."""
    way: str
    """all and lora: Tandem, with every weight or adapters; trl: TRL's GRPOTrainer, with every weight."""
    seed: int
    steps: int
    model: str
    scratch: str
    device: str = "cuda"
    every: int = 20
    """Steps between two sets of weights that are asked."""
    groups: int = 32
    size: int = 16
    tokens: int = 64
    """Most tokens of an answer, in training and when asked."""
    questions: int = 512
    """Most held-out questions."""
    lr: float = 2e-5
    lora_lr: float = 3e-4
    rank: int = 16
    lag: int = 0
    """Most versions that a token trained by Tandem may be old. TRL's are never old."""
    share: float = 0.12
    """Of the GPU's memory, for vLLM."""
    rows: int = 128
    """Answers of a micro-batch of TRL."""
    engine: str = "vllm"
    """Of Tandem; `hf` is the embedded one."""
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of Tandem's spec, by dotted names: in place of what it would have."""
    vllm_python: str = ""
    trl_vllm: bool = True
    began: float = 0.0
    """Time at which the process was started."""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.way}-{self.seed}"


@dataclass(frozen=True)
class RealTask:
    """One reply to each problem; the reward is 1 if its last answer is right, else 0."""

    kind: str
    """A name of KINDS, which is the library's own."""
    problems: int = 0
    """Number of problems made; 0: what KINDS says."""

    replies_first: ClassVar[bool] = True
    _entries: dict[str, dict[str, Any]] = field(init=False, repr=False, compare=False)
    _data: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        import reasoning_gym

        size = self.problems or KINDS[self.kind].problems
        data = reasoning_gym.create_dataset(self.kind, size=size, seed=0, **KINDS[self.kind].config)
        object.__setattr__(self, "_data", data)
        made = (data[number] for number in range(size))
        object.__setattr__(self, "_entries", {entry["question"]: entry for entry in made})

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(
                f"{self.kind}-{number}",
                ({"role": "user", "content": asked},),
                {"question": asked, "answer": made["answer"]},
            )
            for number, (asked, made) in enumerate(self._entries.items())
            if in_split(split, asked)
        ]

    def score(self, question: str, reply: str) -> float:
        found = re.findall(NUMBER, reply)
        said = found[-1].replace(",", "") if found else None
        return float(self._data.score_answer(answer=said, entry=self._entries[question]) >= 1.0)

    async def run(self, task: Task, chat: Chat) -> Outcome:
        right = self.score(task.payload["question"], (await chat.reply()).text)
        return Outcome(right, {"correct": right})
