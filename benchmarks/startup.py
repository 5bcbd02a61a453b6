"""How long `tandem --help` takes, and what it is made of.

python benchmarks/startup.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from common import note, table

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "tandem --help": ["-m", "tandem", "--help"],
    "tandem spec schema": ["-m", "tandem", "spec", "schema"],
}


def seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    rows: list[list[str]] = []
    for name, arguments in COMMANDS.items():
        taken = [seconds(arguments) for _ in range(rounds)]
        rows.append([name, f"{statistics.median(taken):.3f}", f"{max(taken):.3f}"])
    table(["command", "median s", "slowest s"], rows)
    note("must be: tandem --help <= 0.5 s on an idle machine")


if __name__ == "__main__":
    main()
