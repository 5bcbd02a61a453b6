"""The look that all pages for people share, as CSS."""

from __future__ import annotations

from pathlib import Path

LOOK = Path(__file__).with_name("look.css")
