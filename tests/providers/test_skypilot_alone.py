"""What a SkyPilot target promises where no SkyPilot is installed: its refusals and offers."""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path

import pytest

from tandem.build.targets import open_provider, read_targets
from tandem.errors import MaybeLaunched, ProviderRefused, SpecError
from tandem.job_types import Handle, Job, Need
from tandem.providers.skypilot import SkyPilotProvider, SkyPilotSettings
from tandem.providers.skypilot_offers import offered

# Rows as skypilot_client.py makes them of SkyPilot's catalogue; a number may be missing (-1). The prices are made up.
ROWS = [
    ["aws", "us-east-1", "g4dn.xlarge", "T4", 1.0, 16.0, 4.0, 16.0, 0.53],
    ["aws", "eu-west-1", "g4dn.xlarge", "T4", 1.0, 16.0, 4.0, 16.0, 0.59],
    ["aws", "us-east-1", "p5.48xlarge", "H100", 8.0, 80.0, 192.0, 2048.0, 55.0],
    ["lambda", "us-west-1", "gpu_1x_h100", "H100", 1.0, 80.0, 26.0, 200.0, 3.3],
    ["lambda", "us-west-1", "gpu_1x_b300", "B300", 1.0, 288.0, 26.0, 200.0, -1.0],
    ["kubernetes", "", "", "H100", 2.0, -1.0, -1.0, -1.0, 0.0],
]
TOLD = {"infra": ["aws", "kubernetes/mine", "lambda"], "gpus": ROWS}


def provider(tmp_path: Path, **more: object) -> SkyPilotProvider:
    return SkyPilotProvider(
        SkyPilotSettings.model_validate(
            {"python": sys.executable, "state": str(tmp_path / "state"), "directory": str(tmp_path / "jobs"), **more}
        )
    )


def test_the_file_of_targets_names_it(tmp_path: Path) -> None:
    file = tmp_path / "targets.toml"
    file.write_text('[targets.cloud]\nkind = "skypilot"\npython = "/venv/bin/python"\ninfra = ["aws"]\n')
    (settings,) = read_targets(file).values()
    assert isinstance(open_provider(settings), SkyPilotProvider)
    file.write_text('[targets.cloud]\nkind = "skypilot"\n')
    with pytest.raises(SpecError, match=r"targets\.cloud\.python: is missing"):
        read_targets(file)


def test_a_client_that_dies_is_no_answer(tmp_path: Path) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    dying.chmod(0o755)
    with pytest.raises(MaybeLaunched, match="ended with code 3: broken"):
        asyncio.run(provider(tmp_path, python=str(dying)).launch(Job("tandem-x-1", ("true",))))


def test_a_client_that_does_not_answer_in_time_is_no_answer(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nread line\n")
    slow.chmod(0o755)
    (sight,) = asyncio.run(provider(tmp_path, python=str(slow), timeout_s=0.1).look([Handle("tandem-x-1")]))
    assert sight.state == "unknown"


def test_several_hosts_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ProviderRefused, match=r"need\.hosts = 2: a target of kind 'skypilot' is one host"):
        asyncio.run(provider(tmp_path).launch(Job("tandem-x-1", ("true",), need=Need(hosts=2))))
    assert {offer.why_not for offer, _ in offered(Need(hosts=2), TOLD, (), 1.0)} == {"a job of this target is one host"}


def test_offers_are_the_cheapest_of_each_cloud_and_keep_to_their_region() -> None:
    offers = offered(Need(gpus=1), TOLD, (), 0.0)
    assert [(offer.name, offer.usd_per_hour, offer.fits) for offer, _ in offers] == [
        ("lambda/us-west-1/gpu_1x_b300:1", 0.0, False), ("kubernetes/H100:2", 0.0, True),
        ("aws/us-east-1/g4dn.xlarge:1", 0.53, True), ("lambda/us-west-1/gpu_1x_h100:1", 3.3, True),
        ("aws/us-east-1/p5.48xlarge:8", 55.0, True),
    ]  # fmt: skip
    assert offers[0][0].why_not == "SkyPilot's catalogue has no price of it"
    assert offers[2][1] == {"infra": "aws/us-east-1", "accelerators": "T4:1", "instance_type": "g4dn.xlarge"}
    (europe, _) = offered(Need(gpus=1, gpu="t4"), TOLD, ("aws/eu-west-1",), 0.0)[0]
    assert (europe.name, europe.usd_per_hour) == ("aws/eu-west-1/g4dn.xlarge:1", 0.59)


@pytest.mark.parametrize(
    ("need", "why"),
    [
        (Need(gpus=9), "it has 8 GPUs"),
        (Need(gpus=8, gpu="A100"), "its GPUs are 'H100'"),
        (Need(gpus=8, gpu_memory_gib=81), "its GPUs have 80 GiB"),
        (Need(gpus=8, cpus=200), "it has 192 CPUs and 2048 GiB"),
    ],
)
def test_an_offer_that_can_never_meet_the_need_says_why_not(need: Need, why: str) -> None:
    (offer, _) = offered(need, TOLD, ("aws/us-east-1",), 0.0)[-1]
    assert (offer.fits, offer.now, offer.why_not) == (False, False, why)


def test_without_gpus_a_cloud_needs_a_highest_price() -> None:
    free = {offer.name: offer for offer, _ in offered(Need(cpus=4, memory_gib=8), TOLD, (), 0.0)}
    assert [name for name, offer in free.items() if offer.fits] == ["kubernetes/mine"]
    assert "write usd_per_hour" in free["aws"].why_not
    (offer, resources) = offered(Need(cpus=4, memory_gib=8, disk_gib=100), TOLD, ("aws",), 0.4)[0]
    assert (offer.fits, offer.usd_per_hour) == (True, 0.4)
    assert resources == {"infra": "aws", "cpus": "4+", "memory": "8+", "disk_size": 132, "max_hourly_cost": 0.4}


def test_skypilot_is_told_nothing_of_a_job_but_its_name_and_removes_the_machine_itself(tmp_path: Path) -> None:
    secret = Job("tandem-x-1", ("run", "argument9"), env={"KEY": "canary9"}, need=Need(seconds=60), grace_s=5)
    task = provider(tmp_path, idle_minutes=3, setup="pip install it").task(secret, {"infra": "aws"})
    assert task["resources"] == {"infra": "aws", "autostop": {"idle_minutes": 3, "down": True, "wait_for": "jobs"}}
    assert (task["setup"], task["num_nodes"]) == ("pip install it", 1)
    assert "wait_for_job tandem-x-1 65 180" in task["run"]
    assert "canary9" not in str(task)
    assert "argument9" not in str(task)
    handed = provider(tmp_path).handed(secret)
    assert "canary9" in base64.b64decode(handed["text"].strip(":\n")).decode()
    assert "canary9" not in str(handed["command"])


def test_no_two_machines_share_a_connection(tmp_path: Path) -> None:
    """SkyPilot gives all machines of one Kubernetes or Slurm the same address and port."""
    commands = [provider(tmp_path).handed(Job(f"tandem-x-{n}", ("true",)))["command"] for n in (1, 2, 1)]
    paths = [next(part for part in command if part.startswith("ControlPath=")) for command in commands]
    assert paths[0] != paths[1]
    assert paths[0] == paths[2]
    assert "%" not in "".join(paths)
