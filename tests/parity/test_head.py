"""The chunked lm-head against the naive way, which holds everything at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.errors import SpecError
from tandem.ops.head import Head

VOCAB, HIDDEN = 131, 32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are faster on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(config: type, model: type, **sizes: Any) -> Any:
    shape = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48, "initializer_range": 0.3}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    return model(config(**shape, **more, **special, **sizes, dtype="float32")).eval()


def llama(**sizes: Any) -> Any:
    return tiny(transformers.LlamaConfig, transformers.LlamaForCausalLM, **sizes)


MODELS: dict[str, Callable[[], Any]] = {
    "plain": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "softcap": lambda: tiny(
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        attn_implementation="eager",
        final_logit_softcapping=2.0,
    ),
    "multiplied": lambda: tiny(transformers.CohereConfig, transformers.CohereForCausalLM, logit_scale=0.25),
    "divided": lambda: tiny(transformers.GraniteConfig, transformers.GraniteForCausalLM, logits_scaling=6.0),
}


def naive(module: Any, hidden_NH: Tensor, ids_N: Tensor, temperature: float, num_ids: int) -> tuple[Tensor, Tensor]:
    """[tokens, vocab] as the model's own config describes its head."""
    config = module.config
    logits_NV = module.get_output_embeddings()(hidden_NH).float()
    logits_NV = logits_NV * (getattr(config, "logit_scale", None) or 1.0)
    logits_NV = logits_NV / (getattr(config, "logits_scaling", None) or 1.0)
    if cap := getattr(config, "final_logit_softcapping", None):
        logits_NV = cap * (logits_NV / cap).tanh()
    logprobs_NV = (logits_NV[:, :num_ids] / temperature).log_softmax(-1)
    return logprobs_NV[torch.arange(len(ids_N)), ids_N], -(logprobs_NV.exp() * logprobs_NV).sum(-1)


def tokens(count: int, num_ids: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, ids, and a weight for each logprob so that gradients do not cancel."""
    generator = torch.Generator().manual_seed(3)
    hidden_NH = torch.randn(count, HIDDEN, generator=generator)
    return (
        hidden_NH.requires_grad_(),
        torch.randint(0, num_ids, (count,), generator=generator),
        torch.randn(count, generator=generator),
    )


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("num_ids", [VOCAB, 100])
def test_logprobs_entropy_and_gradients_are_those_of_the_naive_way(
    architecture: str, temperature: float, num_ids: int
) -> None:
    module = MODELS[architecture]()
    head = Head(module, num_ids)
    hidden_NH, ids_N, weight_N = tokens(77, num_ids)
    matrix = module.get_output_embeddings().weight
    ours, entropy_N = head.logprobs(hidden_NH, ids_N, temperature, chunk=10)
    our_grads = torch.autograd.grad((ours * weight_N).sum(), [hidden_NH, matrix])
    theirs, their_entropy_N = naive(module, hidden_NH, ids_N, temperature, num_ids)
    their_grads = torch.autograd.grad((theirs * weight_N).sum(), [hidden_NH, matrix])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy_N, their_entropy_N, atol=1e-5, rtol=0)
    for our_grad, their_grad in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(our_grad, their_grad, atol=1e-5, rtol=1e-5)
        assert their_grad.abs().max() > 0.1
    assert not entropy_N.requires_grad
    assert our_grads[1][num_ids:].abs().max() == 0 if num_ids < VOCAB else True


@pytest.mark.parametrize("chunk", [1, 7, 77, 1000])
def test_the_size_of_a_chunk_changes_nothing(chunk: int) -> None:
    head = Head(MODELS["plain"](), VOCAB)
    hidden_NH, ids_N, _ = tokens(77)
    torch.testing.assert_close(
        head.logprobs(hidden_NH, ids_N, 1.0, chunk)[0], head.logprobs(hidden_NH, ids_N, 1.0)[0], atol=1e-6, rtol=0
    )


class Largest(TorchDispatchMode):
    """The most elements that any one tensor had, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def largest(score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], count: int) -> int:
    hidden_NH, ids_N, weight_N = tokens(count)
    with Largest() as seen:
        (score(hidden_NH, ids_N)[0] * weight_N).sum().backward()
    return seen.elements


def test_tokens_by_vocab_is_never_held_in_forward_or_backward() -> None:
    module = MODELS["plain"]()
    head, count, chunk = Head(module, VOCAB), 1000, 300
    held = largest(lambda hidden_NH, ids_N: head.logprobs(hidden_NH, ids_N, 0.7, chunk), count)
    assert held == chunk * VOCAB > count * HIDDEN
    held_naively = largest(lambda hidden_NH, ids_N: naive(module, hidden_NH, ids_N, 0.7, VOCAB), count)
    assert held_naively == count * VOCAB, "the watch sees what it should see"


def test_one_chunk_of_logits_lives_at_a_time() -> None:
    """Saved for backward are hidden states and ids, no logits of any chunk."""
    head = Head(MODELS["plain"](), VOCAB)
    hidden_NH, ids_N, _ = tokens(1000)
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        head.logprobs(hidden_NH, ids_N, 1.0, chunk=50)
    assert max(saved, default=0) <= 1000 * HIDDEN
    assert 50 * VOCAB not in saved


def test_scoring_without_a_gradient_is_the_same() -> None:
    head = Head(MODELS["softcap"](), VOCAB)
    hidden_NH, ids_N, _ = tokens(30)
    with torch.no_grad():
        quiet = head.logprobs(hidden_NH, ids_N, 1.0, chunk=8)[0]
    assert torch.equal(quiet, head.logprobs(hidden_NH, ids_N, 1.0, chunk=8)[0])


@pytest.mark.parametrize("architecture", MODELS)
def test_heads_that_are_understood_pass_the_check(architecture: str) -> None:
    module = MODELS[architecture]()
    Head(module, VOCAB).check(module)
    Head(module, 100).check(module)


class Surprising(transformers.LlamaForCausalLM):
    """A head that does something of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.05
        return out


def test_a_head_that_is_not_understood_is_refused_by_name() -> None:
    module = tiny(transformers.LlamaConfig, Surprising)
    with pytest.raises(SpecError, match="lm-head of Surprising is not understood"):
        Head(module, VOCAB).check(module)


def test_a_head_that_gives_no_numbers_is_refused() -> None:
    module = llama()
    with torch.no_grad():
        module.lm_head.weight[5] = torch.nan
    with pytest.raises(SpecError, match="not understood"):
        Head(module, VOCAB).check(module)
