"""What each algorithm maximises, token by token, against numbers that were worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from samples import CORRECTED, FROM_REWARDS, algorithm_of, micro_of
from torch import Tensor

from tandem.algo import cispo, distill, gspo, importance_ratio, policy_gradient
from tandem.algo.policy_gradient import Objective
from tandem.protocols import Algorithm
from tandem.types import Metrics, Totals

# Each row is one token in a sequence of its own: credit, ratio to the engine's probability, value of the objective, its
# gradient with respect to the logprob.
Rows = Sequence[tuple[float, float, float, float]]
# Each row is one sequence: credit, ratios, and per token the value of the objective and its gradient.
Sequences = Sequence[tuple[float, Sequence[float], Sequence[float], Sequence[float]]]


def evaluate(algorithm: Algorithm, *sequences: tuple[float, Sequence[float]]) -> tuple[float, list[float], Metrics]:
    """The objective's sum over tokens, and its gradient at each of them, as if each counted 1."""
    given, micro = micro_of(sequences)
    if algorithm.needs_reference:
        micro.reference_N = given.logprobs_N.detach()
    loss, metrics = algorithm.loss(given, micro, Totals(tokens=1, sequences=1))
    return -loss.item(), (-torch.autograd.grad(loss, given.logprobs_N)[0]).tolist(), metrics


def check_rows(algorithm: Algorithm, rows: Rows) -> None:
    for credit, token_ratio, value, gradient in rows:
        found, (found_gradient,), _ = evaluate(algorithm, (credit, [token_ratio]))
        assert (found, found_gradient) == pytest.approx((value, gradient), abs=2e-5), (credit, token_ratio)
    # All at once: no token looks at another sequence's.
    _, gradients, _ = evaluate(algorithm, *((credit, [token_ratio]) for credit, token_ratio, _, _ in rows))
    assert gradients == pytest.approx([row[3] for row in rows], abs=2e-5)


def check_sequences(algorithm: Algorithm, rows: Sequences) -> None:
    for credit, ratios, values, gradients in rows:
        found, found_gradients, _ = evaluate(algorithm, (credit, ratios))
        assert found == pytest.approx(sum(values), abs=2e-5), (credit, ratios)
        assert found_gradients == pytest.approx(gradients, abs=2e-5), (credit, ratios)
    _, found_gradients, _ = evaluate(algorithm, *((credit, ratios) for credit, ratios, _, _ in rows))
    assert found_gradients == pytest.approx([value for row in rows for value in row[3]], abs=2e-5)


# --- the clipped surrogate

