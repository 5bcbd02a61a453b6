"""The KL term, against exact sums over a vocabulary of seven tokens. V tokens, each a sequence of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from samples import FROM_REWARDS, MAKERS, algorithm_of, micro_of
from torch import Tensor

from tandem.algo import policy_gradient
from tandem.algo.policy_gradient import divergence
from tandem.protocols import Algorithm
from tandem.types import TokenLogprobs, Totals

V = 7
COEF = 0.3
WIDE = {"clip_low": 0.999, "clip_high": 1e4}
ESTIMATORS = ["k1", "k2", "k3"]


def logits_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(V, generator=generator, dtype=torch.float64)


def kl(p_V: Tensor, q_V: Tensor) -> Tensor:
    """Of two vectors of logprobs."""
    return (p_V.exp() * (p_V - q_V)).sum()


def gradient_of(value: Tensor, logits_V: Tensor) -> Tensor:
    return torch.autograd.grad(value, logits_V, retain_graph=True)[0]


def expected_gradient(algorithm: Algorithm, logits_V: Tensor, reference_V: Tensor, behaviour_V: Tensor) -> Tensor:
    """Of the loss, over every token that the behaviour policy could have sampled; rewards say nothing."""
    logprobs_V = logits_V.log_softmax(-1)
    _, micro = micro_of([(0.0, [1.0])], torch.float64)
    total_V = torch.zeros_like(logits_V)
    for token in range(V):
        micro.behaviour_N, micro.reference_N = behaviour_V[token : token + 1], reference_V[token : token + 1]
        scored = TokenLogprobs(logprobs_V[token : token + 1], torch.zeros(1))
        loss, _ = algorithm.loss(scored, micro, Totals(tokens=1, sequences=1))
        total_V += behaviour_V[token].exp() * gradient_of(loss, logits_V)
    return total_V


def world() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the policy, logprobs of the reference and of an older policy."""
    logits_V = logits_of(0).requires_grad_()
    older_V = (logits_V.detach() + 0.4 * logits_of(1)).log_softmax(-1)
    return logits_V, logits_of(2).log_softmax(-1), older_V


def exact(estimator: str, logits_V: Tensor, reference_V: Tensor) -> Tensor:
    """k1, k2: of KL(policy, reference). k3: of KL(reference, policy)."""
    logprobs_V = logits_V.log_softmax(-1)
    return gradient_of(kl(reference_V, logprobs_V) if estimator == "k3" else kl(logprobs_V, reference_V), logits_V)


def check_expected_gradient(name: str, estimator: str, *, on_policy: bool, **spec: Any) -> None:
    logits_V, reference_V, older_V = world()
    algorithm = algorithm_of(name, kl_coef=COEF, kl_estimator=estimator, **spec)
    behaviour_V = logits_V.log_softmax(-1).detach() if on_policy else older_V
    found_V = expected_gradient(algorithm, logits_V, reference_V, behaviour_V)
    torch.testing.assert_close(found_V, COEF * exact(estimator, logits_V, reference_V), atol=1e-6, rtol=0)


# --- values


def test_k1_and_k3_estimate_the_kl_without_bias_and_k3_is_never_negative() -> None:
    logits_V, reference_V, _ = world()
    logprobs_V = logits_V.detach().log_softmax(-1)
    true = kl(logprobs_V, reference_V)
    expected = {name: (logprobs_V.exp() * divergence(name, logprobs_V, reference_V)).sum() for name in ESTIMATORS}  # pyright: ignore
    assert expected["k1"].item() == pytest.approx(true.item(), abs=1e-12)
    assert expected["k3"].item() == pytest.approx(true.item(), abs=1e-12)
    assert abs(expected["k2"].item() - true.item()) > 0.01
    assert bool((divergence("k3", logprobs_V, reference_V) >= 0).all())
    assert bool((divergence("k2", logprobs_V, reference_V) >= 0).all())
    assert bool((divergence("k1", logprobs_V, reference_V) < 0).any())


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        # gap g = reference - logprob: ln 2, -ln 2, 0
        ("k1", [-0.693147, 0.693147, 0.0], [-0.693147, 0.693147, 0.0]),  # the gradient: a credit of coef * g
        ("k2", [0.240227, 0.240227, 0.0], [-0.693147, 0.693147, 0.0]),  # -g
        ("k3", [0.306853, 0.193147, 0.0], [-1.0, 0.5, 0.0]),  # 1 - exp(g)
    ],
)
@pytest.mark.parametrize("name", FROM_REWARDS)
def test_the_kl_term_has_its_closed_form(
    name: str, estimator: str, values: list[float], gradients: list[float]
) -> None:
    algorithm = algorithm_of(name, kl_coef=0.5, kl_estimator=estimator)
    assert algorithm.needs_reference
    given, micro = micro_of([(0.0, [1.0]), (0.0, [1.0]), (0.0, [1.0])])
    micro.reference_N = given.logprobs_N.detach() + torch.tensor([math.log(2), -math.log(2), 0.0])
    loss, metrics = algorithm.loss(given, micro, Totals(tokens=3, sequences=3))
    assert loss.item() == pytest.approx(0.5 * sum(values) / 3, abs=1e-6)
    assert metrics["loss/kl"] == pytest.approx(sum(values), abs=1e-5)
    (gradient_N,) = torch.autograd.grad(loss, given.logprobs_N)
    assert gradient_N.tolist() == pytest.approx([0.5 * gradient / 3 for gradient in gradients], abs=1e-6)


