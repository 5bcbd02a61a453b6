"""atroposlib's environments and servers with a Tandem trainer, by the commands of docs/atropos.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atropos_served import serving_atropos
from gateway_served import MODEL, gateway_serving
from served import ScriptedEngine, wait_until

from tandem.rollout.atropos.version_lookup import GatewayStamps
from tandem.text.renderer import Renderer
from tandem.text.tokenizer import byte_tokenizer

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


KINDS = ("vllm", "sglang", "openai")


def test_what_each_of_their_servers_samples_has_the_versions_of_the_engine(tmp_path: Path, atropos_python: str):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    engine = ScriptedEngine(Renderer(tokenizer))
    engine.script, engine.flip = "abcdef", 3
    with gateway_serving(engine, Renderer(tokenizer), tmp_path / "gateway") as gateway:
        stamps = GatewayStamps(gateway.url, gateway.data_dir / "token")
        with serving_atropos(tmp_path / "data", gateway=stamps, open_to_all=True) as client:
            trainer = {"run_id": "ours", "groups_per_step": 3, "max_lag": 9, "version": 4}
            client.http.post("/v2/trainer", json=trainer, headers={"Idempotency-Key": "a"}).raise_for_status()
            command = [
                atropos_python, str(HERE / "sample_and_post.py"), gateway.url, gateway.token, MODEL,
                str(tmp_path / "tokenizer"), client.server.url, str(client.join()), *KINDS,
            ]  # fmt: skip
            said = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
            assert said.returncode == 0, said.stdout + said.stderr
            body = {"epoch": 1, "groups": len(KINDS)}
            lease = client.http.post("/v2/leases", json=body, headers={"Idempotency-Key": "b"}).json()
            counts = dict(client.atropos.counts)
    sampled = sum(len(completion.ids) for _, completion in gateway.engine.log)
    assert counts["tokens_unknown"] == 0
    # A client of chat completions is not shown the end of its two turns, and so does not post it.
    assert counts["tokens_stamped"] == sampled - 2
    for each in [trajectory for group in lease["groups"] for trajectory in group["group"]["trajectories"]]:
        turns = [(version, count) for version, count in each["spans"] if version >= 0]
        assert [version for version, _ in turns] == [3, 4] * (len(turns) // 2)
        assert all(count == 3 for version, count in turns if version == 3)


# --- the page's commands


def commands_of(page: str, heading: str) -> list[list[str]]:
    """The commands of the first block of a section."""
    section = page.split(f"\n## {heading}\n", 1)[1]
    block = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[0]
    return [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_page_s_own_commands_train_on_an_environment_of_theirs(tmp_path: Path, atropos_python: str):
    """First its environment is killed: that is named, nothing is left, and the same command goes on."""
    make, install, train = commands_of((ROOT / "docs" / "atropos.md").read_text(), "Moving a project")
    assert (make[1:], install[0]) == (["-m", "venv", ".tandem/atropos"], ".tandem/atropos/bin/pip")
    assert install[1:] == ["install", "atroposlib==0.4.0"], "which is what `make test-atropos` has done"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".tandem").mkdir()
    (tmp_path / ".tandem" / "atropos").symlink_to(Path(atropos_python).parent.parent)
    run = tmp_path / train[train.index("--run-dir") + 1]
    command = [*train, "--set", "train.steps=4", "--set", "device=cpu", "--set", "checkpoint.every=1"]

    with begun(tmp_path, command) as first:
        wait_until(lambda: steps_of(run) or first.poll() is not None, 300)
        for pid in named(tmp_path, "atropos_env.py serve", but="leash.py"):
            os.kill(pid, signal.SIGKILL)
        said, _ = first.communicate(timeout=120)
    assert first.returncode == 1, said
    assert "environment-0 ended before the run did, so all processes were stopped: signal 9" in said
    assert "Traceback" not in said
    wait_until(lambda: not named(tmp_path), 20)

    with begun(tmp_path, command) as second:
        said, _ = second.communicate(timeout=300)
    assert second.returncode == 0, said
    assert "resumes from the checkpoint of step" in said
    assert "The mean training reward was" in said
    rows = steps_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row.get("sync/logprob_gap", 0.0) < 1e-4 for row in rows)
    assert not any("tokens/version_unknown" in row for row in rows), "also of what was posted before"
    assert all(row["lag/max"] <= 1 for row in rows)
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["verdict"]) == ("succeeded", "undecided")
    wait_until(lambda: not named(tmp_path), 20)


@contextmanager
def begun(at: Path, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    assert command[0] == "tandem"
    running = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=at, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield running
    finally:
        if running.poll() is None:
            running.terminate()
            running.communicate(timeout=60)


def steps_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def named(at: Path, what: str = "", but: str = "nothing") -> list[int]:
    """Processes whose command line names this directory."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(at) in words and what in words and but not in words:
            found.append(int(path.parent.name))
    return found
