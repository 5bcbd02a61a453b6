"""Find the control server and the key: the environment first, then ~/.config/tandem/control.toml."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import tomli_w

from tandem.errors import SpecError
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


def find_place(env: Mapping[str, str] | None = None) -> Place | None:
    """Return the configured server; None if there is none. TANDEM_CONTROL is a URL, or the data directory of a server
    on this machine, which holds its token. The key of a URL is in TANDEM_CONTROL_KEY."""
    env = os.environ if env is None else env
    if named := env.get(URL_VARIABLE, ""):
        if not named.startswith(("http://", "https://")):
            return _of_data_dir(Path(named).expanduser())
        key, saved = env.get(KEY_VARIABLE, ""), _saved()
        if saved is not None and saved.url == named.rstrip("/"):
            return replace(saved, key=key or saved.key)
        if not key:
            raise SpecError(
                f"{URL_VARIABLE} = '{named}': put its key into {KEY_VARIABLE}, or use `tandem login {named}`"
            )
        return Place(named.rstrip("/"), key)
    return _saved()


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
    text = tomli_w.dumps({"url": url, "key": place.key, "signing_key": place.signing_key})
    atomic_write.write_bytes(path, text.encode(), mode=0o600)
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
        return Place(str(raw["url"]), str(raw["key"]), str(raw.get("signing_key", "")))
    except (OSError, ValueError, KeyError) as error:
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
