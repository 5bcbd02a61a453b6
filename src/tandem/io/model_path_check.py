"""Check that the model of a spec exists, before anything slow begins and before the run directory is made."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tandem.errors import SpecError
from tandem.io.bounded_json import read_json
from tandem.io.gguf import source as gguf
from tandem.spec.model import ModelSpec, PathModel

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_S = 10.0
_ADAPTER, _WEIGHTS = "adapter_config.json", (".safetensors", ".safetensors.index.json")


def refuse_no_model(source: str, revision: str = "main", field: str = "model.path", *, weights: bool = True) -> None:
    """Raise SpecError unless `source` is a model's directory, a GGUF file or an id on the hub; the error says what was
    found.

    An adapter's directory is accepted; without `weights`, so is a directory with only a tokenizer.
    """
    if os.path.exists(source):
        if why := _gguf(source) or (_lack(Path(source), weights) if os.path.isdir(source) else _file(Path(source))):
            raise SpecError(f"{field} = '{source}': {why}")
    elif _HUB_ID.fullmatch(source):
        _ask_hub(source, revision, field)
    else:
        raise SpecError(
            f"{field} = '{source}': there is no such directory (looked from {Path.cwd()}), and it is no hub id"
        )


def refuse_missing(model: ModelSpec) -> None:
    """Check everything that a spec's [model] names."""
    if isinstance(model, PathModel):
        refuse_no_model(model.path, model.revision)
        if (Path(model.path) / _ADAPTER).exists() and not (Path(model.path) / "config.json").exists():
            refuse_adapter(model.path)
    if model.warm_start is not None:
        refuse_no_model(model.warm_start, field="model.warm_start")


def refuse_adapter(source: str, field: str = "model.path") -> None:
    """Raise the SpecError for an adapter where a model must be named; it names the model that it was trained on."""
    base = ""
    if (file := Path(source) / _ADAPTER).is_file():
        try:
            base = str(read_json(file).get("base_model_name_or_path") or "")
        except (OSError, ValueError, AttributeError):
            base = ""
    of = f"an adapter of '{base}'" if base else "an adapter, which does not name its base"
    if field != "model.path":
        raise SpecError(f"{field} = '{source}': is {of}; merge it into its base, and name the merged model")
    way = f"set model.path = '{base}'" if base else "set model.path to the model that it was trained on"
    raise SpecError(f"{field} = '{source}': is {of}; {way}, and model.warm_start = '{source}'")


def _lack(directory: Path, weights: bool) -> str:
    """Return what a directory lacks; empty if it is complete."""
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if "status.json" in names and "spec.toml" in names:
        return "is a run directory; name its export/"
    if _ADAPTER in names:
        return ""
    if "config.json" not in names and (weights or "tokenizer_config.json" not in names):
        if any(name.endswith(".gguf") for name in names):
            return ""  # _gguf has checked it
        return "has no config.json; name a directory in Hugging Face format (config.json, model.safetensors, tokenizer)"
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if weights and pickled and not any(name.endswith(_WEIGHTS) for name in names):
        return (
            f"its weights are a pickle ({pickled[0]}), which can run code when it is loaded, and only .safetensors is "
            "read; if you trust its author, load and save it once with transformers (docs/troubleshooting.md)"
        )
    return ""


def _file(path: Path) -> str:
    if gguf.is_gguf(path):  # _gguf has checked it
        return ""
    if path.suffix == ".gguf":
        return "is no GGUF file, though its name says so; download it again"
    return "is a file; name the directory that it is in, with config.json and the tokenizer beside the weights"


def _gguf(source: str) -> str:
    """Return why a GGUF file, or the one in a directory, cannot be read; empty if it can, or if there is none."""
    try:
        if (path := gguf.gguf_of(source)) is not None:
            from tandem.io.gguf.directory import check

            check(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:
        return str(error)
    return ""


def _ask_hub(source: str, revision: str, field: str) -> None:
    """Send one request, unless the model was downloaded before: transformers would retry for minutes without a
    network."""
    from huggingface_hub import HfApi, hf_hub_url, try_to_load_from_cache
    from huggingface_hub import get_hf_file_metadata as metadata_of  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import (
        EntryNotFoundError,
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
        found = HfApi().model_info(source, revision=revision, timeout=_HUB_S)
        if getattr(found, "gated", False):  # the hub describes a gated model to everyone, but gives its files to some
            metadata_of(hf_hub_url(source, "config.json", revision=revision), timeout=_HUB_S)
    except GatedRepoError as error:
        raise SpecError(
            f"{field} = '{source}': the hub gives it to those who accepted its terms; accept them on its page there, "
            "and log in with `hf auth login`"
        ) from error
    except EntryNotFoundError as error:
        raise SpecError(f"{field} = '{source}': the hub's files of it have no config.json") from error
    except RevisionNotFoundError as error:
        raise SpecError(f"{field} = '{source}': the hub has no revision '{revision}' of it") from error
    except RepositoryNotFoundError as error:
        raise SpecError(
            f"{field} = '{source}': {here}, and no such model on the hub; a private one needs a token"
        ) from error
    except Exception as error:  # the HTTP client's errors differ between versions of the hub's library
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        asked = "" if revision == "main" else f" (asked for revision '{revision}')"
        raise SpecError(f"{field} = '{source}': {here}, and the hub does not answer: {why}{asked}") from error
