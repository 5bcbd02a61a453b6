"""Recorded data for supervised training (layer 2): conversations and preference pairs, read and checked.

Import `load_rows` from load.py and `load_pairs` from preference_pairs.py; one file per source of rows.
"""
