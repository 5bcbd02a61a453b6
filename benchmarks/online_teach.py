"""Teaches a served model facts while it answers, and asks for them: how many it knows, what it forgot, what it cost.

The model (tiny preset, from scratch) first learns to greet, so that there is something to forget; guests that it never
met are held out, and a gate watches its loss on them. Then the facts are taught in several jobs while other clients ask
without pause. Every token that they were told is scored again with the weights of the version that it is stamped with,
read from the disk: one that those weights do not say is counted as torn. Exit code 1 if less than 95 % are known, or
any token is torn.

python benchmarks/online_teach.py [--facts 20] [--jobs 4] [--steps 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from online_common import OnlineServer, fact

SPEC = """
[model]
preset = "tiny"
[train]
lr = 2e-3
batch_size = 24
[gates]
held_out = "{held_out}"
held_out_rise = 0.1
kl = 30.0
update_norm = 2.0
[replay]
share = 0.15
"""
TORN_NATS = 1e-2
TEMPERATURE = 2.0  # long answers, that cross updates
CLIENTS = 2


def greeting(number: int) -> dict[str, Any]:
    """What the model knows before, of any number."""
    return {
        "messages": [
            {"role": "user", "content": f"greet guest {number:02d}"},
            {"role": "assistant", "content": "good day to you"},
        ]
    }


class Asking:
    """Clients that ask without pause, and keep what they were told."""

    def __init__(self, server: OnlineServer) -> None:
        self.told: list[dict[str, Any]] = []
        self.status_ms: list[float] = []
        self._server, self._end = server, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]
        self._threads.append(threading.Thread(target=self._look))

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, seed: int) -> None:
        body = {"model": "online", "messages": [{"role": "user", "content": f"greet guest {seed}"}], "max_tokens": 200}
        body |= {"temperature": TEMPERATURE, "logprobs": True, "return_token_ids": True}
        with self._client() as client:
            while not self._end.is_set():
                seed += CLIENTS
                answer = client.post("/v1/chat/completions", json=body | {"seed": seed}).raise_for_status().json()
                self.told.append(answer)

    def _look(self) -> None:
        with self._client() as client:
            while not self._end.is_set():
                started = time.perf_counter()
                client.get("/train/status").raise_for_status()
                self.status_ms.append(1000 * (time.perf_counter() - started))
                time.sleep(0.02)

    def _client(self) -> httpx.Client:
        http = self._server.http
        return httpx.Client(base_url=http.base_url, headers=http.headers, timeout=60)


def torn_tokens(told: list[dict[str, Any]], server: OnlineServer) -> tuple[int, int, int]:
    """Of so many tokens, and how many answers cross an update: each is scored with the weights of its own version."""
    import torch

    from tandem.build import online
    from tandem.online.version_store import VersionStore
    from tandem.spec.online import load_online_spec
    from tandem.train.batch_packing import plain_row

    class NoEngine:
        version, receivers = 0, 1

    parts = online.parts(load_online_spec(server.spec), NoEngine())  # type: ignore[arg-type]
    store = VersionStore(server.data_dir / "versions")
    torn = total = crossing = 0
    loaded = {version: store.load(version).held for version in store.known()}
    for answer in told:
        choice = answer["choices"][0]
        prompt, ids = answer["prompt_token_ids"], choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        crossing += len(choice["weight_versions"]) > 1
        at = 0
        for version, count in choice["weight_versions"]:
            loaded[version].restore(dict(parts.policy.trainable()))
            row = plain_row([*prompt, *ids[: at + count]], len(prompt) + at, torch.device("cpu"))
            scored = parts.policy.score(row, TEMPERATURE).tolist()
            torn += sum(abs(a - b) > TORN_NATS for a, b in zip(scored, logprobs[at : at + count], strict=True))
            at += count
        total += at
        torn += at != len(ids)
    return torn, total, crossing


def teach(home: Path, facts: int, jobs: int, steps: int) -> dict[str, Any]:
    held_out = home / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(greeting(n)) + "\n" for n in range(0, 100, 7)))
    server = OnlineServer(home, SPEC.format(held_out=held_out)).start()
    try:
        before = server.wait(
            server.teach([greeting(n) for n in range(100) if n % 7], steps=24, lr=3e-3, source="greetings"), 300
        )
        assert before["state"] == "published", before
        samples = [fact(n) for n in range(facts)]
        token = str(server.http.headers["Authorization"]).removeprefix("Bearer ")
        client = OpenAI(base_url=str(server.http.base_url.join("/v1")), api_key=token)
        started = time.perf_counter()
        with Asking(server) as asking:
            rows = [server.wait(server.teach(samples, steps=steps, seed=n), 300) for n in range(jobs)]
            said = [told_by(client, sample["messages"][0]["content"]) for sample in samples]
        seconds = time.perf_counter() - started
        right = sum(text == each["messages"][1]["content"] for text, each in zip(said, samples, strict=True))
        torn, tokens, crossing = torn_tokens(asking.told, server)
        # Each against the version before it: the first one's is the one before any fact.
        rises = [gate["value"] for row in rows for gate in row["gates"] if gate["gate"] == "held_out"]
        status = sorted(asking.status_ms)
        return {
            "accuracy": right / facts,
            "status_p99_ms": statistics.quantiles(status, n=100)[-1],
            "torn_tokens": torn,
            "seconds": seconds,
            "facts": facts,
            "jobs": [row["state"] for row in rows],
            "why": [row["why"] for row in rows if row["why"]],
            "held_out_rise": max(rises),
            "held_out_rise_in_all": sum(rises),
            "held_out_limit": 0.1,
            "tokens_checked": tokens,
            "answers_across_updates": crossing,
            "status_requests": len(status),
        }
    finally:
        server.kill()


def told_by(client: OpenAI, question: str) -> str:
    asked: Any = [{"role": "user", "content": question}]
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=asked, max_tokens=16, temperature=0.0)
    return answer.choices[0].message.content or ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--facts", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        told = teach(Path(home), options.facts, options.jobs, options.steps)
    print(json.dumps(told) if options.json else "\n".join(f"{name:24} {value}" for name, value in told.items()))
    sys.exit(told["accuracy"] < 0.95 or told["torn_tokens"] > 0)


if __name__ == "__main__":
    main()
