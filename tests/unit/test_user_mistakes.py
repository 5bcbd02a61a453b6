"""Mistakes at the command line: a sentence that names the mistake, an exit code, and never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.__main__ import main

QUICKSTART = str(Path(__file__).parents[2] / "examples" / "quickstart.toml")
URL = "http://127.0.0.1:9"

# What is typed, the exit code, and what the last line says. The directory holds: binary, empty, a file with one list,
# deep (50,000 brackets), folder/, and run/, a run of which every file is damaged.
WRONG: list[tuple[str, int, str]] = [
    ("train nowhere.toml", 2, "nowhere.toml: cannot be read (No such file or directory)"),
    ("train folder", 2, "folder: cannot be read (Is a directory)"),
    ("train binary", 2, "binary: is not TOML"),
    ("train empty", 2, "recipe = (nothing): the first line of a spec names the recipe"),
    ("train deep", 2, "deep: is not a spec: tables and lists are nested too deeply"),
    ("train /proc/self/mem", 2, "/proc/self/mem: cannot be read"),
    (f"train {QUICKSTART} --set train", 2, "--set train: write key.path=value"),
    (f"train {QUICKSTART} --run-dir binary", 2, "binary: is a file; name a directory (--run-dir)"),
    (f"train {QUICKSTART} --run-dir binary/run", 2, "binary/run: cannot be made: Not a directory: 'binary'"),
    (f"train {QUICKSTART} --set environment.name=folder", 2, "environment.name = 'folder': unknown"),
    (f"plan {QUICKSTART} --prices binary", 2, "binary: cannot be read"),
    (f"plan {QUICKSTART} --gpu abacus", 2, "abacus"),
    (f"sweep {QUICKSTART} --seeds one,two", 2, "--seeds one,two: write whole numbers"),
    ("resume nowhere", 2, "nowhere: is not a run"),
    ("resume folder", 2, "folder: is not a run"),
    ("resume run", 2, "run/spec.toml: is not TOML"),
    ("digest run", 2, "run/spec.toml: is not TOML"),
    ("report folder", 2, "folder is not a run directory"),
    ("report run", 2, "run/status.json is not JSON"),
    ("export run", 2, "run/spec.toml: is not TOML"),
    ("watch binary --once", 2, "binary is not a run directory"),
    ("watch run --once", 2, "run/status.json is not JSON"),
    ("compare run", 2, "compare: name two runs or more"),
    ("sync audit run", 2, "run/status.json is not JSON"),
    ("sync status nowhere", 2, "nowhere is not a run directory"),
    (f"sync status {URL} --token-file nowhere", 2, "nowhere"),
    ("rollouts top nowhere --once", 1, "'nowhere' is neither a URL nor the data directory"),
    ("rollouts top deep --once", 1, "deep is not what `tandem rollouts serve` writes"),
    ("rollouts serve --data-dir binary --port 0", 2, "binary"),
    ("serve ./nowhere", 2, "model = './nowhere': there is no such directory"),
    ("serve folder", 2, "model = 'folder': has no config.json"),
    ("serve binary", 2, "model = 'binary': is a file"),
    ("chat deep", 2, "model = 'deep': is a file"),
    ("eval folder", 2, "folder: is not a run, so it has no spec of its own"),
    ("engine serve ./nowhere", 2, "model = './nowhere': there is no such directory"),
    ("gateway serve --model binary", 2, "--model = 'binary': is a file"),
    ("online serve list", 2, "list: is not TOML"),
    ("env try nowhere.py", 2, "environment.name = 'nowhere.py': no such file"),
    ("env new 1st", 2, "name = '1st': write small letters"),
    ("env new mine --directory nowhere", 2, "directory = 'nowhere': is not a directory"),
    ("artifacts push folder --url store", 2, "folder is not a run directory"),
    ("artifacts fetch nowhere name out", 1, "name"),
    ("report " + "x" * 300, 2, "File name too long"),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "empty").write_text("")
    (tmp_path / "list").write_text("[1, 2]")
    (tmp_path / "deep").write_text("x = " + "[" * 50_000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "run").mkdir()
    for name in ("spec.toml", "status.json", "metrics.jsonl", "events.jsonl", "sync.jsonl"):
        (tmp_path / "run" / name).write_bytes(b"\xff\xfe\n{")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("typed", "code", "said"), WRONG, ids=[typed[:60] for typed, _, _ in WRONG])
def test_a_wrong_thing_is_named_and_nothing_is_left(
    typed: str,
    code: int,
    said: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    before = sorted(path.name for path in place.iterdir())
    monkeypatch.setattr(sys, "argv", ["tandem", *typed.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert said in told.err
    assert ended.value.code == code
    assert "Traceback" not in told.out + told.err
    assert sorted(path.name for path in place.iterdir()) == before


HEAD = """
import sys
from tandem.obs.live_view import LiveView
view = LiveView()
for number in range(2000):
    view.say("a line that nobody reads " * 40)
print("went on", file=sys.stderr)
"""


def test_a_run_outlives_what_reads_its_output():
    """`tandem train SPEC | head`"""
    process = subprocess.Popen([sys.executable, "-c", HEAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == "went on\n"
    process.stderr.close()
    assert process.wait(timeout=60) == 0
