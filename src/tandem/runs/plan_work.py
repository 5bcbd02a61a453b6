"""How much a step has to do: sequences, rows, tokens. What a spec does not say is assumed, and said."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.ops import sizes
from tandem.ops.sizes import Shape
from tandem.spec.precision import Bfloat16Precision
from tandem.spec.run import RlSpec, RunSpec
from tandem.spec.train import RlStage, Stage

PROMPT_TOKENS = 64
LONGEST_RECORDED = 2048
_LONGEST_TREE = 1.25
"""Of a group whose prompt is shared, against the mean one. Source: lengths that an end of turn of one chance makes."""


@dataclass(frozen=True, slots=True)
class Work:
    sequences: int
    """That a step trains on."""
    row_tokens: int
    """Of the longest sequence."""
    answer_tokens: int
    """At most sampled in a row; 0 where nothing is sampled."""
    trained_row: int
    """Of a row that is trained on: a sequence, or several."""
    step_tokens: float
    """Expected to be computed in a step."""
    credited_tokens: float
    """Of these, what has a logprob."""
    micro_tokens: int
    """At most in one forward and backward."""
    num_micro: int
    rows: int
    """That the engines decode together."""
    masked: bool
    """Rows hold several sequences."""
    assumed: tuple[str, ...]


def packs(spec: RunSpec, *, on_gpu: bool) -> bool:
    """Rows need no mask, however many sequences they hold (ops/packed_attention.py)."""
    return on_gpu and isinstance(spec.precision, Bfloat16Precision) and spec.model.attention == "packed"


def compiles(spec: RunSpec, *, on_gpu: bool) -> bool:
    """Layers are compiled (model/forward.py)."""
    exact = spec.model.lora is None or spec.model.lora.base == "exact"
    return packs(spec, on_gpu=on_gpu) and spec.model.compile and exact and spec.model.activations != "offload"


def work_of(
    spec: RunSpec,
    shape: Shape,
    answer_share: float,
    *,
    prompt_tokens: int = 0,
    row_tokens: int = 0,
    answer_tokens: float = 0.0,
    on_gpu: bool = False,
) -> Work:
    """`answer_tokens`: of an answer, on average; left out, `answer_share` of the most that one may have."""
    packed = packs(spec, on_gpu=on_gpu)
    if isinstance(spec, RlSpec):
        return _rl(spec, spec.train, shape, answer_share, prompt_tokens, answer_tokens, packed)
    stage = spec.train
    said = spec.data.max_tokens
    longest = row_tokens or min(said or LONGEST_RECORDED, shape.context or LONGEST_RECORDED)
    known = bool(row_tokens or said)
    assumed = () if known else (f"no example has more than {longest} tokens (data.max_tokens says nothing)",)
    sequences = stage.batch_size * (2 if spec.recipe == "preference" else 1)
    most = sequences * longest
    share = 1.0 if row_tokens else 0.5
    if not row_tokens:
        assumed = (*assumed, f"an example has {longest // 2} tokens on average")
    micro, number = _micro(stage, most, longest)
    masked = not row_tokens and not packed
    return Work(sequences, longest, 0, longest, most * share, most * share, micro, number, 0, masked, assumed)


def _rl(
    spec: RlSpec,
    stage: RlStage,
    shape: Shape,
    answer_share: float,
    prompt_tokens: int,
    answer_tokens: float,
    packed: bool,
) -> Work:
    assumed: tuple[str, ...] = ()
    if not prompt_tokens:
        prompt_tokens = PROMPT_TOKENS
        assumed = (f"a prompt has {PROMPT_TOKENS} tokens, and an episode is one turn (--prompt-tokens says otherwise)",)
    longest = min(prompt_tokens + stage.max_tokens, shape.context or 2**31)
    sequences = stage.groups_per_step * stage.group_size
    if not answer_tokens:
        answer_tokens = answer_share * stage.max_tokens
        assumed = (*assumed, f"an answer has {answer_share:.0%} of train.max_tokens on average (--answer-tokens)")
    credited = sequences * answer_tokens
    expected, row, most = credited + sequences * prompt_tokens, longest, sequences * longest
    lengths = [prompt_tokens + answer_tokens] * stage.group_size
    tree = prompt_tokens + stage.group_size * answer_tokens
    shares = sizes.shares_unmasked if packed else sizes.shares_masked(shape.hidden)
    shared = shares(lengths, tree) and tree <= stage.micro_tokens
    if shared:
        expected = stage.groups_per_step * tree
        longest_tree = min(int(tree * _LONGEST_TREE), prompt_tokens + stage.group_size * stage.max_tokens)
        row = min(longest_tree, stage.micro_tokens)
        most = stage.groups_per_step * row
    micro, number = _micro(stage, most, row)
    under_way = sequences * (stage.max_lag + 1)
    together = getattr(spec.engine, "replicas", 1) * getattr(spec.engine, "max_running", 256)
    rows = min(together, max(under_way, spec.eval.tasks))
    masked, seen = shared and not packed, longest if packed else row
    return Work(
        sequences, longest, stage.max_tokens, seen, expected, credited, micro, number, rows, masked, assumed
    )  # fmt: skip


def _micro(stage: Stage, most: int, longest: int) -> tuple[int, int]:
    micro = min(most, max(stage.micro_tokens, longest))
    if micro < most:
        micro = max(micro // longest, 1) * longest  # whole rows
    return micro, -(-most // micro)
