"""An online server whose halves are killed while it learns: is what is served the version before or after, and is no
job trained twice?

The optimizer has no memory (betas 0): a restart after a commit has an older one, and bytes would tell of that alone.
Jobs are taught one by one; at a random instant after each was sent, one of the halves is killed with SIGKILL. Another
server, which nobody kills, is taught the same: after each job both must serve the same bytes. Exit code 1 otherwise.

python benchmarks/online_kills.py [--kills 60] [--seed 0] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from online_common import OnlineServer, fact

SPEC = """
[model]
preset = "tiny"
[train]
lr = 1e-3
steps = 4
attempts = 10
[optimizer]
betas = [0.0, 0.0]
[gates]
kl = 50.0
update_norm = 5.0
[replay]
share = 0.25
"""


def expected(home: Path, jobs: int) -> list[str]:
    """The digests that are served after each job, if nobody is killed; and how long a job takes."""
    server = OnlineServer(home / "unharmed", SPEC).start()
    try:
        digests = [server.get("/versions/served")["digest"]]
        for number in range(jobs):
            server.wait(server.teach([fact(number), fact(number + 1)]))
            server.post("/checkpoint")
            digests.append(server.get("/versions/served")["digest"])
        return digests
    finally:
        server.kill()


def trial(home: Path, kills: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    digests = expected(home, kills)
    server = OnlineServer(home / "killed", SPEC).start()
    told: dict[str, Any] = {"kills": 0, "server": 0, "trainer": 0, "before": 0, "after": 0, "problems": []}
    took_s, restart_s = 1.5, list[float]()
    try:
        for number in range(kills):
            key, started = f"job-{number}", time.monotonic()
            job = server.teach([fact(number), fact(number + 1)], key)
            time.sleep(rng.uniform(0, took_s))
            half = rng.choice(("server", "trainer"))
            told[half] += 1
            told["kills"] += 1
            if half == "server":
                server.kill()
                again = time.monotonic()
                server.start()
                restart_s.append(time.monotonic() - again)
            else:
                server.kill_trainer()
            served = server.get("/versions/served")["digest"]
            side = {digests[number]: "before", digests[number + 1]: "after"}.get(served)
            if side is None:
                told["problems"].append(f"kill {number} of the {half}: served digest {served} is neither")
            else:
                told[side] += 1
            if server.teach([fact(number), fact(number + 1)], key) != job:
                told["problems"].append(f"job {number}: its key gave another job")
            row = server.wait(job)
            server.post("/checkpoint")
            served = server.get("/versions/served")
            if row["state"] != "published" or served["digest"] != digests[number + 1]:
                told["problems"].append(f"job {number} is {row['state']} {row['why']}, served {served}")
            print(
                f"\r{number + 1} of {kills} kills, {len(told['problems'])} problems",
                end="",
                file=sys.stderr,
                flush=True,
            )
            if half == "trainer":
                took_s = min(took_s, 1.2 * (time.monotonic() - started))
        made = [each["job"] for each in server.get("/versions")["versions"] if each["job"]]
        told["double_trained"] = len(made) - len(set(made))
        told["restart_s"] = {"max": max(restart_s, default=0.0)}
        if server.stop() != 0:
            told["problems"].append("SIGTERM did not end it well")
    except (RuntimeError, httpx.HTTPError) as error:
        told["problems"].append(f"{type(error).__name__}: {error}: {server.log()}")
    finally:
        server.kill()
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        told = trial(Path(home), options.kills, options.seed)
    if options.json:
        print(json.dumps(told))
    else:
        print(
            f"{told['kills']} kills ({told['server']} of the server process, {told['trainer']} of the trainer "
            "process): "
            f"served digest the one before {told['before']} times, the one after {told['after']} times, "
            f"{told.get('double_trained')} jobs trained twice"
        )
        print("\n".join(told["problems"]))
    sys.exit(bool(told["problems"]))


if __name__ == "__main__":
    main()
