"""Say what this machine has, for the settings that a spec leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tandem.build.built_model import pick_device
from tandem.build.standalone_engines import default_python
from tandem.errors import SpecError
from tandem.spec.hardware import Hardware


def this_machine(device: Literal["auto", "cpu", "cuda"]) -> Hardware:
    """Return what the trainer would run on. `device`: of the spec."""
    import torch

    picked = pick_device(device)
    if picked.type == "cpu":
        return Hardware("cpu", vllm=vllm_installed())
    card = torch.cuda.get_device_properties(picked)
    return Hardware("cuda", card.name, card.total_memory / 2**30, bf16=card.major >= 8, vllm=vllm_installed())


def refuse_no_vllm(python: str) -> None:
    """Raise SpecError if there is no interpreter for vLLM. `python`: of the spec; empty: the one that was installed."""
    if not Path(python or default_python()).exists():
        field = (
            f"engine.python = '{python}': does not exist" if python else "engine.kind = 'vllm': vLLM is not installed"
        )
        raise SpecError(
            f"{field}; run `tandem engine install vllm` in this directory ({Path.cwd()}), or set engine.python to the "
            "full path of the interpreter of an environment that has vLLM"
        )


def vllm_installed(python: str = "") -> bool:
    """Return whether `tandem engine install vllm` made its environment in this directory. `python`: look for this
    interpreter instead."""
    return Path(python or default_python()).exists()
