"""Learning while serving: what a job changes, whether it may be served, what keeps the rest from being forgotten."""
