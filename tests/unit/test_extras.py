"""A command that lacks an extra names the line that installs it, and nothing else: no traceback, no run directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.errors import MissingExtra
from tandem.io.extras import explain_missing, require_extra

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.toml"
# A process in which `torch` or numpy cannot be found, as after a bare install.
HIDDEN = """
import importlib.util, sys
hidden = {names!r}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in hidden:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in hidden else found(name, package)
sys.argv = ["tandem", *{arguments!r}]
from tandem.__main__ import main
main()
"""


def test_what_is_installed_is_no_error():
    require_extra("train", "torch", "json")


def test_what_is_not_installed_is_named_with_the_line_that_installs_it():
    with pytest.raises(MissingExtra, match=r'needs no_such_package, which is not .* "tandem-rl\[train\]"'):
        require_extra("train", "json", "no_such_package")


def test_only_packages_of_the_extra_are_explained():
    assert 'pip install "tandem-rl[train]"' in explain_missing(ModuleNotFoundError("x", name="numpy.linalg"))
    assert explain_missing(ModuleNotFoundError("x", name="my_environment")) == ""
    assert explain_missing(ValueError("x")) == ""


@pytest.mark.parametrize("arguments", [["train", str(EXAMPLE)], ["serve", "."], ["rollouts", "serve"]], ids=str)
def test_a_command_without_the_extra_ends_with_that_line(tmp_path: Path, arguments: list[str]):
    program = HIDDEN.format(names=["torch"], arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    expected = 'tandem: this needs torch, which is not installed; run: pip install "tandem-rl[train]"'
    assert done.stderr.strip() == expected
    assert list(tmp_path.iterdir()) == []
