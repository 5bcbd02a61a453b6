"""Seal secrets for the database: each with a key of its own, and that key with a master key outside the database.

The master keys are lines of 64 hexadecimal digits: a file of the data directory, which the first start makes, a file of
your own, or the variable TANDEM_SECRETS_KEY. The first line seals, every line opens. To change it, put a new line
before the old one and restart: every secret's key is sealed with the new one then, and the old line can go.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.errors import SpecError, StoreError
from tandem.io import atomic_write

MASTER_FILE, MASTER_VARIABLE = "secrets-key", "TANDEM_SECRETS_KEY"
_KEY_BYTES, _NONCE_BYTES = 32, 12


@dataclass(frozen=True, slots=True)
class Sealed:
    """A secret as the database has it."""

    master: str
    """The id of the master key."""
    wrapped: bytes
    """The secret's own key, sealed with the master key."""
    content: bytes
    """The secret, sealed with its own key."""


class MasterKeys:
    """The first key seals, every key opens."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys: Mapping[str, bytes] = {_id_of(key): key for key in keys}
        self.first = _id_of(keys[0])

    def __contains__(self, master: object) -> bool:
        return master in self._keys

    def seal(self, text: str, owner: str) -> Sealed:
        """Seal a text for its owner: sealed bytes that are moved to another row cannot be opened there."""
        own = secrets.token_bytes(_KEY_BYTES)
        return Sealed(self.first, _sealed(self._keys[self.first], own, owner), _sealed(own, text.encode(), owner))

    def open(self, sealed: Sealed, owner: str) -> str:
        return _opened(self._own_key(sealed, owner), sealed.content, owner).decode()

    def wrap_again(self, sealed: Sealed, owner: str) -> Sealed:
        """Seal a secret's own key with the first master key; the secret itself stays as it is."""
        own = self._own_key(sealed, owner)
        return replace(sealed, master=self.first, wrapped=_sealed(self._keys[self.first], own, owner))

    def digest(self, content: bytes) -> bytes:
        """Return a digest of a request that holds a secret, with which no guess at the secret can be checked."""
        return hmac.new(self._keys[self.first], b"request\n" + content, hashlib.sha256).digest()

    def _own_key(self, sealed: Sealed, owner: str) -> bytes:
        if sealed.master not in self._keys:
            raise StoreError(
                f"a secret is sealed with the master key {sealed.master}, which this server has not; add its line to "
                "the file of master keys and restart"
            )
        return _opened(self._keys[sealed.master], sealed.wrapped, owner)


def read_master_keys(
    data_dir: Path, file: Path | None = None, env: MutableMapping[str, str] = os.environ
) -> MasterKeys:
    """Return the master keys: of the file that the user named, of the variable, or of the data directory's own file,
    which is made if it is not there. The variable is removed, so that no child process gets it."""
    named = env.pop(MASTER_VARIABLE, "")
    if named and file is None:
        return MasterKeys(_parsed(named, MASTER_VARIABLE))
    path = file or data_dir / MASTER_FILE
    if file is None and not path.exists():
        atomic_write.make_directory(data_dir, mode=atomic_write.PRIVATE)
        atomic_write.write_bytes(path, f"{secrets.token_hex(_KEY_BYTES)}\n".encode(), mode=0o600)
    try:
        return MasterKeys(_parsed(path.read_text(encoding="ascii"), f"--secrets-key-file = '{path}'"))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--secrets-key-file = '{path}': cannot be read: {type(error).__name__}") from None


def _parsed(text: str, what: str) -> list[bytes]:
    """Errors never quote the text."""
    lines = text.split()
    if not lines or any(len(line) != 2 * _KEY_BYTES or not _is_hex(line) for line in lines):
        raise SpecError(
            f"{what}: must be lines of {2 * _KEY_BYTES} hexadecimal digits, as `openssl rand -hex 32` prints"
        )
    return [bytes.fromhex(line) for line in lines]


def _is_hex(text: str) -> bool:
    return all(each in "0123456789abcdefABCDEF" for each in text)


def _id_of(key: bytes) -> str:
    return hashlib.sha256(b"tandem master key\n" + key).hexdigest()[:16]


def _sealed(key: bytes, content: bytes, owner: str) -> bytes:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + _cipher(key).encrypt(nonce, content, owner.encode())


def _opened(key: bytes, content: bytes, owner: str) -> bytes:
    from cryptography.exceptions import InvalidTag

    try:
        return _cipher(key).decrypt(content[:_NONCE_BYTES], content[_NONCE_BYTES:], owner.encode())
    except (InvalidTag, ValueError):
        raise StoreError("a secret's row was changed outside the control plane; set the secret again") from None


def _cipher(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)
