"""Self-distillation from demonstrations: the policy samples answers, and the same model, with the demonstration in its
prompt, judges every token of them.

The model learns from its own answers instead of from tokens that it finds unlikely, so that it forgets least. The
judge's logprobs are of the version that answered, computed before the first step, so no second model is needed. A
token's credit is the judge's logprob minus the policy's, as in algo/distill.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tandem.algo import importance_ratio
from tandem.algo.advantages import has_tokens
from tandem.algo.policy_gradient import pushing, token_mean
from tandem.protocols import Algorithm, Credit
from tandem.spec.algorithm import Correction, TruncateToken
from tandem.types import Group, MicroBatch, TokenLogprobs, TokenSums, Totals, Trajectory

Judge = Callable[[Trajectory], Sequence[float]]
"""Returns the judge's logprobs of an answer's trained tokens."""

_TRUNCATE = TruncateToken()


def make(judge: Judge, *, advantage_clip: float = 5.0, correction: Correction = _TRUNCATE) -> Algorithm:
    """Make the algorithm. `advantage_clip`: limit of a token's credit, which is unbounded for tokens that the judge
    finds impossible; 0: no limit."""

    def credit(groups: Sequence[Group]) -> list[Credit]:
        return [[_credit(trajectory, judge(trajectory), advantage_clip) for trajectory in group] for group in groups]

    def loss(scored: TokenLogprobs, micro: MicroBatch, totals: Totals) -> tuple[Tensor, TokenSums]:
        # The credit changes with the policy's logprobs while it learns, and is 0 once they equal the judge's.
        moved_N = scored.logprobs_N.detach() - micro.behaviour_N
        credit_N = micro.credit_N - moved_N
        found = importance_ratio.corrected(scored.logprobs_N, micro, correction)
        value_N = pushing(found.weight_N, scored.logprobs_N) * credit_N
        sums = {**found.metrics, "loss/kl": -credit_N.sum(), "policy/entropy": scored.entropy_N.sum()}
        return -(value_N * token_mean(micro, totals)).sum(), sums

    return Algorithm("self_distill", has_tokens, credit, loss, credit_is_all=False)


def _credit(trajectory: Trajectory, judged: Sequence[float], clip: float) -> list[float]:
    own = [logprob for logprob, trained in zip(trajectory.logprobs, trajectory.trained, strict=True) if trained]
    gaps = [theirs - mine for theirs, mine in zip(judged, own, strict=True)]
    return [max(-clip, min(clip, gap)) for gap in gaps] if clip else gaps