def test_without_a_coefficient_no_reference_is_asked_for() -> None:
    assert {name: algorithm_of(name).needs_reference for name in MAKERS} == {
        **dict.fromkeys([*FROM_REWARDS, "rejection_sampling"], False),
        "distill": True,
    }


# --- expected gradients


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", FROM_REWARDS)
def test_on_policy_the_expected_gradient_is_the_exact_one(name: str, estimator: str) -> None:
    check_expected_gradient(name, estimator, on_policy=True)


OFF_POLICY = [
    *((name, {"correction": {"kind": "none"}, **WIDE}) for name in ("dr_grpo", "grpo", "rloo", "dapo", "reinforce_pp")),
    ("dr_grpo", {"correction": {"kind": "truncate_sequence", "ratio_cap": 1e3}, **WIDE}),
    ("dr_grpo", {"correction": {"kind": "mask_token", "ratio_cap": 1e3, "ratio_floor": 1e-3}, **WIDE}),
    ("gspo", WIDE),
    ("cispo", {"clip_high": 1e4}),
    ("ppo", {"dual_clip": 1e4, **WIDE}),
]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("name", "spec"), OFF_POLICY)
def test_off_policy_too_as_far_as_the_weight_is_not_bounded(name: str, spec: dict[str, Any], estimator: str) -> None:
    check_expected_gradient(name, estimator, on_policy=False, **spec)


def test_a_distilled_policy_descends_the_kl_to_its_teacher() -> None:
    logits_V, teacher_V, older_V = world()
    for behaviour_V in (logits_V.log_softmax(-1).detach(), older_V):
        algorithm = algorithm_of("distill", correction={"kind": "none"})
        found_V = expected_gradient(algorithm, logits_V, teacher_V, behaviour_V)
        torch.testing.assert_close(found_V, exact("k1", logits_V, teacher_V), atol=1e-6, rtol=0)


# --- the sums reject planted errors


def test_the_traps_are_what_the_docs_say() -> None:
    """As a loss, k1 pulls nowhere; k3 pulls elsewhere than the KL it estimates."""
    logits_V, reference_V, _ = world()
    logprobs_V = logits_V.log_softmax(-1)
    weights_V = logprobs_V.exp().detach()
    as_loss = {name: (weights_V * divergence(name, logprobs_V, reference_V)).sum() for name in ESTIMATORS}  # pyright: ignore
    assert gradient_of(as_loss["k1"], logits_V).abs().max() < 1e-12
    true_V = exact("k1", logits_V, reference_V)
    assert (gradient_of(as_loss["k3"], logits_V) - true_V).abs().max() > 0.1 * true_V.abs().max()


def k1_as_loss(estimator: Any, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    return logprobs_N - reference_N


def k3_upside_down(estimator: Any, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    gap_N = logprobs_N - reference_N
    return gap_N.exp() - gap_N - 1


def k2_without_its_half(estimator: Any, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    return (reference_N - logprobs_N).square()


def k1_with_the_wrong_sign(estimator: Any, logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    return reference_N - logprobs_N


@pytest.mark.parametrize(
    ("estimator", "wrong"),
    [("k2", k1_as_loss), ("k3", k3_upside_down), ("k2", k2_without_its_half), ("k1", k1_with_the_wrong_sign)],
)
def test_a_wrong_estimator_is_rejected(estimator: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check_expected_gradient("dr_grpo", estimator, on_policy=True)
    monkeypatch.setattr(policy_gradient, "divergence", wrong)
    with pytest.raises(AssertionError):
        check_expected_gradient("dr_grpo", estimator, on_policy=True)


def test_a_kl_term_that_is_not_weighed_is_rejected_off_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    right = policy_gradient.surrogate

    def unweighed(*args: Any, **kwargs: Any) -> policy_gradient.Objective:
        made = right(*args, **kwargs)
        return policy_gradient.Objective(made.value_N, torch.ones_like(made.weight_N), made.metrics)

    monkeypatch.setattr(policy_gradient, "surrogate", unweighed)
    for estimator in ("k2", "k3"):
        check_expected_gradient("dr_grpo", estimator, on_policy=True)
        with pytest.raises(AssertionError):
            check_expected_gradient("dr_grpo", estimator, on_policy=False, correction={"kind": "none"}, **WIDE)
