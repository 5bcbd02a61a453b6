"""The environments that come with Tandem: arithmetic, guess, sort. env/load.py names them."""
