#!/usr/bin/env python3
"""In place of `tandem`, as a target's command: an agent whose trainer writes a row in each `pace` seconds.

`standin_agent.py agent URL`: claims, mirrors a run directory of its own, ends. It ends at once when it is asked to, and
dies without a word if the run's name says "dies" and it is the first attempt. While the file STANDIN_HELD_BY is there,
it stays at its last row.
"""

import base64
import hashlib
import http.client
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def main(url):
    name = f"i{os.getpid()}"
    token = os.environ["TANDEM_ATTEMPT_TOKEN"]

    def post(what, **body):
        content = json.dumps({"instance": name, **body}).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        while True:
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(f"{url}/{what}", content, headers), timeout=10
                ) as got:
                    return json.load(got)
            except urllib.error.HTTPError as error:
                if error.code not in (408, 429, 500, 502, 503, 504, 507):
                    sys.exit(f"{what}: {error.code} {error.read().decode()}")
            except (OSError, http.client.HTTPException):
                pass  # the server was killed before it answered, or while it did
            time.sleep(0.2)

    claimed = post("claim", pid=os.getpid())
    rows = int(claimed["name"].rpartition("-")[2]) if claimed["name"].rpartition("-")[2].isdigit() else 3
    home = Path.cwd() / "run"
    home.mkdir(exist_ok=True)
    streams = {file: (each["generation"], each["size"]) for file, each in claimed["streams"].items()}
    want, ticks = "run", 0
    lines = b""
    for step in range(1, rows + 1):
        lines += json.dumps({"step": step, "reward/mean": step / rows}).encode() + b"\n"
        status = {"state": "running", "recipe": "rl", "steps_total": rows, "steps_done": step}
        progress = {"stage": "rl", "step": step, "ticks": step, "process": "x", "limit_s": 30}
        for file, content in (("status.json", status), ("progress.json", progress)):
            (home / file).write_text(json.dumps(content))
        (home / "metrics.jsonl").write_bytes(lines)
        (home / "log.txt").write_bytes(b"".join(b"step %d\n" % each for each in range(1, step + 1)))
        want, ticks = ship(post, home, streams, ticks), ticks + 1
        if "dies" in claimed["name"] and claimed["n"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while step == rows and want == "run" and os.path.exists(os.environ.get("STANDIN_HELD_BY", "")):
            time.sleep(0.1)  # it ends when the test lets it
            want, ticks = ship(post, home, streams, ticks), ticks + 1
        if want != "run":
            break
        time.sleep(float(os.environ.get("STANDIN_PACE_S", "0.1")))
    state = "succeeded" if want == "run" else "stopped"
    (home / "status.json").write_text(
        json.dumps({"state": state, "recipe": "rl", "steps_total": rows, "steps_done": step, "verdict": "improved"})
    )
    ship(post, home, streams, ticks)
    files = {
        file.name: {"size": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in home.iterdir()
    }
    while not (told := post("end", state=state, exit_code=0, files=files))["written"]:
        for file, each in told["differ"].items():  # its generations jump when it starts again
            streams[file] = (each["generation"], each["size"])
        ship(post, home, streams, ticks)


def ship(post, home, streams, ticks):
    pieces = []
    for file in sorted(home.iterdir()):
        content = file.read_bytes()
        generation, size = streams.get(file.name, (0, 0))
        if file.suffix == ".json" or not generation:
            generation, size = generation + 1, 0
        data = content[size:]
        pieces.append(
            {"file": file.name, "generation": generation, "offset": size, "data": base64.b64encode(data).decode(),
             "sha256": hashlib.sha256(data).hexdigest()}
        )  # fmt: skip
    told = post("append", sign={"ticks": ticks, "limit_s": 30}, pieces=pieces)
    for file, each in told["streams"].items():
        streams[file] = (each["generation"], each["size"])
    return told["want"]


if __name__ == "__main__":
    main(sys.argv[2])
