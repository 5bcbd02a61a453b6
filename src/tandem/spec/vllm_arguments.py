"""A user's own arguments of `vllm serve`: which ones would replace what a run sets.

vLLM accepts an argument in many forms: --max_num_seqs, --max-num-se, --no-X, --X=1 and --X.field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

OF_EVERY_RUN: Mapping[str, str] = {
    "model": "model.path", "dtype": "precision.weights", "tensor-parallel-size": "engine.tensor_parallel",
    "max-num-seqs": "engine.max_running", "max-model-len": "engine.max_context", "enforce-eager": "engine.eager",
    "gpu-memory-utilization": "engine.memory_share", "device-memory-utilization": "engine.memory_share",
    "enable-sleep-mode": "engine.sleep", "max-lora-rank": "model.lora.rank", "enable-lora": "model.lora",
    **dict.fromkeys((
        "max-loras", "max-cpu-loras", "served-model-name", "uds", "host", "port", "seed", "worker-extension-cls",
        "scheduler-cls", "middleware", "logprobs-mode", "generation-config", "disable-uvicorn-access-log",
        "enable-scale-out", "config",
    ), ""),
}  # fmt: skip
"""What Tandem sets for every model, or what would set it, and the spec's own field for it."""


def check_form(arguments: Sequence[str]) -> None:
    """Raise ValueError for what is no list of long names and their values."""
    if arguments and arguments[0][:1] != "-":
        raise ValueError(f"engine.arguments: '{arguments[0]}' is no argument; write its name before it: --name, value")
    if short := next((each for each in arguments if each[:1] == "-" and each[1:2].isalpha()), ""):
        raise ValueError(f"engine.arguments: write the long name of '{short}', which begins with --")


def replaced(arguments: Sequence[str], ours: Iterable[str]) -> str:
    """Return the first of our names that one of the arguments would set; empty if none would."""
    names = names_in(arguments)
    return next((our for our in ours if any(our.startswith(name) for name in names)), "")  # abbreviations, too


def names_in(arguments: Sequence[str]) -> list[str]:
    """Return the names without their values, in the one form that vLLM takes them for."""
    return [_plain(each) for each in arguments if _is_name(each)]


def as_given(name: str, arguments: Sequence[str]) -> str:
    """Return the argument of this name with its value."""
    place = next(number for number, each in enumerate(arguments) if _is_name(each) and _plain(each) == name)
    return " ".join([arguments[place], *(each for each in arguments[place + 1 : place + 2] if not _is_name(each))])


def _is_name(argument: str) -> bool:
    return argument.startswith("--")


def _plain(argument: str) -> str:
    return argument.removeprefix("--").partition("=")[0].partition(".")[0].replace("_", "-").removeprefix("no-")
