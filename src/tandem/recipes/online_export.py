"""Export what an online server learned: load a published version into the model that the server started with, and write
it as a model directory. The server may be running or stopped."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.build import built_model, online
from tandem.errors import CheckpointError, RunError
from tandem.io import atomic_write
from tandem.online.job_store import active_version
from tandem.runs.model_card import learned_card, takes_images
from tandem.spec.model import PresetModel
from tandem.spec.online import OnlineSpec

SPEC, VERSIONS, JOBS, EXPORT = "spec.json", "versions", "jobs", "export"
_VERSION = re.compile(r"(?:anchor-|version-)?(\d{1,15})")


@dataclass(frozen=True)
class Learned:
    """A version of an online server's data directory."""

    home: Path
    version: int

    def spec(self) -> OnlineSpec:
        return OnlineSpec.model_validate(json.loads((self.home / SPEC).read_text(encoding="utf-8")))


def keep_spec(spec: OnlineSpec, home: Path) -> None:
    """Write the server's spec to its data directory, for later exports. Paths become absolute."""
    content = spec.model_dump(mode="json")
    model: dict[str, Any] = content["model"]
    for key in ("path", "warm_start"):
        if model.get(key) and Path(model[key]).exists():
            model[key] = str(Path(model[key]).resolve())
    atomic_write.write_bytes(home / SPEC, json.dumps(content, indent=2).encode(), mode=0o600)


def find_learned(source: Path, version: str = "") -> Learned | None:
    """Return the named version, or None if `source` is not a data directory of an online server. `source`: the data
    directory, its `versions` folder, or one version in it. `version`: a number, `anchor-N` or `current` (the default).
    """
    for home, name in ((source, ""), (source.parent, ""), (source.parent.parent, source.name)):
        if (home / VERSIONS).is_dir() and (home / JOBS).is_dir() and source in (home, home / VERSIONS / name):
            return Learned(home, _number(home, version or name))
    return None


def _number(home: Path, version: str) -> int:
    if not (home / SPEC).exists():
        raise RunError(
            f"{home}: has no {SPEC}, which holds the server's spec: an older Tandem wrote this directory; "
            "start `tandem online serve SPEC` on it once"
        )
    if version in ("", "current"):
        return active_version(home / JOBS)
    if (match := _VERSION.fullmatch(version)) is None:
        raise RunError(f"version '{version}': write a number, anchor-N or current")
    return int(match[1])


def export_learned(learned: Learned, *, merge: bool = False, directory: Path | None = None) -> Path:
    """Write the version in Hugging Face format, and return its directory. With [model.lora] that is the adapter, or the
    whole model with `merge`."""
    spec = learned.spec()
    as_adapter = spec.model.lora is not None and not merge
    if as_adapter and isinstance(spec.model, PresetModel):
        raise RunError(
            f"{learned.home}: the adapter's base was made from scratch and is stored nowhere else; add --merge"
        )
    name = f"version-{learned.version:06d}{'-merged' * (merge and spec.model.lora is not None)}"
    target = directory or learned.home / EXPORT / name
    model = built_model.model(spec.model, spec.precision, spec.seed, built_model.pick_device("cpu"))
    online.choose_trained(spec, model)
    _restore(learned, dict(model.policy.trainable()))
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write.directory(target) as place:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            model.policy.export(Path(scratch))
            copy_export(Path(scratch), place, as_adapter=as_adapter)
        kind = "adapter" if as_adapter else "model"
        card = learned_card(spec.name, learned.version, kind, _base(spec), sees=takes_images(place))
        (place / "README.md").write_text(card, encoding="utf-8")
    return target


def merged_copy(learned: Learned) -> Path:
    """Return the directory of the whole model, for `tandem serve`. It is written once: a version never changes."""
    suffix = "-merged" * (learned.spec().model.lora is not None)
    there = learned.home / EXPORT / f"version-{learned.version:06d}{suffix}"
    return there if (there / "config.json").exists() else export_learned(learned, merge=True)


def _restore(learned: Learned, trained: Mapping[str, Any]) -> None:
    from tandem.online.version_store import VersionStore

    store = VersionStore(learned.home / VERSIONS)
    if learned.version not in (known := store.named()):
        existing = ", ".join(map(str, sorted(known)))
        raise CheckpointError(f"{learned.home}: version {learned.version} does not exist; there are: {existing}")
    store.load(learned.version).held.restore(trained)


def _base(spec: OnlineSpec) -> str:
    return "" if isinstance(spec.model, PresetModel) else spec.model.path


_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")


def copy_export(source: Path, place: Path, *, as_adapter: bool) -> None:
    """Copy what `Policy.export` wrote: the model without its adapter, or the adapter with the tokenizer."""
    shutil.copytree(source, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("adapter"))
    if as_adapter:
        for pattern in _WEIGHTS:
            for file in place.glob(pattern):
                file.unlink()
        shutil.copytree(source / "adapter", place, dirs_exist_ok=True)
