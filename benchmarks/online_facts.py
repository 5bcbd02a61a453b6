"""Teaches a real model five facts by `tandem online serve` with the defaults, and asks twenty ordinary questions.

Five facts that no model knows are taught in one job (`--jobs 5`: one after the other). Then the server is asked each
of them, and twenty ordinary questions; an answer is the same by meaning if it passes the question's pattern. The twenty
are chosen before anything is taught (benchmarks/online_questions.py): the first of the candidates to which the model's
greedy answer is right, and eight of eight answers at temperature 0.7. Exit code 1 unless, of every seed, all facts are
known, all ordinary answers are kept and every job was published.

python benchmarks/online_facts.py --model DIR [--device cuda] [--seeds 3] [--jobs 1] [--lora] [--json FILE]

DIR: as benchmarks/real_model.py writes it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from online_common import OnlineServer
from online_questions import FACTS, NUM_ORDINARY, Question, known_questions

SPEC = """
device = "{device}"
seed = {seed}
engine_threads = {threads}
trainer_threads = {threads}
[model]
path = "{model}"
{more}
"""
BF16 = '[precision]\nweights = "bfloat16"\nmaster = "split"'
LORA = "lora = { rank = 16 }"
FACT_TOKENS, ORDINARY_TOKENS, DEADLINE_S, AT_ONCE = 24, 40, 3600.0, 48


def asked(server: OnlineServer, texts: list[str], tokens: int, temperature: float = 0.0, seed: int = 0) -> list[str]:
    """Answers in the order of the questions; the server batches what is asked together."""

    def ask(text: str) -> str:
        body = {"model": "online", "messages": [{"role": "user", "content": text}]}
        body |= {"max_tokens": tokens, "temperature": temperature, "seed": seed}
        answer = server.http.post("/v1/chat/completions", json=body, timeout=DEADLINE_S).raise_for_status().json()
        return answer["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, texts))


def right(questions: list[Question], answers: list[str]) -> list[bool]:
    return [question.accepts(answer) for question, answer in zip(questions, answers, strict=True)]


def teach(home: Path, options: argparse.Namespace, seed: int, ordinary: list[Question]) -> dict[str, Any]:
    """`ordinary`: filled by the first call, with the questions that the model knows."""
    bf16 = options.weights == "bfloat16"
    more = "\n".join((*([LORA] if options.lora else []), *([BF16] if bf16 else [])))
    model, threads = Path(options.model).resolve(), options.threads
    spec = SPEC.format(device=options.device, seed=seed, threads=threads, model=model, more=more)
    facts = [fact.question for fact in FACTS]
    server = OnlineServer(home, spec).start(600)
    try:
        if not ordinary:
            ordinary += known_questions(lambda texts, t, n: asked(server, texts, ORDINARY_TOKENS, t, n))
        texts = [question.text for question in ordinary]
        before = asked(server, texts, ORDINARY_TOKENS)
        samples = [fact.sample() for fact in FACTS]
        size = len(samples) // options.jobs
        started, rows = time.perf_counter(), []
        for first in range(0, len(samples), size):
            job = server.teach(samples[first : first + size], seed=seed)
            rows.append(server.wait(job, DEADLINE_S))
        seconds = time.perf_counter() - started
        said = asked(server, [question.text for question in facts], FACT_TOKENS)
        other = asked(server, [fact.rephrased for fact in FACTS], FACT_TOKENS)
        after = asked(server, texts, ORDINARY_TOKENS)
    finally:
        server.kill()
    kept = right(ordinary, after)
    gates = [{gate["gate"]: gate["value"] for gate in row["gates"]} for row in rows]
    return {
        "seed": seed,
        "jobs": [row["state"] for row in rows],
        "why": [row["why"] for row in rows if row["why"]],
        "learned": sum(right(facts, said)),
        "rephrased": sum(right(facts, other)),
        "kept": sum(kept),
        "same words": sum(a == b for a, b in zip(before, after, strict=True)),
        "kl": max(gate["kl"] for gate in gates),
        "update_norm": max(gate["update_norm"] for gate in gates),
        "steps": [int(row["metrics"]["train/steps"]) for row in rows],
        "seconds": round(seconds, 1),
        "ordinary": texts,
        "facts": said,
        "broken": [[text, then, now] for text, then, now, ok in zip(texts, before, after, kept, strict=True) if not ok],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, choices=(1, 5), default=1)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, ordinary = list[dict[str, Any]](), list[Question]()
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as home:
            rows.append(teach(Path(home), options, seed, ordinary))
        print("\n".join(f"{name:12} {value}" for name, value in rows[-1].items()), end="\n\n", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    good = [row["learned"] == len(FACTS) and row["kept"] == NUM_ORDINARY and not row["why"] for row in rows]
    print(f"{sum(good)} of {len(good)} seeds: all facts learned, all ordinary answers kept")
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
