"""Requests of an agent to the control plane."""

from __future__ import annotations

import logging
from typing import TypeVar

import httpx
from pydantic import ValidationError

from tandem.errors import Fenced, RunError
from tandem.shapes.base import Answer, Asked

_log = logging.getLogger(__name__)
A = TypeVar("A", bound=Answer)
_TIMEOUT_S = 10.0
_DEAD = (401, 403, 404, 409, 410)


class Link:
    """The routes of one attempt. An answer that is none is `None`: send the same request again."""

    def __init__(self, url: str, token: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._client = httpx.Client(headers=headers, timeout=timeout_s)
        self._silent = False

    def ask(self, what: str, body: Asked, kind: type[A]) -> A | None:
        """Send a request. Fenced if the attempt is another execution's or closed; RunError if this body is refused."""
        try:
            told = self._client.post(f"{self._url}/{what}", content=body.model_dump_json())
        except httpx.TransportError as error:
            return self._nothing(f"{type(error).__name__}: {error}")
        if told.status_code in _DEAD:
            raise Fenced(f"the control plane answers {what} with {told.status_code}: {told.text:.300}")
        if told.status_code in (408, 429) or (told.status_code >= 500 and told.status_code != 507):
            return self._nothing(f"{told.status_code}: {told.text:.200}")
        if told.status_code >= 400:
            raise RunError(f"the control plane refuses this {what}: {told.status_code}: {told.text:.300}")
        try:
            answer = kind.model_validate_json(told.content)
        except ValidationError as error:  # a proxy's page, for example
            return self._nothing(f"an answer that is none: {error}")
        if self._silent:
            _log.warning("the control plane answers again")
        self._silent = False
        return answer

    def close(self) -> None:
        self._client.close()

    def _nothing(self, why: str) -> None:
        if not self._silent:
            _log.warning("no answer from %s, asked again: %s", self._url, why)
        self._silent = True
