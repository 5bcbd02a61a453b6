"""What a person answers, as an assistant's client hands it on."""

from __future__ import annotations

from typing import Any

from mcp_types import ElicitResult


def answering(action: str, content: Any, asked: list[str]) -> Any:
    async def answer(_: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action=action, content=content)  # type: ignore[arg-type]

    return answer
