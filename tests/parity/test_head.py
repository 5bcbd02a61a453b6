"""The chunked lm-head against the naive way, which holds everything at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engine.hf.sampler import Settings, draw
from tandem.errors import SpecError
from tandem.ops.fused_logprobs import WORKSPACE_BYTES
from tandem.ops.lm_head import Head

VOCAB, HIDDEN = 131, 32
SMALL = 50_000
"""Bytes of workspace: some thirty tokens at a time when fused, some fifteen when checkpointed."""


pytestmark = pytest.mark.usefixtures("one_thread")


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


def adapted(targets: list[str], **options: Any) -> Any:
    with warnings.catch_warnings():
        # peft asks the model by a name that transformers 5.23 deprecates.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return peft.get_peft_model(llama(), peft.LoraConfig(target_modules=targets, **options))


def checkpointed(module: Any, num_ids: int = VOCAB) -> Head:
    """A head with something in the way of fusing."""
    module.get_output_embeddings().register_forward_hook(lambda *_: None)
    return Head(module, num_ids)


WAYS: dict[str, Callable[[Any, int], Head]] = {"fused": Head, "checkpointed": checkpointed}


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("num_ids", [VOCAB, 100])
def test_logprobs_entropy_and_gradients_are_those_of_the_naive_way(
    way: str, architecture: str, temperature: float, num_ids: int
) -> None:
    module = MODELS[architecture]()
    head = WAYS[way](module, num_ids)
    assert (not head.why_not_fused()) == (way == "fused")
    hidden_NH, ids_N, weight_N = tokens(77, num_ids)
    matrix = module.get_output_embeddings().weight
    ours, entropy_N = head.logprobs(hidden_NH, ids_N, temperature, workspace_bytes=SMALL)
    our_grads = torch.autograd.grad((ours * weight_N).sum(), [hidden_NH, matrix])
    theirs, their_entropy_N = naive(module, hidden_NH, ids_N, temperature, num_ids)
    their_grads = torch.autograd.grad((theirs * weight_N).sum(), [hidden_NH, matrix])
    torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(entropy_N, their_entropy_N, atol=1e-5, rtol=0)
    for our_grad, their_grad in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(our_grad, their_grad, atol=1e-5, rtol=1e-5)
        assert their_grad.abs().max() > 0.1
    assert not entropy_N.requires_grad
    assert our_grads[1][num_ids:].abs().max() == 0 if num_ids < VOCAB else True


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workspace_bytes", [1, 5_000, 1_000_000])
def test_the_size_of_the_workspace_changes_nothing(way: str, workspace_bytes: int) -> None:
    head = WAYS[way](MODELS["plain"](), VOCAB)
    hidden_NH, ids_N, _ = tokens(77)
    torch.testing.assert_close(
        head.logprobs(hidden_NH, ids_N, 1.0, workspace_bytes=workspace_bytes)[0],
        head.logprobs(hidden_NH, ids_N, 1.0)[0],
        atol=5e-6,
        rtol=0,
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_no_tokens_are_no_special_case(way: str, top_p: float) -> None:
    head = WAYS[way](MODELS["plain"](), VOCAB)
    hidden_NH, ids_N, _ = tokens(0)
    logprobs_N, entropy_N = head.logprobs(hidden_NH, ids_N, 0.7, top_p)
    logprobs_N.sum().backward()
    assert logprobs_N.shape == entropy_N.shape == (0,)


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_tokens_by_vocab_is_never_held_in_forward_or_backward(way: str, top_p: float) -> None:
    module, count, workspace_bytes = MODELS["plain"](), 1000, 400_000
    head = WAYS[way](module, VOCAB)
    held = largest(
        lambda hidden_NH, ids_N: head.logprobs(hidden_NH, ids_N, 0.7, top_p, workspace_bytes=workspace_bytes), count
    )
    assert held < count * VOCAB
    assert (held <= count * HIDDEN) or (held * 4 <= workspace_bytes)
    held_naively = largest(lambda hidden_NH, ids_N: naive(module, hidden_NH, ids_N, 0.7, VOCAB), count)
    assert held_naively == count * VOCAB, "the watch sees what it should see"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_no_logits_are_kept_for_backward(way: str, top_p: float) -> None:
    """Saved are hidden states, weight, ids, and a number or two for each token."""
    head = WAYS[way](MODELS["plain"](), VOCAB)
    hidden_NH, ids_N, _ = tokens(1000)
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        head.logprobs(hidden_NH, ids_N, 1.0, top_p, workspace_bytes=SMALL)
    assert sum(saved) <= 1000 * HIDDEN + VOCAB * HIDDEN + 2 * 1000
    assert saved


@pytest.mark.parametrize("way", WAYS)
def test_scoring_without_a_gradient_is_the_same(way: str) -> None:
    head = WAYS[way](MODELS["softcap"](), VOCAB)
    hidden_NH, ids_N, _ = tokens(30)
    with torch.no_grad():
        quiet = head.logprobs(hidden_NH, ids_N, 1.0, workspace_bytes=SMALL)[0]
    assert torch.equal(quiet, head.logprobs(hidden_NH, ids_N, 1.0, workspace_bytes=SMALL)[0])


# --- which heads are fused


def test_a_head_that_cannot_be_fused_says_why_and_scores_all_the_same() -> None:
    module = llama()
    peft_module = adapted(["lm_head"], init_lora_weights=False)
    cases = {"": module, "a bias": llama(), "is a Linear, not a plain nn.Linear": peft_module, "float16": llama()}
    cases["a bias"].lm_head = torch.nn.Linear(HIDDEN, VOCAB)
    cases["float16"].half()
    for reason, each in cases.items():
        head = Head(each, VOCAB)
        assert (not head.why_not_fused()) == (reason == "")
        assert reason in head.why_not_fused()
        hidden_NH, ids_N, _ = tokens(20)
        hidden_NH = hidden_NH.detach().to(next(each.parameters()).dtype).requires_grad_()
        ours_N, _ = head.logprobs(hidden_NH, ids_N, 0.8)
        theirs_N, _ = naive(each, hidden_NH, ids_N, 0.8, VOCAB)
        torch.testing.assert_close(ours_N, theirs_N, atol=1e-5, rtol=0)
        (ours,) = torch.autograd.grad(ours_N.sum(), hidden_NH)
        (theirs,) = torch.autograd.grad(theirs_N.sum(), hidden_NH)
        torch.testing.assert_close(ours, theirs, atol=1e-5 if reason != "float16" else 2e-2, rtol=1e-5)


def test_a_frozen_head_under_an_adapter_is_fused_and_gets_no_gradient() -> None:
    module = adapted(["q_proj"])
    head = Head(module, VOCAB)
    hidden_NH, ids_N, _ = tokens(20)
    assert not head.why_not_fused()
    assert "sorted" in head.why_not_fused(0.9)
    head.logprobs(hidden_NH, ids_N, 0.8)[0].sum().backward()
    assert hidden_NH.grad is not None
    assert head.linear.weight.grad is None


def test_what_is_held_is_said_beforehand() -> None:
    module = llama()
    for head in (Head(module, VOCAB), checkpointed(module)):
        assert (0, 0) == head.buffer_bytes(0) < head.buffer_bytes(10) < head.buffer_bytes(20)
        assert 0.4 * WORKSPACE_BYTES < max(head.buffer_bytes(10**7)) <= WORKSPACE_BYTES


# --- top-p


def kept_by_hand(logits_V: Tensor, top_p: float) -> list[int]:
    """One id after the other, the likeliest first, until `top_p` is reached."""
    probs, before, kept = logits_V.double().softmax(-1).tolist(), 0.0, list[int]()
    for at in sorted(range(len(probs)), key=lambda at: -probs[at]):
        if kept and before >= top_p:
            break
        kept.append(at)
        before += probs[at]
    return kept


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", ["plain", "softcap"])
@pytest.mark.parametrize("top_p", [0.999, 0.9, 0.3, 1e-6])
def test_under_top_p_the_distribution_is_the_nucleus_with_the_token_in_it(
    way: str, architecture: str, top_p: float
) -> None:
    module, num_ids, temperature = MODELS[architecture](), 120, 0.8
    head = WAYS[way](module, num_ids)
    hidden_NH, ids_N, weight_N = tokens(60, num_ids)
    matrix = module.get_output_embeddings().weight
    ours_N, entropy_N = head.logprobs(hidden_NH, ids_N, temperature, top_p, workspace_bytes=SMALL)
    our_grads = torch.autograd.grad((ours_N * weight_N).sum(), [hidden_NH, matrix])
    logits_NV = head.logits(hidden_NH) / temperature
    theirs, entropies, outside = [], [], 0
    for logits_V, at in zip(logits_NV, ids_N.tolist(), strict=True):
        kept = kept_by_hand(logits_V.detach(), top_p)
        outside += at not in kept
        kept = kept if at in kept else [*kept, at]
        logprobs_K = logits_V[kept].log_softmax(-1)
        theirs.append(logprobs_K[kept.index(at)])
        entropies.append(-(logprobs_K.exp() * logprobs_K).sum())
    assert outside > 10 or top_p > 0.9, "most random ids are outside"
    torch.testing.assert_close(ours_N, torch.stack(theirs), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy_N, torch.stack(entropies).detach(), atol=1e-5, rtol=0)
    their_grads = torch.autograd.grad((torch.stack(theirs) * weight_N).sum(), [hidden_NH, matrix])
    for our_grad, their_grad in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(our_grad, their_grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.05])
def test_the_engine_reports_the_same_logprob_of_what_it_drew(dtype: torch.dtype, top_p: float) -> None:
    rows, temperature = 500, 0.7
    head = Head(MODELS["plain"]().to(dtype), VOCAB)
    hidden_NH = tokens(rows)[0].detach().to(dtype)
    hidden_NH[:20] = 0  # every id as likely as the next: the border runs through equals
    settings = Settings.empty(rows, torch.device("cpu"))
    settings.temperature_S.fill_(temperature)
    settings.top_p_S.fill_(top_p)
    settings.seed_S.copy_(torch.arange(rows))
    with torch.no_grad():
        logits_SV = head.logits(hidden_NH)
    ids_S, theirs_S, _ = draw(logits_SV, settings, torch.zeros(rows, dtype=torch.long))
    ours_S, _ = head.logprobs(hidden_NH, ids_S, temperature, top_p)
    torch.testing.assert_close(ours_S, theirs_S, atol=1e-5, rtol=0)
    # One id more or less inside, and every logprob of its row would be another.
    assert (head.logprobs(hidden_NH, ids_S, temperature, top_p * 0.9)[0] - theirs_S).abs().max() > 1e-3


# --- what is understood


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_are_understood_pass_the_check(architecture: str, dtype: torch.dtype) -> None:
    module = MODELS[architecture]().to(dtype)
    Head(module, VOCAB).check(module)
    Head(module, 100).check(module)


class Surprising(transformers.LlamaForCausalLM):
    """A head that does something of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.05
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_is_not_understood_is_refused_by_name(dtype: torch.dtype) -> None:
    module = tiny(transformers.LlamaConfig, Surprising).to(dtype)
    with pytest.raises(SpecError, match="lm-head of Surprising is not supported"):
        Head(module, VOCAB).check(module)


def test_a_head_that_gives_no_numbers_is_refused() -> None:
    module = llama()
    with torch.no_grad():
        module.lm_head.weight[5] = torch.nan
    with pytest.raises(SpecError, match="not supported"):
        Head(module, VOCAB).check(module)
