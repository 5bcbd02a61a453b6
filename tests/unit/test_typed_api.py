"""Pyright in strict mode on a user's script: a right one has no error, and a mistake in any public call is found."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import tandem

FUNCTIONS = {name: value for name in tandem.__all__ if inspect.isfunction(value := getattr(tandem, name))}
VALUES = {
    "str": '"a"',
    "str | Path": '"a"',
    "AnySpec": '"a.toml"',
    "OnlineSpec | Mapping[str, Any] | str | Path": '"a.toml"',
    "Mapping[str, Any]": '{"recipe": "sft"}',
    "Listen": 'tandem.Listen("a")',
    "FirstAnswers": 'tandem.FirstAnswers("rewards", "a", "sort", "none")',
    "Sequence[int]": "[0, 1]",
    "Sequence[str | Path]": '["a", "b"]',
}
"""What a user writes for a parameter of this type; a function with another type of required parameter needs a line."""

BY_HAND = """
task = tandem.Task("a", ({"role": "user", "content": "?"},))


class Mine:
    def tasks(self, split: str) -> list[tandem.Task]:
        return [task]

    async def run(self, task: tandem.Task, chat: tandem.Chat) -> tandem.Outcome:
        return tandem.Outcome(float((await chat.reply()).text == "b"), {"correct": 1.0})

    def on_step(self, step: tandem.Step) -> dict[str, float]:
        return {"mine/tokens": float(step.tokens.mask_T.sum())}


run = tandem.run({"recipe": "rl"}, "runs/mine", environment=Mine(), callbacks=[Mine()])
print(run.directory, run.status["verdict"], tandem.plan_run("mine.toml").fits)
"""
WRONG_BY_HAND = [
    'tandem.Task("a", mesages=())',
    "tandem.Outcome(reward=1.0, metric={})",
    "tandem.Sampling(max_token=1)",
    'tandem.Listen("a", prot=1)',
    'tandem.run("a.toml", environment=3)',
    'tandem.run("a.toml", callbacks=[tandem.Outcome(1.0)])',
    'tandem.run("a.toml").direktory',
    'tandem.plan_run("a.toml").fit',
    "tandem.resume(5)",
    "tandem.Sampling(max_tokens=1).temprature",
    'tandem.FirstAnswers("rewards", "a", "sort", "none", gpus=1)',
]
VERBS = {"sample": '["a"]', "forward_backward": "[]", "optim_step": "", "publish": "", "save": '"a"', "load": '"a"',
         "export": '"a"', "close": ""}  # fmt: skip
"""The methods of tandem.Trainer, with what a user cannot leave out."""


def required(name: str) -> list[str]:
    """The arguments that a call of this function cannot leave out, as a user writes them."""
    written: list[str] = []
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.values():
        if parameter.default is parameter.empty:
            by_name = f"{parameter.name}=" if parameter.kind is parameter.KEYWORD_ONLY else ""
            written.append(by_name + VALUES[str(parameter.annotation)])
    return written


def wrong_lines() -> Iterator[str]:
    for name in tandem.__all__:
        yield f"tandem.{name[:-1]}_{name[-1]}"
    for name, function in FUNCTIONS.items():
        arguments = required(name)
        yield f"tandem.{name}({', '.join([*arguments, 'mispelt=1'])})"
        yield f"tandem.{name}({', '.join([*arguments, *['1'] * 20])})"
        for parameter in inspect.signature(function).parameters.values():
            if parameter.default is not parameter.empty:
                yield f"tandem.{name}({', '.join([*arguments, f'{parameter.name}_=1'])})"
    for verb, arguments in VERBS.items():
        yield f'tandem.Trainer("a.toml").{verb}({", ".join(filter(None, [arguments, "mispelt=1"]))})'
        yield f'tandem.Trainer("a.toml").{verb[:-1]}_({arguments})'
    yield from WRONG_BY_HAND


def lines_with_errors(script: Path, text: str) -> dict[int, list[str]]:
    script.write_text(f"# pyright: strict, reportUnusedExpression=false, reportUnusedCallResult=false\n{text}")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=script.parent)
    found: dict[int, list[str]] = {}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        found.setdefault(each["range"]["start"]["line"] - 1, []).append(each["message"])
    return found


def test_a_script_without_a_mistake_has_no_error(tmp_path: Path):
    methods = {name for name in vars(tandem.Trainer) if not name.startswith("_")} - {"version"}
    assert methods == VERBS.keys()
    calls = "\n".join(f"print(tandem.{name}({', '.join(required(name))}))" for name in FUNCTIONS)
    calls += "".join(f'\nprint(tandem.Trainer("a.toml").{verb}({arguments}))' for verb, arguments in VERBS.items())
    assert lines_with_errors(tmp_path / "right.py", f"import tandem\n{BY_HAND}\n{calls}\n") == {}


def test_a_typing_error_in_every_public_call_is_found(tmp_path: Path):
    wrong = ["import tandem", *wrong_lines()]
    found = lines_with_errors(tmp_path / "wrong.py", "\n".join(wrong) + "\n")
    assert [line for number, line in enumerate(wrong) if number not in found] == ["import tandem"]
    assert len(wrong) > 200
