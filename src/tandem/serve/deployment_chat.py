"""Chat in the terminal with a model behind a name of a control server."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx

from tandem.client.place import Place, find_place
from tandem.client.requests import CONNECT_S, refusal
from tandem.errors import ControlSilent, SpecError, TandemError
from tandem.io.retry_after import retry_after_s
from tandem.serve.terminal_chat import STOPPED, converse, ctrl_c_cancels
from tandem.types import Message

_PATIENCE_S, _READ_S = 300.0, 600.0
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
"""What a request says so that the replica renders its template with thinking on, or refuses it if that has none."""


def is_deployment(source: str | Path) -> bool:
    """Return whether `tandem chat SOURCE` means a name of the control server that the user has logged in to."""
    name = str(source)
    if "/" in name or Path(source).exists() or (place := find_place()) is None:
        return False
    try:
        told = httpx.get(f"{place.url}/v1/models", headers=_headers(place), timeout=CONNECT_S, trust_env=False)
    except httpx.TransportError as error:
        raise ControlSilent(f"{place.url} did not answer ({type(error).__name__}): is '{name}' a name there?") from None
    if told.status_code != 200:
        raise refusal(told.status_code, told.content)
    return name in {str(each["id"]) for each in told.json()["data"]}


def chat_with_deployment(
    name: str, *, temperature: float = 0.0, max_tokens: int = 512, system: str = "", thinking: bool = False
) -> None:
    """Talk to a model behind a name, until /exit."""
    if (place := find_place()) is None:
        raise SpecError("no control server is configured: use `tandem login URL`")

    async def talk() -> None:
        timeout = httpx.Timeout(_READ_S, connect=CONNECT_S)
        headers = _headers(place) | {"X-Session-Id": uuid.uuid4().hex}
        async with httpx.AsyncClient(base_url=place.url, headers=headers, timeout=timeout, trust_env=False) as http:
            asked = {"model": name, "temperature": temperature, "max_tokens": max_tokens, "stream": True}
            await converse(DeploymentConversation(http, asked | (THINKING if thinking else {}), system))

    asyncio.run(talk())


@dataclass
class DeploymentConversation:
    """`asked`: the fields of each request but the messages."""

    http: httpx.AsyncClient
    asked: dict[str, Any]
    system: str = ""
    messages: list[Message] = field(default_factory=list[Message])
    revision: str = ""

    def forget(self) -> None:
        self.messages = []

    async def reply(self, said: str, tell: Callable[[str], None]) -> None:
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        messages: list[Message] = [*(self.messages or first), {"role": "user", "content": said}]
        task = asyncio.create_task(self._answer(messages, tell))
        with ctrl_c_cancels(task):
            await asyncio.wait((task,))
        if task.cancelled():
            tell(STOPPED)
            return
        try:
            answer = task.result()
        except (TandemError, httpx.TransportError) as error:
            tell(f"\n({error or type(error).__name__}; this turn is forgotten)\n")
            return
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    async def _answer(self, messages: list[Message], tell: Callable[[str], None]) -> str:
        """Tell the answer as it comes; return it. A model that is being started is waited for."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            body = {**self.asked, "messages": messages}
            async with self.http.stream("POST", "/v1/chat/completions", json=body) as told:
                if told.status_code == 200:
                    self._tell_revision(told.headers.get("x-tandem-revision", ""), tell)
                    return await _told(told, tell)
                error = refusal(told.status_code, await told.aread())
            wait_s = retry_after_s(told.headers.get("retry-after", "")) if told.status_code == 503 else None
            if wait_s is None or time.monotonic() + wait_s > until:
                raise error
            tell(f"({error}; waiting)\n")
            await asyncio.sleep(wait_s)

    def _tell_revision(self, revision: str, tell: Callable[[str], None]) -> None:
        if revision != self.revision:
            tell(f"({revision})\n")
        self.revision = revision


async def _told(told: httpx.Response, tell: Callable[[str], None]) -> str:
    parts, reason, thinks = list[str](), "", False
    async for line in told.aiter_lines():
        if not line.startswith("data:") or line == "data: [DONE]":
            continue
        event = cast("dict[str, Any]", json.loads(line.removeprefix("data:")))
        if "error" in event:
            raise ControlSilent(str(event["error"]["message"]))
        for choice in event["choices"]:
            thought, text = (choice["delta"].get(name) or "" for name in ("reasoning_content", "content"))
            if thought:
                tell(thought if thinks else f"<think>{thought}")
                thinks = True
            if text:
                tell(f"</think>{text}" if thinks else text)
                thinks = False
                parts.append(text)
            reason = choice.get("finish_reason") or reason
    if not reason:
        raise ControlSilent("the answer broke off")
    tell("\n(cut at max_tokens)\n" if reason == "length" else "\n")
    return "".join(parts)


def _headers(place: Place) -> dict[str, str]:
    return {"Authorization": f"Bearer {place.key}"}
