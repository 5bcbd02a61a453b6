"""`tandem init`: write a first spec from four answers: goal, model, task and GPU.

docs/init.md says where the figures come from, and which of them were measured.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from tandem.errors import SpecError
from tandem.runs.planner.calibration import cards
from tandem.spec.bridges import on_one_gpu
from tandem.spec.data import SUFFIXES
from tandem.spec.hardware import micro_tokens
from tandem.spec.load import parse_spec
from tandem.spec.presets import SIZES

Goal: TypeAlias = Literal["rewards", "imitate", "prefer"]
"""rewards: RL on an environment. imitate: SFT on conversations. prefer: DPO on pairs of answers."""

Way: TypeAlias = Literal["full", "lora", "nf4"]
"""full: every weight is trained. lora: an adapter. nf4: an adapter on a base of 4 bits."""

_GIB = ("8", "12", "16", "24", "32", "48", "80")

_MEASURED_B = 0.135  # billions of parameters of the model whose rates were measured
_FULL_GIB, _LORA_GIB, _NF4_GIB = 16.0, 2.5, 2.0  # per billion parameters: weights, master bits, gradients, optimizer
_RL_GIB = 1.5  # more for RL: keys and values, and processes
_ROOM = 0.6  # of the memory, beside activations and keys and values
_CPU_FULL_B, _CPU_LORA_B = 0.1, 2.0
_SHORT, _MATHS, _USUAL = 64, 512, 256  # tokens of an answer
_BUILT_IN = {"sort": "", "guess": "", "arithmetic": "What is {problem}?"}
_WIDTH = {"float64": 8, "float32": 4}


@dataclass(frozen=True, slots=True)
class FirstAnswers:
    """The four answers. `billions`: parameters of the model, where its name or files do not say; 0: they do."""

    goal: Goal
    model: str
    task: str
    gpu: str
    billions: float = 0.0
    vllm: bool = False
    """Whether vLLM is installed: the embedded engine is slower and needs nothing."""


@cache
def gpus() -> Mapping[str, float]:
    """Return the answers to the fourth question, with GiB of memory."""
    known = {name: float(card["memory_gib"]) for name, card in cards().items()}
    return {"none": 0.0, **{gib: float(gib) for gib in _GIB}, **known}


def gpu_gib(gpu: str) -> float:
    """Return the GiB of memory of an answer to the fourth question; 0 for none. SpecError if it is unknown."""
    if gpu not in gpus():
        raise SpecError(f"--gpu {gpu}: choose GiB of memory or a card: {', '.join(gpus())}")
    return gpus()[gpu]


def write_first_spec(answers: FirstAnswers, path: str | Path) -> Path:
    """Write the spec into a new file and return its path."""
    path = Path(path)
    text = first_spec(answers)
    parse_spec(tomllib.loads(text))  # whatever the answers are: a wrong spec is not written
    try:
        with path.open("x", encoding="utf-8") as file:  # x: fails rather than overwrites
            file.write(text)
    except FileExistsError as error:
        raise SpecError(f"{path}: exists already; choose another with --out, or move it away") from error
    return path


def first_spec(answers: FirstAnswers) -> str:
    """Return the text of a spec, with a comment where a figure was chosen."""
    if answers.goal not in get_args(Goal):
        raise SpecError(f"--goal {answers.goal}: choose {', '.join(get_args(Goal))}")
    gpu_gib(answers.gpu)  # refuses an unknown one
    if answers.model in SIZES:
        return _from_scratch(answers)
    size = answers.billions or model_billions(answers.model)
    return spec_for(answers, size, _way(answers, size))


def spec_for(answers: FirstAnswers, size: float, way: Way) -> str:
    """Return the text of the spec that trains a model of `size` billions of parameters this way, fitting or not."""
    tables = [_head(answers, size, way), _model(answers, way)]
    if answers.gpu != "none":
        tables.append('[precision]\nweights = "bfloat16"' + ('\nmaster = "split"' if way == "full" else ""))
    if answers.goal == "rewards":
        tables += [_environment(answers.task), *_engine(answers, way), _rl(answers, size, way), _eval(answers)]
    else:
        tables += [_data(answers), _supervised(answers, way)]
    return "\n\n".join(tables) + "\n"


def model_billions(model: str) -> float:
    """Return how many billions of parameters a model has: by its files, or by its name."""
    files = list(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    if files:
        config: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        width = _WIDTH.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
        return sum(file.stat().st_size for file in files) / width / 1e9
    if found := re.search(r"(?<![\d.])(\d+(?:\.\d+)?)\s*([mb])(?![a-z])", Path(model).name, re.IGNORECASE):
        return float(found[1]) / (1e3 if found[2].lower() == "m" else 1)
    raise SpecError(f"--model {model}: neither its name nor its files say how large it is; give --billions")


def _way(answers: FirstAnswers, size: float) -> Way:
    """Return what is trained: the most that fits."""
    memory = gpus()[answers.gpu]
    if answers.gpu == "none":
        if size > _CPU_LORA_B:
            raise SpecError(
                f"--model {answers.model}: {size:.3g}B parameters are too many for a CPU (at most {_CPU_LORA_B:g}B); "
                "choose a smaller one, or a GPU"
            )
        return "full" if size <= _CPU_FULL_B else "lora"
    copies = 2 if answers.vllm and answers.goal == "rewards" else 1  # vLLM has the base for itself
    room = _ROOM * memory - (_RL_GIB if answers.goal == "rewards" else 0)
    if size * _FULL_GIB <= room:
        return "full"
    if size * _LORA_GIB * copies <= room:
        return "lora"
    if size * _NF4_GIB <= room and (answers.goal != "rewards" or not answers.vllm):
        return "nf4"
    most = room / (_LORA_GIB if copies == 2 else _NF4_GIB) / copies
    raise SpecError(
        f"--model {answers.model}: {size:.3g}B parameters do not fit --gpu {answers.gpu}; take a model of at most "
        f"{most:.2g}B, or a larger GPU"
    )


def rate(goal: Goal, size: float, way: Way) -> float:
    """Return the learning rate, to one digit."""
    smaller = min(1.0, _MEASURED_B / size)
    if goal == "rewards":
        found = max(1e-6, 2e-5 * math.sqrt(smaller)) if way == "full" else 3e-4 * smaller**0.25
    elif goal == "imitate":
        found = 1e-5 if way == "full" else 1e-4
    else:
        found = 5e-6 if way == "full" else 5e-5
    return float(f"{found:.0e}")


# --- tables


def _head(answers: FirstAnswers, size: float, way: Way) -> str:
    what = {"full": "all weights", "lora": "LoRA", "nf4": "LoRA on a base of 4 bits"}[way]
    recipe = {"rewards": "rl", "imitate": "sft", "prefer": "preference"}[answers.goal]
    where = "a CPU" if answers.gpu == "none" else f"a GPU of {gpus()[answers.gpu]:g} GiB"
    return f'# Written by tandem init: {what} of {size:.3g}B parameters, on {where}.\nrecipe = "{recipe}"'


def _model(answers: FirstAnswers, way: Way) -> str:
    lines = ["[model]", f"path = {_quoted(answers.model)}"]
    if way == "lora":
        lines.append("lora = { rank = 16 }            # leave out to train every weight, with a tenth of train.lr")
    if way == "nf4":
        lines.append('lora = { rank = 16, base = "nf4" }   # needs bitsandbytes')
    if answers.gpu != "none":
        if way != "nf4":
            lines.append('attention = "packed"             # no masks and no padding')
        lines.append('activations = "recompute"        # less memory; "keep" is faster where it fits')
    return "\n".join(lines)


def _is_file_of_rows(task: str) -> bool:
    return Path(task).suffix.lower() in SUFFIXES


def _environment(task: str) -> str:
    if _is_file_of_rows(task):
        data = f"params.data = {{ path = {_quoted(task)}, eval_share = 0.1 }}    # a tenth is held out"
        reward = 'params.reward = "last_number"    # of the column answer; docs/your_data.md has others, and yours'
        return f'[environment]\nname = "prompts"\n{data}\n{reward}'
    prompt = _BUILT_IN.get(task, "")
    return f"[environment]\nname = {_quoted(task)}" + (f"\nparams = {{ prompt = {_quoted(prompt)} }}" if prompt else "")


def _engine(answers: FirstAnswers, way: Way) -> list[str]:
    if answers.gpu == "none" or not answers.vllm:
        if answers.gpu == "none":
            return []
        return ["# The embedded engine. vLLM is many times as fast: `tandem engine install vllm`, then init again."]
    bridge = on_one_gpu(adapters=way != "full").name
    return [f'[engine]\nkind = "vllm"\nmemory_share = 0.3            # of the GPU\n\n[sync]\nbridge = "{bridge}"']


def _rl(answers: FirstAnswers, size: float, way: Way) -> str:
    on_cpu = answers.gpu == "none"
    groups, siblings = (8, 8) if on_cpu else (32, 16) if size < 3 else (16, 16)
    tokens = _SHORT if answers.task in _BUILT_IN else _MATHS if answers.task in ("gsm8k", "math") else _USUAL
    return "\n".join(
        [
            "[train]",
            f"steps = {100 if on_cpu else 120}",
            f"groups_per_step = {groups}            # tasks a step ...",
            f"group_size = {siblings}                 # ... and answers to each",
            f"max_tokens = {tokens}                # longest answer; `tandem env check` says how many are cut off",
            *_micro(answers),
            f"lr = {rate(answers.goal, size, way):.0e}",
            'schedule = { kind = "linear" }',
        ]
    )


def _micro(answers: FirstAnswers) -> list[str]:
    """Return the most tokens of one pass, where the default is too many for the memory."""
    if (fitting := micro_tokens(gpus()[answers.gpu])) == micro_tokens(math.inf):
        return []
    return [f"micro_tokens = {fitting}           # most tokens in one forward and backward pass"]


def _eval(answers: FirstAnswers) -> str:
    return f"[eval]\ntasks = {64 if answers.gpu == 'none' else 256}"


def _data(answers: FirstAnswers) -> str:
    if _is_file_of_rows(answers.task):
        return f'[data]\nkind = "file"\npath = {_quoted(answers.task)}'
    if "." in Path(answers.task).name:
        raise SpecError(f"--task {answers.task}: must end in {', '.join(SUFFIXES)}, or be a data set of the hub")
    return f'[data]\nkind = "dataset"\nname = {_quoted(answers.task)}'


def _supervised(answers: FirstAnswers, way: Way) -> str:
    batch = 16 if answers.gpu == "none" else 32
    rows = _rows(answers.task)
    epochs = 3 if answers.goal == "imitate" else 1
    steps = max(20, math.ceil(epochs * rows / batch)) if rows else 200
    why = f"{epochs} times over {rows} rows, at least 20" if rows else "about three times over the rows is usual"
    return "\n".join(
        [
            "[train]",
            f"steps = {steps}                    # {why}",
            f"batch_size = {batch}",
            *_micro(answers),
            f"lr = {rate(answers.goal, 1.0, way):.0e}",
            'schedule = { kind = "linear" }',
        ]
    )


def _rows(task: str) -> int:
    path = Path(task)
    if path.suffix not in (".jsonl", ".ndjson") or not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _from_scratch(answers: FirstAnswers) -> str:
    """Return a spec of a preset, which knows nothing: RL needs a warm-up by demonstrations."""
    model = f'[model]\npreset = "{answers.model}"                 # made from scratch'
    if answers.goal != "rewards":
        head = f'# Written by tandem init.\nrecipe = "{"sft" if answers.goal == "imitate" else "preference"}"'
        lr = "2e-3" if answers.goal == "imitate" else "3e-4"
        train = _supervised(answers, "full")
        return "\n\n".join([head, model, _data(answers), re.sub(r"lr = \S+", f"lr = {lr}", train)]) + "\n"
    if _is_file_of_rows(answers.task):
        raise SpecError(
            f"--task {answers.task}: --model {answers.model} is made from scratch and answers no question rightly; "
            "name a pretrained model, or a task with demonstrations, such as sort"
        )
    environment = f"[environment]\nname = {_quoted(answers.task)}"
    warmup = "[warmup]                         # first imitate the environment's demonstrations\nsteps = 700\n"
    train = "[train]                          # then learn from rewards\nsteps = 90\ngroups_per_step = 16\n"
    return "\n\n".join(
        [
            '# Written by tandem init: the figures of examples/quickstart.toml.\nrecipe = "rl"',
            model,
            environment,
            warmup + "batch_size = 64\nlr = 1e-3",
            train + 'group_size = 16\nmax_tokens = 16\nlr = 1.5e-4\nschedule = { kind = "linear" }',
            "[eval]\ntasks = 256",
        ]
    ) + "\n"  # fmt: skip


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def choices(field: str) -> list[str]:
    """Return the answers that a question takes; empty if it takes any."""
    return {"goal": list(get_args(Goal)), "gpu": list(gpus())}.get(field, [])


def questions() -> list[tuple[str, str, str]]:
    """Return the field, the question and the default of each question, in their order."""
    known: Any = ", ".join(_BUILT_IN)
    return [
        ("goal", "What for? rewards (RL), imitate (SFT on conversations), prefer (DPO on pairs)", "rewards"),
        ("model", f"Which model? A directory, a hub id, or from scratch: {', '.join(SIZES)}", "Qwen/Qwen3-0.6B"),
        (
            "task",
            f"Which task? rewards: {known}, gsm8k, module:Class, file.py; for all goals: rows.jsonl",
            "arithmetic",
        ),
        ("gpu", f"Which GPU? GiB of memory or a card: {', '.join(gpus())}", "none"),
    ]
