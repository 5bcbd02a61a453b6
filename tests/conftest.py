"""What tests of every kind share."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import typer.testing

import forked
from standstill import Standstill

HERE = Path(__file__).parent
SLOW = {
    "atropos": "real Atropos environments, where they are installed",
    "real": "a pretrained model, where it is installed",
    "families/test_families.py": "every model family through every capability",
    "families/test_planned_families.py": "a plan of every model family, beside a step of it",
    "families/test_images.py": "a model that learns from images",
    "schemas": "thousands of requests of schemathesis, where it is installed",
    "faults": "kills, hangs and lies between real processes",
    "learning": "whole runs that must learn, and the examples",
    "conformance/test_engine_images.py": "a model that sees, whose code takes seconds to import",
    "conformance/test_bridge_processes.py": "both ends of each bridge killed at many instants",
    "parallel/test_rank_rewards.py": "whole runs of two ranks that must learn",
    "parallel/test_broadcast_boxes.py": "ranks and workers in processes of their own, some of them killed",
    "http/test_slow_bodies.py": "bodies that arrive slower than their deadline",
    "http/test_service_run.py": "a whole run over the rollout service",
    "http/test_online_take_home.py": "an online server that is taught, exported and served",
    "http/test_gguf_joints.py": "a GGUF file through two ranks, adapters and an online server",
    "http/test_online_kl_gate.py": "an online server of its own, whose gate rejects a lesson",
    "http/test_dashboard.py": "a whole run, and a browser where there is one",
    "http/test_dashboard_stranger.py": "whole runs, and a browser where there is one",
    "http/test_dashboard_environments.py": "a server with many packages, and a browser where there is one",
    "http/test_dashboard_served.py": "a control plane's whole runs, and a browser where there is one",
    "http/test_online_page.py": "an online server, and a browser where there is one",
    "http/test_rollouts_page.py": "a rollout service that is killed, and a browser where there is one",
    "http/test_env_serve.py": "environments in processes of their own, against a service",
    "unit/test_gallery.py": "environments of the gallery, with answers that loop, and a sandbox",
    "unit/test_typed_api.py": "pyright on a script with every public call",
    "unit/test_compiled_layers.py": "the compiler at work on layers with adapters",
    "unit/test_sync_bench.py": "every bridge measured on a real model",
    "parallel/test_checkpoints_by_rows.py": "whole runs on 1, 2 and 4 ranks",
    "parity/test_apollo.py": "many steps beside the published optimizer",
    "parallel/test_ends_and_resumes.py": "runs of ranks that are killed, stopped and resumed",
    "parallel/test_equal_bytes.py": "69 trainings on 1, 2 and 4 ranks",
    "parallel/test_planted.py": "ranks with wrong weights, in processes of their own",
    "parity/test_by_owner.py": "updates of three ranks beside one",
    "parallel/test_launcher_ends.py": "runs under a launcher that end early",
    "parallel/test_two_agents.py": "whole runs under two agents of torchrun",
    "http/test_online.py": "an online server that is stopped and taught again and again",
    "parity/test_optimizers.py": "many steps beside the published optimizers",
    "unit/test_plan_ranks.py": "plans of many layouts",
    "http/test_gateway_service.py": "gateways in processes of their own, some of them killed",
    "unit/test_env_maths.py": "scorers that stand still until their deadline",
    "parallel/test_load_rows.py": "the memory of ranks that load a model",
    "parallel/test_command.py": "the command on two ranks, beside one",
    "unit/test_own_code.py": "whole runs on code of the user's own, resumed",
    "http/test_service_start_and_end.py": "services that are ended in the middle of answers",
    "http/test_rollouts_cli.py": "commands against a rollout service of their own",
    "parallel/test_lost_ranks.py": "ranks that are killed and stopped, until their deadline",
    "control/test_openid_real.py": "an OpenID provider and a control server in processes of their own",
    "control/test_control_command.py": "a control server in a process of its own, killed, and runs on its machine",
    "providers/test_local.py": "jobs on this machine, ended and launched many times",
    "providers/test_ssh.py": "a real sshd, some times killed",
    "control/test_assistant_over_http.py": "a control server and whole runs, from an assistant's client",
    "control/test_assistant_deploys.py": "a control server, whole runs and their replicas, from an assistant's client",
    "control/test_agent_elsewhere.py": "whole runs over a real sshd and Slurm's daemons",
    "http/test_adapter_models.py": "a run that trains adapters, and a server of them",
    "control/test_deployments.py": "replicas of a real run, one killed and one refused",
    "control/test_agent.py": "whole runs under a control plane, killed on the way",
    "control/test_packages_attacked.py": "more than a hundred and fifty attacks on a real server",
    "control/test_packages_played.py": "a real server, pip, and whole runs of a package",
    "providers/test_ray.py": "a real Ray cluster, where it is installed",
    "providers/test_skypilot.py": "machines that SkyPilot starts, where it is installed",
    "providers/test_skypilot_texts.py": "what waits on a machine for a job, and for its end",
    "providers/test_slurm.py": "Slurm's real daemons, some times killed",
}
"""The slow tier, `make test-slow`: a folder or a file, and what takes its time. `make test` runs all the others."""
BOTH = {"control"}
"""Folders with tests of both tiers in one file: those on PostgreSQL are marked slow, for example."""
TOGETHER = ["tests/parallel"]
"""Folders whose tests run one after another, before all others: each is several processes with deadlines in seconds."""
LONGEST = [
    "tests/learning/test_examples.py", "tests/families", "tests/learning/test_thumbs.py",
    "tests/faults/test_online_orchestrator.py", "tests/learning/test_quickstart.py", "tests/learning/test_numerics.py",
    "tests/http/test_online.py", "tests/faults/test_engine_process.py", "tests/http/test_gguf_joints.py",
    "tests/learning/test_sweep_run.py", "tests/conformance/test_bridge_processes.py",
    "tests/learning/test_your_data.py", "tests/learning/test_scaffold.py",
]  # fmt: skip
"""What begins next, the longest first: a long file that began last would leave the other workers idle."""
typer.testing._get_command = typer.main.get_command = cache(typer.main.get_command)
"""Once for each process, as in real use: the parsers of all commands take 0.2 s, and hundreds of tests want them."""
_PAUSE_S, _REPEATS = 0.25, 2
_UNTIL = float(os.environ.get("TANDEM_SLOW_TESTS_UNTIL", "inf"))
"""After this time, in seconds since 1970, no further slow test begins: a slow machine's `.ci/run` must end, too."""
_TIME_WAS_UP = "its time was up (TANDEM_SLOW_TESTS_UNTIL)"
_machine = Standstill()
_failed: set[str] = set()
"""Which phases of the test that ran last have failed."""


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Iterator[None]:
    with _machine:
        return (yield)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        forked.execute_again()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    forked.fork_workers_of_xdist()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker a file at a time, and all files of a folder in `TOGETHER` to the same worker."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((folder for folder in TOGETHER if f"{folder}/" in file), file)

    return Scheduler(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of the other tier: each worker would, and that takes a tenth of the time of either tier."""
    asked = config.option.markexpr
    if asked not in ("slow", "not slow") or collection_path.suffix != ".py":
        return None
    if asked == "slow" and collection_path.relative_to(HERE).parts[0] in BOTH:
        return None
    return True if is_slow(collection_path) != (asked == "slow") else None


def is_slow(file: Path) -> bool:
    path = file.relative_to(HERE) if file.is_relative_to(HERE) else file
    return path.parts[0] in SLOW or path.as_posix() in SLOW


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leases, deadlines and patience are real seconds here, between real processes. If the machine stands still in the
    middle of one, its failure says nothing of the code: the test is done again, and what it said is told. What fails on
    a machine that works has failed."""
    first = [*TOGETHER, *LONGEST]
    items.sort(key=lambda item: next((n for n, start in enumerate(first) if item.nodeid.startswith(start)), len(first)))
    for item in items:
        if is_slow(item.path):
            item.add_marker(pytest.mark.slow)
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            item.add_marker(pytest.mark.flaky(reruns=_REPEATS, condition=_machine_stood_still))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > _UNTIL and item.get_closest_marker("slow"):
        pytest.skip(_TIME_WAS_UP)
    _machine.begin()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped: list[pytest.TestReport] = terminalreporter.stats.get("skipped", [])
    if left_out := [report for report in skipped if _TIME_WAS_UP in str(report.longrepr)]:
        files = sorted({report.nodeid.partition("::")[0] for report in left_out})
        terminalreporter.section(f"{len(left_out)} slow tests were not run: {_TIME_WAS_UP}", bold=True)
        terminalreporter.write_line(" ".join(files))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    report = yield
    if report.when == "setup":
        _failed.clear()
    if report.failed:
        _failed.add(report.when)
    return report


def _machine_stood_still() -> bool:
    """Tell after a failed test. The plugin asks after every test, and an answer takes 0.04 s."""
    return bool(_failed) and _machine.longest_s() > _PAUSE_S


@pytest.fixture(scope="module")
def forked_programs() -> Iterator[None]:
    """Fork the programs of Python that this file's tests start, instead of having each import torch."""
    with forked.forked_programs():
        yield


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a hub on loopback: HF_HUB_OFFLINE in the environment would forbid it, too."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write no report, which takes half a second: for files whose tests look at none."""
    from tandem import recipes

    monkeypatch.setattr(recipes, "write_report", lambda _: None)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny matrices are faster on one thread, and a second one spins where cores are shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
