"""The live dashboard of a directory of runs: `tandem dashboard`. Others import `tandem.dashboard.service`."""
