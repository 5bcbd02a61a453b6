"""A model behind a name, the whole way: a real server, a real agent, a run that was really trained."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import openai.types.chat
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from whole_way import Control, until

from tandem.cli.main import app
from tandem.client import Tandem
from tandem.control import counts
from tandem.errors import ControlConflict, ControlNotKnown
from tandem.io import sealed_directory
from tandem.shapes.deployments import RevisionInfo


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    started = Control(tmp_path_factory.mktemp("control"))
    yield started
    started.close()


@pytest.fixture
def control(shared: Control) -> Control:
    """One for all tests; each begins when the replicas of the one before have ended."""
    until(lambda: not shared.processes("serve"), 60)
    return shared


@pytest.fixture(scope="module")
def run(shared: Control) -> str:
    return trained(shared, 3)


def trained(control: Control, steps: int, **more: Any) -> str:
    run = control.submit(steps, **more)
    until(lambda: control.state(run) == "succeeded", 240)
    return run


def test_two_checkpoints_behind_a_name(control: Control, run: str, monkeypatch: pytest.MonkeyPatch):
    url = f"http://127.0.0.1:{control.port}"
    monkeypatch.setenv("TANDEM_CONTROL", url)
    monkeypatch.setenv("TANDEM_CONTROL_KEY", control.token)
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

        def told(*words: str) -> str:
            found = CliRunner().invoke(app, list(words))
            assert not found.exit_code, found.output
            return found.output

        told("deploy", f"{run}@2", "--name", "support")
        assert f"{run}@3" in told("deploy", run, "--name", "last")  # its last saved step
        told("undeploy", "last")
        until(lambda: is_ready(1), 120)
        assert told("deployments").split() == ["support@1", f"{run}@2", "weight", "100", "ready"]
        assert json.loads(told("deployments", "support", "--json"))[0]["revisions"][0]["step"] == 2
        assert revision_of("support") == "support@1"
        talked = CliRunner().invoke(app, ["chat", "support", "--max-tokens", "4"], input="hi\n/exit\n")
        assert not talked.exit_code, talked.output
        assert "(support@1)" in talked.output
        thinks = ["chat", "support", "--max-tokens", "4", "--thinking"]
        assert "<think>" in CliRunner().invoke(app, thinks, input="hi\n/exit\n").output
        assert "<think>" not in talked.output
        stream = ask.chat.completions.create(
            model="support", messages=[{"role": "user", "content": "hi"}], max_tokens=4, stream=True
        )
        assert [piece.choices[0].finish_reason for piece in stream if piece.choices][-1] in ("stop", "length")
        for words, why in (
            (("deploy", "run_nothing@2", "--name", "support"), "run"),
            (("deploy", f"{run}@two", "--name", "support"), "write the step as a number"),
            (("promote", "support"), "write a name and a revision"),
            (("rollback", "support"), "nothing to go back to"),
            (("undeploy", "another"), "no deployment 'another'"),
        ):
            refused = CliRunner().invoke(app, list(words))
            assert refused.exit_code
            assert why in " ".join(f"{refused.output} {refused.exception}".replace("│", " ").split())
        server.deploy(run, 3, name="support")
        with pytest.raises(ControlConflict, match="does not answer yet"):
            server.promote("support", 2)
        until(lambda: is_ready(2), 120)
        assert (revision_of("support"), revision_of("support@2")) == ("support@1", "support@2")
        told("promote", "support@2")
        assert revision_of("support") == "support@2"
        told("rollback", "support")
        assert revision_of("support") == "support@1"

        for pid in control.processes("serve", "support@1"):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not is_ready(1), 60)
        until(lambda: is_ready(1), 120)
        assert revision_of("support") == "support@1"

        assert [each.id for each in server.runs()] == [run]
        streams = [
            ask.chat.completions.create(
                model="support", messages=[{"role": "user", "content": "hi"}], max_tokens=200, stream=True, n=8
            )
            for _ in range(4)
        ]
        told("undeploy", "support")  # what has begun is answered
        for each in streams:
            ends = [piece.choices[0].finish_reason for piece in each if piece.choices]
            assert len([end for end in ends if end in ("stop", "length")]) == 8
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
        until(lambda: server.deployment("tampered").revisions[0].state == "failed", 120)
        found = server.deployment("tampered").revisions[0]
        assert "model.safetensors" in found.why
        assert not found.ready
        server.deploy(run, 7, name="never")
        until(lambda: server.deployment("never").revisions[0].state == "failed", 120)
        assert "has no checkpoint of step 7" in server.deployment("never").revisions[0].why


def test_a_replica_takes_thumbs_sleeps_when_it_is_idle_and_wakes_for_the_next_request(
    control: Control, run: str, monkeypatch: pytest.MonkeyPatch
):
    url = f"http://127.0.0.1:{control.port}"
    monkeypatch.setenv("TANDEM_CONTROL", url)
    monkeypatch.setenv("TANDEM_CONTROL_KEY", control.token)
    ask = openai.OpenAI(base_url=f"{url}/v1", api_key=control.key("chat"), max_retries=8)

    def told(*words: str) -> str:
        found = CliRunner().invoke(app, list(words))
        assert not found.exit_code, found.output
        return found.output

    def chat() -> str:
        return ask.chat.completions.create(
            model="support", messages=[{"role": "user", "content": "hi"}], max_tokens=4
        ).id

    with Tandem(url, control.token) as server:

        def revision() -> RevisionInfo:
            return server.deployment("support").revisions[0]

        told("deploy", f"{run}@2", "--name", "support", "--feedback", "--keep-s", "3")
        ids = [chat() for _ in range(3)]
        for id, value in zip(ids, (True, True, False), strict=True):
            ask.post("/feedback", cast_to=object, body={"id": id, "value": value})
        assert (revision().feedback.count, round(revision().feedback.mean, 3)) == (3, 0.667)
        until(lambda: revision().errors.count == 3)
        until(lambda: revision().asleep, 120)
        assert not control.processes("serve", "support@1")
        shown = told("deployments")
        assert "asleep" in shown
        assert "failed   0 of 3 (0 %, 0 to 56 %)" in shown
        assert "feedback 0.667 (" in shown
        again = chat()  # wakes it
        assert again not in ids
        ask.post("/feedback", cast_to=object, body={"id": ids[0], "value": False})  # it has kept the chats of before
        assert (revision().feedback.count, round(revision().feedback.mean, 3)) == (3, 0.333)
        for share in ("5", "0", "-1%", "x", "100%"):
            assert (
                CliRunner().invoke(app, ["deploy", f"{run}@2", "--name", "support", "--canary", share]).exit_code == 2
            )
        told("deploy", f"{run}@2", "--name", "support", "--canary", "50%")
        assert "canary 50 %" in told("deployments", "support")
        told("undeploy", "support")
        until(lambda: not control.processes(), 60)  # also none of the replica that was about to start


def chat(ask: openai.OpenAI, model: str) -> openai.types.chat.ChatCompletion:
    return ask.with_options(max_retries=0).chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=4
    )


def a_canary_that_users_dislike_is_taken_away(server: Tandem, ask: openai.OpenAI, run: str) -> None:
    server.deploy(run, 1, name="support", canary=0.5, feedback=True)
    until(lambda: server.deployment("support").revisions[-1].ready, 60)
    for _ in range(24):
        told = chat(ask, "support")
        ask.post("/feedback", cast_to=object, body={"id": told.id, "value": told.model != "support@3"})
    old, tried = server.deployment("support").revisions[1:]
    assert tried.feedback.high < old.feedback.low
    assert (tried.canary, tried.feedback.count + old.feedback.count) == (0.5, 24)  # thumbs alone take nothing away
    server.rollback("support")
    assert {chat(ask, "support").model for _ in range(12)} == {"support@2"}


def a_canary_that_fails_is_rolled_back_by_itself(server: Tandem, ask: openai.OpenAI, run: str, steps: Path) -> None:
    """An adapter whose training has diverged: its file is proven, and what it computes overflows."""
    with sealed_directory.sealed(steps / "step-3") as fresh:
        without_seal = shutil.ignore_patterns(sealed_directory.NAME)
        shutil.copytree(steps / "step-2", fresh, dirs_exist_ok=True, ignore=without_seal)
        file = fresh / "deploy/adapter_model.safetensors"
        save_file({name: tensor * 1e25 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    server.deploy(run, 3, name="support", canary=0.5, feedback=True)
    until(lambda: server.deployment("support").revisions[-1].ready, 60)
    failed, began = 0, time.monotonic()
    while server.deployment("support").revisions[-1].canary:
        assert time.monotonic() < began + 60
        with ThreadPoolExecutor(4) as together:  # in the same batches
            asked = [together.submit(chat, ask, model) for model in ("support", "support", "sales", "support@1")]
        assert [each.result().model for each in asked[2:]] == ["sales@1", "support@1"]
        for each in asked[:2]:
            if (error := each.exception()) is None:
                assert each.result().model == "support@2"
            else:
                assert "adapter 'support@4': its logits are not finite" in str(error)
                failed += 1
    why = server.deployment("support").revisions[-1].why
    told = re.fullmatch(r"rolled back: (\d+) of its (\d+) answers failed, and 0 of (\d+) of the others: more .*", why)
    assert told, why
    of_it, asked_of_it, others = map(int, told.groups())
    assert 0 < of_it == asked_of_it <= failed < 100  # how few suffice depends on how the requests fell
    assert 1 / math.comb(of_it + others, of_it) <= counts.SURE  # the chance that all failures are the canary's
    assert {chat(ask, model).model for model in ("support", "sales") for _ in range(8)} == {"support@2", "sales@1"}


def test_adapters_of_one_run_are_served_by_one_process_and_promoted_within_seconds(
    control: Control, monkeypatch: pytest.MonkeyPatch
):
    run = trained(control, 2, model={"preset": "tiny", "lora": {"rank": 4}})
    url = f"http://127.0.0.1:{control.port}"
    ask = openai.OpenAI(base_url=f"{url}/v1", api_key=control.key("chat"), max_retries=8)

    def versions_of(model: str) -> tuple[str, list[list[int]]]:
        told = ask.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=4
        ).model_dump()
        return told["model"], [version for version, _ in told["choices"][0]["weight_versions"]]

    with Tandem(url, control.token) as server:
        server.deploy(run, 1, name="support", feedback=True)
        assert versions_of("support") == ("support@1", [1])
        server.deploy(run, 2, name="support", feedback=True)
        until(lambda: server.deployment("support").revisions[1].ready, 60)
        server.promote("support", 2)
        assert versions_of("support") == ("support@2", [2])
        assert versions_of("support@1") == ("support@1", [1])
        server.deploy(run, 2, name="sales", feedback=True)
        until(lambda: server.deployment("sales").revisions[0].ready, 60)
        serving = control.processes("serve")
        a_canary_that_users_dislike_is_taken_away(server, ask, run)
        a_canary_that_fails_is_rolled_back_by_itself(server, ask, run, control.directory(run) / "checkpoints")
        assert control.processes("serve") == serving  # the replica of all of them has not even been started again
        weights = control.directory(run) / "checkpoints/step-1/deploy/adapter_model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        server.deploy(run, 1, name="support", feedback=True)
        until(lambda: "adapter_model.safetensors" in server.deployment("support").revisions[-1].why, 60)
        assert not server.deployment("support").revisions[-1].ready
        assert len(control.processes("serve", "support@1")) == len(
            control.processes("serve")
        )  # one server, and its keeper
        server.undeploy("support")
        server.deploy(run, 2, name="support", feedback=True)  # on the replica that had other weights as support@1
        assert versions_of("support") == ("support@1", [2])
        server.undeploy("support")
        assert versions_of("sales") == ("sales@1", [2])
        server.undeploy("sales")
        until(lambda: not control.processes("serve"), 60)
