"""What SkyPilot runs on a machine, run on this one, and a Python without SkyPilot."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path

import pytest
from test_skypilot_alone import provider

from tandem.errors import ProviderRefused
from tandem.job_types import Handle, Job, Need


def test_a_python_that_is_none_or_has_no_skypilot_is_refused_by_name(tmp_path: Path) -> None:
    nothing = provider(tmp_path, python=str(tmp_path / "none"))
    with pytest.raises(ProviderRefused, match=r"python = '.*none': cannot be started: No such file"):
        asyncio.run(nothing.offers(Need()))
    without = provider(tmp_path)
    with pytest.raises(ProviderRefused, match="has no SkyPilot"):
        asyncio.run(without.find(""))
    (sight,) = asyncio.run(without.look([Handle("tandem-x-1")]))
    assert (sight.state, "has no SkyPilot" in sight.why) == ("unknown", True)


def test_a_job_is_handed_in_once_and_what_waits_for_it_stays_until_it_is_over(tmp_path: Path) -> None:
    """The texts that run on a machine, run here. A text that was cut on its way begins nothing."""
    begin = 'echo "$KEY" | wc -c; echo began >> starts; sleep 2; exit 7'
    wanted, here = Job("tandem-x-1", ("sh", "-c", begin), env={"KEY": "canary9"}), provider(tmp_path)
    waiting = subprocess.Popen(["bash", "-c", here.task(wanted, {})["run"]])
    handed, pipe = here.handed(wanted), tmp_path / "jobs/.tandem-x-1.in"
    command, text = ["sh", "-c", handed["command"][-1]], handed["text"].encode()
    while not pipe.is_fifo():
        time.sleep(0.02)
    assert oct(pipe.stat().st_mode & 0o777) == "0o600"
    with pipe.open("wb") as cut:  # and another begins before it has closed its end
        cut.write(text[: len(text) - 22])  # whole characters of base64: they would be read with the next
        cut.flush()
        time.sleep(0.1)
        assert not (tmp_path / "jobs/tandem-x-1").exists()
        assert subprocess.run(command, input=text, check=False).returncode in (0, 1)
    codes = [subprocess.run(command, input=text, check=False).returncode for _ in range(2)]
    assert codes[-1] == 0
    assert waiting.poll() is None
    assert waiting.wait(20) == 0
    job = tmp_path / "jobs/tandem-x-1"
    assert [(job / name).read_text() for name in ("console", "starts", ".job/rc")] == ["8\n", "began\n", "7\n"]
    assert not pipe.exists()
    assert [file for file in tmp_path.rglob("*") if file.is_file() and b"canary9" in file.read_bytes()] == []
