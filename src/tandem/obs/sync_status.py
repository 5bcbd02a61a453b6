"""Show how trainer and engines are connected, and the last proofs: `tandem sync status`, of a run or an engine's
server.

At each attachment a run writes what the engines report to `sync-map.json`: boot ids, workers and the layout of their
weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from tandem.errors import EngineError, SpecError
from tandem.io.bounded_json import read_json
from tandem.io.jsonl import finite, salvage_jsonl
from tandem.io.token_file import named_token
from tandem.obs.run_history import read_status
from tandem.obs.sync_audit import proofs_of

MAP_FILE = "sync-map.json"
TOLD = {
    "sleep": "engine.sleep", "sampled": "logprobs of rollouts", "on_update": "requests under way",
    "scheduler": "vLLM's scheduler", "requests": "requests to vLLM", "compiled": "compiled models",
    "beside": "adapters beside the base", "blocks": "blocks of adapters", "graphs": "CUDA graphs of decode steps",
    "prompt_graphs": "CUDA graphs of single prompts", "rows": "requests at once",
    "lengths": "prompts of different lengths",
}  # fmt: skip
"""Options that an engine reports when it is attached (requested, engaged), with their names here and in a run's
events."""
ASKED_BY = {
    "sleep": "sleep", "on_update": "on_update", "graphs": "eager", "prompt_graphs": "eager", "rows": "max_running",
}  # fmt: skip
"""Fields of [engine] that ask for one of these options, unless they are "auto". An engine chooses the others itself."""
STATUS_ROUTE = "/engine/status"
_TIMEOUT_S = 10.0
_KINDS = {dict: "object", list: "list"}
Kind = TypeVar("Kind", dict[str, Any], list[Any])


def sync_status(source: str | Path, *, token_file: str | Path | None = None, last: int = 5) -> dict[str, Any]:
    """Return the state of a run directory with its `last` proofs, or of an engine's server by URL and token. Plain
    JSON."""
    if str(source).startswith(("http://", "https://")):
        return _of_server(str(source).rstrip("/"), Path(token_file) if token_file else None)
    if token_file is not None:
        raise SpecError(
            f"--token-file = '{token_file}': is for an engine's URL, but '{source}' is not a URL; leave it out"
        )
    return _of_run(Path(source), last)


def _of_run(run_dir: Path, last: int) -> dict[str, Any]:
    status, ledger = read_status(run_dir), salvage_jsonl(run_dir / "sync.jsonl")
    by_line, odd = proofs_of(ledger)
    proofs, unreadable = list(by_line.values()), len(odd) + len(ledger.damaged)
    newest = proofs[-1] if proofs else None
    damage: list[str] = []
    told = _read_map(run_dir / MAP_FILE, damage)
    read = [_engine(each, newest.tensors if newest else 0, damage) for each in _part(told, "engines", list, damage)]
    engines = [engine for engine in read if engine]
    mapped = {str(engine["boot_id"]) for engine in engines}
    if unreadable:
        rows = "1 row" if unreadable == 1 else f"{unreadable} rows"
        damage.append(f"sync.jsonl: {rows} cannot be read; `tandem sync audit` says which")
    return {
        "kind": "run",
        "directory": str(run_dir),
        "state": str(status.get("state", "unknown")),
        "mode": str(told.get("mode") or (newest.mode if newest else "")),
        "transport": _part(told, "transport", dict, damage, needs=("requested", "engaged")),
        "version": newest.version if newest else None,
        "engines": engines,
        "coverage": min((engine["coverage"] for engine in engines), default=None),
        # A map is written before the first proof of its connection; in between they are of different engines.
        "map_is_of_the_last_proof": bool(newest and engines and mapped == set(newest.engines)),
        "proofs": [finite(asdict(proof)) for proof in (proofs[-last:] if last else ())],
        "unreadable_proofs": unreadable,
        "damage": damage,
    }


def _engine(told: Any, sent: int, damage: list[str]) -> dict[str, Any]:
    """Return what an engine reported; empty if it is not valid.

    `places` maps the trainer's tensors to the parameters of an engine that fuses or shards them; derived tensors have
    no place. An engine that keeps the names needs none. For an engine with adapters the base is mapped; each proof
    compares the adapters themselves.
    """
    if not isinstance(told, dict):
        damage.append(f"{MAP_FILE}: {told!r:.80} is not an engine")
        return {}
    layout, base, versions = (_part(told, name, dict, damage) for name in ("layout", "base", "versions"))
    places = _places(told, damage)
    held = {place[0] for place in places} | {str(name) for name in _part(told, "derived", list, damage)}
    mapped, wanted = len(held if places else layout), len(base) or sent
    fused, sharded = _joined(places)
    return {
        "boot_id": str(told.get("boot_id", "")),
        "workers": told.get("workers", 1),
        "tensors": len(layout),
        "mapped": mapped,
        "of": wanted,
        "is_base": bool(base),
        "coverage": min(mapped / wanted, 1.0) if wanted else 0.0,
        "layout": layout,
        "places": places,
        "fused": fused,
        "sharded": sharded,
        "versions": versions,
        **{part: _part(told, part, dict, damage, needs=("requested", "engaged")) for part in TOLD},
    }


def _places(told: Mapping[str, Any], damage: list[str]) -> list[list[Any]]:
    """Return each piece that a worker serves: name, the engine's parameter, first and last row, first and last
    column."""
    places = _part(told, "places", list, damage)
    whole = [
        place
        for place in places
        if isinstance(place, list) and len(place) == 6 and all(isinstance(name, str) for name in place[:2])
    ]
    if len(whole) < len(places):
        damage.append(f"{MAP_FILE}: {len(places) - len(whole)} of {len(places)} places are not valid")
    return whole


def _joined(places: Sequence[Sequence[Any]]) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return the parameters that hold several tensors, with their names, and the tensors in several pieces, with
    counts."""
    names: defaultdict[str, dict[str, None]] = defaultdict(dict)
    boxes: defaultdict[str, set[str]] = defaultdict(set)
    for name, param, *box in places:
        names[param][name] = None
        boxes[name].add(str(box))  # a piece that several workers hold counts once
    fused = {param: list(held) for param, held in names.items() if len(held) > 1}
    return fused, {name: len(held) for name, held in boxes.items() if len(held) > 1}


