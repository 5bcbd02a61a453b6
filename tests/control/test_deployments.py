"""A model behind a name, the whole way: a real server, a real agent, a run that was really trained."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from whole_way import Control, until

from tandem.client import Tandem
from tandem.errors import ControlConflict, ControlNotKnown


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    started = Control(tmp_path)
    yield started
    started.close()


def test_two_checkpoints_behind_a_name(control: Control):
    run = control.submit(3)
    until(lambda: control.state(run) == "succeeded", 240)
    url = f"http://127.0.0.1:{control.port}"
    ask = openai.OpenAI(base_url=f"{url}/v1", api_key=control.key("chat"), max_retries=0)

    def revision_of(model: str) -> str | None:
        told = ask.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=4
        )
        assert told.parse().choices
        return told.headers.get("x-tandem-revision")

    with Tandem(url, control.token) as server:

        def is_ready(n: int) -> bool:
            return server.deployment("support").revisions[n - 1].ready

        server.deploy(run, 2, name="support")
        until(lambda: is_ready(1), 120)
        assert revision_of("support") == "support@1"
        server.deploy(run, 3, name="support")
        with pytest.raises(ControlConflict, match="does not answer yet"):
            server.promote("support", 2)
        until(lambda: is_ready(2), 120)
        assert (revision_of("support"), revision_of("support@2")) == ("support@1", "support@2")
        server.promote("support", 2)
        assert revision_of("support") == "support@2"
        server.rollback("support")
        assert revision_of("support") == "support@1"

        for pid in control.processes("serve", "support@1"):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not is_ready(1), 60)
        until(lambda: is_ready(1), 120)
        assert revision_of("support") == "support@1"

        assert [each.id for each in server.runs()] == [run]
        server.undeploy("support")
        with pytest.raises(ControlNotKnown):
            server.deployment("support")
        with pytest.raises(openai.NotFoundError, match="no deployment 'support'"):
            revision_of("support")
        until(lambda: not control.processes("serve", "support@1"), 60)

        weights = control.directory(run) / "checkpoints/step-3/deploy/model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        server.deploy(run, 3, name="tampered")
        until(lambda: "model.safetensors" in server.deployment("tampered").revisions[0].why, 120)
        assert server.deployment("tampered").revisions[0].state == "failed"
        assert not server.deployment("tampered").revisions[0].ready
