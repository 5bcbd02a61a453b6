"""The environments that come with Tandem: arithmetic, count, guess, sort. env/load.py names them."""
