"""Trackers: each in the file that is named after it, fed by feed.py."""
