"""The environments that come with Tandem: arithmetic, guess, sort."""
