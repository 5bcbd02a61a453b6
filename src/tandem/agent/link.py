"""Requests of an agent to the control plane."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TypeVar

import httpx
from pydantic import ValidationError

from tandem.errors import ControlNotKnown, ControlSilent, Fenced, RunError
from tandem.shapes.base import Answer, Asked

_log = logging.getLogger(__name__)
A = TypeVar("A", bound=Answer)
PATIENCE_S = 10.0
"""How long to wait for an answer."""
_INDEX_S = 30.0
_DEAD = (401, 403, 404, 409, 410)


class Link:
    """The routes of one attempt. An answer that is none is `None`: send the same request again."""

    def __init__(self, url: str, token: str, *, transport: httpx.BaseTransport | None = None) -> None:
        """`transport`: in place of the network."""
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._client = httpx.Client(headers=headers, timeout=PATIENCE_S, transport=transport)
        self._silent = False

    def ask(self, what: str, body: Asked, kind: type[A], patience_s: float = PATIENCE_S) -> A | None:
        """Send a request. Fenced if the attempt is another execution's or closed; RunError if this body is refused."""
        try:
            told = self._client.post(f"{self.url}/{what}", content=body.model_dump_json(), timeout=patience_s)
        except httpx.TransportError as error:
            return self._nothing(f"{type(error).__name__}: {error}")
        if told.status_code in _DEAD and not _is_ours(told):
            return self._nothing(f"{told.status_code}, and not from a control plane: {told.text:.200}")
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

    def fetch(self, path: str, headers: Mapping[str, str]) -> bytes:
        """Return what the index of packages has under this path. ControlNotKnown if it has nothing, ControlSilent if it
        does not answer for a while; Fenced if the attempt is closed."""
        until, why = time.monotonic() + _INDEX_S, ""
        while time.monotonic() < until:
            try:
                told = self._client.get(f"{self.url}/simple/{path}", headers=dict(headers))
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if told.status_code == 200:
                    return told.content
                if told.status_code == 404 and _is_ours(told):
                    raise ControlNotKnown(f"the index has no '{path:.100}'", status=404)
                if told.status_code in _DEAD and _is_ours(told):
                    raise Fenced(f"the control plane answers with {told.status_code}: {told.text:.300}")
                why = f"{told.status_code}: {told.text:.200}"
            time.sleep(1.0)
        raise ControlSilent(f"the index of packages did not answer for {_INDEX_S:.0f} s: {why}")

    def close(self) -> None:
        self._client.close()

    def _nothing(self, why: str) -> None:
        if not self._silent:
            _log.warning("no answer from %s, asked again: %s", self.url, why)
        self._silent = True


def _is_ours(told: httpx.Response) -> bool:
    """Return whether an error has the form of Tandem's services; a proxy's page has not."""
    try:
        error = told.json()["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(error, dict) and "code" in error
