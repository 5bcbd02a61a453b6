"""List the environments that a name in `[environment]` can select: `tandem env list`."""

from __future__ import annotations

import importlib
import inspect

from tandem.env.load import ADAPTERS, BUILT_IN

_NEED_NO_ID = ("gsm8k", "math")


def list_environments() -> list[dict[str, str]]:
    """Return name and meaning of each environment that is built in, and of each library's, with `ID` in its name."""
    rows = [{"name": name, "about": _about(found)} for name, found in sorted(BUILT_IN.items())]
    for name, place in sorted(ADAPTERS.items()):
        module, _, class_name = place.partition(":")
        loaded = importlib.import_module(module)
        about = _about(getattr(loaded, class_name)) if name in _NEED_NO_ID else _first_sentence(loaded.__doc__)
        rows.append({"name": name if name in _NEED_NO_ID else f"{name}:ID", "about": about})
    return rows


def _about(found: type) -> str:
    return _first_sentence(inspect.getdoc(found))


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "."
