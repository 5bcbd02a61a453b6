"""Show a run to people (layer 2): live views, curves, report, sync audit.

It reads a run's directory and the rows that the run writes; it imports no trainer and no engine. readings.py formats
the numbers of every live view.
"""
