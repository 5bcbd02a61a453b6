"""Asking a rollout service how it is doing: what `tandem rollouts top` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from tandem.errors import StoreError
from tandem.io.bounded_json import read_json
from tandem.io.token_file import named_token

READY_FILE = "ready.json"
"""In a rollout service's data directory, unless it was told of another place: where it listens."""

_TIMEOUT_S = 5.0


def rollouts_status(source: str | Path, *, token_file: str | Path | None = None, refused: int = 10) -> dict[str, Any]:
    """Of a rollout service, by its URL and token or by its data directory: what its /v2/status says, its `url`, and its
    last `refused` posts as `quarantine`. Plain JSON."""
    asking = ServicePoller(str(source), Path(token_file) if token_file else None, refused=refused)
    try:
        return asking.status()
    finally:
        asking.close()


class ServicePoller:
    """One service, asked again and again. Who is asked is looked up each time: a service that was started again may
    listen elsewhere, and have another token."""

    def __init__(self, source: str, token_file: Path | None = None, *, refused: int = 10) -> None:
        import httpx

        self.source, self._token_file, self._refused = source, token_file, refused
        # No proxy of the environment, and nowhere else: the token is for this service alone.
        self._client = httpx.Client(timeout=_TIMEOUT_S, trust_env=False, follow_redirects=False)

    def status(self) -> dict[str, Any]:
        url, token_file = self._where()
        token = "" if token_file is None else named_token(token_file)
        told = self._get(url, "/v2/status", token)
        if not {"queue", "environments", "rates"} <= told.keys():
            raise StoreError(f"{url}/v2/status: that is no service of `tandem rollouts serve`")
        return {
            "url": url,
            **told,
            "quarantine": self._get(url, "/v2/quarantine", token)["quarantine"][: self._refused],
        }

    def close(self) -> None:
        self._client.close()

    def _where(self) -> tuple[str, Path | None]:
        if self.source.startswith(("http://", "https://")):
            return self.source.rstrip("/"), self._token_file
        ready = Path(self.source)
        if not ready.exists():
            raise StoreError(f"'{ready}' is neither a URL nor the data directory of `tandem rollouts serve`")
        if ready.is_dir():
            ready = ready / READY_FILE
        try:
            said = read_json(ready)
            return str(said["url"]), self._token_file or Path(said["token_file"])
        except FileNotFoundError:
            raise StoreError(
                f"{ready} is not there: no rollout service listens, or its --ready-file is elsewhere; name that file, "
                "or its URL with --token-file"
            ) from None
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise StoreError(f"{ready} is not what `tandem rollouts serve` writes: {error}") from error

    def _get(self, url: str, path: str, token: str) -> dict[str, Any]:
        import httpx

        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            answer = self._client.get(url + path, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise StoreError(
                f"{url}: no rollout service answers there: {str(error) or type(error).__name__}"
            ) from error
        if answer.status_code == 401:
            raise StoreError(f"{url}: that is not its token; --token-file takes the file that its ready file names")
        try:
            told = answer.json()
        except ValueError:
            told = None
        if answer.status_code != 200 or not isinstance(told, dict):
            raise StoreError(f"{url}{path} answers {answer.status_code}: that is no service of `tandem rollouts serve`")
        return cast("dict[str, Any]", told)
