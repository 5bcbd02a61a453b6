"""Headless Chromium over its debugging pipe: DevTools' messages, a NUL after each. No driver, no port, no package."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser_only = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt install chromium)")

# Chromium reads commands at 3 and writes answers at 4. Our ends may lie there, so they move up first.
_EXEC = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(ends[0], 3); os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--no-sandbox",
    "--window-size=1100,1400",
)  # fmt: skip


class Page:
    """A tab; `said` is what its console, its dialogs and its policy reported."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser, self.said = browser, list[str]()
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        browser.pages[self.session] = self
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)

    def close(self) -> None:
        """Close the tab, and its connections with it: a browser has six to a server."""
        self.browser.call("Target.closeTarget", targetId=self.target)

    def call(self, method: str, **params: Any) -> Any:
        return self.browser.call(method, self.session, **params)

    def run(self, script: str) -> Any:
        """A JavaScript expression's value."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 15) -> None:
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"waited in vain for {script}; the page is:\n{self.text}\n{self.said}"
            time.sleep(0.03)

    @property
    def text(self) -> str:
        """As a person sees it."""
        return self.run("document.body ? document.body.innerText : ''")

    def type(self, text: str) -> None:
        """Into what has the focus, with Enter after it."""
        self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key="Enter", windowsVirtualKeyCode=13, text="\r")

    def heard(self, method: str, params: Any) -> None:
        if method in ("Page.javascriptDialogOpening", "Runtime.exceptionThrown"):
            self.said.append(f"{method} {params}")
        elif method == "Log.entryAdded":
            self.said.append(params["entry"]["text"])


class Browser:
    def __init__(self, process: subprocess.Popen[bytes], commands: int, answers: int) -> None:
        self.process, self._commands, self._answers = process, commands, answers
        self.pages: dict[str, Page] = {}
        self._rest, self._number = b"", 0

    def call(self, method: str, session: str = "", **params: Any) -> Any:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(asked).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]
            if told.get("sessionId") in self.pages:
                self.pages[told["sessionId"]].heard(told["method"], told["params"])

    def _next(self, seconds: float = 60) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._answers], [], [], seconds)[0], "the browser is silent"
            came = os.read(self._answers, 1 << 20)
            assert came, f"the browser ended: {self.process.poll()}"
            self._rest += came
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    assert CHROMIUM
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable,
            "-Sc",
            _EXEC,
            str(theirs_in),
            str(theirs_out),
            CHROMIUM,
            *_FLAGS,
            f"--user-data-dir={profile}",
        ],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(process, commands, answers)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(commands)
        os.close(answers)
