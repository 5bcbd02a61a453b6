"""`tandem online serve` with vLLM on one GPU: what the trainer process takes there, and what clients notice.

For each way (full: bf16, a split master, APOLLO with its tables' moments in 8 bits; lora: rank 16): a server as a
process, 8 streams that ask without pause, jobs of one micro-batch a step. Short jobs have next to no activations, so
that their peak is weights, gradients and states; a long one has 8,192 tokens. Then a version of before is served, and
the last one again. Memory is told by torch (the most of each part of a job: training, gates, making the update,
publishing) and by the driver (what the process has of the GPU). `full` then goes ten small versions back, and forth.
Numbers go to $OUT.

python benchmarks/gpu/online.py [full] [lora] [--shape qwen3-1.7b] [--threads 8]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import note, table
from online_common import Asking, OnlineServer, events
from tandem.build import standalone_engines
from tandem.recipes.random_checkpoints import random_checkpoint

GIB = 2**30
STREAMS, TOKENS, BACK = 8, 64, 10
SPEC = """
name = "online"
device = "{device}"
trainer_threads = {threads}
[model]
{model}
[precision]
weights = "bfloat16"
[train]
lr = {lr}
steps = 2
parts = "all"
batch_size = 8
micro_tokens = {micro_tokens}
[gates]
kl = 50.0
update_norm = 0.5
[replay]
share = 0.0
[ordinary]
per_step = 0
[updates]
anchor_every = 1000
anchor_share = 1000.0
[checkpoint]
every_s = 100000.0
at_shutdown = false
[engine]
kind = "vllm"
python = "{python}"
memory_share = {share}
max_context = {context}
eager = {eager}
{more}
"""
MORE = {
    "full": '[optimizer]\nkind = "apollo"\ntables = "adamw_8bit"',
    "lora": "[model.lora]\nrank = 16",
}
LR = {"full": 1e-5, "lora": 1e-4}
KEPT = ("weights", "master", "optimizer", "reference", "gradients", "other")


class Stream(Asking):
    """Asks without pause; every wait for a token, and what the answers are stamped with."""

    def __init__(self, server: OnlineServer, number: int) -> None:
        super().__init__(server.connect(str(server.http.headers["Authorization"]).removeprefix("Bearer ")), number)
        self.waits: list[tuple[float, float]] = []
        self.tokens = self.torn = self.answers = 0
        self.versions = set[int]()

    def ask(self) -> None:
        body: dict[str, Any] = {"model": "online", "prompt": [65 + self.number] * 16, "max_tokens": TOKENS}
        body |= {"temperature": 1.0, "stream": True, "return_token_ids": True}
        count, last, spans = 0, time.perf_counter(), list[list[int]]()
        stamps = set[str]()
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for told in events(answer):
                now = time.perf_counter()
                self.waits.append((now, now - last))
                last = now
                count += len(told["choices"][0]["token_ids"])
                stamps.add(str(told["weight_version"]))
                spans = told["choices"][0].get("weight_versions", spans)
        # A request ends under the version that it began with: one span, over all of it.
        whole = len(spans) == 1 and spans[0][1] == count and stamps == {str(spans[0][0])}
        self.torn += 0 if whole else count
        self.tokens, self.answers = self.tokens + count, self.answers + 1
        self.versions |= {version for version, _ in spans}


class Load:
    def __init__(self, server: OnlineServer) -> None:
        self.streams = [Stream(server, number) for number in range(STREAMS)]

    def __enter__(self) -> Load:
        for each in self.streams:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.streams:
            each.ended.set()
        for each in self.streams:
            each.join(30)

    def told(self, quiet: tuple[float, float], learning: tuple[float, float]) -> dict[str, Any]:
        def waits(spell: tuple[float, float]) -> dict[str, float]:
            inside = sorted(1e3 * s for each in self.streams for at, s in each.waits if spell[0] <= at <= spell[1])
            shares = {f"p{share}_ms": inside[int(share / 100 * (len(inside) - 1))] for share in (50, 99)}
            return {**shares, "max_ms": inside[-1], "tokens_per_s": len(inside) / (spell[1] - spell[0])}

        return {
            "tokens": sum(each.tokens for each in self.streams),
            "answers": sum(each.answers for each in self.streams),
            "torn_tokens": sum(each.torn for each in self.streams),
            "versions": sorted(set[int]().union(*(each.versions for each in self.streams))),
            "errors": [each.error for each in self.streams if each.error],
            "quiet": waits(quiet),
            "learning": waits(learning),
        }


def of_the_gpu() -> dict[int, float]:
    """GiB by process, as the driver says it; empty where it says nothing."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
        return {int(pid): float(mib) / 1024 for pid, _, mib in (line.partition(",") for line in lines)}
    except (OSError, ValueError):
        return {}


