"""Messages between the two ends of an engine: what is not a number is an error, and not null."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tandem.io.engine_messages import Tokens, decoded, encoded, line

NESTED = {
    "ids": [1, 2**63],
    "logprobs": [-0.1, -1e-30],
    "why": "null",
    "none": None,
    "engines": ("a", "ü\u2028"),
    "on": True,
}


def test_it_is_the_json_that_everybody_reads():
    assert json.loads(encoded(NESTED)) == json.loads(json.dumps(NESTED)) == decoded(encoded(NESTED))
    assert b"\n" not in encoded({"text": "two\nlines"})


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("why", ["", "null"])
def test_what_is_no_number_is_refused(odd: float, why: str):
    for value in ({"x": odd, "why": why}, [1.0, odd], Tokens(ids=[1], logprobs=[odd], version=1)):
        with pytest.raises(ValueError, match="not JSON compliant"):
            encoded(value)
    with pytest.raises(ValueError, match="not JSON compliant"):
        line(Tokens(ids=[1, 2], logprobs=[-1.0, odd], version=1))


@pytest.mark.parametrize("value", [{"x": np.float64(0.7)}, ["half a character \ud800"], {None: 1, True: 2}])
def test_what_msgspec_does_not_take_is_said_all_the_same(value: object):
    assert json.loads(encoded(value)) == json.loads(json.dumps(value))


@pytest.mark.parametrize("text", [b"", b"{", b"NaN", b"\xff"])
def test_what_is_no_json_is_refused(text: bytes):
    with pytest.raises(ValueError):
        decoded(text)
