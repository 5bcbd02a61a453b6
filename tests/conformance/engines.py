"""Small random models, engines of every kind, and the slow, right way to score: for the suites beside this file."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from remote_engine import ThreadRemoteEngine
from server_engine import ThreadServerEngine

from tandem.engine.hf.engine import EmbeddedEngine
from tandem.engine.pool import EnginePool
from tandem.model.presets import make_model
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Sampling

VOCAB, END, CONTEXT = 97, 96, 160
KINDS = ("inline", "threaded", "pool", "server")
ANSWERING = (*KINDS, "remote")
"""And what takes no live weights: with fixed ones it must answer as all others do."""
Request = tuple[list[int], Sampling]


# --- models: small, random, and with weights large enough that attention decides what comes next


def tiny(config: type, model: type, attention: str = "sdpa", **sizes: Any) -> Any:
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
    }
    special = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": None}
    torch.manual_seed(0)
    return model(config(**(shape | sizes | special), attn_implementation=attention, dtype="float32")).eval()


def llama(**sizes: Any) -> Any:
    sizes = {"num_key_value_heads": 2, "intermediate_size": 96} | sizes
    return tiny(transformers.LlamaConfig, transformers.LlamaForCausalLM, **sizes)


def qwen3_preset(attention: str = "sdpa") -> Any:
    module = make_model("tiny", byte_tokenizer(), seed=0, attention=attention).eval()
    torch.manual_seed(1)
    for tensor in module.parameters():
        if tensor.ndim == 2:
            torch.nn.init.normal_(tensor, std=0.1)
    return module


def gemma(config: type, model: type, **sizes: Any) -> Any:
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "sliding_window": 8} | sizes
    return tiny(config, model, **sizes)


def delta_net() -> Any:
    return tiny(
        transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "qwen3": qwen3_preset,
    "qwen3-eager": lambda: qwen3_preset("eager"),
    "llama-gqa": llama,
    "mistral-sliding": lambda: tiny(
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        num_key_value_heads=2,
        intermediate_size=96,
        sliding_window=8,
    ),
    "gemma2-softcap-mixed": lambda: gemma(
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        attention="eager",
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
    ),
    "gemma3-mixed": lambda: gemma(
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": lambda: tiny(transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "neox": lambda: tiny(transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, intermediate_size=96),
    "granite-scaled": lambda: tiny(
        transformers.GraniteConfig,
        transformers.GraniteForCausalLM,
        num_key_value_heads=2,
        intermediate_size=96,
        logits_scaling=4.0,
    ),
    "qwen3.5-delta-net": delta_net,
    "lfm2-convolutions": lambda: tiny(
        transformers.Lfm2Config,
        transformers.Lfm2ForCausalLM,
        num_key_value_heads=2,
        intermediate_size=96,
        layer_types=["conv", "full_attention"],
    ),
    "falcon-h1-both": lambda: tiny(
        transformers.FalconH1Config,
        transformers.FalconH1ForCausalLM,
        num_key_value_heads=2,
        intermediate_size=96,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_ssm=128,
        mamba_d_state=16,
    ),
}


def reciter(length: int) -> Any:
    """A model whose greedy continuation of token i is token i + 1: what it says is known."""
    module = llama(
        vocab_size=length, hidden_size=length, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.no_grad():
        module.model.layers[0].self_attn.o_proj.weight.zero_()
        module.model.layers[0].mlp.down_proj.weight.zero_()
        module.model.embed_tokens.weight.copy_(torch.eye(length))
        module.lm_head.weight.copy_(torch.eye(length).roll(1, 0))
    return module


# --- engines


def make_engine(kind: str, module: Any, *, num_ids: int = 0, decode: Any = None, **options: Any) -> Any:
    def one(inline: bool) -> EmbeddedEngine:
        return EmbeddedEngine(
            module,
            num_ids=num_ids or module.config.vocab_size,
            end_ids=frozenset({END}),
            decode=decode or (lambda ids: "".join(chr(0x4E00 + i) for i in ids)),
            inline=inline,
            **options,
        )

    if kind == "remote":
        return ThreadRemoteEngine(one(False), num_ids=num_ids or module.config.vocab_size)
    if kind == "server":
        return ThreadServerEngine(one(False), num_ids=num_ids or module.config.vocab_size)
    return EnginePool([one(False), one(False)]) if kind == "pool" else one(kind == "inline")


def finish(engine: Any, play: Callable[[], Any]) -> Any:
    """Runs `play` to its end, and the engine to its close; a minute is a hang."""

    async def go() -> Any:
        try:
            return await asyncio.wait_for(play(), 60)
        finally:
            await engine.close()

    return asyncio.run(go())


def complete(engine: Any, requests: Sequence[Request]) -> list[Completion]:
    return finish(engine, lambda: asyncio.gather(*(engine.generate(*request) for request in requests)))


async def one_after_another(engine: Any, asked: Sequence[Request], adapters: Sequence[str] = ()) -> list[Completion]:
    """Ask for each once the one before has a token: each is prefilled alone, beside rows that decode."""
    answers = list[asyncio.Task[Completion]]()
    for (prompt, sampling), adapter in zip(asked, adapters or [""] * len(asked), strict=True):
        begun = asyncio.Event()

        def told(*_: Any, begun: asyncio.Event = begun) -> None:
            begun.set()

        answers.append(asyncio.create_task(engine.generate(prompt, sampling, on_token=told, adapter=adapter)))
        await begun.wait()
    return await asyncio.gather(*answers)


def check_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert [each.ids for each in found] == [each.ids for each in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-5)


def adapter_of(module: Any, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    tensors = dict[str, torch.Tensor]()
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and path != "lm_head":
            tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(4, layer.in_features) / 4
            tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(layer.out_features, 4) / 8
    return tensors


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, END, (length,), generator=generator).tolist() for length in lengths]


def of_many_lengths(count: int, *, most_tokens: int) -> list[Request]:
    drawn = random.Random(3)
    requests = list[Request]()
    for number, prompt in enumerate(prompts(*[drawn.randint(1, 40) for _ in range(count)])):
        requests.append((prompt, Sampling(drawn.randint(1, most_tokens), temperature=1.0, seed=number)))
    return requests


def forwards(module: Any) -> list[tuple[int, int]]:
    """Filled with the [rows, positions] of each pass through the model."""
    seen: list[tuple[int, int]] = []
    module.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return seen


# --- the slow, right way


@torch.no_grad()
def teacher_forced(module: Any, prompt: list[int], completion: Completion, sampling: Sampling) -> list[float]:
    """Logprobs of a completion from one forward over all of it, filtered by hand."""
    logits_TV = module(input_ids=torch.tensor([prompt + completion.ids])).logits[0].double()
    rows = logits_TV[len(prompt) - 1 : -1]
    return [filtered(row, sampling)[token].log().item() for row, token in zip(rows, completion.ids, strict=True)]


def filtered(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities under temperature, then top-k, then top-p: the smallest set that holds at least top_p."""
    if sampling.temperature == 0:
        return logits_V.softmax(-1)
    probs_V = (logits_V / sampling.temperature).softmax(-1)
    order = probs_V.argsort(descending=True).tolist()
    kept = order[: sampling.top_k or None]
    mass = probs_V[kept].sum()
    nucleus, held = [], 0.0
    for token in kept:
        if sampling.top_p < 1 and held >= sampling.top_p:
            break
        nucleus.append(token)
        held += (probs_V[token] / mass).item()
    out_V = torch.zeros_like(probs_V)
    out_V[nucleus] = probs_V[nucleus] / probs_V[nucleus].sum()
    return out_V


@torch.no_grad()
def generated(module: Any, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, eos_token_id=END,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def largest_gap(module: Any, requests: Sequence[Request], completions: Sequence[Completion]) -> float:
    return max(
        abs(theirs - ours)
        for (prompt, sampling), completion in zip(requests, completions, strict=True)
        for theirs, ours in zip(teacher_forced(module, prompt, completion, sampling), completion.logprobs, strict=True)
    )


SETTINGS = {
    "plain": Sampling(max_tokens=24),
    "tempered": Sampling(max_tokens=24, temperature=0.7),
    "top_k": Sampling(max_tokens=24, top_k=5),
    "top_p": Sampling(max_tokens=24, top_p=0.8),
    "all three": Sampling(max_tokens=24, temperature=1.3, top_k=20, top_p=0.7),
    "greedy": Sampling(max_tokens=24, temperature=0.0),
    "greedy keeps the whole distribution": Sampling(max_tokens=24, temperature=0.0, top_k=3, top_p=0.5),
}
