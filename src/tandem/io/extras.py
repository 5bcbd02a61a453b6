"""Check that an extra of the package is installed, and say which command installs it."""

from __future__ import annotations

from importlib.util import find_spec

from tandem.errors import MissingExtra

_OF_TRAIN = {
    "numpy",
    "matplotlib",
    "aiohttp",
    "httptools",
    "PIL",
    "huggingface_hub",
    "prometheus_client",
    "msgspec",
    "gguf",
}


def require_extra(extra: str, *packages: str) -> None:
    """Raise MissingExtra unless every one of `packages` can be imported; nothing is imported here."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtra(_text(extra, missing))


def explain_missing(error: BaseException) -> str:
    """Return which extra brings the module that an import did not find; empty for every other error."""
    if not isinstance(error, ModuleNotFoundError) or (error.name or "").partition(".")[0] not in _OF_TRAIN:
        return ""
    return _text("train", [str(error.name)])


def _text(extra: str, missing: list[str]) -> str:
    verb = "is" if len(missing) == 1 else "are"
    return f'this needs {", ".join(missing)}, which {verb} not installed; run: pip install "tandem-rl[{extra}]"'
