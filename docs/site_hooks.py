"""What the site adds to docs/: the pages that lie at the root of the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
AT_THE_ROOT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page, source in AT_THE_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = re.sub(r"\]\(docs/", "](", text)
        text = re.sub(r"\[([^\]]*)\]\((?!https?://|#|[\w-]+\.md)[^)]*\)", r"\1", text)  # files of the repository
        files.append(File.generated(config, page, content=text))
    return files
