"""What any Engine must do, run over the embedded engine on the loop's thread, on its own, and two behind a pool."""

from __future__ import annotations

import asyncio
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers

from tandem.bridge.inproc import InprocBridge
from tandem.engine.hf import EmbeddedEngine
from tandem.engine.pool import EnginePool
from tandem.errors import EngineError, SpecError, SyncError, SyncTimeout
from tandem.model.presets import make_model
from tandem.ops.tensors import live_tensors
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Completion, Sampling, Weights

VOCAB, END, CONTEXT = 97, 96, 160
KINDS = ("inline", "threaded", "pool")
Request = tuple[list[int], Sampling]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are faster on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, END, (length,), generator=generator).tolist() for length in lengths]


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


# --- greedy and logprobs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_model_generate(architecture: str) -> None:
    module = ARCHITECTURES[architecture]()
    lengths, budgets = (3, 30, 1, 17, 9, 30, 12, 5), (24, 5, 40, 1, 16, 24, 33, 24)
    requests = [
        (prompt, Sampling(max_tokens=budget, temperature=0.0))
        for prompt, budget in zip(prompts(*lengths), budgets, strict=True)
    ]
    completions = complete(make_engine("inline", module, max_running=5), requests)
    assert [c.ids for c in completions] == [generated(module, prompt, s.max_tokens) for prompt, s in requests]
    assert largest_gap(module, requests, completions) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_model_generate_in_every_kind_of_engine(kind: str) -> None:
    module = llama()
    requests = [(prompt, Sampling(max_tokens=20, temperature=0.0)) for prompt in prompts(*range(1, 40, 3))]
    completions = complete(make_engine(kind, module, max_running=4), requests)
    assert [c.ids for c in completions] == [generated(module, prompt, 20) for prompt, _ in requests]


SETTINGS = {
    "plain": Sampling(max_tokens=24),
    "tempered": Sampling(max_tokens=24, temperature=0.7),
    "top_k": Sampling(max_tokens=24, top_k=5),
    "top_p": Sampling(max_tokens=24, top_p=0.8),
    "all three": Sampling(max_tokens=24, temperature=1.3, top_k=20, top_p=0.7),
    "greedy": Sampling(max_tokens=24, temperature=0.0),
    "greedy keeps the whole distribution": Sampling(max_tokens=24, temperature=0.0, top_k=3, top_p=0.5),
}


def with_seed(sampling: Sampling, seed: int) -> Sampling:
    return Sampling(**{name: getattr(sampling, name) for name in sampling.__slots__} | {"seed": seed})


@pytest.mark.parametrize("architecture", ["qwen3", "mistral-sliding", "gemma2-softcap-mixed"])
def test_logprobs_are_those_of_a_teacher_forced_forward_when_all_settings_share_a_batch(architecture: str) -> None:
    module = ARCHITECTURES[architecture]()
    requests = [
        (prompt, with_seed(setting, seed))
        for seed, prompt in enumerate(prompts(2, 11, 25))
        for setting in SETTINGS.values()
    ]
    completions = complete(make_engine("inline", module, max_running=9), requests)
    assert sum(len(completion.ids) for completion in completions) > 300
    assert largest_gap(module, requests, completions) < 1e-4


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_a_teacher_forced_forward_under_each_setting(kind: str, setting: str) -> None:
    module = llama()
    requests = [(prompt, with_seed(SETTINGS[setting], seed)) for seed, prompt in enumerate(prompts(1, 4, 19, 33))]
    assert largest_gap(module, requests, complete(make_engine(kind, module), requests)) < 1e-4


def test_ids_that_the_tokenizer_cannot_name_are_never_sampled() -> None:
    requests = [(prompt, Sampling(max_tokens=40, temperature=5.0)) for prompt in prompts(3, 4, 5)]
    completions = complete(make_engine("inline", llama(), num_ids=50), requests)
    assert max(token for completion in completions for token in completion.ids) < 50


