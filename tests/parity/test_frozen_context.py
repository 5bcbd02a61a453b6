"""context_grad = "none": the same logprobs, and the gradient that a computation by hand with a frozen context has."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from tandem.algo import sft
from tandem.model.policy import CausalPolicy
from tandem.model.presets import make_model
from tandem.ops.byte_sizes import shares_never
from tandem.text.tokenizer import byte_tokenizer
from tandem.train.batch_packing import make_batch
from tandem.types import NO_VERSION, Trajectory


def samples() -> list[tuple[list[int], int]]:
    return [([7, 8, 9, 10, 11, 12], 3), ([20, 21], 1), ([30, 31, 32, 33], 1), ([5, 4, 3, 2, 1, 6, 7, 8], 7)]


def recording(ids: list[int], first: int) -> Trajectory:
    count = len(ids)
    return Trajectory(ids, [i >= first for i in range(count)], [0.0] * count, [NO_VERSION] * count, status="recorded")


def gradients(policy: CausalPolicy) -> dict[str, torch.Tensor]:
    found = {name: tensor.grad.clone() for name, tensor in policy.trainable() if tensor.grad is not None}
    policy.module.zero_grad()
    return found


def by_hand(policy: CausalPolicy, total: int) -> dict[str, torch.Tensor]:
    for ids, first in samples():
        cache = DynamicCache()
        if first > 1:
            with torch.no_grad():
                policy.module(input_ids=torch.tensor([ids[: first - 1]]), past_key_values=cache)
        logits = policy.module(input_ids=torch.tensor([ids[first - 1 : -1]]), past_key_values=cache).logits
        wanted = torch.tensor(ids[first:])
        logprobs = logits[0, :, : policy.head.num_ids].log_softmax(-1).gather(-1, wanted[:, None])
        (-logprobs.sum() / total).backward()
    return gradients(policy)


def test_logprobs_are_the_same_and_the_gradient_is_that_of_a_frozen_context():
    tokenizer = byte_tokenizer()
    policy = CausalPolicy(make_model("tiny", tokenizer, seed=0), tokenizer)
    algorithm = sft.make()
    groups = [[recording(*sample)] for sample in samples()]
    batch = make_batch(groups, algorithm, micro_tokens=4096, version=0, shares=shares_never, device=torch.device("cpu"))
    values: dict[bool, torch.Tensor] = {}
    found: dict[bool, dict[str, torch.Tensor]] = {}
    for context_grad in (True, False):
        policy.context_grad = context_grad
        values[context_grad] = torch.cat([policy.logprobs(micro, 1.0).logprobs_N.detach() for micro in batch.micro])
        for micro in batch.micro:
            loss, _ = algorithm.loss(policy.logprobs(micro, 1.0), micro, batch.totals)
            loss.backward()
        found[context_grad] = gradients(policy)
    torch.testing.assert_close(values[True], values[False], atol=1e-5, rtol=0)
    expected = by_hand(policy, batch.totals.tokens)
    for name, gradient in found[False].items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)
    flat = {key: torch.cat([each.flatten() for each in part.values()]) for key, part in found.items()}
    cosine = torch.nn.functional.cosine_similarity(flat[True], flat[False], dim=0)
    assert 0.5 < cosine < 0.999, "a part of the whole gradient, and not all of it"


def test_siblings_keep_a_context_each_however_long_it_is():
    tokenizer = byte_tokenizer()
    policy = CausalPolicy(make_model("tiny", tokenizer, seed=0), tokenizer)
    group = [recording([*range(90), number, number + 1], 90) for number in range(8)]
    batch = make_batch(
        [group], sft.make(), micro_tokens=4096, version=0, shares=shares_never, device=torch.device("cpu")
    )
    assert batch.metrics["tokens/shared"] == 0
    whole = [policy.score(micro, 1.0) for micro in batch.micro]
    policy.context_grad = False
    for micro, expected_N in zip(batch.micro, whole, strict=True):
        torch.testing.assert_close(policy.logprobs(micro, 1.0).logprobs_N.detach(), expected_N, atol=1e-5, rtol=0)
