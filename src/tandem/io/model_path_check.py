"""Is there a model where a spec says? Asked before anything heavy or slow begins, and before a run has a directory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tandem.errors import SpecError
from tandem.spec.model import ModelSpec, PathModel

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_S = 10.0
_ADAPTER, _WEIGHTS = "adapter_config.json", (".safetensors", ".safetensors.index.json")


def refuse_no_model(source: str, revision: str = "main", field: str = "model.path", *, weights: bool = True) -> None:
    """SpecError, with what is there instead, unless `source` is a model's directory or an id that the hub knows.

    An adapter's directory passes. Without `weights`, so does one that holds a tokenizer alone.
    """
    if os.path.isdir(source):
        if why := _lack(Path(source), weights):
            raise SpecError(f"{field} = '{source}': {why}")
    elif os.path.exists(source):
        raise SpecError(f"{field} = '{source}': {_file(Path(source))}")
    elif _HUB_ID.fullmatch(source):
        _ask_hub(source, revision, field)
    else:
        raise SpecError(
            f"{field} = '{source}': there is no such directory (looked from {Path.cwd()}), and it is no hub id"
        )


def refuse_missing(model: ModelSpec) -> None:
    """All that a spec's [model] names."""
    if isinstance(model, PathModel):
        refuse_no_model(model.path, model.revision)
    if model.warm_start is not None:
        refuse_no_model(model.warm_start, field="model.warm_start")


def _lack(directory: Path, weights: bool) -> str:
    """Empty if nothing is lacking."""
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if "status.json" in names and "spec.toml" in names:
        return "is a run directory; name its export/"
    if _ADAPTER in names:
        return ""
    if "config.json" not in names and (weights or "tokenizer_config.json" not in names):
        if gguf := [name for name in names if name.endswith(".gguf")]:
            return _gguf(gguf[0])
        return "has no config.json; name a directory in Hugging Face format (config.json, model.safetensors, tokenizer)"
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if weights and pickled and not any(name.endswith(_WEIGHTS) for name in names):
        return (
            f"its weights are a pickle ({pickled[0]}), which can run code when it is loaded, and only .safetensors is "
            "read; if you trust its author, load and save it once with transformers (docs/troubleshooting.md)"
        )
    return ""


def _file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if is_gguf or path.suffix == ".gguf":
        return _gguf(path.name)
    return "is a file; name the directory that it is in, with config.json and the tokenizer beside the weights"


def _gguf(name: str) -> str:
    return (
        f"{name} is a GGUF file, which is not read; write it once as a directory in Hugging Face format with "
        "transformers (docs/troubleshooting.md has the lines), and name that"
    )


def _ask_hub(source: str, revision: str, field: str) -> None:
    """One request, unless the model was downloaded before: transformers try for minutes where there is no network."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError as error:
        raise SpecError(f"{field} = '{source}': there is no such directory, and it is no hub id: {error}") from error
    if isinstance(try_to_load_from_cache(source, "config.json", revision=revision), str):
        return
    here = f"there is no such directory (looked from {Path.cwd()})"
    try:
        HfApi().model_info(source, revision=revision, timeout=_HUB_S)
    except GatedRepoError as error:
        raise SpecError(f"{field} = '{source}': the hub asks for its terms to be accepted, or for a token") from error
    except RevisionNotFoundError as error:
        raise SpecError(f"{field} = '{source}': the hub knows it, and no revision '{revision}' of it") from error
    except RepositoryNotFoundError as error:
        raise SpecError(
            f"{field} = '{source}': {here}, and no such model on the hub; a private one needs a token"
        ) from error
    except Exception as error:  # of whatever client the hub's library stands on: its versions differ
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecError(f"{field} = '{source}': {here}, and the hub does not answer: {why}") from error
