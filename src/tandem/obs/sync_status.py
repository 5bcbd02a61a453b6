"""How trainer and engine are joined, and what was proven last: `tandem sync status`, of a run or of an engine's server.

A run writes down at each meeting what the engines said of themselves, in `sync-map.json`: boot ids, workers, and the
layout that they serve from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.errors import EngineError, RunError, SpecError
from tandem.io.jsonl import finite, salvage_jsonl
from tandem.obs.audit import proofs_of
from tandem.obs.history import read_status

MAP_FILE = "sync-map.json"
STATUS_ROUTE = "/engine/status"
_TIMEOUT_S = 10.0


def sync_status(source: str, *, token_file: Path | None = None, last: int = 5) -> dict[str, Any]:
    """Of a run directory, with its `last` proofs; or of an engine's server, by its URL and token. Plain JSON."""
    if source.startswith(("http://", "https://")):
        return _of_server(source.rstrip("/"), token_file)
    if token_file is not None:
        raise SpecError(f"--token-file = '{token_file}': is for an engine's URL, and '{source}' is none; leave it out")
    return _of_run(Path(source), last)


def _of_run(run_dir: Path, last: int) -> dict[str, Any]:
    status, (proofs, _) = read_status(run_dir), proofs_of(salvage_jsonl(run_dir / "sync.jsonl"))
    newest = proofs[-1] if proofs else None
    told = _read_map(run_dir / MAP_FILE)
    engines = [_engine(each, newest.tensors if newest else 0) for each in told.get("engines") or ()]
    mapped = {str(engine["boot_id"]) for engine in engines}
    return {
        "kind": "run",
        "directory": str(run_dir),
        "state": str(status.get("state", "unknown")),
        "mode": str(told.get("mode") or (newest.mode if newest else "")),
        "transport": dict(told.get("transport") or {}),
        "version": newest.version if newest else None,
        "engines": engines,
        "coverage": min((engine["coverage"] for engine in engines), default=None),
        # A map is written before the first proof of its meeting; in between they are of different engines.
        "map_is_of_the_last_proof": bool(newest and engines and mapped == set(newest.engines)),
        "proofs": [finite(asdict(proof)) for proof in (proofs[-last:] if last else ())],
    }


def _engine(told: Mapping[str, Any], sent: int) -> dict[str, Any]:
    """`pieces` says where each of the trainer's tensors lies in an engine that fuses or shards them; an engine that
    keeps their names needs none. Of an engine that takes adapters it is the base that must be mapped; what is sent on
    top of it, each proof compares."""
    layout, pieces, base = (told.get(name) or {} for name in ("layout", "pieces", "base"))
    mapped, wanted = len(pieces or layout), len(base) or sent
    return {
        "boot_id": str(told.get("boot_id", "")),
        "workers": told.get("workers", 1),
        "tensors": len(layout),
        "mapped": mapped,
        "of": wanted,
        "is_base": bool(base),
        "coverage": min(mapped / wanted, 1.0) if wanted else 0.0,
        "layout": layout,
        "pieces": pieces,
        "versions": told.get("versions") or {},
        "sleep": told.get("sleep") or {},
    }


def _read_map(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is not JSON: {error}") from error
    return told if isinstance(told, dict) else {}


def _of_server(url: str, token_file: Path | None) -> dict[str, Any]:
    import httpx

    headers = {} if token_file is None else {"Authorization": f"Bearer {_token(token_file)}"}
    try:
        # Not by a proxy of the environment: the token is for this server alone.
        answer = httpx.get(url + STATUS_ROUTE, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        raise EngineError(f"{url}: no engine answers there: {error or type(error).__name__}") from error
    if answer.status_code == 401:
        raise EngineError(
            f"{url}: that is not its token; --token-file takes the file that the engine's ready file names"
        )
    try:
        told = answer.json()
    except ValueError:
        told = None
    if answer.status_code != 200 or not isinstance(told, dict):
        raise EngineError(
            f"{url}{STATUS_ROUTE} answers {answer.status_code}: that is no engine of `tandem engine serve`"
        )
    return {"kind": "engine", "url": url, **told}


def _token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SpecError(f"--token-file = '{path}': cannot be read: {error.strerror}") from error