def _read_map(path: Path, damage: list[str]) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        told = read_json(path)
    except (OSError, ValueError) as error:
        damage.append(f"{path.name} is not valid JSON: {error}")
        return {}
    if not isinstance(told, dict):
        damage.append(f"{path.name} is not an object: {told!r:.80}")
        return {}
    return told


def _part(told: Mapping[str, Any], name: str, kind: type[Kind], damage: list[str], needs: Sequence[str] = ()) -> Kind:
    """Return a part of the map; empty if it is missing or has another type."""
    value = told.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        damage.append(f"{MAP_FILE}: {name} = {value!r:.80} is not of type {_KINDS[kind]}")
        return kind()
    if lacking := [field for field in needs if value and field not in value]:
        damage.append(f"{MAP_FILE}: {name} lacks {' and '.join(lacking)}")
    return value


def _of_server(url: str, token_file: Path | None) -> dict[str, Any]:
    import httpx

    headers = {} if token_file is None else {"Authorization": f"Bearer {named_token(token_file)}"}
    try:
        # No proxy from the environment: only this server may see the token.
        answer = httpx.get(url + STATUS_ROUTE, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        raise EngineError(f"{url}: no engine answers: {error or type(error).__name__}") from error
    if answer.status_code == 401:
        raise EngineError(
            f"{url}: refuses the token; give the file that the engine's ready file names with --token-file"
        )
    try:
        told = answer.json()
    except ValueError:
        told = None
    if answer.status_code != 200 or not isinstance(told, dict):
        raise EngineError(
            f"{url}{STATUS_ROUTE} answers {answer.status_code}: this is not an engine of `tandem engine serve`"
        )
    return {"kind": "engine", "url": url, **told}
