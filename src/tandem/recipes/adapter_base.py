"""Name the base model of an exported adapter by its id on the hub, not by a path of this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tandem.errors import ArtifactError

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_CACHED = "models--"  # the hub's cache names a model's directory models--USER--NAME


def base_id(path: str, base: str = "") -> str:
    """Return the id of the model at `path`: `base` if it is given, else what the path says; empty if unknown."""
    if base and not _ID.fullmatch(base):
        raise ArtifactError(f"--base {base}: write the id of the base model on the hub, user/name")
    if base or not (Path(path).is_absolute() or Path(path).exists()):
        return base or path
    cached = next((part for part in Path(path).parts if part.startswith(_CACHED)), "")
    if cached.count("--") == 2:
        return cached.removeprefix(_CACHED).replace("--", "/")
    try:
        told = json.loads((Path(path) / "config.json").read_text(encoding="utf-8")).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        return ""
    return told if isinstance(told, str) and _ID.fullmatch(told) and not Path(told).exists() else ""


def name_base(adapter: Path, base: str) -> None:
    """Write the base's id into the adapter's configuration, where PEFT looks for it."""
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "base_model_name_or_path": base}, indent=2) + "\n", encoding="utf-8")
