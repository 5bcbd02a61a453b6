"""`tandem rollouts top`: one frame, the numbers as JSON, and a view that outlives the service."""

from __future__ import annotations

import codecs
import io
import json
import os
import pty
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from malformed_groups import good
from rich.console import Console
from rollouts_process import rollouts_process
from rollouts_served import RolloutClient, serving_rollouts
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.errors import SpecError, StoreError, TandemError
from tandem.obs.rollouts_status import rollouts_status
from tandem.obs.rollouts_top import TopView, lag_rows, print_frame


@pytest.fixture
def client(tmp_path: Path) -> Iterator[RolloutClient]:
    with serving_rollouts(tmp_path) as client:
        yield client


def busy(client: RolloutClient) -> None:
    """Five tickets, of which one is dropped; three groups, of which one is taken; one post is refused."""
    client.begin()
    client.post("/v2/environments", {"name": "other", "weight": 3})
    tickets = client.post("/v2/tickets", {"environment": 1, "count": 5})["tickets"]
    for ticket in tickets[:3]:
        client.post("/v2/groups", {"groups": [good() | {"ticket": ticket}]})
    client.post(f"/v2/tickets/{tickets[4]}/drop", {"environment": 1, "reason": "no_signal"})
    client.post("/v2/leases", {"epoch": client.epoch, "groups": 1})
    client.post("/v2/trainer/version", {"epoch": client.epoch, "version": 1})
    bad = good()
    bad["trajectories"][1]["ids"][0] = 5000
    assert client.send("/v2/groups?environment=1", {"groups": [bad]}).status_code == 422


