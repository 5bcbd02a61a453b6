"""How much a step has to do: sequences, rows, tokens. What a spec does not say is assumed, and said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from tandem.ops import byte_sizes
from tandem.ops.activation_sizes import Pass, activation_bytes, backward_bytes
from tandem.ops.counted_shape import Shape
from tandem.ops.row_packing import busiest
from tandem.runs.planner.lengths import Lengths, Micro, recorded_steps
from tandem.runs.planner.rank_share import sums_kept
from tandem.spec.parallel import ParallelSpec
from tandem.spec.precision import Bfloat16Precision, PrecisionSpec
from tandem.spec.run import PreferenceSpec, RlSpec, RunSpec, SftSpec
from tandem.spec.train import RlStage, Stage

PROMPT_TOKENS = 64
LONGEST_RECORDED = 2048
_NO_WORK = Micro(2, 2, 1, masked=False)
"""Of a rank that has no micro-batch, and takes part in what the others gather and reduce (train/tree_trainer.py)."""
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
    step_tokens: float
    """Expected to be computed in a step."""
    credited_tokens: float
    """Of these, what has a logprob."""
    attended: float
    """Positions that attention looks at from each of them, half of which come after it."""
    masked: float
    """Share of them in rows that hold several sequences under a mask."""
    micro: Micro
    """The micro-batch that takes most memory, of those that a step begins with."""
    later: Micro | None
    """The same of those that find the gradients of earlier ones there."""
    num_micro: int
    rows: int
    """That the engines decode together."""
    lengths: Literal["read", "told", "assumed"]
    """Where the lengths of sequences are from: what a plan says is worth no more than these."""
    assumed: tuple[str, ...]
    rounds: int = 1
    """Micro-batches that a rank computes one after the other."""
    sums: int = 0
    """Sums of the gradients of earlier rounds that are kept at once, where parallel.shares has them added as a tree."""
    rank_tokens: float = 0.0
    """Of `step_tokens`, those of the rank that has most."""
    dealt: tuple[tuple[Micro, Micro | None], ...] = ()
    """`micro` and `later` of each rank, where they are known and differ."""

    def of_rank(self, number: int) -> Work:
        """Return the same work with the micro-batches of one rank."""
        if not self.dealt:
            return self
        micro, later = self.dealt[number]
        return replace(self, micro=micro, later=later)

    def sized(self, tokens: int) -> Work:
        """Return the same work in micro-batches of so many tokens."""
        credited = round(self.micro.credited * tokens / self.micro.tokens)
        micro = replace(self.micro, tokens=tokens, credited=credited)
        return replace(self, micro=micro, later=micro if self.rounds > 1 else None, dealt=())


def packs(spec: RunSpec, *, on_gpu: bool) -> bool:
    """Rows need no mask, however many sequences they hold (ops/packed_attention.py)."""
    return on_gpu and isinstance(spec.precision, Bfloat16Precision) and spec.model.attention == "packed"


def compiles(spec: RunSpec, *, on_gpu: bool) -> bool:
    """Layers are compiled (model/forward.py)."""
    exact = spec.model.lora is None or spec.model.lora.base == "exact"
    return packs(spec, on_gpu=on_gpu) and spec.model.compile and exact and spec.model.activations != "offload"


def pass_of(spec: RunSpec, shape: Shape, micro: Micro, *, on_gpu: bool) -> Pass:
    """Return how a micro-batch is computed."""
    kept = "keep" if spec.model.activations == "offload" and not on_gpu else spec.model.activations
    rank = spec.model.lora.rank if spec.model.lora else 0
    masked = micro.masked or (shape.masks and not packs(spec, on_gpu=on_gpu))
    compiled = compiles(spec, on_gpu=on_gpu)
    return Pass(width_of(spec.precision), rank, kept, micro.row if masked else 0, compiled, spec.model.lora)


def width_of(precision: PrecisionSpec) -> int:
    return 2 if isinstance(precision, Bfloat16Precision) else 4


def work_of(
    spec: RunSpec,
    shape: Shape,
    answer_share: float,
    *,
    prompt_tokens: int = 0,
    row_tokens: int = 0,
    answer_tokens: float = 0.0,
    on_gpu: bool = False,
    lengths: Lengths | None = None,
) -> Work:
    """`answer_tokens`: of an answer, on average; left out, `answer_share` of the most that one may have. `lengths`: of
    the data or of the prompts; what is told by the other arguments goes before them."""
    packed = packs(spec, on_gpu=on_gpu)
    if lengths is not None and not lengths.groups and not lengths.prompts:
        found = work_of(
            spec, shape, answer_share, prompt_tokens=prompt_tokens, row_tokens=row_tokens, answer_tokens=answer_tokens,
            on_gpu=on_gpu,
        )  # fmt: skip
        return replace(found, assumed=(lengths.told, *found.assumed))
    if isinstance(spec, RlSpec):
        prompts = lengths.prompts if lengths is not None and not prompt_tokens else ()
        return _rl(spec, spec.train, shape, answer_share, prompt_tokens, prompts, answer_tokens, packed)
    if lengths is not None and not row_tokens:
        return _recorded(spec, shape, lengths, packed, on_gpu)
    stage = spec.train
    said = spec.data.max_tokens
    longest = row_tokens or min(said or LONGEST_RECORDED, shape.context or LONGEST_RECORDED)
    assumed = () if row_tokens or said else (f"no example has more than {longest} tokens (data.max_tokens is not set)",)
    sequences = stage.batch_size * (2 if _on_pairs(spec) else 1)
    most = sequences * longest
    share = 1.0 if row_tokens else 0.5
    if not row_tokens:
        assumed = (*assumed, f"an example has {longest // 2} tokens on average")
    tokens, number = _micro(stage, spec.parallel, most, longest)
    masked = not row_tokens and not packed
    micro = Micro(tokens, longest, tokens, masked)
    return _in_rounds(spec.parallel, Work(
        sequences, longest, 0, most * share, most * share, longest, float(masked), micro,
        micro, number, 0, "told" if row_tokens else "assumed", assumed,
    ))  # fmt: skip


def _on_pairs(spec: SftSpec | PreferenceSpec) -> bool:
    return spec.recipe == "preference" and spec.algorithm.kind != "kto"


def _recorded(spec: SftSpec | PreferenceSpec, shape: Shape, lengths: Lengths, packed: bool, on_gpu: bool) -> Work:
    """Of data that was read: the very micro-batches of the steps to come."""
    stage, pairs = spec.train, _on_pairs(spec)
    shares = (
        byte_sizes.shares_never
        if not pairs
        else byte_sizes.shares_unmasked
        if packed
        else byte_sizes.shares_masked(shape.hidden)
    )
    steps = recorded_steps(
        lengths.groups, steps=stage.steps, batch_size=stage.batch_size, micro_tokens=stage.micro_tokens, seed=spec.seed,
        shares=shares, together=pairs, packed=packed, multiple=spec.parallel.num_shares,
    )  # fmt: skip

    def held(micro: Micro) -> float:
        how = pass_of(spec, shape, micro, on_gpu=on_gpu)
        return activation_bytes(shape, how, micro.tokens) + backward_bytes(shape, how, micro.tokens)

    ranks = spec.parallel.ranks
    rounds = max(-(-len(step) // ranks) for step in steps)

    def largest(rank: int) -> tuple[Micro, Micro | None]:
        first = max((step[rank] for step in steps if rank < len(step)), key=held, default=_NO_WORK)
        return first, max((micro for step in steps for micro in step[rank + ranks :: ranks]), key=held, default=None)

    every = [micro for step in steps for micro in step]
    tokens = sum(micro.tokens for micro in every)
    return Work(
        sequences=stage.batch_size * (2 if pairs else 1),
        row_tokens=max(length for group in lengths.groups for length in group.lengths),
        answer_tokens=0,
        step_tokens=tokens / len(steps),
        credited_tokens=sum(micro.credited for micro in every) / len(steps),
        attended=sum(micro.pairs for micro in every) / tokens,
        masked=sum(micro.tokens for micro in every if micro.masked) / tokens,
        micro=max((micro for step in steps for micro in step[:ranks]), key=held),
        later=max((micro for step in steps for micro in step[ranks:]), key=held, default=None),
        num_micro=max(len(step) for step in steps),
        rows=0,
        lengths="read",
        assumed=(lengths.told,),
        rounds=rounds,
        sums=sums_kept(rounds) if spec.parallel.num_shares > 1 else 0,
        rank_tokens=sum(busiest([micro.tokens for micro in step], ranks) for step in steps) / len(steps),
        dealt=tuple(map(largest, range(ranks))) if ranks > 1 else (),
    )


def _rl(
    spec: RlSpec,
    stage: RlStage,
    shape: Shape,
    answer_share: float,
    prompt_tokens: int,
    prompts: Sequence[int],
    answer_tokens: float,
    packed: bool,
) -> Work:
    assumed: tuple[str, ...] = ()
    mean_prompt = float(prompt_tokens)
    if prompts:
        prompt_tokens, mean_prompt = max(prompts), fmean(prompts)
        assumed = (
            f"{len(prompts):,} prompts of the environment have {min(prompts)} to {prompt_tokens} tokens, "
            f"{mean_prompt:.0f} on average; an episode is one turn",
        )
    elif not prompt_tokens:
        prompt_tokens, mean_prompt = PROMPT_TOKENS, float(PROMPT_TOKENS)
        assumed = (f"a prompt has {PROMPT_TOKENS} tokens, and an episode is one turn (--prompt-tokens says otherwise)",)
    longest = min(prompt_tokens + stage.max_tokens, shape.context or 2**31)
    sequences = stage.groups_per_step * stage.group_size
    if not answer_tokens:
        answer_tokens = answer_share * stage.max_tokens
        assumed = (*assumed, f"an answer has {answer_share:.0%} of train.max_tokens on average (--answer-tokens)")
    credited = sequences * answer_tokens
    expected, row, most = credited + sequences * mean_prompt, longest, sequences * longest
    lengths = [mean_prompt + answer_tokens] * stage.group_size
    tree = mean_prompt + stage.group_size * answer_tokens
    shares = byte_sizes.shares_unmasked if packed else byte_sizes.shares_masked(shape.hidden)
    shared = shares(lengths, tree) and tree <= stage.micro_tokens
    answers = stage.max_tokens / longest
    if shared:
        expected = stage.groups_per_step * tree
        longest_tree = min(int(tree * _LONGEST_TREE), prompt_tokens + stage.group_size * stage.max_tokens)
        row = min(longest_tree, stage.micro_tokens)
        most = stage.groups_per_step * row
        answers = 1 - prompt_tokens / row
    tokens, number = _micro(stage, spec.parallel, most, row)
    under_way = sequences * (stage.max_lag + 1)
    together = getattr(spec.engine, "replicas", 1) * getattr(spec.engine, "max_running", 256)
    rows = min(together, max(under_way, spec.eval.tasks))
    masked, seen = shared and not packed, longest if packed else row
    micro = Micro(tokens, seen, max(1, int(tokens * answers)), masked)
    return _in_rounds(spec.parallel, Work(
        sequences, longest, stage.max_tokens, expected, credited, seen, float(masked), micro,
        micro, number, rows, "assumed", assumed,
    ))  # fmt: skip


def _micro(stage: Stage, parallel: ParallelSpec, most: int, longest: int) -> tuple[int, int]:
    """Return the tokens of a micro-batch, and how many there are, as many as a multiple of parallel.shares."""
    micro = min(most, max(stage.micro_tokens, longest))
    if micro < most:
        micro = max(micro // longest, 1) * longest  # whole rows
    number, shares = -(-most // micro), parallel.num_shares
    if shares > 1:
        rows = -(-most // longest)
        each = -(-rows // (-(-number // shares) * shares))
        micro, number = each * longest, -(-rows // each)
    return micro, number


def _in_rounds(parallel: ParallelSpec, work: Work) -> Work:
    """Return the work of micro-batches that are all alike, dealt to the ranks."""
    rounds = -(-work.num_micro // parallel.ranks)
    return replace(
        work, later=work.later if rounds > 1 else None, rounds=rounds,
        sums=sums_kept(rounds) if parallel.num_shares > 1 else 0,
        rank_tokens=work.step_tokens * rounds / work.num_micro,
    )  # fmt: skip
