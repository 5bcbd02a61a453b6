"""Make and check the tokens of keys and of attempts.

A key is `tdm_ID_SECRET`; the database has its SHA-256 only. An attempt's token is `tda_ID_MAC`, a function of the
attempt's id and of a secret of the data directory: so each launch of an attempt hands over the same token, also after a
restart, and no row holds it. It dies with its attempt.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from tandem.io import atomic_write

SECRET_FILE = "attempt-secret"


def new_key_token(key_id: str) -> str:
    return f"tdm_{key_id.removeprefix('key_')}_{secrets.token_hex(32)}"


def hash_of(token: str) -> str:
    """Return what the database keeps of a key. A random key of 256 bits needs no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()


def attempt_token(secret: bytes, attempt_id: str) -> str:
    mac = hmac.new(secret, attempt_id.encode(), hashlib.sha256).hexdigest()
    return f"tda_{attempt_id.removeprefix('attempt_')}_{mac}"


def serve_token(secret: bytes, attempt_id: str) -> str:
    """Return the token of the server that an attempt starts."""
    return hmac.new(secret, f"serve {attempt_id}".encode(), hashlib.sha256).hexdigest()


def id_in(token: str) -> tuple[str, str]:
    """Return which kind of token this says it is, `key` or `attempt`, and of which id. Nothing is checked yet."""
    kind, _, rest = token.partition("_")
    name = {"tdm": "key", "tda": "attempt"}.get(kind, "")
    return name, f"{name}_{rest.partition('_')[0]}"


def attempt_secret(data_dir: Path) -> bytes:
    """Return the data directory's secret for attempts' tokens; the first call makes it."""
    path = data_dir / SECRET_FILE
    if not path.exists():
        atomic_write.make_directory(data_dir, mode=atomic_write.PRIVATE)
        atomic_write.write_bytes(path, secrets.token_bytes(32), mode=0o600)
    return path.read_bytes()
