"""Get the status of a rollout service, for `tandem rollouts top`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from tandem.errors import StoreError
from tandem.io.bounded_json import read_json
from tandem.io.token_file import named_token

READY_FILE = "ready.json"
"""Default ready file in a rollout service's data directory."""

_TIMEOUT_S = 5.0


def rollouts_status(source: str | Path, *, token_file: str | Path | None = None, refused: int = 10) -> dict[str, Any]:
    """Return the status of a rollout service, named by URL and token or by data directory: its /v2/status, its `url`,
    and its last `refused` posts as `quarantine`. Plain JSON."""
    asking = ServicePoller(str(source), Path(token_file) if token_file else None, refused=refused)
    try:
        return asking.status()
    finally:
        asking.close()


class ServicePoller:
    """Polls one service. It reads the ready file each time, because a restarted service may have another URL and
    another token."""

    def __init__(self, source: str, token_file: Path | None = None, *, refused: int = 10) -> None:
        import httpx

        self.source, self._token_file, self._refused = source, token_file, refused
        # No proxy from the environment and no redirects: only this service may see the token.
        self._client = httpx.Client(timeout=_TIMEOUT_S, trust_env=False, follow_redirects=False)

    def status(self) -> dict[str, Any]:
        url, token_file = self._where()
        token = "" if token_file is None else named_token(token_file)
        told = self._get(url, "/v2/status", token)
        if not {"queue", "environments", "rates"} <= told.keys():
            raise StoreError(f"{url}/v2/status: not a service of `tandem rollouts serve`")
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
                f"{ready} does not exist: no rollout service runs, or its --ready-file is elsewhere; name that file, "
                "or the service's URL with --token-file"
            ) from None
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise StoreError(f"{ready} is not what `tandem rollouts serve` writes: {error}") from error

    def _get(self, url: str, path: str, token: str) -> dict[str, Any]:
        import httpx

        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            answer = self._client.get(url + path, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise StoreError(f"{url}: no rollout service answers: {str(error) or type(error).__name__}") from error
        if answer.status_code == 401:
            raise StoreError(f"{url}: refuses the token; give the file that its ready file names with --token-file")
        try:
            told = answer.json()
        except ValueError:
            told = None
        if answer.status_code != 200 or not isinstance(told, dict):
            raise StoreError(f"{url}{path} answers {answer.status_code}: not a service of `tandem rollouts serve`")
        return cast("dict[str, Any]", told)
