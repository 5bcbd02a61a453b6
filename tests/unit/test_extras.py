"""A command that lacks an extra names the line that installs it, and nothing else: no traceback, no run directory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
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


@pytest.mark.slow
def test_assistants_are_told_in_a_sentence_where_the_package_mcp_is_missing(tmp_path: Path):
    """`tandem mcp` ends with the line that installs it; a control server serves all the rest, and says so at /mcp."""
    program = HIDDEN.format(names=["mcp", "mcp_types"], arguments=["mcp"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == 'tandem: this needs mcp, which is not installed; run: pip install "tandem-rl[mcp]"'
    serve = ["control", "serve", "--port", "0", "--data-dir", "data", "--ready-file", "ready.json"]
    program = HIDDEN.format(names=["mcp", "mcp_types"], arguments=serve)
    served = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert served.stdout is not None
        assert 'install "tandem-rl[control,mcp]" for /mcp' in served.stdout.readline()
        while not (ready := tmp_path / "ready.json").exists():
            assert served.poll() is None
            time.sleep(0.05)
        token = (tmp_path / "data/token").read_text().strip()
        with httpx.Client(
            base_url=json.loads(ready.read_text())["url"], headers={"Authorization": f"Bearer {token}"}
        ) as client:
            told = client.post("/mcp", json={})
            assert (told.status_code, client.get("/api/runs").status_code) == (501, 200)
            assert "tandem-rl[control,mcp]" in told.json()["error"]["message"]
    finally:
        served.terminate()
        served.communicate(timeout=30)
