"""`python -m tandem.recipes.follower`: a rank other than 0, started by rank 0. It trains what rank 0 orders."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from tandem.recipes.crew import follow
from tandem.runs.run_ending import spec_of

if __name__ == "__main__":
    logging.basicConfig(format=f"%(asctime)s rank {os.environ['RANK']} %(levelname)s %(name)s: %(message)s")
    follow(spec_of(Path(sys.argv[1])))
