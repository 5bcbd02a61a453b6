"""Tell whether a path is a GGUF file, or a directory that holds one."""

from __future__ import annotations

from pathlib import Path


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def gguf_of(source: str) -> Path | None:
    """Return the GGUF file that `source` is, or that it holds as its only weights; None if there is none. ValueError
    for a directory with several."""
    path = Path(source)
    if path.is_file():
        return path if is_gguf(path) else None
    if not path.is_dir() or (path / "config.json").exists() or (path / "adapter_config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise ValueError(f"holds {len(found)} GGUF files; name one, such as {found[0]}")
    return found[0] if found else None
