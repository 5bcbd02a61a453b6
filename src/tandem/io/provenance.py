"""Provenance of a wheel: a statement of who made what, in a DSSE envelope that a control server signed (Ed25519).

The statement has the form of in-toto's: a subject with its SHA-256, and a predicate. The signature is over the bytes of
the payload and over its type, so that neither can be passed off as something else.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tandem.errors import SpecError
from tandem.io import atomic_write
from tandem.io.extras import require_extra

KEY_FILE, PUBLIC_FILE = "signing-key", "signing-key.pub"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "tandem-environment-provenance/v1"
_KEY_HEX = 64


class Signer:
    """The signing key of a control server."""

    def __init__(self, key: bytes) -> None:
        require_extra("control", "cryptography")
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(key)
        self.public = self._key.public_key().public_bytes_raw().hex()

    def envelope(self, subject: str, sha256: str, predicate: Mapping[str, Any]) -> dict[str, Any]:
        """Return the signed statement about one file."""
        statement = {
            "_type": STATEMENT, "subject": [{"name": subject, "digest": {"sha256": sha256}}],
            "predicateType": PREDICATE, "predicate": dict(predicate),
        }  # fmt: skip
        payload = json.dumps(statement, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        signature = self._key.sign(_signed(PAYLOAD_TYPE, payload))
        return {
            "payloadType": PAYLOAD_TYPE, "payload": base64.b64encode(payload).decode(),
            "signatures": [{"keyid": key_id(self.public), "sig": base64.b64encode(signature).decode()}],
        }  # fmt: skip


def read_signer(data_dir: Path) -> Signer:
    """Return the data directory's signing key; the first call makes it."""
    path = data_dir / KEY_FILE
    if not path.exists():
        atomic_write.make_directory(data_dir, mode=atomic_write.PRIVATE)
        atomic_write.write_bytes(path, f"{os.urandom(_KEY_HEX // 2).hex()}\n".encode(), mode=0o600)
    text = path.read_text(encoding="ascii").strip()
    if len(text) != _KEY_HEX or not _is_hex(text):
        raise SpecError(f"{path}: is not the signing key that the first start wrote; take it from a backup")
    signer = Signer(bytes.fromhex(text))
    atomic_write.write_bytes(data_dir / PUBLIC_FILE, f"{signer.public}\n".encode())
    return signer


def checked_statement(envelope: object, public: str, subject: str, sha256: str) -> dict[str, Any]:
    """Return the predicate of a statement about this very file. SpecError if the signature is not of the key `public`,
    or if the statement is about another file."""
    require_extra("train", "cryptography")
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if len(public) != _KEY_HEX or not _is_hex(public):
        raise SpecError("the signing key must be 64 hexadecimal digits, as in the server's DATA/signing-key.pub")
    try:
        told = cast("Mapping[str, Any]", envelope)
        kind, payload = str(told["payloadType"]), base64.b64decode(told["payload"], validate=True)
        signatures = [base64.b64decode(each["sig"], validate=True) for each in told["signatures"]]
    except (TypeError, KeyError, ValueError, binascii.Error):
        raise SpecError(f"{subject}: its provenance is no signed envelope") from None
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))

    def signed_by_it(signature: bytes) -> bool:
        try:
            key.verify(signature, _signed(kind, payload))
        except InvalidSignature:
            return False
        return True

    if kind != PAYLOAD_TYPE or not any(map(signed_by_it, signatures[:8])):
        raise SpecError(
            f"{subject}: its provenance is not signed by the server's key {key_id(public)[:16]}; do not use this file"
        )
    try:
        statement = json.loads(payload)
        (about,) = statement["subject"]
        is_ours = statement["_type"] == STATEMENT and statement["predicateType"] == PREDICATE
        name, digest, predicate = about["name"], about["digest"]["sha256"], dict(statement["predicate"])
    except (ValueError, KeyError, TypeError):
        raise SpecError(f"{subject}: its provenance is no statement about a file") from None
    if not is_ours or (name, digest) != (subject, sha256):
        raise SpecError(f"{subject}: its provenance is about {str(name)[:100]} with other bytes; do not use this file")
    return predicate


def key_id(public: str) -> str:
    return hashlib.sha256(bytes.fromhex(public)).hexdigest()


def _signed(kind: str, payload: bytes) -> bytes:
    """Return what a DSSE signature is over."""
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)


def _is_hex(text: str) -> bool:
    return all(each in "0123456789abcdef" for each in text)
