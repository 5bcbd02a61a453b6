"""Trackers: one file each, named after the service. tracker_queue.py feeds them in a process of their own."""
