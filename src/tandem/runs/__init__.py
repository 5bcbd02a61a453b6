"""Runs: a spec, a directory, a status. No torch here."""
