"""An online server as a process for a whole test file; benchmarks/online_common.py starts it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from online_common import ENDED, OnlineServer, fact, online_server

__all__ = ["ENDED", "SPEC", "OnlineServer", "fact", "online_server"]

SPEC = """
feedback = true
[model]
preset = "tiny"
[train]
lr = 1e-3
steps = 2
[gates]
kl = 50.0
update_norm = 0.3
[watch]
metric = "rating"
window = 8
min_samples = 3
"""
