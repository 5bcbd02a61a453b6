"""A wheel that somebody else made is opened without trusting it."""

from __future__ import annotations

import pytest
from wheels import wheel
from wrong_wheels import WRONG

from tandem.errors import SpecError
from tandem.io.wheel_file import open_wheel


def test_a_right_wheel_is_read():
    found = open_wheel(*wheel("default-Word_Count", "1.2.0", requires=("pytest>=8",)))
    assert (found.distribution, found.version, found.requires) == ("default-word-count", "1.2.0", ("pytest>=8",))
    assert (found.environments, list(found.files)) == ({"shout": "shout_env:Shout"}, ["shout_env.py"])
    assert (found.requires_python, found.summary) == (">=3.11", "shouts")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_wheel_is_refused(name: str):
    make, says = WRONG[name]
    file, content = make()
    with pytest.raises(SpecError, match=says):
        open_wheel(file, content)
