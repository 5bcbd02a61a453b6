"""A deployable copy of what a run made, or an online server learned: an adapter or a whole model, with a card."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

from tandem.build import training
from tandem.errors import ArtifactError, RunError
from tandem.io import atomic_write
from tandem.recipes.online_export import copy_export, export_learned, find_learned
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.model_card import model_card
from tandem.runs.run_ending import spec_of
from tandem.runs.storage_retry import Limits, tried
from tandem.spec.model import PresetModel
from tandem.spec.run import RunSpec

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")


def export_run(
    run_dir: str | Path,
    *,
    merge: bool = False,
    step: int | None = None,
    version: str = "",
    directory: str | Path | None = None,
    push: str = "",
    public: bool = False,
    endpoint: str | None = None,
) -> Path:
    """What a run of [model.lora] made is its adapter, unless `merge` asks for the whole model; a new directory holds it
    (default: RUN/deploy, RUN/deploy-merged; of a `step` RUN/deploy-step-N...). `step`: as it was then, of a run in any
    state, from a checkpoint that is still there. `push`: also a repository of the Hugging Face hub, in one commit.

    `run_dir` may also be the data directory of an online server. `version` then says which of its versions (a number,
    `anchor-N`, or `current`, the default); the new directory is export/version-N in there."""
    if push and not _REPO.fullmatch(push):
        raise ArtifactError(f"--push {push}: write user/name, as the hub does")
    run_dir, directory = Path(run_dir), Path(directory) if directory else None
    if (learned := find_learned(run_dir, version)) is not None:
        if step is not None:
            raise RunError(f"{run_dir}: is an online server's, which has versions and no steps; give --version")
        _must_be_free(directory)
        target = export_learned(learned, merge=merge, directory=directory)
        if push:
            push_folder(target, push, public=public, endpoint=endpoint)
        return target
    if version:
        raise RunError(f"{run_dir}: is a run, which has steps and no versions; give --step")
    spec = spec_of(run_dir)
    as_adapter = spec.model.lora is not None and not merge
    if as_adapter and isinstance(spec.model, PresetModel):
        raise RunError(f"{run_dir}: the adapter's base was made from scratch and is kept nowhere else; add --merge")
    source = run_dir / "export" if step is None else _checkpoint(run_dir, step) / "deploy"
    if not source.exists():
        raise RunError(f"{run_dir}: has no export/, because it did not end well; {_saved_steps(run_dir)}")
    name = f"deploy{'' if step is None else f'-step-{step}'}{'-merged' * merge}"
    target = directory or run_dir / name
    _must_be_free(target)
    with atomic_write.directory(target) as place:
        if step is not None and spec.model.lora is not None and merge:
            _merged(spec, source.parent, place)
        elif step is not None:
            shutil.copytree(source, place, dirs_exist_ok=True)
        else:
            copy_export(source, place, as_adapter=as_adapter)
        kind = "adapter" if as_adapter else "model"
        (place / "README.md").write_text(model_card(run_dir, kind, step), encoding="utf-8")
    if push:
        push_folder(target, push, public=public, endpoint=endpoint)
    return target


def _checkpoint(run_dir: Path, step: int) -> Path:
    """Verified."""
    shelf = Checkpoints(run_dir)
    if step not in shelf.versions():
        raise RunError(f"{run_dir}: no checkpoint of step {step} is there; {_saved_steps(run_dir)}")
    return shelf.read(step).path


def _saved_steps(run_dir: Path) -> str:
    saved = ", ".join(map(str, Checkpoints(run_dir).versions()))
    return f"--step takes what was saved: {saved}" if saved else f"nothing was saved; see {run_dir / 'status.json'}"


def _merged(spec: RunSpec, checkpoint: Path, place: Path) -> None:
    model = training.model(spec.model, spec.precision, spec.seed, training.pick_device(spec.device))
    training.load_weights(model, checkpoint)
    model.policy.export(place)
    shutil.rmtree(place / "adapter")


def push_folder(directory: Path, repo: str, *, public: bool = False, endpoint: str | None = None) -> str:
    """One commit: on the hub all of it is there, or nothing is. Private unless `public`."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    limits = Limits(tries=6, timeout_s=3600)
    deadline = time.monotonic() + limits.timeout_s

    def create() -> str:
        return api.create_repo(repo, private=not public, exist_ok=True).repo_id

    def upload(repo_id: str) -> str:
        return str(api.upload_folder(repo_id=repo_id, folder_path=directory, commit_message="tandem export"))

    repo_id = tried(create, limits, deadline, f"{repo}: creating it")
    return tried(lambda: upload(repo_id), limits, deadline, f"{repo}: uploading")


def _must_be_free(directory: Path | None) -> None:
    if directory is not None and directory.exists() and any(directory.iterdir()) and not _is_ours(directory):
        raise RunError(f"{directory}: holds something else; name another directory with --out")


def _is_ours(directory: Path) -> bool:
    card = directory / "README.md"
    return card.exists() and "tandem-rl" in card.read_text(encoding="utf-8", errors="replace")