# With clip_low 0.2, clip_high 0.28, a token's ratio cut to 2.
CLIPPED = [
    (+3.0, 0.50, 1.50, 1.50),  # below the clip: the pessimist's minimum is the ratio itself
    (+3.0, 0.90, 2.70, 2.70),
    (+3.0, 1.00, 3.00, 3.00),
    (+3.0, 1.27, 3.81, 3.81),
    (+3.0, 1.29, 3.84, 0.00),  # above the clip: no further push up
    (+3.0, 5.00, 3.84, 0.00),  # above the cap
    (-3.0, 0.50, -2.40, 0.00),  # below the clip: no further push down
    (-3.0, 0.79, -2.40, 0.00),
    (-3.0, 0.81, -2.43, -2.43),
    (-3.0, 1.00, -3.00, -3.00),
    (-3.0, 1.50, -4.50, -4.50),  # above the clip: still pushed down, by as much as it has risen
    (-3.0, 5.00, -6.00, -6.00),  # above the cap: with the cap as its weight
    (0.0, 1.10, 0.00, 0.00),
]
# Cut to 1.1, below the clip: what has risen is still pushed up, with the cap as its weight.
CUT_LOW = [
    (+3.0, 1.05, 3.15, 3.15),
    (+3.0, 1.20, 3.30, 3.30),
    (+3.0, 5.00, 3.30, 3.30),
    (-3.0, 5.00, -3.30, -3.30),
]
UNCORRECTED = [*CLIPPED[:-2], (-3.0, 5.00, -15.0, -15.0)]
# Between 0.5 and 2.
MASKED = [
    (+3.0, 0.49, 0.00, 0.00),
    (+3.0, 0.51, 1.53, 1.53),
    (+3.0, 1.00, 3.00, 3.00),
    (+3.0, 1.90, 3.84, 0.00),  # inside the mask, above the clip
    (+3.0, 2.10, 0.00, 0.00),
    (-3.0, 0.49, 0.00, 0.00),
    (-3.0, 0.51, -2.40, 0.00),  # inside the mask, below the clip
    (-3.0, 1.90, -5.70, -5.70),
    (-3.0, 2.10, 0.00, 0.00),
]
# The weight is the sequence's ratio; the clip looks at the token's own.
SEQUENCE_CUT = [
    (+3.0, [1.2, 1.5], [5.40, 3.84], [5.40, 0.00]),  # 1.8; the second token is above the clip
    (-3.0, [1.2, 1.5], [-5.40, -5.40], [-5.40, -5.40]),
    (-3.0, [2.0, 1.5], [-6.00, -6.00], [-6.00, -6.00]),  # 3, cut to 2
    (+3.0, [0.5, 0.9], [1.35, 1.35], [1.35, 1.35]),  # 0.45
    (-3.0, [0.5, 0.9], [-2.40, -1.35], [0.00, -1.35]),  # the first token is below the clip
    (+1.0, [1.0, 1.25, 0.8, 1.0], [1.0] * 4, [1.0] * 4),  # 1, though two tokens moved
]
SEQUENCE_MASKED = [
    (+3.0, [1.2, 1.5], [5.40, 3.84], [5.40, 0.00]),
    (-3.0, [2.0, 1.5], [0.0, 0.0], [0.0, 0.0]),  # 3 is outside
    (-3.0, [0.5, 0.9], [0.0, 0.0], [0.0, 0.0]),  # 0.45 is outside
    (+1.0, [0.2, 1.0, 4.0], [0.8, 0.8, 1.28], [0.8, 0.8, 0.0]),  # 0.8 is inside, though two tokens are not
]
TOKEN_TABLES: list[tuple[dict[str, Any], Rows]] = [
    ({"kind": "truncate_token"}, CLIPPED),
    ({"kind": "truncate_token", "ratio_cap": 1.1}, CUT_LOW),
    ({"kind": "none"}, UNCORRECTED),
    ({"kind": "mask_token"}, MASKED),
]
SEQUENCE_TABLES: list[tuple[dict[str, Any], Sequences]] = [
    ({"kind": "truncate_sequence"}, SEQUENCE_CUT),
    ({"kind": "mask_sequence"}, SEQUENCE_MASKED),
]


@pytest.mark.parametrize("name", CORRECTED)
def test_the_clipped_surrogate_and_its_gradient_have_their_closed_form(name: str) -> None:
    for correction, rows in TOKEN_TABLES:
        check_rows(algorithm_of(name, correction=correction), rows)
    check_rows(algorithm_of(name), CLIPPED)


@pytest.mark.parametrize(("correction", "rows"), SEQUENCE_TABLES, ids=["truncate", "mask"])
def test_a_sequence_is_weighed_by_the_product_of_its_tokens(correction: dict[str, Any], rows: Sequences) -> None:
    for name in ("dr_grpo", "rloo", "dapo", "reinforce_pp"):  # grpo's shares differ with the length
        check_sequences(algorithm_of(name, correction=correction), rows)


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "rloo"])
def test_the_default_is_the_truncated_clipped_minimum_bit_for_bit(name: str) -> None:
    """min(w A, clip(w) A) with w = min(pi / b, 2), written out."""
    torch.manual_seed(0)
    sequences = [(credit, (0.7 * torch.randn(length)).exp().tolist()) for credit, length in
                 zip(torch.randn(40).tolist(), torch.randint(1, 9, (40,)).tolist(), strict=True)]  # fmt: skip
    given, micro = micro_of(sequences)
    totals = Totals(len(micro.credit_N), 40)
    ours, _ = algorithm_of(name).loss(given, micro, totals)
    (gradient_N,) = torch.autograd.grad(ours, given.logprobs_N)
    cut_N = (given.logprobs_N.detach() - micro.behaviour_N).exp().clamp(max=2.0)
    weight_N = cut_N * (given.logprobs_N - given.logprobs_N.detach()).exp()
    value_N = torch.minimum(weight_N * micro.credit_N, weight_N.clamp(1 - 0.2, 1 + 0.28) * micro.credit_N)
    share_N = 1 / (micro.length_N * 40) if name == "grpo" else torch.full_like(cut_N, 1 / totals.tokens)
    plain = -(value_N * share_N).sum()
    assert ours.item() == plain.item()
    assert torch.equal(gradient_N, torch.autograd.grad(plain, given.logprobs_N)[0])


# --- the others' own

