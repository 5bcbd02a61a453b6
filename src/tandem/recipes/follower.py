"""`python -m tandem.recipes.follower`: a rank other than 0, started by rank 0. It trains what rank 0 orders."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from tandem.io.process_identity import age_s
from tandem.runs.rank_processes import Starting

_LEAST_S = 5.0

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    starting = Starting(directory, int(os.environ["RANK"]))  # before the imports that take seconds
    from tandem.recipes.crew import end_follower, follow
    from tandem.runs.run_ending import spec_of

    logging.basicConfig(format=f"%(asctime)s rank {os.environ['RANK']} %(levelname)s %(name)s: %(message)s")
    spec = spec_of(directory)
    # Rank 0 listens before it starts a rank, and imports torch meanwhile, as this rank does. If this one is ready and
    # rank 0 does not answer for so long, it stands still.
    follow(spec, patience_s=max(_LEAST_S, spec.parallel.deadline_s - age_s()), met_others=starting.met)
    end_follower()
