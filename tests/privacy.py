"""What other users of the machine could read in a directory that they can enter."""

from __future__ import annotations

from pathlib import Path


def readable_by_others(directory: Path) -> list[str]:
    found: list[str] = []
    for path in sorted(directory.iterdir()):
        mode = path.lstat().st_mode
        if path.is_dir() and mode & 0o011:
            found += [f"{path.name}/{each}" for each in readable_by_others(path)]
        elif not path.is_dir() and mode & 0o066:
            found.append(path.name)
    return found
