"""`tandem export`: write a deployable copy of a run's or an online server's model, with a model card."""

from __future__ import annotations

import logging
import re
import shutil
import time
from pathlib import Path
from typing import Literal

from tandem.build import built_model, training
from tandem.build.ollama import ollama_modelfile
from tandem.errors import ArtifactError, RunError, TemplateError
from tandem.io import atomic_write
from tandem.io.gguf.writer import GgufKind, write_gguf
from tandem.recipes.adapter_base import base_id, name_base
from tandem.recipes.online_export import copy_export, export_learned, find_learned
from tandem.runs.checkpoints import Checkpoints
from tandem.runs.model_card import model_card, takes_images
from tandem.runs.run_ending import spec_of
from tandem.runs.storage_retry import Limits, tried
from tandem.spec.model import PresetModel
from tandem.spec.run import RunSpec

_log = logging.getLogger(__name__)
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
    base: str = "",
    gguf: GgufKind | Literal[""] = "",
    endpoint: str | None = None,
) -> Path:
    """Write a deployable copy into a new directory and return the directory.

    After training with [model.lora] this is the adapter, or with `merge` the whole model. The directory defaults to
    RUN/deploy, RUN/deploy-merged, or with `step` RUN/deploy-step-N. `step`: export that checkpoint, of a run in any
    state. `base`: the id of an adapter's base on the hub, where a local directory does not say it. `push`: also upload
    to a repository of the Hugging Face hub, in one commit. `gguf`: write the whole model as one GGUF file
    of this kind, with a Modelfile for Ollama, into RUN/deploy-gguf.

    `run_dir` may also be the data directory of an online server. `version` then selects a version (a number, `anchor-N`
    or `current`, the default), and the directory defaults to export/version-N in it.
    """
    merge = merge or bool(gguf)
    if push and not _REPO.fullmatch(push):
        raise ArtifactError(f"--push {push}: write user/name")
    run_dir, directory = Path(run_dir), Path(directory) if directory else None
    if (learned := find_learned(run_dir, version)) is not None:
        if step is not None:
            raise RunError(f"{run_dir}: is an online server's directory, which has no steps; use --version, not --step")
        if gguf:
            raise RunError(f"--gguf {gguf}: is for runs; export {run_dir} with --merge, and use its directory")
        _must_be_free(directory)
        target = export_learned(learned, merge=merge, directory=directory)
        if push:
            push_folder(target, push, public=public, endpoint=endpoint)
        return target
    if version:
        raise RunError(f"{run_dir}: is a run, which has no --version; use --step")
    spec = spec_of(run_dir)
    as_adapter = spec.model.lora is not None and not merge
    if as_adapter and isinstance(spec.model, PresetModel):
        raise RunError(f"{run_dir}: the adapter's base was made from scratch, so the adapter needs it; add --merge")
    if gguf and getattr(spec.algorithm, "kind", "") == "reward_model":
        raise RunError(f"--gguf {gguf}: a reward model has no lm-head, which a GGUF file needs; leave --gguf out")
    source = run_dir / "export" if step is None else _checkpoint(run_dir, step) / "deploy"
    if not source.exists():
        raise RunError(f"{run_dir}: has no export/, because the run did not succeed; {_saved_steps(run_dir)}")
    its_base = _base_of(spec, base, push) if as_adapter else ""
    name = f"deploy{'' if step is None else f'-step-{step}'}{'-gguf' if gguf else '-merged' * merge}"
    target = directory or run_dir / name
    _must_be_free(target)
    with atomic_write.directory(target) as place:
        if step is not None and spec.model.lora is not None and merge:
            _write_merged(spec, source.parent, place)
        elif step is not None:
            shutil.copytree(source, place, dirs_exist_ok=True)
        else:
            copy_export(source, place, as_adapter=as_adapter)
        if its_base:
            name_base(place, its_base)
        no_modelfile = _as_gguf(place, gguf, spec) if gguf else ""
        kind = "adapter" if as_adapter else f"gguf-{gguf}" if gguf else "model"
        card = model_card(run_dir, kind, step, base=its_base, no_modelfile=no_modelfile, sees=takes_images(place))
        (place / "README.md").write_text(card, encoding="utf-8")
    if push:
        push_folder(target, push, public=public, endpoint=endpoint)
    return target


def _as_gguf(place: Path, kind: GgufKind, spec: RunSpec) -> str:
    """Put a GGUF file, and Ollama's Modelfile for it, in the place of a directory's files. Return why there is no
    Modelfile; empty if there is one."""
    files, written, why_not = [*place.iterdir()], place / f"model-{kind}.gguf", ""
    try:
        write_gguf(place, written, kind, spec.name)
    except ValueError as error:
        raise RunError(f"--gguf {kind}: {error}; leave --gguf out, or choose another kind") from error
    try:
        text = ollama_modelfile(place, written.name, thinking=spec.model.thinking)
        (place / "Modelfile").write_text(text, encoding="utf-8")
    except TemplateError as error:
        why_not = str(error)
        _log.warning("no Modelfile was written: %s", error)
    for path in files:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return why_not


def _base_of(spec: RunSpec, base: str, push: str) -> str:
    """Return the id of the adapter's base; empty, for a copy that stays here, if it is only a path."""
    path = getattr(spec.model, "path", "")
    if not (found := base_id(path, base)) and push:
        raise ArtifactError(
            f"--push {push}: the adapter's base is {path}, a path of this machine; add --base user/name"
        )
    return found


def _checkpoint(run_dir: Path, step: int) -> Path:
    """Verify the checkpoint of a step and return its directory."""
    checkpoints = Checkpoints(run_dir)
    if step not in checkpoints.versions():
        raise RunError(f"{run_dir}: has no checkpoint of step {step}; {_saved_steps(run_dir)}")
    return checkpoints.read(step).path


def _saved_steps(run_dir: Path) -> str:
    saved = ", ".join(map(str, Checkpoints(run_dir).versions()))
    return f"saved steps for --step: {saved}" if saved else f"no step was saved; see {run_dir / 'status.json'}"


def _write_merged(spec: RunSpec, checkpoint: Path, place: Path) -> None:
    """Write the whole model of a checkpoint with its adapter merged in."""
    model = built_model.model(spec.model, spec.precision, spec.seed, built_model.pick_device(spec.device))
    training.load_weights(model, checkpoint)
    model.policy.export(place)
    shutil.rmtree(place / "adapter")


def push_folder(directory: Path, repo: str, *, public: bool = False, endpoint: str | None = None) -> str:
    """Upload a directory to the hub in one commit, so that it is complete or absent. A new repository is private unless
    `public`."""
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
        raise RunError(f"{directory}: is not empty and is no earlier export; choose another directory with --out")


def _is_ours(directory: Path) -> bool:
    """Return whether a directory holds an earlier export, which may be replaced."""
    card = directory / "README.md"
    return card.exists() and "tandem-rl" in card.read_text(encoding="utf-8", errors="replace")
