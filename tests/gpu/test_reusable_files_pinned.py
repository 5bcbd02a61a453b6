"""Files that a GPU writes into directly hold the right bytes, version after version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.bridge.files.reusable_files import ReusableFiles
from tandem.io.file_system import memory_backed

pytestmark = pytest.mark.gpu


def test_bytes_of_a_gpu_are_in_the_file_when_put_returns() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    import tempfile

    with tempfile.TemporaryDirectory(dir=memory_backed()) as home:
        sheets = ReusableFiles(Path(home))
        for version in range(6):
            raw = torch.randint(0, 255, (5_000_011,), dtype=torch.uint8, device="cuda")
            sheets.put(raw, path := Path(home) / f"v{version}")
            assert path.read_bytes() == raw.cpu().numpy().tobytes()
            if version:
                sheets.take_back(Path(home) / f"v{version - 1}")
        assert sheets._why_not_pinned is None
        assert all(sheet.is_pinned for _, sheet in sheets._held.spare)
        sheets.close()