def used_gib() -> float:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()[0]) / 1024
    except (OSError, ValueError, IndexError):
        return float("nan")


def sample(number: int, length: int) -> dict[str, Any]:
    text = (f"{number * 7919 % 1000:03d} is what it says. " * (length // 20 + 1))[:length]
    return {"messages": [{"role": "user", "content": f"Number {number}?"}, {"role": "assistant", "content": text}]}


def teach(
    server: OnlineServer, what: str, samples: list[Any], rows: list[dict[str, Any]], **settings: Any
) -> dict[str, Any]:
    started = time.perf_counter()
    row = server.wait(server.teach(samples, **settings), 300)
    if row["state"] != "published":
        raise RuntimeError(f"{what}: {row['state']}: {row['why']}: {server.log()}")
    trainer = server.get("/train/status")["trainer"]
    gib = {**row["metrics"], **trainer["memory"]}
    told = {"what": what, "version": row["version"], "seconds": time.perf_counter() - started, "update": row["bytes"]}
    told |= {"changed": row["changed"], "update_s": row["seconds"]} if "changed" in row else {}
    told |= {name: value for name, value in gib.items() if name.startswith(("memory/", "time/", "update/", "loss/"))}
    told |= {"process": of_the_gpu().get(trainer["pid"]), "used": used_gib(), "base": trainer["base"]}
    rows.append(told)
    print(f"  {what}: {time.perf_counter() - started:.2f} s, {told}", flush=True)
    return told


def activate(server: OnlineServer, version: int) -> tuple[float, dict[str, Any]]:
    seconds = server.post(f"/versions/{version}/activate")["seconds"]
    return seconds, server.get("/versions/served")


def go_back(server: OnlineServer, told: dict[str, Any]) -> None:
    """Ten versions, each of a learning rate of 1e-6, as clients notice it: until the version is served."""
    jobs: list[dict[str, Any]] = []
    first = server.get("/versions/served")
    for number in range(BACK):
        samples = [sample(100 + 8 * number + n, 40) for n in range(8)]
        teach(server, f"small {number}", samples, jobs, lr=1e-6, steps=1)
    last = server.get("/versions/served")
    ways = [(activate(server, first["version"]), activate(server, last["version"])) for _ in range(3)]
    told["ten"] = {
        "changed": [job.get("changed") for job in jobs],
        "job_s": [job["seconds"] for job in jobs],
        "update_s": [job.get("update_s") for job in jobs],
        "update_bytes": [job["update"] for job in jobs],
        "back_s": [back[0] for back, _ in ways],
        "forth_s": [forth[0] for _, forth in ways],
        "right": all((back[1], forth[1]) == (first, last) for back, forth in ways),
        "memory": server.get("/train/status")["trainer"]["memory"],
    }
    print(f"  ten versions: {told['ten']}", flush=True)


def measure(server: OnlineServer, long_tokens: int, told: dict[str, Any], *, ten: bool) -> None:
    """Into `told`, as it is found."""
    started = time.perf_counter()
    server.start(400)
    status = server.get("/train/status")["trainer"]
    told |= {"start_s": time.perf_counter() - started, "parameters": status["parameters"]}
    told |= {"process_at_start": of_the_gpu().get(status["pid"]), "used_at_start": used_gib(), "base": status["base"]}
    jobs: list[dict[str, Any]] = told["jobs"]
    teach(server, "first", [sample(n, 40) for n in range(8)], jobs)
    served = {1: server.get("/versions/served")}
    with Load(server) as load:
        time.sleep(1.5)
        begun = time.perf_counter()
        time.sleep(4)
        learning = time.perf_counter()
        for number in range(3):
            teach(server, f"short {number}", [sample(8 * number + n, 40) for n in range(8)], jobs)
        ended = time.perf_counter()
    told["load"] = load.told((begun, learning), (learning, ended))
    teach(server, "long", [sample(1, long_tokens)], jobs)
    last = jobs[-1]["version"]
    served[last] = server.get("/versions/served")
    back_s, back = activate(server, 1)
    forth_s, forth = activate(server, last)
    told |= {"back_s": back_s, "forth_s": forth_s, "digests": [served[1], served[last], back, forth]}
    proven = {row["version"]: row["served_digest"] for row in server.get("/versions")["versions"]}
    told["as_proven"] = all(each["digest"] == proven[each["version"]] for each in told["digests"])
    told["right"] = (
        told["as_proven"] and back == served[1] and forth == served[last] and back["digest"] != forth["digest"]
    )
    answer = server.ask("Number 1?", 8)
    told["answer"] = {"spans": answer["choices"][0].get("weight_versions"), "version": answer.get("weight_version")}
    told["activate_memory"] = server.get("/train/status")["trainer"]["memory"]
    if ten:
        go_back(server, told)
    told["versions"] = server.get("/versions")["versions"]


def end(server: OnlineServer) -> None:
    """With its engine, whose memory the next one needs."""
    try:
        if server.process is not None:
            server.stop(30)
    except subprocess.TimeoutExpired:
        server.kill()


def show(told: dict[str, Any]) -> None:
    count = told.get("parameters", 1)
    rows: list[list[str]] = []
    for job in told["jobs"]:
        parts = [job.get(f"memory/peak_{part}", float("nan")) for part in ("train", "gates", "update", "publish")]
        most = max(parts)
        passing = job.get("memory/activations", 0) + job.get("memory/logits", 0)
        kept = sum(job.get(f"memory/{part}", 0) for part in KEPT)  # as a step of the optimizer finds it
        without = max(kept, *parts[1:])
        process = job["process"] if job["process"] is not None else float("nan")
        rows.append(
            [job["what"], f"{job['seconds']:.2f} s", *(f"{part:.2f}" for part in parts), f"{passing:.2f}",
             f"{most * GIB / count:.2f}", f"{without * GIB / count:.2f}", f"{process:.2f}",
             f"{job['update'] / 1e6:.1f} MB"]
        )  # fmt: skip
    head = ("job", "in all", "train", "gates", "update", "publish", "activations, logits")
    table((*head, "bytes/weight", "without them", "process", "update"), rows)
    if "versions" not in told:
        return print({name: value for name, value in told.items() if name != "jobs"}, flush=True)
    load = told["load"]
    print(
        f"{told['way']}: {count / 1e6:.0f}M trained, started in {told['start_s']:.0f} s; GiB at start: process "
        f"{told['process_at_start']}, GPU {told['used_at_start']:.1f}; back {told['back_s']:.2f} s, forth "
        f"{told['forth_s']:.2f} s, digests {'right' if told['right'] else 'WRONG'}; answer {told['answer']}; base "
        f"{told['jobs'][-1]['base']}\ntorn {load['torn_tokens']} of {load['tokens']} tokens in {load['answers']} "
        f"answers, versions {load['versions']}, errors {load['errors']}; quiet {load['quiet']}, learning "
        f"{load['learning']}\nactivate: {told['activate_memory']}\n{told['versions'][-1]}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ways", nargs="*", default=["full", "lora"])
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--preset", default="", help="instead of a shape, and on the CPU: to try this script")
    parser.add_argument("--python", default=standalone_engines.default_python())
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, as for lora anyway: vLLM starts sooner")
    parser.add_argument("--share", type=float, default=0.4)
    asked = parser.parse_args()
    out, checkpoint = Path(os.environ.get("OUT", ".")), Path("/tmp") / asked.shape
    device, model, long_tokens = "cuda", f'path = "{checkpoint}"', 8000
    if asked.preset:
        device, model, long_tokens = "cpu", f'preset = "{asked.preset}"', 300
    elif not checkpoint.exists():
        random_checkpoint(asked.shape, checkpoint, device="cuda")
    note(f"{asked.preset or asked.shape}, {asked.threads} threads of the trainer process; GiB unless said otherwise")
    found: list[Any] = []
    for way in asked.ways:
        home = Path("/tmp/online") / way
        shutil.rmtree(home, ignore_errors=True)
        server = OnlineServer(
            home,
            SPEC.format(
                device=device, threads=asked.threads, model=model, lr=LR[way], python=asked.python, share=asked.share,
                context=512 if asked.preset else 16384, micro_tokens=512 if asked.preset else 8192,
                eager=str(asked.eager or way == "lora").lower(), more=MORE[way],
            ),
        )  # fmt: skip
        try:
            found.append({"way": way, "jobs": []})
            measure(server, long_tokens, found[-1], ten=way == "full")
        except Exception as error:  # noqa: BLE001  the other way is tried all the same
            found[-1]["error"] = f"{type(error).__name__}: {error}"
            print(f"{way} FAILED {found[-1]['error'][:6000]}", flush=True)
        finally:
            end(server)
        show(found[-1])
        for file in (home / "server.log", home / "data" / "trainer.log"):
            if file.exists():
                shutil.copy(file, out / f"{way}-{file.name}")
        (out / "online.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