# --- sharing, seeds, the distribution


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_one_prompt_share_one_prefill(kind: str) -> None:
    module = llama()
    seen = forwards(module)
    engine = make_engine(kind, module)
    seen.clear()  # engines check the module when they are made
    requests = [(prompt, Sampling(max_tokens=4, seed=s)) for prompt in prompts(9, 14, 5) for s in range(8)]
    completions = complete(engine, requests)
    prefilled = sum(rows for rows, positions in seen if positions > 1)
    assert prefilled == (6 if kind == "pool" else 3)
    assert len({tuple(completion.ids) for completion in completions}) > 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(kind: str) -> None:
    module = llama()
    mine = [(prompt, Sampling(max_tokens=24, seed=seed)) for seed, prompt in enumerate(prompts(7, 7, 12))]
    alone = [complete(make_engine(kind, module), [request])[0] for request in mine]
    others = [
        (prompt, Sampling(max_tokens=5 + i, temperature=0.1 * i, top_k=i, seed=i))
        for i, prompt in enumerate(prompts(*range(1, 25), seed=5))
    ]
    for max_running in (2, 7, 64):
        for requests in ([*mine, *others], [*others, *mine], [*others[:9], *mine[::-1], *others[9:]]):
            completions = complete(make_engine(kind, module, max_running=max_running), requests)
            for request, expected in zip(mine, alone, strict=True):
                found = completions[requests.index(request)]
                assert found.ids == expected.ids
                assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_different_seeds_give_different_tokens() -> None:
    (prompt,) = prompts(6)
    requests = [(prompt, Sampling(max_tokens=12, temperature=2.0, seed=seed)) for seed in range(64)]
    completions = complete(make_engine("inline", llama()), requests)
    assert len({tuple(completion.ids) for completion in completions}) == 64


@pytest.mark.parametrize(
    "sampling", [Sampling(max_tokens=2), Sampling(max_tokens=2, temperature=0.6, top_k=6, top_p=0.9)], ids=str
)
def test_pairs_of_tokens_come_as_often_as_the_model_says(sampling: Sampling) -> None:
    module = llama(vocab_size=8, initializer_range=0.1)
    prompt, draws = [1, 5, 2], 4096
    requests = [(prompt, with_seed(sampling, seed)) for seed in range(draws)]
    completions = complete(make_engine("inline", module), requests)
    counted = Counter(tuple(completion.ids) for completion in completions)
    with torch.no_grad():
        first_V = filtered(module(torch.tensor([prompt])).logits[0, -1].double(), sampling)
        after_VV = torch.stack(
            [filtered(module(torch.tensor([[*prompt, v]])).logits[0, -1].double(), sampling) for v in range(8)]
        )
    expected_VV = first_V[:, None] * after_VV * draws
    possible = [(a, b) for a in range(8) for b in range(8) if expected_VV[a, b] > 0]
    assert set(counted) <= set(possible)
    # Pairs that are expected fewer than five times stand in one cell together, as the approximation asks for.
    cells = [(counted[pair], expected_VV[pair].item()) for pair in possible if expected_VV[pair] >= 5]
    rest = (draws - sum(seen for seen, _ in cells), draws - sum(expected for _, expected in cells))
    cells += [rest] if rest[1] >= 5 else []
    chi_square = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = len(cells) - 1
    assert freedom >= 7
    # Wilson and Hilferty's approximation of the 99.9 % point.
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


# --- when a completion ends

SPOKEN = "naïve: €5 → 😀, fin.".encode()


def say(kind: str, sampling: Sampling) -> Completion:
    """A model that recites SPOKEN, one byte a token."""
    decode = lambda ids: bytes(SPOKEN[i] for i in ids).decode(errors="replace")  # noqa: E731
    engine = make_engine(kind, reciter(len(SPOKEN)), decode=decode)
    return complete(engine, [([0], sampling)])[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [("€",), ("😀",), ("ve: €5",), ("nothing", "→"), ("ïve", "€"), ("n.",)])
def test_a_stop_string_ends_a_completion_with_its_last_byte(kind: str, stop: tuple[str, ...]) -> None:
    completion = say(kind, Sampling(max_tokens=len(SPOKEN) - 1, temperature=0.0, stop=stop))
    first = min(SPOKEN.find(word.encode()) + len(word.encode()) for word in stop if word.encode() in SPOKEN)
    assert completion.ids == list(range(1, first))
    assert completion.finish_reason == "stop"
    assert len(completion.logprobs) == len(completion.ids) == sum(span.count for span in completion.spans)