GSPO = [  # with clip_low 0.2, clip_high 0.28; the ratio is the geometric mean, a token pushes by ratio * A / length
    (+3.0, [1.21, 1.00], [1.65, 1.65], [1.65, 1.65]),  # 1.1
    (+3.0, [2.25, 1.00], [1.92, 1.92], [0.0, 0.0]),  # 1.5: above the clip, every token of it
    (-3.0, [2.25, 1.00], [-2.25, -2.25], [-2.25, -2.25]),
    (-1.0, [8.0, 1.0, 1.0], [-2 / 3] * 3, [-2 / 3] * 3),  # 2
    (+3.0, [0.25, 1.00], [0.75, 0.75], [0.75, 0.75]),  # 0.5
    (-3.0, [0.25, 1.00], [-1.20, -1.20], [0.0, 0.0]),  # below the clip
    (+3.0, [4.00, 0.25, 1.00, 1.00], [0.75] * 4, [0.75] * 4),  # 1: tokens that left the clip cancel
    (+1.0, [1.10], [1.10], [1.10]),
]
GSPO_DEFAULT = [
    (+1.0, [1.0003] * 2, [1.0003 / 2] * 2, [1.0003 / 2] * 2),
    (+1.0, [1.0005] * 2, [1.0004 / 2] * 2, [0.0] * 2),
    (-1.0, [0.9998] * 2, [-0.9998 / 2] * 2, [-0.9998 / 2] * 2),
    (-1.0, [0.9996] * 2, [-0.9997 / 2] * 2, [0.0] * 2),
    (-1.0, [1.5] * 2, [-0.75] * 2, [-0.75] * 2),
]
CISPO = [  # a weight between 0 and 5
    (+3.0, 0.01, 0.03, 0.03),
    (+3.0, 1.00, 3.00, 3.00),
    (+3.0, 1.50, 4.50, 4.50),
    (+3.0, 7.00, 15.0, 15.0),  # the weight is clipped, the gradient is not
    (-3.0, 0.01, -0.03, -0.03),
    (-3.0, 1.50, -4.50, -4.50),
    (-3.0, 7.00, -15.0, -15.0),
    (0.0, 2.00, 0.00, 0.00),
]
CISPO_NARROW = [  # between 0.8 and 1.28
    (+3.0, 0.50, 2.40, 2.40),
    (+3.0, 1.50, 3.84, 3.84),
    (-3.0, 0.50, -2.40, -2.40),
    (-3.0, 1.50, -3.84, -3.84),
]
PPO = [  # clips 0.2 and 0.2, dual clip 3
    (+3.0, 0.50, 1.50, 1.50),
    (+3.0, 1.19, 3.57, 3.57),
    (+3.0, 1.21, 3.60, 0.00),
    (+3.0, 5.00, 3.60, 0.00),
    (-3.0, 0.79, -2.40, 0.00),
    (-3.0, 0.81, -2.43, -2.43),
    (-3.0, 1.50, -4.50, -4.50),
    (-3.0, 2.90, -8.70, -8.70),
    (-3.0, 3.10, -9.00, 0.00),  # the second clip: not below 3 * A, and no further push down
    (-3.0, 50.0, -9.00, 0.00),
    (0.0, 5.00, 0.00, 0.00),
]
PPO_WIDE = [(+3.0, 4.00, 12.0, 12.0), (+3.0, 6.5, 18.0, 0.0), (-3.0, 4.0, -9.0, 0.0)]  # clip_high 5: of A > 0 only


def check_gspo() -> None:
    check_sequences(algorithm_of("gspo", clip_low=0.2, clip_high=0.28), GSPO)
    check_sequences(algorithm_of("gspo"), GSPO_DEFAULT)


def check_cispo() -> None:
    check_rows(algorithm_of("cispo"), CISPO)
    check_rows(algorithm_of("cispo", clip_low=0.2, clip_high=0.28), CISPO_NARROW)


def check_ppo() -> None:
    check_rows(algorithm_of("ppo"), PPO)
    check_rows(algorithm_of("ppo", clip_high=5.0), PPO_WIDE)


def check_distill() -> None:
    """Credit: log teacher - log policy; times the truncated ratio. No clip."""
    teacher_minus_own = torch.tensor([0.5, -0.5, 0.5, -2.0, 0.0])
    given, micro = micro_of([(0.0, [1.0, 1.0, 5.0]), (1.0, [0.5, 1.5])])
    micro.reference_N = given.logprobs_N.detach() + teacher_minus_own
    loss, metrics = algorithm_of("distill").loss(given, micro, Totals(tokens=10, sequences=2))
    expected_N = torch.tensor([0.5, -0.5, 1.0, -0.5, 1.5])  # the third is cut to 2; the last two have a reward's credit
    torch.testing.assert_close(torch.autograd.grad(loss, given.logprobs_N)[0], -expected_N / 10)
    assert loss.item() == pytest.approx(-expected_N.sum().item() / 10)
    assert metrics["loss/kl"] == pytest.approx(1.5)
    assert metrics["loss/cap_fraction"] == 1
    loss, _ = algorithm_of("distill", advantage_clip=0.4).loss(given, micro, Totals(tokens=10, sequences=2))
    expected_N = torch.tensor([0.4, -0.4, 0.8, -0.2, 0.6])
    torch.testing.assert_close(torch.autograd.grad(loss, given.logprobs_N)[0], -expected_N / 10)


