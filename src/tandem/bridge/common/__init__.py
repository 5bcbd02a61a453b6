"""What bridges share: deadlines, the manifest of a version with the base of the engine's ends, packing, and the
proof that several ranks hold one version.

Imported by bridges only; it knows no transport.
"""
