"""Which exports the embedded engine refuses, read from their config as transformers fills it in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, JambaConfig, Lfm2Config, LlamaConfig, MambaConfig

from tandem.build.built_model import embedded_refuses


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (LlamaConfig(), False),
        (Lfm2Config(layer_types=["conv", "full_attention"] * 16), False),
        (Lfm2Config(layer_types=["conv"] * 32), True),
        (JambaConfig(), False),
        (MambaConfig(), True),
        (BloomConfig(), True),
    ],
    ids=lambda given: type(given).__name__ if not isinstance(given, bool) else "",
)
def test_layers_that_no_mask_describes_are_refused(tmp_path: Path, config: Any, refused: bool):
    config.save_pretrained(tmp_path)
    assert embedded_refuses(tmp_path) is refused


def test_where_no_model_was_exported_none_is_refused(tmp_path: Path):
    assert not embedded_refuses(tmp_path / "export")