def test_a_stop_string_in_the_prompt_does_not_end_a_completion() -> None:
    completion = say("inline", Sampling(max_tokens=6, temperature=0.0, stop=("n",)))
    assert (completion.ids, completion.finish_reason) == ([1, 2, 3, 4, 5, 6], "length")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("max_tokens", "stop_ids", "expected"),
    [
        (3, (), ([1, 2, 3], "length")),
        (9, (5, 7), ([1, 2, 3, 4, 5], "stop")),
        (5, (5,), ([1, 2, 3, 4, 5], "stop")),
        (4, (5,), ([1, 2, 3, 4], "length")),
        (1, (), ([1], "length")),
    ],
)
def test_a_completion_ends_at_a_stop_id_or_at_max_tokens(
    kind: str, max_tokens: int, stop_ids: tuple[int, ...], expected: Any
) -> None:
    completion = say(kind, Sampling(max_tokens=max_tokens, temperature=0.0, stop_ids=stop_ids))
    assert (completion.ids, completion.finish_reason) == expected


def test_the_tokenizers_own_end_stops_a_completion() -> None:
    completion = complete(make_engine("inline", reciter(END + 1)), [([90], Sampling(max_tokens=50, temperature=0.0))])[
        0
    ]
    assert (completion.ids, completion.finish_reason) == ([91, 92, 93, 94, 95, 96], "stop")


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_told_one_by_one_as_they_are_made(kind: str) -> None:
    engine, told = make_engine(kind, llama()), []
    completion = finish(
        engine, lambda: engine.generate([3, 4], Sampling(max_tokens=9), on_token=lambda *token: told.append(token))
    )
    assert told == list(zip(completion.ids, completion.logprobs, completion.versions, strict=True))


# --- rows and memory


