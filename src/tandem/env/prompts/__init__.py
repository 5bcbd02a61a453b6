"""The environment `prompts`: a data set of prompts, and functions that score the answers."""
