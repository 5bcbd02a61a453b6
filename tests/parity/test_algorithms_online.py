"""The leash and self-distillation against their closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from samples import micro_of

from tandem.algo import self_distill, sft
from tandem.algo.reference_anchor import anchored
from tandem.online.self_distillation import judge_messages
from tandem.types import TokenLogprobs, Totals, Trajectory


def logprob_after(kl_coef: float, reference: float) -> float:
    """Of one demonstrated token among many, once the loss has come to rest."""
    logit = torch.tensor(reference).sigmoid().logit().requires_grad_()
    algorithm = anchored(sft.make(), kl_coef)
    _, micro = micro_of([(1.0, [1.0])])
    micro.reference_N = torch.tensor([reference])
    optimizer = torch.optim.Adam([logit], lr=0.05)
    for _ in range(600):
        optimizer.zero_grad()
        logprobs_N = torch.nn.functional.logsigmoid(logit).view(1)
        loss, _ = algorithm.loss(TokenLogprobs(logprobs_N, torch.zeros(1)), micro, Totals(1, 1))
        loss.backward()
        optimizer.step()
    return torch.nn.functional.logsigmoid(logit).item()


@pytest.mark.parametrize("kl_coef", [0.5, 1.0, 4.0])
def test_a_demonstrated_token_rises_by_one_over_the_coefficient_and_rests_there(kl_coef: float):
    assert logprob_after(kl_coef, -6.0) == pytest.approx(-6.0 + 1 / kl_coef, abs=1e-3)


def test_the_leash_adds_its_term_and_nothing_else():
    plain, leashed = sft.make(), anchored(sft.make(), 0.25)
    assert anchored(plain, 0.0) is plain
    assert (plain.needs_reference, leashed.needs_reference) == (False, True)
    leaf, micro = micro_of([(1.0, [1.0, 2.0]), (1.0, [0.5])])
    micro.reference_N = torch.tensor([-1.0, -2.0, -3.0])
    totals = Totals(tokens=5, sequences=2)
    gap_N = leaf.logprobs_N.detach() - micro.reference_N
    without, _ = plain.loss(leaf, micro, totals)
    with_it, metrics = leashed.loss(leaf, micro, totals)
    assert (with_it - without).item() == pytest.approx(0.25 * gap_N.square().sum().item() / 2 / 5, rel=1e-6)
    assert metrics["loss/away"] == pytest.approx(gap_N.square().sum().item() / 2, rel=1e-6)
    gradient_N = torch.autograd.grad(with_it, leaf.logprobs_N)[0]
    assert torch.allclose(gradient_N, (-1 + 0.25 * gap_N) / 5)


def answer(own: list[float]) -> Trajectory:
    count = len(own)
    return Trajectory(
        [1, 2, *range(3, 3 + count)], [False] * 2 + [True] * count, [0.0, 0.0, *own], [-1] * 2 + [0] * count
    )


def test_credit_is_the_judge_s_logprob_minus_its_own():
    algorithm = self_distill.make(lambda trajectory: [-0.5, -9.0, -1.0], advantage_clip=5.0)
    own = answer([-1.0, -1.0, -1.0])
    assert algorithm.credit([[own]]) == [[[0.5, -5.0, 0.0]]]
    assert self_distill.make(lambda trajectory: [-0.5, -9.0, -1.0], advantage_clip=0.0).credit([[own]])[0][0][1] == -8.0
    assert algorithm.keep([own])
    assert not algorithm.needs_reference


def test_in_expectation_it_descends_the_reverse_kl_to_the_judge():
    """Over every token of a vocabulary of 7, sampled by the policy itself: the gradient of KL(policy, judge)."""
    torch.manual_seed(0)
    logits_V = torch.randn(7, dtype=torch.float64, requires_grad=True)
    judge_V = torch.randn(7, dtype=torch.float64).log_softmax(-1)
    logprobs_V = logits_V.log_softmax(-1)
    kl = (logprobs_V.exp() * (logprobs_V - judge_V)).sum()
    expected_V = torch.autograd.grad(kl, logits_V, retain_graph=True)[0]
    found_V = torch.zeros(7, dtype=torch.float64)
    for token in range(7):
        own = logprobs_V[token].item()
        algorithm = self_distill.make(lambda trajectory, token=token: [judge_V[token].item()], advantage_clip=0.0)
        _, micro = micro_of([(algorithm.credit([[answer([own])]])[0][0][0], [1.0])], torch.float64)
        micro = replace(micro, behaviour_N=torch.tensor([own], dtype=torch.float64))
        loss, _ = algorithm.loss(TokenLogprobs(logprobs_V[token : token + 1], torch.zeros(1)), micro, Totals(1, 1))
        found_V += math.exp(own) * torch.autograd.grad(loss, logits_V, retain_graph=True)[0]
    assert torch.allclose(found_V, expected_V, atol=1e-12)


def test_a_second_step_on_the_same_answers_goes_by_where_the_policy_is_now():
    leaf, micro = micro_of([(1.0, [math.e])])  # credit 1 when it was sampled; its logprob has risen by 1 since
    loss, metrics = self_distill.make(lambda trajectory: []).loss(leaf, micro, Totals(1, 1))
    assert float(torch.autograd.grad(loss, leaf.logprobs_N)[0]) == pytest.approx(0.0, abs=1e-6)
    assert metrics["loss/kl"] == pytest.approx(0.0, abs=1e-6)


def test_the_prompt_with_the_demonstration_ends_as_the_one_without():
    plain = [{"role": "user", "content": "Capital of Xanadu?"}]
    shown = judge_messages(plain, "Shangdu.")
    assert shown[1:] == plain
    assert "Shangdu." in shown[0]["content"]
    spoken = [{"role": "system", "content": "Be brief."}, *plain]
    shown = judge_messages(spoken, "Shangdu.")
    assert len(shown) == 2
    assert shown[0]["content"].startswith("Be brief.\n\n")
    assert shown[1:] == plain
