"""Every figure that this project promises for a CPU, as tables: `make bench`. Twelve minutes on two idle cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TABLES = ("startup", "engine", "precision", "packing", "apollo", "remote", "rollouts", "quickstart",
          "rude_requests")  # fmt: skip

if __name__ == "__main__":
    for name in TABLES:
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, str(HERE / f"{name}.py")], check=True)
