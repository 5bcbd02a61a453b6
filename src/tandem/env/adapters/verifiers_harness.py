# pyright: basic, reportMissingImports=false
"""A harness for verifiers that runs in this process: a chat with the task's tools until the model calls none.

verifiers' own harnesses are programs that `uv` starts with their packages: a process and a download per episode. This
one keeps their contract: each model call goes through the rollout's endpoint, which enforces limits and stops, and
writes the trace.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, cast

import httpx
import mcp.client.streamable_http  # noqa: F401 - imported early: a later import would block the event loop
from verifiers.v1 import Harness, HarnessConfig, ProgramResult
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

_MAX_CHARS = 16_000  # most characters of a tool's answer


class ChatHarnessConfig(HarnessConfig):
    pass


class ChatHarness(Harness[ChatHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages = opening(system, prompt)
        limit_s = self.config.tool_timeout
        async with AsyncExitStack() as stack:
            servers = {name: {"url": url, "timeout": limit_s} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            # No timeout here: deadlines of verifiers and Tandem cancel the request.
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                response = await client.post(
                    f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
                )
                if response.is_error:  # a limit or a stop; verifiers' session records other errors
                    return ProgramResult(exit_code=1, stdout="", stderr=response.text[-2_000:])
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                if not (calls := message.get("tool_calls")):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    content = await _called(connections, dispatch, call["function"], limit_s)
                    name = call["function"]["name"]
                    messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})


def opening(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """Return the task's opening messages in OpenAI's form."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(message_to_wire(each) for each in cast("Sequence[Any]", prompt or []))]


async def _called(connections: Any, dispatch: Any, function: dict[str, str], limit_s: float) -> Any:
    """Call a tool and return its answer; an error becomes the answer."""
    name = function["name"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        return f"error: invalid JSON in the call ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    if name not in dispatch:
        return f"error: no tool is called '{name:.80}'; there are: {', '.join(dispatch)}"
    try:
        async with asyncio.timeout(limit_s):
            content = await call_mcp(connections, dispatch, name, arguments)
    except Exception as error:  # noqa: BLE001 - a tool's errors are answers to the model
        return f"error: {type(error).__name__}: {error}"[:_MAX_CHARS]
    return content[:_MAX_CHARS] if isinstance(content, str) else content


__all__ = ["ChatHarness"]