def test_gspo_has_its_closed_form() -> None:
    check_gspo()


def test_cispo_has_its_closed_form() -> None:
    check_cispo()


def test_ppo_has_its_closed_form_with_the_second_clip() -> None:
    check_ppo()


def test_distillation_has_its_closed_form() -> None:
    check_distill()


def test_a_distilled_token_outside_the_mask_has_no_gradient() -> None:
    given, micro = micro_of([(0.0, [1.0, 0.4, 3.0])])
    micro.reference_N = given.logprobs_N.detach() + 1.0
    algorithm = algorithm_of("distill", correction={"kind": "mask_token"})
    loss, metrics = algorithm.loss(given, micro, Totals(tokens=1, sequences=1))
    assert torch.autograd.grad(loss, given.logprobs_N)[0].tolist() == [-1.0, 0.0, 0.0]
    assert metrics["loss/mask_fraction"] == 2


# --- the tables reject planted errors


def clip_of(spec: Any) -> tuple[float, float]:
    return 1 - spec.clip_low, 1 + spec.clip_high


def attached(weight_N: Tensor, logprobs_N: Tensor) -> Tensor:
    return weight_N * (logprobs_N - logprobs_N.detach()).exp()


def of(value_N: Tensor, weight_N: Tensor) -> Objective:
    return Objective(value_N, weight_N, {})


def maximum(logprobs_N: Tensor, weight_N: Tensor, drift_N: Tensor, credit_N: Tensor, spec: Any, dual=math.inf) -> Any:
    live_N = attached(weight_N, logprobs_N)
    return of(torch.maximum(live_N * credit_N, live_N.clamp(*clip_of(spec)) * credit_N), weight_N)


def clip_alone(logprobs_N: Tensor, weight_N: Tensor, drift_N: Tensor, credit_N: Tensor, spec: Any, dual=0.0) -> Any:
    return of(attached(weight_N, logprobs_N).clamp(*clip_of(spec)) * credit_N, weight_N)


def no_clip(logprobs_N: Tensor, weight_N: Tensor, drift_N: Tensor, credit_N: Tensor, spec: Any, dual=0.0) -> Any:
    return of(attached(weight_N, logprobs_N) * credit_N, weight_N)


ours = policy_gradient.surrogate


def sign_in_the_clip(logprobs_N: Tensor, weight_N: Tensor, drift_N: Tensor, credit_N: Tensor, *rest, **more) -> Any:
    """The classic: the clip of positive credits applied to the size of negative ones."""
    made = ours(logprobs_N, weight_N, drift_N, credit_N.abs(), *rest, **more)
    return of(made.value_N * credit_N.sign(), weight_N)


def upside_down(logprobs_N: Tensor, *rest: Any, **more: Any) -> Any:
    made = ours(-logprobs_N, *rest, **more)
    return made


def second_clip_for_all(logprobs_N: Tensor, weight_N: Tensor, drift_N: Tensor, credit_N: Tensor, spec, dual=9.0) -> Any:
    made = ours(logprobs_N, weight_N, drift_N, credit_N, spec, dual)
    return of(torch.where(drift_N > dual, dual * credit_N, made.value_N), weight_N)


def no_second_clip(logprobs_N: Tensor, weight_N: Tensor, drift_N: Tensor, credit_N: Tensor, spec: Any, dual=0.0) -> Any:
    return ours(logprobs_N, weight_N, drift_N, credit_N, spec)


def check_clipped() -> None:
    check_rows(algorithm_of("dr_grpo"), CLIPPED)


