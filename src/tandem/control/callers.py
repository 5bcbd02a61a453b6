"""Who calls: the operator, a key, or the agent of an attempt. The rows of the keys are kept in memory.

One process owns the database, so what is in memory is what is in the database: every change is written first.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tandem.control.tables import Key
from tandem.control.tokens import attempt_token, hash_of, id_in, serve_token
from tandem.shapes.runs import SCOPES

OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Caller:
    """A key and what it may do; the operator is a key without a row."""

    key: str
    org: str
    scopes: frozenset[str]
    project: str = ""
    """The id of the only project that it may see; empty: all of its org."""

    @property
    def is_operator(self) -> bool:
        return self.key == OPERATOR


@dataclass(frozen=True, slots=True)
class AgentCaller:
    """The agent of one attempt. Its token lets it speak for that attempt only."""

    attempt: str


class Callers:
    """Tells who a credential is. `token`: the operator's, whose org is `org`."""

    def __init__(self, token: str, secret: bytes, org: str, rows: Iterable[Key], clock: Callable[[], int]) -> None:
        self._operator = hash_of(token)
        self._secret, self._org, self._clock = secret, org, clock
        self._keys = {row.id: row for row in rows}

    def put(self, row: Key) -> None:
        """Know a key that was made or revoked."""
        self._keys[row.id] = row

    def serve_token(self, attempt: str) -> str:
        """Return the token of the server that an attempt starts."""
        return serve_token(self._secret, attempt)

    def rows(self) -> list[Key]:
        return list(self._keys.values())

    def find(self, authorization: str) -> Caller | AgentCaller | None:
        """Return who sent this header; None if it is not known, has expired or was revoked."""
        scheme, _, token = authorization.partition(" ")
        if scheme != "Bearer" or not token.isascii():
            return None
        if hmac.compare_digest(hash_of(token), self._operator):
            return Caller(OPERATOR, self._org, frozenset(SCOPES))
        kind, name = id_in(token)
        if kind == "attempt":
            return AgentCaller(name) if hmac.compare_digest(token, attempt_token(self._secret, name)) else None
        row = self._keys.get(name)
        if row is None or not hmac.compare_digest(hash_of(token), row.sha256):
            return None
        if row.revoked_at or (row.expires_at and self._clock() >= row.expires_at):
            return None
        return Caller(row.id, row.org, frozenset(row.scopes), row.project)


def all_keys(session: Session) -> list[Key]:
    return list(session.scalars(sa.select(Key)))
