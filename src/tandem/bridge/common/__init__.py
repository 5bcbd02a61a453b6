"""What bridges share: deadlines, the manifest of a version with the base of the engine's ends, and packing.

Imported by bridges only; it knows no transport.
"""
