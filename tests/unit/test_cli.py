"""The command line as a process: quick, clear about mistakes, and light until it has to be heavy."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem import __version__
from tandem.cli.main import app
from tandem.env.load import load_environment
from tandem.spec.load import load_spec, parse_spec
from tandem.spec.run import RlSpec

TANDEM = Path(sys.executable).with_name("tandem")
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
HEAVY = ("torch", "transformers", "peft", "matplotlib", "fastapi", "datasets")

# Runs the command line in a fresh interpreter and reports which heavy packages it imported.
PROBE = f"""
import sys
sys.argv[0] = "tandem"
code = 0
try:
    from tandem.cli.main import main
    main()
except SystemExit as end:
    code = end.code or 0
print("heavy:", [name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


def tandem(*arguments: str | Path, cwd: Path | None = None, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [TANDEM, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, input=typed, capture_output=True, text=True, timeout=60, check=False)


def probed(*arguments: str | Path, cwd: Path) -> tuple[int, list[str]]:
    """Exit code, and the lines of stderr; the last one names the heavy imports."""
    command = [sys.executable, "-c", PROBE, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr.splitlines()


WRONG = [
    (("--set", "train.lrr=1"), "tandem: train.lrr = 1: unknown here; did you mean 'lr'?"),
    (("--set", "train.lr=nan"), "tandem: train.lr = NaN: must be a finite number"),
    (("--set", "train.batch_size=4"), "tandem: train.batch_size = 4: unknown here; remove it."),
    (("--set", "sync.every=9"), "tandem: sync.every = 9: groups would wait longer"),
    (("--set", "recipe=grpo"), 'tandem: recipe = "grpo": the first line of a spec'),
    (("--set", "train.lr"), "tandem: --set train.lr: write key.path=value"),
    (("--set", "environment.name=srot"), "tandem: environment.name = 'srot': unknown; did you mean 'sort'?"),
    (("--set", "environment.name=mine.py"), "tandem: environment.name = 'mine.py': no such file"),
    (
        ("--set", "environment.params.leters=4"),
        "tandem: environment.params.leters = 4: unknown to 'sort'; did you mean 'letters'?",
    ),
    (
        ("--set", "environment.params.letters=many"),
        'tandem: environment.params.letters = "many": must be a whole number',
    ),
    (("--set", "environment.params.letters=99"), "tandem: environment.params.letters = 99: choose between 2 and 32"),
]


@pytest.mark.parametrize(("arguments", "expected"), WRONG, ids=[arguments[1] for arguments, _ in WRONG])
def test_a_wrong_spec_ends_with_2_and_one_line_before_anything_heavy_is_imported(
    tmp_path: Path, arguments: tuple[str, ...], expected: str
):
    code, lines = probed("train", QUICKSTART, *arguments, cwd=tmp_path)
    assert code == 2
    assert lines[0].startswith(expected)
    assert lines[1:] == ["heavy: []"]
    assert list(tmp_path.iterdir()) == []  # no half-made run directory


def test_the_probe_sees_what_is_heavy(tmp_path: Path):
    command = "import torch\n" + PROBE
    done = subprocess.run(
        [sys.executable, "-c", command, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "heavy: ['torch']" in done.stderr


@pytest.mark.parametrize(
    "arguments", [("--help",), ("train", "--help"), ("spec", "schema"), ("spec", "show", QUICKSTART), ("env", "--help")]
)
def test_looking_around_imports_nothing_heavy(tmp_path: Path, arguments: tuple[str, ...]):
    assert probed(*arguments, cwd=tmp_path) == (0, ["heavy: []"])


def test_the_version_is_told():
    told = CliRunner().invoke(app, ["--version"])
    assert (told.exit_code, told.output.split()) == (0, ["tandem", __version__])


def test_help_answers_within_half_a_second():
    """Of processor time, beside what it must import, in turns: neither others nor a slow machine decide the outcome."""
    commands = (TANDEM, "--help"), (sys.executable, "-c", "import typer.rich_utils")
    for _ in range(5):
        help_s, imports_s = (processor_seconds(*command) for command in commands)
        # Where the imports alone take longer than 0.2 s, the machine is slow, and all else takes longer too.
        if help_s <= 0.5 * max(1.0, imports_s / 0.2):
            return
    pytest.fail(f"tandem --help took {help_s:.2f} s, and its imports alone {imports_s:.2f} s")


def processor_seconds(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_no_arguments_show_the_commands():
    shown = tandem().stdout + tandem().stderr
    for command in ("train", "serve", "chat", "report", "spec", "env"):
        assert command in shown


def test_the_schema_is_json_with_a_member_for_each_recipe():
    schema = json.loads(tandem("spec", "schema").stdout)
    assert len(schema["oneOf"]) == 3
    assert schema["discriminator"]["propertyName"] == "recipe"
    for reference in (member["$ref"] for member in schema["oneOf"]):
        assert reference.removeprefix("#/$defs/") in schema["$defs"]


def test_show_prints_a_spec_that_loads_to_the_same_with_its_overrides(tmp_path: Path):
    shown = tandem("spec", "show", QUICKSTART, "--set", "train.lr=3e-5").stdout
    path = tmp_path / "shown.toml"
    path.write_text(shown)
    assert load_spec(path) == load_spec(QUICKSTART, ("train.lr=3e-5",))
    assert "max_lag = 0" in shown  # a default that nobody wrote


def test_a_report_of_what_is_no_run_ends_with_2(tmp_path: Path):
    done = tandem("report", tmp_path / "nothing")
    assert done.returncode == 2
    assert done.stderr.startswith(f"tandem: {tmp_path / 'nothing'}")
    assert "Traceback" not in done.stderr


def test_a_spec_that_is_not_there_ends_with_2(tmp_path: Path):
    done = tandem("train", "nowhere.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0][:31]) == (2, "tandem: nowhere.toml: cannot be")


def test_a_new_environment_and_its_spec_load_where_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done = tandem("env", "new", "shout", cwd=tmp_path)
    assert (done.returncode, done.stdout.split()) == (0, ["shout.py", "shout.toml"])
    monkeypatch.chdir(tmp_path)
    spec = load_spec("shout.toml")
    assert isinstance(spec, RlSpec)
    environment = load_environment(spec.environment.name, spec.environment.params)
    assert len(environment.tasks("train")) > len(environment.tasks("eval")) >= spec.eval.tasks
    assert tandem("env", "new", "shout", cwd=tmp_path).returncode == 2  # nothing is overwritten


def test_an_episode_is_played_from_piped_input():
    task = load_environment("sort", {"letters": 3}).tasks("eval")[1]
    for typed, reward in ((task.payload["answer"], 1), (task.payload["word"][::-1] + "x", 0)):
        done = tandem("env", "try", "sort", "--set", "letters=3", "--index", "1", typed=typed + "\n")
        assert done.returncode == 0
        assert f"user> sort {task.payload['word']}" in done.stdout
        assert f"reward> {reward}" in done.stdout


def test_an_episode_whose_input_ends_is_an_error_in_one_line():
    done = tandem("env", "try", "sort")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["tandem: the input ended before the episode did"]


def test_the_python_api_is_light_until_it_is_used():
    code = "import sys, tandem; tandem.load_spec; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_every_name_of_the_python_api_is_there():
    import tandem

    for name in tandem.__all__:
        assert getattr(tandem, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = tandem.trian


def test_python_and_toml_meet_in_the_same_spec():
    import tandem

    assert tandem.load_spec(QUICKSTART) == load_spec(QUICKSTART) != parse_spec({**_minimal(), "seed": 5})


def _minimal() -> dict[str, object]:
    return {
        "recipe": "rl",
        "model": {"preset": "tiny"},
        "environment": {"name": "sort"},
        "train": {"steps": 1, "lr": 1e-4, "groups_per_step": 1, "group_size": 2},
    }
