"""Command line and Python are two layers over the same functions, and docs/ tells of each."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import tandem
import tandem.client
from tandem.cli.main import app

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

PYTHON_FUNCTION = {
    "train": "run",
    "atropos": "run_atropos",
    "resume": "resume",
    "digest": "digest_run",
    "sweep": "sweep",
    "plan": "plan_run",
    "doctor": "diagnose",
    "serve": "serve_model",
    "engine serve": "serve_engine",
    "gateway serve": "serve_gateway",
    "rollouts serve": "serve_rollouts",
    "online serve": "serve_online",
    "rollouts top": "rollouts_status",
    "engine install": "install_engine",
    "engine check": "check_engine",
    "model check": "check_model",
    "chat": "chat_with",
    "report": "write_report",
    "watch": "watch_run",
    "explain": "explain_run",
    "samples": "samples",
    "feedback": "feedback_rows",
    "runs": "list_runs",
    "targets": "list_targets",
    "env list": "list_environments",
    "eval": "evaluate_model",
    "export": "export_run",
    "compare": "compare_runs",
    "artifacts push": "push_artifacts",
    "artifacts list": "list_artifacts",
    "artifacts fetch": "fetch_artifact",
    "spec schema": "json_schema",
    "spec show": "load_spec",
    "sync audit": "audit_sync",
    "sync status": "sync_status",
    "sync bench": "bench_sync",
    "env check": "measure_base_rate",
    "init": "write_first_spec",
    "env new": "new_environment",
    "env try": "try_environment",
    "env serve": "serve_environment",
}
"""Every command, and the function that does its work."""

CLIENT_METHOD = {
    "login": "save_place",
    "submit": "Tandem.submit",
    "cancel": "RemoteRun.cancel",
    "pull": "RemoteRun.pull",
    "logs": "RemoteRun.read",
    "control project": "Tandem.put_project",
    "control key new": "Tandem.make_key",
    "control key list": "Tandem.keys",
    "control key revoke": "Tandem.revoke_key",
    "control secret set": "Tandem.set_secret",
    "control secret list": "Tandem.secrets",
    "control secret delete": "Tandem.delete_secret",
    "control usage": "Tandem.usage",
    "control audit": "Tandem.audit",
    "deploy": "Tandem.deploy",
    "deployments": "Tandem.deployments",
    "promote": "Tandem.promote",
    "rollback": "Tandem.rollback",
    "undeploy": "Tandem.undeploy",
    "env push": "Tandem.push_environment",
    "env yank": "Tandem.yank_environment",
    "env verify": "Tandem.verify_environment",
}
"""Commands for a control server, and what does their work in `tandem.client`."""

OF_OPERATORS = {"control serve", "control backup", "control restore", "control upgrade", "control doctor"}
"""Commands that look after a data directory; they are no part of the Python API."""

FOR_ASSISTANTS = {"mcp"}
"""Commands that another program starts."""

TO_LOOK_AT = {"dashboard", "top"}
"""Commands whose use is what they show; that, the Python API reads itself."""

BEHIND_AN_OPTION = {"supervise_run": ("train", "resume"), "check_demonstrations": ("env check",)}
"""Functions that commands call with an option, --supervise, or without one, --model."""

PYTHON_ONLY = {"load_environment", "parse_spec"}
"""Functions that a command line has no use for."""


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not hasattr(group, "commands"):
        yield path, group
        return
    for name, command in group.commands.items():
        if not command.hidden:  # such as `tandem agent`, which a control plane starts
            yield from commands(command, f"{path} {name}".strip())


COMMANDS = dict(commands(typer.main.get_command(app)))
NAMES = sorted({*tandem.__all__} - {"__version__"})
FUNCTIONS = {name for name in NAMES if inspect.isfunction(getattr(tandem, name))}


def taken_from(name: str) -> str:
    """The module that the Python API takes it from, as type checkers read it."""
    tree = ast.parse(Path(tandem.__file__).read_text(encoding="utf-8"))
    (module,) = (
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}
    )
    return str(module)


def test_every_command_has_a_python_function():
    assert set(COMMANDS) == {*PYTHON_FUNCTION, *CLIENT_METHOD, *OF_OPERATORS, *FOR_ASSISTANTS, *TO_LOOK_AT}
    assert set(PYTHON_FUNCTION.values()) <= FUNCTIONS


def test_every_python_function_has_a_command_or_is_meant_for_python_alone():
    assert FUNCTIONS - set(PYTHON_FUNCTION.values()) == PYTHON_ONLY | set(BEHIND_AN_OPTION)
    for function, names in BEHIND_AN_OPTION.items():
        for name in names:
            body = inspect.getsource(inspect.unwrap(COMMANDS[name].callback))
            assert f"from {taken_from(function)} import {function}" in body


@pytest.mark.parametrize(("command", "function"), PYTHON_FUNCTION.items())
def test_a_command_calls_its_function(command: str, function: str):
    """By the source: the command imports the function from the module that the Python API takes it from."""
    body = inspect.getsource(inspect.unwrap(COMMANDS[command].callback))
    assert f"from {taken_from(function)} import" in body
    assert function in body


@pytest.mark.parametrize(("command", "method"), CLIENT_METHOD.items())
def test_a_command_for_a_control_server_calls_the_client(command: str, method: str):
    found: Any = tandem.client
    for name in method.split("."):
        found = getattr(found, name)
    module = sys.modules[inspect.unwrap(COMMANDS[command].callback).__module__]
    assert f".{found.__name__}(" in inspect.getsource(module) or f" {found.__name__}(" in inspect.getsource(module)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_page_in_docs(command: str):
    assert [page.name for page in DOCS if f"tandem {command}" in page.read_text()]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_python_api_has_a_page_in_docs(name: str):
    told = [page.name for page in DOCS if f"tandem.{name}" in page.read_text() or f"`{name}" in page.read_text()]
    assert told


def test_every_command_and_option_says_what_it_does():
    for name, command in COMMANDS.items():
        assert command.help, name
        for option in command.params:
            assert getattr(option, "help", ""), f"{name} {option.name}"


def bare(text: str) -> str:
    """Without spaces, line ends and the lines of boxes, which rich puts where it likes."""
    return re.sub(r"[\s─-╿]+", "", text)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_word_that_the_source_says(name: str):
    """rich takes `[artifacts]` for a style, and shows nothing of it."""
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    command = COMMANDS[name]
    told = [inspect.getdoc(inspect.unwrap(command.callback)), *(getattr(one, "help", "") for one in command.params)]
    assert [text for text in told if bare(text or "") not in bare(shown)] == []


ALL_IMPORTED = """
import tandem, tandem.build.training, tandem.train.batch_packing, tandem.serve.http.service
for name in tandem.__all__[1:]:
    assert callable(getattr(tandem, name)), name
"""


def test_the_python_api_holds_after_everything_was_imported():
    done = subprocess.run([sys.executable, "-c", ALL_IMPORTED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
