"""Trackers: one file each, named after the service. tracker_queue.py sends rows to them in their own processes."""
