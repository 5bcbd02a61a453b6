"""Two reward functions for examples/prompts.toml. The first parameter is the model's reply, the others are columns."""

import re


def correct(reply, answer):
    """1 if the last number of the reply is the answer."""
    numbers = re.findall(r"\d+", reply)
    return bool(numbers) and numbers[-1] == answer


def brief(completions, **kwargs):
    """A function written for TRL works as it is: lists in, a list out."""
    return [max(0.0, 1.0 - len(completion.split()) / 40) for completion in completions]
