"""Answer a repeated write with its first answer. The answer is written in the transaction of the write itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tandem.control.tables import Answered
from tandem.errors import KeyReused
from tandem.io.request_key import RequestKey

KEPT_MS = 24 * 3_600_000


def once(
    session: Session, caller: str, key: RequestKey, now: int, change: Callable[[Session], dict[str, Any]]
) -> dict[str, Any]:
    """Make a change unless this caller made it with this key; return its answer. KeyReused if the request differs."""
    session.execute(sa.delete(Answered).where(Answered.at < now - KEPT_MS))
    name, digest = f"{caller}:{key.key}", key.digest.hex()
    if (row := session.get(Answered, name)) is not None:
        if row.digest != digest:
            raise KeyReused(f"the idempotency key '{key.key}' was used for another request; send a new one")
        return row.answer
    answer = change(session)
    session.add(Answered(id=name, at=now, digest=digest, answer=answer))
    return answer
