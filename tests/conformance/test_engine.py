"""What any Engine must do, run over the embedded engine on the loop's thread, on its own, two behind a pool, and one
behind HTTP, asked as ours and as any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from engines import (
    ANSWERING,
    ARCHITECTURES,
    CONTEXT,
    END,
    SETTINGS,
    complete,
    filtered,
    finish,
    forwards,
    generated,
    largest_gap,
    llama,
    make_engine,
    prompts,
    reciter,
)

from tandem.errors import EngineError
from tandem.types import Completion, Sampling

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


@pytest.mark.parametrize("kind", ANSWERING)
def test_greedy_tokens_are_those_of_model_generate_in_every_kind_of_engine(kind: str) -> None:
    module = llama()
    requests = [(prompt, Sampling(max_tokens=20, temperature=0.0)) for prompt in prompts(*range(1, 40, 3))]
    completions = complete(make_engine(kind, module, max_running=4), requests)
    assert [c.ids for c in completions] == [generated(module, prompt, 20) for prompt, _ in requests]


def with_seed(sampling: Sampling, seed: int) -> Sampling:
    return Sampling(**{name: getattr(sampling, name) for name in sampling.__slots__} | {"seed": seed})


@pytest.mark.parametrize("architecture", ["qwen3", "mistral-sliding", "gemma2-softcap-mixed", "qwen3.5-delta-net"])
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
@pytest.mark.parametrize("kind", ANSWERING)
def test_logprobs_are_those_of_a_teacher_forced_forward_under_each_setting(kind: str, setting: str) -> None:
    module = llama()
    requests = [(prompt, with_seed(SETTINGS[setting], seed)) for seed, prompt in enumerate(prompts(1, 4, 19, 33))]
    assert largest_gap(module, requests, complete(make_engine(kind, module), requests)) < 1e-4


def test_ids_that_the_tokenizer_cannot_name_are_never_sampled() -> None:
    requests = [(prompt, Sampling(max_tokens=40, temperature=5.0)) for prompt in prompts(3, 4, 5)]
    completions = complete(make_engine("inline", llama(), num_ids=50), requests)
    assert max(token for completion in completions for token in completion.ids) < 50


# --- sharing, seeds, the distribution


@pytest.mark.parametrize("kind", ["inline", "threaded", "pool"])  # over HTTP they arrive one by one
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


@pytest.mark.parametrize("kind", ANSWERING)
def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(kind: str) -> None:
    module = llama()
    mine = [(prompt, Sampling(max_tokens=24, seed=seed)) for seed, prompt in enumerate(prompts(7, 7, 12))]
    alone = [complete(make_engine(kind, module), [request])[0] for request in mine]
    others = [
        (prompt, Sampling(max_tokens=5 + i, temperature=min(0.1 * i, 2.0), top_k=i, seed=i))
        for i, prompt in enumerate(prompts(*range(1, 25), seed=5))
    ]
    orders, rows = ([*mine, *others], [*others, *mine], [*others[:9], *mine[::-1], *others[9:]]), (2, 7, 64)
    # All pairs of both where the sampling is done; each once behind an engine that hands on what that one does.
    pairs = product(orders, rows) if kind == "inline" else zip(orders, rows, strict=True)
    for requests, max_running in pairs:
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


@pytest.mark.parametrize("kind", ANSWERING)
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


@pytest.mark.parametrize("kind", ANSWERING)
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


@pytest.mark.parametrize("kind", ANSWERING)
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


@pytest.mark.parametrize("kind", ANSWERING)
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


@pytest.mark.parametrize("kind", ANSWERING)
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