@pytest.mark.parametrize("wrong", [maximum, clip_alone, no_clip, sign_in_the_clip, upside_down])
@pytest.mark.parametrize("check", [check_clipped, check_gspo, check_ppo])
def test_a_wrong_clip_is_rejected(check: Callable[[], None], wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check()
    monkeypatch.setattr(policy_gradient, "surrogate", wrong)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("wrong", [no_second_clip, second_clip_for_all])
def test_a_wrong_second_clip_is_rejected(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_gradient, "surrogate", wrong)
    with pytest.raises(AssertionError):
        check_ppo()


def dead_past_the_cap(weight_N: Tensor, logprobs_N: Tensor) -> Tensor:
    live_N = attached(weight_N, logprobs_N)
    return torch.where(weight_N >= 2, live_N.detach(), live_N)


@pytest.mark.parametrize("wrong", [dead_past_the_cap, lambda weight_N, logprobs_N: weight_N * logprobs_N.exp()])
def test_a_weight_that_does_not_push_is_rejected(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (policy_gradient, cispo, distill):
        monkeypatch.setattr(module, "pushing", wrong)
    for check in (check_clipped, check_cispo, check_distill):
        with pytest.raises(AssertionError):
            check()


def token_for_sequence(values_N: Tensor, micro: Any) -> Tensor:
    return values_N


def mean_for_sum(values_N: Tensor, micro: Any) -> Tensor:
    return right_sum(values_N, micro) / micro.length_N


def sum_over_all(values_N: Tensor, micro: Any) -> Tensor:
    return values_N.sum().expand_as(values_N)


right_sum = importance_ratio.sequence_sum


@pytest.mark.parametrize("wrong", [token_for_sequence, mean_for_sum, sum_over_all])
def test_a_wrong_sequence_ratio_is_rejected(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance_ratio, "sequence_sum", wrong)
    for correction, rows in SEQUENCE_TABLES:
        with pytest.raises(AssertionError):
            check_sequences(algorithm_of("dr_grpo", correction=correction), rows)
    with pytest.raises(AssertionError):
        check_gspo()


def test_a_token_mean_in_place_of_gspo_s_sequence_mean_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gspo.policy_gradient, "sequence_mean", policy_gradient.token_mean)
    with pytest.raises(AssertionError):
        check_gspo()


# --- all of them


CORRECTIONS = ["truncate_token", "truncate_sequence", "mask_token", "mask_sequence", "none"]
VARIANTS = [(name, {}) for name in FROM_REWARDS if name not in CORRECTED]
VARIANTS += [(name, {"correction": {"kind": kind}}) for name in CORRECTED for kind in CORRECTIONS]


@pytest.mark.parametrize(("name", "spec"), VARIANTS)
def test_ratios_beyond_all_bounds_keep_loss_and_gradient_finite(name: str, spec: dict[str, Any]) -> None:
    given, micro = micro_of([(credit, [1.0]) for credit in (1.0, 1.0, -1.0, -1.0)])
    micro.behaviour_N = given.logprobs_N.detach() + torch.tensor([-300.0, 300.0, -300.0, 300.0])
    loss, _ = algorithm_of(name, **spec).loss(given, micro, Totals(tokens=4, sequences=4))
    assert math.isfinite(loss.item())
    assert bool(torch.autograd.grad(loss, given.logprobs_N)[0].isfinite().all())


def test_a_logprob_that_is_not_finite_is_not_hidden() -> None:
    for name in FROM_REWARDS:
        given, micro = micro_of([(1.0, [1.0, 1.0])])
        given.logprobs_N.data[0] = math.nan
        loss, _ = algorithm_of(name).loss(given, micro, Totals(tokens=2, sequences=1))
        assert not math.isfinite(loss.item()), name


def test_clipped_cut_and_masked_tokens_are_counted() -> None:
    rows = [(credit, [token_ratio]) for credit, token_ratio, _, _ in CLIPPED]
    _, _, metrics = evaluate(algorithm_of("dr_grpo"), *rows)
    assert metrics["loss/clip_fraction"] == 4
    assert metrics["loss/cap_fraction"] == 2
    assert metrics["loss/ratio_mean"] == pytest.approx(sum(min(ratios[0], 2.0) for _, ratios in rows))
    _, _, metrics = evaluate(algorithm_of("dr_grpo", correction={"kind": "mask_token", "ratio_floor": 0.6}), *rows)
    assert metrics["loss/mask_fraction"] == 4  # 0.5 and 5, twice each
    assert metrics["loss/clip_fraction"] == 2  # of those that are left
    _, _, metrics = evaluate(algorithm_of("cispo"), *rows, (1.0, [7.0]))
    assert metrics["loss/clip_fraction"] == 1
    _, _, metrics = evaluate(algorithm_of("ppo"), *rows)
    assert metrics["loss/clip_fraction"] == 6  # 1.27, 1.29 and 5 up; 0.5 and 0.79 down; 5 by the second clip
    assert metrics["loss/dual_clip_fraction"] == 1
    _, _, metrics = evaluate(algorithm_of("gspo", clip_low=0.2, clip_high=0.28), *((row[0], row[1]) for row in GSPO))
    assert metrics["loss/clip_fraction"] == 4  # tokens of two sequences
