"""Read LoRA adapters from files, and build the base of a run that trained one, to serve them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tandem.errors import RunError
from tandem.io.safetensors_format import StoredTensor, read_header
from tandem.spec.load import load_spec
from tandem.spec.model import PathModel
from tandem.spec.precision import PrecisionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.build.built_model import BuiltModel
    from tandem.spec.model import ModelSpec
    from tandem.spec.run import RunSpec

CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN: dict[str, Any] = {
    "use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "bias": "none",
    "modules_to_save": None, "lora_bias": False, "layer_replication": None, "trainable_token_indices": None,
}  # fmt: skip
"""With other settings the same tensors mean something else."""


_Placed: TypeAlias = tuple[str, StoredTensor]

GROUP_BYTES = 16 * 2**20
"""Most bytes of tensors that are scaled, and looked at, together. torch pins memory in powers of two."""
_MOST_THREADS = 8


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


def read_adapter(
    directory: Path,
    memory: Callable[[int], Tensor] | None = None,
    look: Callable[[Mapping[str, Tensor]], None] | None = None,
) -> ServedAdapter:
    """Return an adapter in PEFT's format. RunError if it cannot be served. `memory`: gives so many bytes to read into.
    `look`: is called with some tensors after the others, as they will be returned, while the next are read."""
    from safetensors import SafetensorError

    tensors: dict[str, Tensor] = {}
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        _refuse_other_kinds(directory, config)
        for some in _read(directory / _WEIGHTS, memory):
            for name, tensor in some.items():
                if ".lora_B." in name:
                    tensor.mul_(alpha / rank)
            if look is not None:
                look(some)
            tensors |= some
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise RunError(f"{directory}: no LoRA adapter can be read from it: {error}") from error
    return ServedAdapter(tensors, {"r": rank})


def _refuse_other_kinds(directory: Path, config: Mapping[str, Any]) -> None:
    for field, plain in _PLAIN.items():
        if (found := config.get(field)) not in (plain, None):
            raise RunError(
                f"{directory}: its adapter has {field} = {found}, which is not served beside others; merge it"
            )


def _read(path: Path, memory: Callable[[int], Tensor] | None) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a file in float32, some of them while the next are read."""
    import torch
    from safetensors.torch import load_file

    from tandem.bridge.files.parallel_io import fill_from

    with path.open("rb", buffering=0) as file:
        stored = read_header(file.fileno(), path)
        placed = sorted(stored.items(), key=lambda each: (each[1].offset, each[1].size_bytes))
        if (
            not stored
            or any(each.dtype != "float32" or (each.offset - placed[0][1].offset) % 4 for each in stored.values())
            # It refuses files with gaps and overlaps.
            or any(each.offset + each.size_bytes != later.offset for (_, each), (_, later) in pairwise(placed))
        ):
            yield {name: tensor.to(torch.float32, copy=True) for name, tensor in load_file(path).items()}
            return
        groups = _side_by_side(placed)
        with ThreadPoolExecutor(min(len(groups), _MOST_THREADS), "adapter") as threads:
            under_way: list[Future[Tensor]] = []
            for group in groups:
                size = sum(each.size_bytes for _, each in group)
                whole = torch.empty(size, dtype=torch.uint8) if memory is None else memory(size)
                under_way.append(threads.submit(fill_from, file.fileno(), whole, group[0][1].offset))
            for group, filled in zip(groups, under_way, strict=True):
                whole, first = filled.result(), group[0][1].offset
                yield {
                    name: whole[(at := each.offset - first) : at + each.size_bytes].view(torch.float32).view(each.shape)
                    for name, each in group
                }


def _side_by_side(placed: Sequence[_Placed]) -> list[list[_Placed]]:
    """Return the tensors, which lie in this order, in groups of at most GROUP_BYTES."""
    groups, begin = list[list[_Placed]](), 0
    for name, each in placed:
        if not groups or each.offset + each.size_bytes - begin > GROUP_BYTES:
            groups.append([])
            begin = each.offset
        groups[-1].append((name, each))
    return groups


def base_of_run(run_dir: Path, precision: PrecisionSpec, device: Any, max_context: int) -> BuiltModel:
    """Build the base under a run's adapter, as its trainer did, but for its precision."""
    from tandem.build import built_model

    spec, model = _base_spec(run_dir)
    return built_model.model(model, precision, spec.seed, device, max_context)


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
    if not (run_dir / "spec.toml").is_file():
        raise RunError(
            f"{run_dir}: an adapter alone is served beside its base: `tandem serve BASE --adapter NAME={run_dir}`"
        )
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
