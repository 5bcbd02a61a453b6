"""Read LoRA adapters from files, and build the base of a run that trained one, to serve them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import RunError
from tandem.io.safetensors_format import read_header
from tandem.spec.load import load_spec
from tandem.spec.model import PathModel
from tandem.spec.precision import PrecisionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.build.training import BuiltModel
    from tandem.spec.model import ModelSpec
    from tandem.spec.run import RunSpec

CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN: dict[str, Any] = {
    "use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "bias": "none",
    "modules_to_save": None, "lora_bias": False, "layer_replication": None, "trainable_token_indices": None,
}  # fmt: skip
"""With other settings the same tensors mean something else."""


@dataclass(frozen=True)
class ServedAdapter:
    """`tensors`: under PEFT's names, B scaled."""

    tensors: Mapping[str, Any]
    config: Mapping[str, Any]


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).is_file() and not (directory / "config.json").exists()


def rank_of(directory: Path) -> int:
    try:
        return int(json.loads((directory / CONFIG).read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{directory}: no LoRA adapter can be read from it: {error}") from error


def read_adapter(directory: Path, memory: Callable[[int], Tensor] | None = None) -> ServedAdapter:
    """Return an adapter in PEFT's format. RunError if it cannot be served. `memory`: gives so many bytes to read it
    into."""
    from safetensors import SafetensorError

    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        tensors = _read(directory / _WEIGHTS, memory)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunError(f"{directory}: no LoRA adapter can be read from it: {error}") from error
    for field, plain in _PLAIN.items():
        if (found := config.get(field)) not in (plain, None):
            raise RunError(
                f"{directory}: its adapter has {field} = {found}, which is not served beside others; merge it"
            )
    for name, tensor in tensors.items():
        if ".lora_B." in name:
            tensor.mul_(alpha / rank)
    return ServedAdapter(tensors, {"r": rank})


def _read(path: Path, memory: Callable[[int], Tensor] | None) -> dict[str, Tensor]:
    """Return the tensors of a file in float32."""
    import torch
    from safetensors.torch import load_file

    from tandem.bridge.files.parallel_io import fill_from

    with path.open("rb", buffering=0) as file:
        stored = read_header(file.fileno(), path)
        places = sorted((each.offset, each.offset + each.size_bytes) for each in stored.values())
        first = places[0][0] if places else 0
        if (
            not stored
            or any(each.dtype != "float32" or (each.offset - first) % 4 for each in stored.values())
            or any(end != begin for (_, end), (begin, _) in pairwise(places))  # it refuses files with gaps and overlaps
        ):
            return {name: tensor.to(torch.float32, copy=True) for name, tensor in load_file(path).items()}
        size = places[-1][1] - first
        whole = torch.empty(size, dtype=torch.uint8) if memory is None else memory(size)
        fill_from(file.fileno(), whole, first)
    return {
        name: whole[(at := each.offset - first) : at + each.size_bytes].view(torch.float32).view(each.shape)
        for name, each in stored.items()
    }


def base_of_run(run_dir: Path, precision: PrecisionSpec, device: Any, max_context: int) -> BuiltModel:
    """Build the base under a run's adapter, as its trainer did, but for its precision."""
    from tandem.build import training

    spec, model = _base_spec(run_dir)
    return training.model(model, precision, spec.seed, device, max_context)


def base_directory(run_dir: Path, preset_into: Path) -> str:
    """Return the base under a run's adapter as a model directory or a hub id. A preset is written into `preset_into`,
    with the seed of the run. RunError if the base is not one model on disk."""
    from tandem.build.standalone_engines import write_preset

    spec, model = _base_spec(run_dir)
    if model.warm_start is not None:
        raise RunError(f"{run_dir}: model.warm_start = '{model.warm_start}': vLLM serves a base that lies in one place")
    if isinstance(model, PathModel):
        if model.revision != "main":
            raise RunError(f"{run_dir}: model.revision = '{model.revision}': vLLM serves a base of a local directory")
        return model.path
    if not preset_into.exists():
        write_preset(model.preset, str(spec.seed), str(preset_into))
    return str(preset_into)


def _base_spec(run_dir: Path) -> tuple[RunSpec, ModelSpec]:
    spec = load_spec(run_dir / "spec.toml")
    lora, start = spec.model.lora, spec.model.warm_start
    if lora is None:
        raise RunError(f"{run_dir}: trains every weight, so it has no base under an adapter")
    if lora.base != "exact":
        raise RunError(
            f"{run_dir}: model.lora.base = '{lora.base}': an adapter over quantised weights is not served beside "
            "others; serve its export, which is merged"
        )
    if start is not None and is_adapter(Path(start)):
        start = None  # the run's own adapter went on from it
    return spec, spec.model.model_copy(update={"lora": None, "warm_start": start})