@pytest.mark.parametrize("kind", ["inline", "threaded"])
def test_a_cancelled_request_frees_its_row_and_disturbs_nobody(kind: str) -> None:
    module = llama()
    requests = [(prompt, Sampling(max_tokens=60, seed=i)) for i, prompt in enumerate(prompts(4, 9, 6))]
    expected = complete(make_engine(kind, module, num_ids=END), requests)  # END never comes: all are long
    engine = make_engine(kind, module, num_ids=END, max_running=2)
    order: list[str] = []

    async def play() -> list[Completion]:
        def told(name: str) -> Callable[..., None]:
            return lambda *token: order.append(name)

        tasks = [
            asyncio.create_task(engine.generate(*request, on_token=told(name)))
            for name, request in zip("abc", requests, strict=True)
        ]
        while order.count("a") < 10:
            await asyncio.sleep(0)
        assert "c" not in order, "two rows, and both are taken"
        tasks[0].cancel()
        completions = await asyncio.gather(*tasks[1:])
        assert tasks[0].cancelled()
        return completions

    assert [c.ids for c in finish(engine, play)] == [c.ids for c in expected[1:]]
    assert order.count("a") < 15
    assert order[: order.index("c")].count("b") < 20, "the third began long before the second ended: in the first's row"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "options", "field"),
    [
        (CONTEXT, 1, {}, "engine.max_context"),
        (10, 23, {"max_context": 32}, "engine.max_context"),
        (10, 23, {"kv_gib": 32 * 512 / 2**30}, "kv_gib"),
        (0, 4, {}, "empty prompt"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_the_field_named(
    kind: str, prompt_length: int, max_tokens: int, options: dict[str, Any], field: str
) -> None:
    request = (prompts(prompt_length)[0], Sampling(max_tokens=max_tokens))
    with pytest.raises(EngineError, match=field):
        complete(make_engine(kind, llama(), **options), [request])


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_just_fits_is_answered(kind: str) -> None:
    (completion,) = complete(make_engine(kind, reciter(40), max_context=32), [([0] * 10, GREEDY_22)])
    assert len(completion.ids) == 22


GREEDY_22 = Sampling(max_tokens=22, temperature=0.0)


@pytest.mark.parametrize("kind", ["inline", "threaded"])
def test_requests_wait_for_memory_and_all_of_them_end(kind: str) -> None:
    module = llama()
    requests = [(prompt, Sampling(max_tokens=30, seed=i)) for i, prompt in enumerate(prompts(*[10] * 12))]
    expected = complete(make_engine(kind, module), requests)
    position_bytes = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head size, float32
    engine = make_engine(kind, module, kv_gib=3 * 40 * position_bytes / 2**30)
    seen = forwards(module)
    completions = complete(engine, requests)
    assert [c.ids for c in completions] == [c.ids for c in expected]
    assert max(rows for rows, positions in seen if positions == 1) == 3


# --- versions


def start(kind: str, module: Any, **options: Any) -> tuple[Any, InprocBridge]:
    return make_engine(kind, module, **options), InprocBridge(deadline_s=0.3)


async def publish(engine: Any, bridge: InprocBridge, module: Any, version: int) -> Any:
    bridge.send(Weights(version, "full", lambda: live_tensors(module)))
    return await engine.load(version)


def receivers(kind: str) -> int:
    return 2 if kind == "pool" else 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama-gqa", "mistral-sliding"])
def test_every_token_is_exact_for_the_version_that_its_span_names(kind: str, architecture: str) -> None:
    module = ARCHITECTURES[architecture]()
    before = copy.deepcopy(module)
    engine, bridge = start(kind, module, max_running=4)
    requests = [(prompt, Sampling(max_tokens=25, seed=i)) for i, prompt in enumerate(prompts(*range(2, 26, 2)))]
    made = Counter[int]()

    async def play() -> list[Completion]:
        await engine.attach(bridge.source(receivers(kind)))
        await publish(engine, bridge, module, 3)
        tasks = [
            asyncio.create_task(
                engine.generate(*request, on_token=lambda token, logprob, version: made.update([version]))
            )
            for request in requests
        ]
        while made[3] < 40:
            await asyncio.sleep(0.001)
        await engine.sleep()
        with torch.no_grad():
            for tensor in module.parameters():
                tensor.add_(torch.randn_like(tensor), alpha=0.05)
        await publish(engine, bridge, module, 4)
        assert engine.version == 4
        return await asyncio.gather(*tasks)

    completions = finish(engine, play)
    both = [c for c in completions if [span.version for span in c.spans] == [3, 4]]
    assert len(both) >= 3
    for (prompt, sampling), completion in zip(requests, completions, strict=True):
        assert set(completion.versions) <= {3, 4}
        under = {
            3: teacher_forced(before, prompt, completion, sampling),
            4: teacher_forced(module, prompt, completion, sampling),
        }
        exact = [under[version][index] for index, version in enumerate(completion.versions)]
        assert completion.logprobs == pytest.approx(exact, abs=1e-4)
    moved = max(
        abs(a - b)
        for (prompt, sampling), c in zip(requests, both, strict=False)
        for a, b in zip(
            teacher_forced(before, prompt, c, sampling), teacher_forced(module, prompt, c, sampling), strict=True
        )
    )
    assert moved > 0.1, "else the two versions could not be told apart"


@pytest.mark.parametrize("kind", KINDS)
def test_load_returns_a_proof_of_identity_and_no_byte_moves(kind: str) -> None:
    module = llama()
    engine, bridge = start(kind, module)

    async def play() -> Any:
        await engine.attach(bridge.source(receivers(kind)))
        return await publish(engine, bridge, module, 7)

    proof = finish(engine, play)
    tensors = len(dict(module.named_parameters())) + len(dict(module.named_buffers()))
    assert (proof.version, proof.verified, proof.bytes_moved) == (7, "identity", 0)
    assert proof.tensors == tensors * receivers(kind)
    assert len(set(proof.engines)) == receivers(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_decoded_in_sleep_and_waking_changes_no_token(kind: str) -> None:
    module = llama()
    requests = [(prompt, Sampling(max_tokens=40, seed=i)) for i, prompt in enumerate(prompts(4, 9, 6, 3))]
    expected = complete(make_engine(kind, module), requests)
    engine, made = make_engine(kind, module), []

    async def play() -> list[Completion]:
        tell = lambda *token: made.append(token)  # noqa: E731
        tasks = [asyncio.create_task(engine.generate(*request, on_token=tell)) for request in requests[:3]]
        while len(made) < 9:
            await asyncio.sleep(0.001)
        await engine.sleep()
        tasks.append(asyncio.create_task(engine.generate(*requests[3], on_token=tell)))
        asleep = len(made)
        await asyncio.sleep(0.1)
        assert len(made) == asleep
        await engine.wake()
        return await asyncio.gather(*tasks)

    completions = finish(engine, play)
    assert [c.ids for c in completions] == [c.ids for c in expected]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", ["a copy", "one missing", "one too many", "another shape"])
def test_weights_that_are_not_this_memory_are_refused(kind: str, wrong: str) -> None:
    module = llama()
    engine, bridge = start(kind, module)
    offered = dict(live_tensors(copy.deepcopy(module) if wrong == "a copy" else module))
    name = "model.layers.1.mlp.up_proj.weight"
    if wrong == "one missing":
        del offered[name]
    if wrong == "one too many":
        offered["model.layers.9.mlp.up_proj.weight"] = offered[name]
    if wrong == "another shape":
        offered[name] = offered[name].view(64, 96)

    async def play() -> None:
        await engine.attach(bridge.source(receivers(kind)))
        await publish(engine, bridge, module, 1)
        bridge.send(Weights(2, "full", lambda: iter(offered.items())))
        await engine.load(2)

    with pytest.raises(SyncError, match="mlp.up_proj" if wrong != "a copy" else "not the trainer's memory"):
        finish(engine, play)
    assert engine.version == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_that_was_not_sent_is_refused_within_the_deadline(kind: str) -> None:
    module = llama()
    engine, bridge = start(kind, module)

    async def play() -> None:
        with pytest.raises(SyncError, match="before attach"):
            await engine.load(1)
        await engine.attach(bridge.source(receivers(kind)))
        with pytest.raises(SyncTimeout, match=r"version 5 was not sent within 0\.3 s"):
            await engine.load(5)
        bridge.send(Weights(6, "full", lambda: live_tensors(module)))
        with pytest.raises(SyncError, match="asked for version 5, sent was 6"):
            await engine.load(5)

    finish(engine, play)
    assert engine.version == -1


# --- failures


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", ["plain", "greedy", "all three"])
def test_logits_that_are_not_numbers_end_every_request_with_an_error(kind: str, setting: str) -> None:
    module, sampling = llama(), SETTINGS[setting]
    engine = make_engine(kind, module)
    with torch.no_grad():
        module.model.norm.weight[0] = torch.nan

    async def play() -> None:
        answers = [engine.generate(prompt, sampling) for prompt in prompts(3, 4, 5)]
        for answer in await asyncio.gather(*answers, return_exceptions=True):
            assert isinstance(answer, EngineError)
            assert "not finite" in str(answer)
        with pytest.raises(EngineError, match="stopped"):
            await asyncio.wait_for(engine.generate([1], sampling), 5)

    finish(engine, play)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_ends_whoever_waits(kind: str) -> None:
    engine = make_engine(kind, llama())

    async def play() -> None:
        waiting = asyncio.create_task(engine.generate([1, 2], Sampling(max_tokens=100, temperature=9.0)))
        await asyncio.sleep(0.01)
        await engine.sleep()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(waiting, 5)

    finish(engine, play)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (
            "mamba",
            lambda: transformers.MambaForCausalLM(
                transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1)
            ),
        ),
        (
            "qwen3_next",
            lambda: tiny(
                transformers.Qwen3NextConfig,
                transformers.Qwen3NextForCausalLM,
                num_key_value_heads=2,
                layer_types=["linear_attention", "full_attention"],
                intermediate_size=32,
            ),
        ),
        ("lfm2", lambda: tiny(transformers.Lfm2Config, transformers.Lfm2ForCausalLM, layer_types=["conv"] * 2)),
    ],
)
def test_layers_that_carry_a_state_are_refused_by_name(name: str, make: Callable[[], Any]) -> None:
    with pytest.raises(SpecError, match=f"{name} has layers of kind (linear_attention|conv)"):
        make_engine("inline", make())
