"""What an environment's sandbox costs: the start of a worker, an episode of no work, and groups a second.

python benchmarks/sandbox.py [--starts 30] [--groups 64] [--rounds 5]

Workers without a sandbox, with one for each worker, and with one for each episode take turns. Groups a second are those
of env_faults.py without faults: its stand-in engine is the bottleneck, as a real one would be. Exit code 1 if a figure
is missed: 60 ms for the start of a worker, 3 % of the groups a second. It needs bubblewrap.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import env_faults
from common import note, table
from tandem.env.sandbox.outside import Sandbox
from tandem.io import json_frames
from tandem.rollout.episode import Setting, play
from tandem.rollout.workers.forkserver_client import ForkServerClient, Order
from tandem.rollout.workers.pool import WorkerEnvironment
from tandem.types import Completion, Sampling, Span

HERE = str(Path(__file__).parent)
KINDS: dict[str, Sandbox | None] = {
    "no sandbox": None,
    "one for each worker": Sandbox(read=(HERE,), for_each_episode=False),
    "one for each episode": Sandbox(read=(HERE,)),
}
MOST_START_MS, LEAST_SHARE = 60.0, 0.97
_EPISODES, _WORKERS, _TIMEOUT_S = 128, 4, 60.0


def load_s(sandbox: Sandbox | None) -> float:
    """Return the seconds that the fork server takes to start and to load an environment."""
    started = time.perf_counter()
    ForkServerClient(order_of(sandbox)).close()
    return time.perf_counter() - started


def start_ms(sandbox: Sandbox | None, starts: int) -> float:
    """Return the median time from the order for a worker to its first answer."""
    client, found = ForkServerClient(order_of(sandbox)), list[float]()
    try:
        for number in range(1, starts + 1):
            started = time.perf_counter()
            with client.start(number) as worker:
                worker.settimeout(_TIMEOUT_S)
                json_frames.send(worker, {"op": "tasks", "split": "train"})
                assert json_frames.receive(worker), "the worker has ended"
                found.append(1000 * (time.perf_counter() - started))
            client.kill(number, "measured")
    finally:
        client.close()
    return statistics.median(found)


class AtOnce(env_faults.Engine):
    async def generate(self, prompt_ids, sampling, *, session=None, on_token=None) -> Completion:
        return Completion([7], [-0.5], [Span(0, 1)], "stop")


def episode_ms(sandbox: Sandbox | None) -> float:
    """Return the time for each of many episodes that do nothing, on 4 workers; the engine answers at once."""
    return 1000 * asyncio.run(_play_many(sandbox)) / _EPISODES


async def _play_many(sandbox: Sandbox | None) -> float:
    environment = WorkerEnvironment(order_of(sandbox), _WORKERS)
    setting = Setting(environment, AtOnce(), env_faults.Plain(), Sampling(), 64, 30.0, _TIMEOUT_S)  # pyright: ignore
    try:
        task = environment.tasks("train")[0]
        await asyncio.gather(*(play(setting, task, [0], seed) for seed in range(_WORKERS)))
        started = time.perf_counter()
        await asyncio.gather(*(play(setting, task, [0], seed) for seed in range(_EPISODES)))
        return time.perf_counter() - started
    finally:
        environment.close()
        await asyncio.sleep(0)


def order_of(sandbox: Sandbox | None) -> Order:
    return Order(env_faults.__file__, {"share": 0.0}, _TIMEOUT_S, sandbox=sandbox)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=30)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if shutil.which("bwrap") is None:
        sys.exit("bubblewrap is not installed: `make install-system`")
    loads, starts, episodes, rates = ({kind: list[float]() for kind in KINDS} for _ in range(4))
    for _ in range(asked.rounds):
        for kind, sandbox in KINDS.items():
            loads[kind].append(1000 * load_s(sandbox))
            starts[kind].append(start_ms(sandbox, asked.starts))
            episodes[kind].append(episode_ms(sandbox))
            rates[kind].append(env_faults.measure(0.0, asked.groups, sandbox).groups_per_s)
    plain = next(iter(KINDS))
    shares = {kind: [rate / rates[plain][n] for n, rate in enumerate(rates[kind])] for kind in KINDS}
    rows = [[kind, *(_text(each[kind], digits) for each, digits in (
        (loads, 0), (starts, 1), (episodes, 1), (rates, 2), (shares, 3)))] for kind in KINDS]  # fmt: skip
    table(["", "loading, ms", "start of a worker, ms", "an episode of no work, ms", "groups/s", "of no sandbox"], rows)
    more_ms = max(statistics.median(starts[kind]) for kind in KINDS) - statistics.median(starts[plain])
    least = min(statistics.median(shares[kind]) for kind in KINDS)
    version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    note(f"{more_ms:.1f} ms more a start, must be <= {MOST_START_MS:g}; {least:.3f} of the groups/s, must be >= "
         f"{LEAST_SHARE}; {version}, {asked.rounds} rounds, medians [least to most]")  # fmt: skip
    sys.exit(0 if more_ms <= MOST_START_MS and least >= LEAST_SHARE else 1)


def _text(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f} to {max(values):.{digits}f}]"


if __name__ == "__main__":
    main()