def drawn(told: Any, width: int = 100) -> list[str]:
    """Words of each line of a frame."""
    console = Console(file=io.StringIO(), width=width)
    print_frame(told, console)
    return [" ".join(line.strip("│╭╮╰╯─ \n").split()) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_a_frame_shows_every_number_that_the_service_tells(client: RolloutClient, tmp_path: Path):
    busy(client)
    told = rollouts_status(client.url, token_file=tmp_path / "token")
    told["environments"][1] |= {"silent": True, "silent_s": 75.0}
    lines = drawn(told)
    text = "\n".join(lines)
    rates = told["rates"]  # since its start, in the first minute
    assert rates["put_per_s"] == pytest.approx(3 * rates["taken_per_s"]) != 0
    for line in (
        "run run · version 1 · max_lag 1 · epoch 1", "4 of 8 held", "playing ███ 1", "queued █ 2 of at most 20,000",
        "leases 1 lease with 1 group", "0 0 1 ████████████████████████", "1 2 ████████████████████████ 0",
        "no_signal 1, refused 1", "since its start 3 put · 1 taken · 0 acked · 2 dropped",
        "env_0: groups.0.trajectories.1.ids: id 5000", f"put a second {rates['put_per_s']:.5g}",
        f"tokens a second {rates['tokens_per_s']:.5g}",
    ):  # fmt: skip
        assert line in text, f"{line}\n{text}"
    (env,) = [line for line in lines if line.startswith("env_0 ")]
    assert env == "env_0 1 25.0% 100.0% 2 1 no_signal 1, refused 1"
    assert [line for line in lines if line.startswith("other_0 silent 1:15 3 75.0% 0.0% 0 0")]
    assert max(len(line) for line in drawn(told, 80)) <= 80


def test_a_frame_of_a_service_that_nobody_uses_yet(client: RolloutClient, tmp_path: Path):
    text = "\n".join(drawn(rollouts_status(client.url, token_file=tmp_path / "token")))
    for line in ("no trainer has registered yet", "no environment has registered yet", "0 of 0 held", "dropped none"):
        assert line in text
    told = rollouts_status(client.url, token_file=tmp_path / "token")
    told["stored"]["broken"] = "the disk failed"
    assert "nothing more is acknowledged until a restart: the disk failed" in "\n".join(drawn(told))


def test_the_command_prints_one_frame_or_the_status_as_json(client: RolloutClient, tmp_path: Path):
    busy(client)
    (tmp_path / "ready.json").write_text(json.dumps({"url": client.url, "token_file": str(tmp_path / "token")}))
    printed = CliRunner().invoke(app, ["rollouts", "top", str(tmp_path), "--json"])
    told = json.loads(printed.stdout)
    mine = client.get("/v2/status")
    assert {name: told[name] for name in ("queue", "taken_lag", "dropped", "totals", "trainer")} == {
        name: mine[name] for name in ("queue", "taken_lag", "dropped", "totals", "trainer")
    }
    assert told["url"] == client.url
    assert [row["field"] for row in told["quarantine"]] == ["groups.0.trajectories.1.ids"]
    for source, options in ((tmp_path, []), (tmp_path / "ready.json", []), (client.url, ["--token-file"])):
        named = [*options, str(tmp_path / "token")] if options else []
        once = CliRunner().invoke(app, ["rollouts", "top", str(source), *named, "--once"])
        assert once.exit_code == 0
        assert once.stdout.count("run run · version 1") == 1


def test_what_is_asked_and_is_not_there_is_named(client: RolloutClient, tmp_path: Path):
    empty, broken, two_lines = tmp_path / "empty", tmp_path / "broken.json", tmp_path / "two"
    empty.mkdir()
    broken.write_text("[]")
    two_lines.write_text("a\nb")
    stranger = tmp_path / "stranger"
    stranger.write_text("another")
    asked: list[tuple[str, Path | None, type[TandemError], str]] = [
        ("http://127.0.0.1:9", None, StoreError, "127.0.0.1:9: no rollout service answers"),
        ("http://[::1", None, StoreError, "no rollout service answers"),
        (client.url, None, StoreError, "refuses the token"),
        (client.url, stranger, StoreError, "refuses the token"),
        (client.url, two_lines, SpecError, "contains no token"),
        (client.url, tmp_path / "none", SpecError, "cannot be read"),
        (f"{client.url}/v2", tmp_path / "token", StoreError, "not a service of `tandem rollouts serve`"),
        (str(tmp_path / "nowhere"), None, StoreError, "neither a URL nor the data directory"),
        (str(empty), None, StoreError, "ready.json does not exist"),
        (str(broken), None, StoreError, "not what `tandem rollouts serve` writes"),
    ]
    for source, token_file, kind, text in asked:
        with pytest.raises(kind) as raised:
            rollouts_status(source, token_file=token_file)
        assert text in str(raised.value)


def test_what_others_wrote_draws_no_line_and_steers_no_terminal(client: RolloutClient, tmp_path: Path):
    client.begin()
    body = {"groups": [good() | {"[red]\n\x1b[2Jtandem rollouts": 1}]}
    assert client.send("/v2/groups?environment=1", body).status_code == 422
    told = rollouts_status(client.url, token_file=tmp_path / "token")
    assert "\x1b" in json.loads(json.dumps(told["quarantine"][0]))["reason"] or "\n" in told["quarantine"][0]["reason"]
    console = Console(file=io.StringIO(), width=200, color_system=None, force_terminal=True)
    print_frame(told, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    assert "[red]" in text
    assert len([line for line in text.splitlines() if "refused" in line and "tandem rollouts" in line]) == 1


def test_lags_are_told_one_by_one_until_they_are_many():
    assert lag_rows({"0": 2, "3": 1}, {"1": 5}) == [("0", 2, 0), ("1", 0, 5), ("3", 1, 0)]
    many = {str(lag): 1 for lag in range(12)}
    assert lag_rows(many, {"9": 4}) == [("0", 1, 0), ("1", 1, 0), ("2-3", 2, 0), ("4-7", 4, 0), ("8-15", 4, 4)]


def test_a_service_that_goes_and_comes_is_told_apart_from_one_that_was_started_again(
    client: RolloutClient, tmp_path: Path
):
    told = rollouts_status(client.url, token_file=tmp_path / "token") | {"url": "U"}
    view = TopView("U", Console(file=io.StringIO()))
    assert view.came(told | {"uptime_s": 100.0}, 10.0, 10.1) == []
    assert view.came(told | {"uptime_s": 101.0}, 11.0, 13.1) == []  # a slow answer is no restart
    assert view.lost(StoreError("U: gone"), 14.0) == ["U: gone; asking again"]
    assert view.lost(StoreError("U: gone"), 15.0) == []
    assert "the numbers are old: U: gone" in rendered(view)
    assert view.came(told | {"uptime_s": 106.0}, 16.0, 16.1) == ["U answers again"]
    assert "from before" not in rendered(view)
    assert view.came(told | {"uptime_s": 0.5}, 17.0, 17.1) == ["U was restarted; rates and totals count from then"]
    assert view.came(told | {"uptime_s": 1.5}, 18.0, 18.1) == []


def rendered(view: TopView) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(view.frame())
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_it_goes_on_over_a_service_that_is_killed_and_started_again_elsewhere(tmp_path: Path):
    data_dir, said = tmp_path / "data", queue.Queue[str]()

    def until(word: str) -> str:
        while word not in (line := said.get(timeout=20)):
            pass
        return line

    with rollouts_process(data_dir, "--port", "0") as client:
        client.begin()
        client.post("/v2/groups", {"groups": [good()]})
        top = subprocess.Popen(
            [sys.executable, "-m", "tandem", "rollouts", "top", str(data_dir), "--every", "0.1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=_hears_sigint,
        )
        assert top.stdout is not None
        reader = threading.Thread(target=lambda out: [said.put(line) for line in out], args=(top.stdout,))
        reader.start()
        try:
            assert until("queued").startswith("version 0 · 1 queued · 0 playing")
            first = client.url
        except BaseException:
            top.kill()
            raise
    try:
        until("asking again")
        with rollouts_process(data_dir, "--port", "0") as client:
            assert client.url != first
            assert client.url in until("was restarted")
            client.begin()
            client.post("/v2/groups", {"groups": [good()]})
            until("2 queued")
            top.send_signal(signal.SIGINT)
            assert top.wait(10) == 0
    finally:
        top.kill()
        top.wait()
        reader.join()
        top.stdout.close()
    with rollouts_process(data_dir, "--port", "0", ready=tmp_path / "elsewhere.json") as client:
        assert not (data_dir / "ready.json").exists()
        assert rollouts_status(str(tmp_path / "elsewhere.json"))["queue"]["queued"] == 2


def test_in_a_terminal_the_panel_is_drawn_anew_and_says_that_the_service_went(tmp_path: Path):
    ours, theirs = pty.openpty()
    with serving_rollouts(tmp_path) as client:
        client.begin()
        command = [sys.executable, "-m", "tandem", "rollouts", "top", client.url, "--every", "0.1", "--token-file"]
        top = subprocess.Popen(
            [*command, str(tmp_path / "token")],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "50"},
            preexec_fn=_hears_sigint,
        )
        os.close(theirs)
        screen = _Screen(ours)
        try:
            screen.until("run run · version 0")
            client.post("/v2/trainer/version", {"epoch": client.epoch, "version": 7})
            screen.until("run run · version 7")
        except BaseException:
            top.kill()
            raise
    try:
        screen.until("asking again")
        screen.until("the numbers are old")
        assert "run run · version 7" in screen.text
        top.send_signal(signal.SIGINT)
        screen.until("\x1b[?25h")  # the cursor is there again
        assert top.wait(10) == 0
    finally:
        top.kill()
        top.wait()
        os.close(ours)


def _hears_sigint() -> None:
    """What a shell starts in the background ignores it, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class _Screen:
    def __init__(self, fd: int) -> None:
        self.fd, self.text = fd, ""

    def until(self, word: str) -> None:
        decoder, deadline = codecs.getincrementaldecoder("utf-8")("replace"), time.monotonic() + 20
        while word not in self.text:
            assert time.monotonic() < deadline, self.text[-3000:]
            assert select.select([self.fd], [], [], 20)[0], self.text
            self.text += decoder.decode(os.read(self.fd, 65536))
