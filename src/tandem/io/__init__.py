"""Files that are either whole or not there."""
