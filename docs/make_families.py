"""Write families.md from the suite of tests/families: `python docs/make_families.py`; about a minute."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "families"))


def main() -> None:
    import family_suite
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    (ROOT / "docs" / "families.md").write_text(family_suite.page(), encoding="utf-8")


if __name__ == "__main__":
    main()
