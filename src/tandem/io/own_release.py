"""Which release of Tandem this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_release() -> str:
    """Return this Tandem's version; empty if it is not installed."""
    try:
        return version("tandem-rl")[:40]
    except PackageNotFoundError:
        return ""
