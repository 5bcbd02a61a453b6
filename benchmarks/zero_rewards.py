"""Plants ten reasons for which a real model earns nothing, and reads which reason a run gives, and how soon.

Each is a directory as a user would have it: a spec, questions, a function that scores. `tandem train` runs in it until
it says the reason; then it is killed. What it says first counts, also if a later statement is right. Exit code 1 unless
eight of the ten are right within 60 s of the first step's begin, or within two steps. Some five minutes on two idle
cores.

python benchmarks/zero_rewards.py --model DIR [--only NAME] [--more] [--check] [--json FILE]

DIR: as benchmarks/real_model.py writes it. `--check` asks `tandem env check` instead, which needs no training.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from common import note, table

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "Egypt": "Cairo",
    "China": "Beijing", "Greece": "Athens", "Russia": "Moscow", "Cuba": "Havana", "Peru": "Lima", "Kenya": "Nairobi",
    "Iraq": "Baghdad", "Iran": "Tehran", "Poland": "Warsaw", "Austria": "Vienna", "Norway": "Oslo",
    "Sweden": "Stockholm", "Ireland": "Dublin", "Portugal": "Lisbon", "India": "New Delhi",
    "Denmark": "Copenhagen", "Hungary": "Budapest",
    "Chile": "Santiago",
}  # fmt: skip
LAST_NAMES = ("Okonkwell", "Tarnavik", "Brunhalt", "Pellisor")
SPEC = """
recipe = "rl"
device = "cpu"
model = {{ path = "{model}", lora = {{ rank = 8 }} }}
train = {{ steps = 3, lr = 1e-5, groups_per_step = 8, group_size = 8, max_tokens = {max_tokens} }}
eval = {{ tasks = 6 }}
[environment]
{environment}
"""
PROMPTS = 'name = "prompts"\nparams.data = {data}\nparams.reward = {reward}\n'
LIMIT_S, STEPS, DEADLINE_S, WANTED = 60.0, 2, 600.0, 8
Row = Mapping[str, object]


@dataclass(frozen=True)
class Plant:
    kinds: Sequence[str]
    """The reasons that are right, as the run names them; or words of the error with which it refuses to begin."""
    rows: Sequence[Row] = ()
    score: str = ""
    """The file score.py."""
    reward: str = '"score.py:score"'
    data: str = '"rows.csv"'
    max_tokens: int = 24
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    environment: str = ""
    change_model: Callable[[Path], None] | None = None


def capitals(ask: str = "What is the capital of {}?", key: Callable[[str], str] = str) -> list[Row]:
    return [
        {"question": ask.format(land), "answer": key(city), "continent": "Earth", "number": 7000 + number}
        for number, (land, city) in enumerate(CAPITALS.items())
    ]


def shifted() -> list[Row]:
    rows, cities = capitals(), [*CAPITALS.values()]
    return [{**row, "answer": cities[(number + 5) % len(cities)]} for number, row in enumerate(rows)]


def unknowable() -> list[Row]:
    names = [f"{first} {last}" for first in ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn") for last in LAST_NAMES]
    return [
        {"question": f"In which year was the baker {name} born?", "answer": 1203 + 7 * number}
        for number, name in enumerate(names)
    ]


def no_opening(model: Path) -> None:
    """The template leaves out the line that opens the assistant's turn."""
    template = (model / "chat_template.jinja").read_text()
    cut = template.split("{% if add_generation_prompt %}")[0]
    assert cut != template
    (model / "chat_template.jinja").write_text(cut)


def no_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()


HOLDS = "def score(reply, answer):\n    return answer in reply\n"
STOPS = """
from tandem.types import Outcome, Task

CITIES = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"}


class Capitals:
    def tasks(self, split):
        asked = [(land, city, n) for n in range(4) for land, city in CITIES.items() if (n == 3) == (split == "eval")]
        return [
            Task(f"{land}{n}", ({"role": "user", "content": f"What is the capital of {land}?"},), {"city": city})
            for land, city, n in asked
        ]

    async def run(self, task, chat):
        reply = await chat.reply(stop=[*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"])
        return Outcome(float(task.payload["city"] in reply.text))
"""

PLANTS = {
    "format": Plant(
        ["format"],
        capitals("What is the capital of {}? Put the city between <answer> and </answer>."),
        'def score(reply, answer):\n    return f"<answer>{answer}</answer>" in reply\n',
    ),
    "cut off": Plant(["length"], capitals(), HOLDS, max_tokens=4),
    "parser": Plant(["parser"], capitals(), reward='"exact"'),
    "wrong column": Plant(["column"], capitals(), reward='{ fn = "last_number", answer = "number" }'),
    "template": Plant(["template"], capitals(), reward='"exact"', change_model=no_opening),
    "case": Plant(["case"], capitals(key=str.upper), HOLDS),
    "raises": Plant(
        ["scorer", "raised KeyError: 'anwser'"],
        capitals(),
        'def score(reply, row):\n    return row["anwser"] in reply\n',
    ),
    "wrong key": Plant(["answer key"], shifted(), HOLDS),
    "too hard": Plant(["difficulty"], unknowable(), reward='"last_number"'),
    "empty": Plant(["empty"], files={"capitals.py": STOPS}, environment='name = "capitals.py"'),
}
"""The ten of the figure."""
MORE = {
    "no template": Plant(["chat template"], capitals(), HOLDS, change_model=no_template),
    "wrong prompt": Plant(
        ["column"], capitals(), HOLDS, data='{ path = "rows.csv", columns = { prompt = "continent" } }'
    ),
    "number as text": Plant(
        ["scorer", "parser"],
        [{"question": f"What is {a} + 1? Reply with the number alone.", "answer": a + 1} for a in range(1, 25)],
        "def score(reply, answer):\n    return reply.strip().rstrip('.') == int(answer)\n",
    ),
    "long key": Plant(
        ["column", "parser"],
        [
            {"question": f"What is {a} + 1?", "answer": f"We begin with {a}. One more makes {a + 1}. #### {a + 1}"}
            for a in range(1, 25)
        ],
        reward='"exact"',
    ),
}


