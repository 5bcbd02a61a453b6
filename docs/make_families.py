"""Write families.md from the suite of tests/families: `python docs/make_families.py`; about five minutes."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "families"), str(ROOT / "tests")]


def main() -> None:
    import family_page
    import torch
    from transformers.utils import logging

    import forked

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    with forked.forked_programs():  # the engine servers
        text = family_page.page()
    (ROOT / "docs" / "families.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
