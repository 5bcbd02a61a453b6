"""Find the control server and the key: the environment first, then ~/.config/tandem/control.toml."""

from __future__ import annotations

import fcntl
import os
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import tomli_w

from tandem.client import openid
from tandem.client.openid import SignedIn
from tandem.errors import ControlSilent, SpecError
from tandem.io import atomic_write
from tandem.io.bounded_json import read_json
from tandem.io.provenance import PUBLIC_FILE

PLACE_FILE = Path("~/.config/tandem/control.toml")
URL_VARIABLE, KEY_VARIABLE = "TANDEM_CONTROL", "TANDEM_CONTROL_KEY"
READY_FILE = "ready.json"


@dataclass(frozen=True, slots=True)
class Place:
    """A control server, and the key to show it."""

    url: str
    key: str = field(repr=False)
    signing_key: str = ""
    """The public key of the server's provenance of environments, as it was at the login; empty: not known."""
    signed_in: SignedIn | None = None
    """How the key is renewed; None: it is a key that someone made, and is used as it is."""


def find_place(env: Mapping[str, str] | None = None) -> Place | None:
    """Return the configured server; None if there is none. TANDEM_CONTROL is a URL, or the data directory of a server
    on this machine, which holds its token. The key of a URL is in TANDEM_CONTROL_KEY."""
    env = os.environ if env is None else env
    if named := env.get(URL_VARIABLE, ""):
        if not named.startswith(("http://", "https://")):
            return _of_data_dir(Path(named).expanduser())
        key, saved = env.get(KEY_VARIABLE, ""), _saved()
        if saved is not None and saved.url == named.rstrip("/"):
            return replace(saved, key=key) if key else _renewed(saved)
        if not key:
            raise SpecError(
                f"{URL_VARIABLE} = '{named}': put its key into {KEY_VARIABLE}, or use `tandem login {named}`"
            )
        return Place(named.rstrip("/"), key)
    saved = _saved()
    return None if saved is None else _renewed(saved)


def _renewed(saved: Place) -> Place:
    """Return the place with a key that is valid for a while. Of several processes one gets it."""
    if saved.signed_in is None or not saved.signed_in.is_due:
        return saved
    path = PLACE_FILE.expanduser()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        now = _saved()
        if now is None or now.signed_in is None or not now.signed_in.is_due:
            return now or saved  # another process was first
        try:
            key, signed_in = openid.renew(
                now.url, now.key, now.signed_in, lambda told: save_place(replace(now, signed_in=told))
            )
        except ControlSilent:
            if time.time() * 1000 < now.signed_in.expires_at:
                return now  # it is valid still
            raise
        save_place(made := replace(now, key=key, signed_in=signed_in))
        return made


def save_place(place: Place) -> Path:
    """Write the server and the key to the user's own file, which no other user can read."""
    if not place.url.startswith(("http://", "https://")):
        raise SpecError(
            f"'{place.url}' is not a URL; give the one that `tandem control serve` prints: http://HOST:PORT"
        )
    path = PLACE_FILE.expanduser()
    atomic_write.make_directory(path.parent)
    url, saved = place.url.rstrip("/"), _saved()
    if saved is not None and saved.url == url and saved.signing_key not in ("", place.signing_key):
        raise SpecError(
            f"{url}: its signing key has changed since the last login; ask its operator whether that is so, and remove "
            f"the line signing_key from {path} before you log in again"
        )
    told: dict[str, Any] = {"url": url, "key": place.key, "signing_key": place.signing_key}
    if place.signed_in is not None:
        told["signed_in"] = asdict(place.signed_in)
    atomic_write.write_bytes(path, tomli_w.dumps(told).encode(), mode=0o600)
    return path


def known_signing_key(place: Place) -> str:
    """Return the server's signing key. SpecError if none is known here."""
    if not place.signing_key:
        raise SpecError(
            f"no signing key of {place.url} is known here: log in again (`tandem login {place.url}`), or give it by "
            "--key, as DATA/signing-key.pub of the server has it"
        )
    return place.signing_key


def _saved() -> Place | None:
    path = PLACE_FILE.expanduser()
    if not path.exists():
        return None
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        signed_in = SignedIn(**raw["signed_in"]) if "signed_in" in raw else None
        return Place(str(raw["url"]), str(raw["key"]), str(raw.get("signing_key", "")), signed_in)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{path}: is not the file of a control server ({error}); use `tandem login URL`") from error


def _of_data_dir(directory: Path) -> Place:
    try:
        ready = cast("dict[str, Any]", read_json(directory / READY_FILE))
        token = (directory / "token").read_text(encoding="utf-8").strip()
        key = directory / PUBLIC_FILE
        return Place(str(ready["url"]), token, key.read_text(encoding="ascii").strip() if key.exists() else "")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"{URL_VARIABLE} = '{directory}': is no URL, and no data directory of a `tandem control serve` that runs "
            f"here ({error})"
        ) from error