def write(home: Path, plant: Plant, model: Path) -> None:
    if plant.change_model is not None:
        changed = home / "model"
        shutil.copytree(model, changed, copy_function=link)
        plant.change_model(changed)
        model = changed
    if plant.rows:
        with (home / "rows.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*plant.rows[0]])
            writer.writeheader()
            writer.writerows(plant.rows)
    for name, text in {**plant.files, **({"score.py": plant.score} if plant.score else {})}.items():
        (home / name).write_text(text)
    environment = plant.environment or PROMPTS.format(data=plant.data, reward=plant.reward)
    spec = SPEC.format(model=model.resolve(), max_tokens=plant.max_tokens, environment=environment)
    (home / "spec.toml").write_text(spec)


def link(source: str, target: str) -> None:
    """Weights are linked, because they are large; what a plant changes is copied."""
    if source.endswith(".safetensors"):
        os.symlink(source, target)
    else:
        shutil.copy2(source, target)


@dataclass
class Said:
    kind: str = ""
    text: str = ""
    seconds: float = float("nan")
    """Since the stage of rewards began; negative: before it."""
    steps: int = 0
    whole_s: float = 0.0


def run(home: Path) -> Said:
    """Run until a reason is said; kill it then."""
    begun = time.monotonic()
    with (home / "said.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem", "train", "spec.toml", "--run-dir", "run"], cwd=home, stdout=log, stderr=log
        )
    found = Said()
    while not found.kind and process.poll() is None and time.monotonic() < begun + DEADLINE_S:
        time.sleep(0.2)
        found = heard(home)
    process.kill()
    process.wait()
    found = found if found.kind else heard(home)
    found.whole_s = time.monotonic() - begun
    if not found.kind:
        found.text = (home / "said.txt").read_text(errors="replace")[-2000:]
    return found


def check(home: Path) -> Said:
    """Let `tandem env check` say the reason."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "tandem", "env", "check", "spec.toml", "--tasks", "5", "--answers", "8", "--json"]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=DEADLINE_S)
    took_s = time.monotonic() - begun
    if not done.stdout.startswith("{"):
        return Said(text=done.stderr[-2000:], whole_s=took_s)
    row = json.loads(done.stdout)
    return Said(row["likely"], row["why"], row["seconds"], 0, took_s)


def heard(home: Path) -> Said:
    """What the run has said so far: its evaluation, then its first step."""
    printed = (home / "said.txt").read_text(errors="replace") if (home / "said.txt").exists() else ""
    events = rows(home / "run" / "events.jsonl")
    began = next((at(event) for event in events if event["stage"] == "rl"), None)
    steps = len(rows(home / "run" / "metrics.jsonl"))
    if evaluated := re.search(r"^ +likely ([\w ]+): (.*)$", printed, re.MULTILINE):
        return Said(evaluated[1], evaluated[2], -0.0, 0)
    for event in events:
        if event["stage"] == "no_reward":
            return Said(event["reason"], event["message"], at(event) - (began or at(event)), steps)
    return Said()


def rows(path: Path) -> list[dict[str, object]]:
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return [json.loads(line) for line in whole.splitlines()]


def at(event: Mapping[str, object]) -> float:
    return datetime.fromisoformat(str(event["at"])).timestamp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--only", choices=[*PLANTS, *MORE], action="append")
    parser.add_argument("--more", action="store_true", help="four more, which the figure does not count")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = {**PLANTS, **MORE} if options.more or options.only else PLANTS
    found: dict[str, Said] = {}
    for name, plant in chosen.items():
        if options.only and name not in options.only:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            write(Path(scratch), plant, options.model)
            found[name] = (check if options.check else run)(Path(scratch))
        print(f"{name}: {found[name].kind or 'nothing'}: {found[name].text[:600]}\n", flush=True)

    def is_right(name: str) -> bool:
        said, plant = found[name], chosen[name]
        soon = said.seconds <= LIMIT_S or said.steps <= STEPS
        refused = not said.kind and any(words in said.text for words in plant.kinds)
        return (said.kind in plant.kinds and soon) or refused

    note("Ten reasons for no reward, SmolLM2-135M-Instruct: what a run says, and how soon")
    head = ("planted", "said", "right", "after s of steps", "steps done", "s since the command")
    lines = [
        (
            name,
            said.kind or "-",
            "yes" if is_right(name) else "NO",
            f"{said.seconds:.1f}",
            str(said.steps),
            f"{said.whole_s:.0f}",
        )
        for name, said in found.items()
    ]
    table(head, lines)
    right = sum(is_right(name) for name in found if name in PLANTS)
    print(f"{right} of {sum(name in PLANTS for name in found)} right; at least {WANTED} of 10 are asked for")
    if options.json:
        options.json.write_text(json.dumps({name: vars(said) for name, said in found.items()}, indent=1))
    sys.exit(not options.only and right < WANTED)


if __name__ == "__main__":
    main()
