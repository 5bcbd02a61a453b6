"""Read a model directory by rows, so that no rank has more in memory than its share and one tensor.

transformers builds the module from stand-ins: tensors of the right shape that are one number in memory. Their addresses
show which tensor of the files is which weight. So everything that `load_checkpoint.load_whole` refuses is refused here,
too, before any weight is read.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.errors import CheckpointError, SpecError
from tandem.io import row_file
from tandem.io.gguf.directory import model_directory
from tandem.io.safetensors_format import KNOWN
from tandem.model.load_checkpoint import refuse_images, refuse_incomplete, refuse_unfit, supported_attention
from tandem.ops.parts import Box

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
RowsOf = Callable[[Tensor, Box], Tensor]
"""Reads a rectangle of a parameter in float32."""


class _Source(NamedTuple):
    """The place of a stand-in's rows. The stand-in is kept, so that no other tensor gets its address."""

    stand_in: Tensor
    file: row_file.RowFile
    name: str


@contextmanager
def opened_model(
    path: str, revision: str, attention: str, field: str = "model.path", *, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Any, RowsOf]]:
    """Yield a module whose parameters are stand-ins, and a function that reads their rows. Its buffers have values.

    `field`: the field of the spec that errors name. `dtype`: of the stand-ins. Stand-ins work even if parameters are
    renamed or tied. Rows can be read until the block ends.
    """
    path = model_directory(path, field)
    config = refuse_unfit(path, revision, field)
    refuse_images(config, path, field, _ONE_RANK)
    attention = supported_attention(config, attention)
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(row_file.opened(file)) for file in _files(path, revision)]
        except (OSError, ValueError, LookupError, TypeError, CheckpointError) as error:
            raise _unreadable(path, field, error) from error
        module, sources = _skeleton(path, revision, attention, field, files)
        if dtype != torch.float32:
            _narrow(module, sources, dtype)

        def rows_of(parameter: Tensor, box: Box) -> Tensor:
            source = sources[_identity(parameter)]
            return source.file.read(source.name, box).to(torch.float32)

        yield module, rows_of


def _skeleton(
    path: str, revision: str, attention: str, field: str, files: list[row_file.RowFile]
) -> tuple[Any, dict[int, _Source]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention}
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    with torch.device("meta"):
        try:
            empty = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False, **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise _unreadable(path, field, error) from error
    refuse_converted(empty, path, field)
    types = {name: tensor.dtype for name, tensor in empty.state_dict().items()}
    stand_ins: dict[str, Tensor] = {}
    sources: dict[int, _Source] = {}
    unreadable: list[str] = []
    for file in files:
        for name, stored in file.tensors.items():
            if stored.dtype not in KNOWN:
                unreadable.append(name)
                continue
            stand_in = stand_ins[name] = _stand_in(stored.shape, types.get(name, torch.float32))
            sources[_identity(stand_in)] = _Source(stand_in, file, name)
    try:
        module, report = type(empty).from_pretrained(
            None, config=config, state_dict=dict(stand_ins), output_loading_info=True, ignore_mismatched_sizes=True,
            **options,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreadable(path, field, error) from error
    report["error_msgs"] = [*report["error_msgs"], *unreadable]
    refuse_incomplete(module, report, path, field)
    _generate_as_told(module, path, revision)
    if odd := [name for name, tensor in module.named_parameters() if _identity(tensor) not in sources]:
        raise SpecError(f"{field} = '{path}': '{odd[0]}' is made of several tensors in the files, so {_BY_ROWS}")
    for name, buffer in module.named_buffers():
        if source := sources.get(_identity(buffer)):
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner)._buffers[key] = source.file.read(source.name).to(buffer.dtype)
    return module, sources


_ONE_RANK = "set parallel.ranks = 1"
_BY_ROWS = f"its rows cannot be read by several ranks; {_ONE_RANK}"


def refuse_converted(module: Any, path: str, field: str) -> None:
    """Raise SpecError if transformers stacks or cuts tensors of files: then a weight's rows are not a file's rows."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    refuse_images(module.config, path, field, _ONE_RANK)
    found = [each for each in get_model_conversion_mapping(module) if not isinstance(each, WeightRenaming)]
    if found:
        name = type(module).__name__
        raise SpecError(f"{field} = '{path}': {name} makes its weights of several tensors of a file, so {_BY_ROWS}")


def _generate_as_told(module: Any, path: str, revision: str) -> None:
    """Set the generation config, as `from_pretrained` does."""
    from transformers import GenerationConfig

    module.config._name_or_path = path
    module.config.name_or_path = path
    try:
        module.generation_config = GenerationConfig.from_pretrained(path, revision=revision)
    except OSError:
        module.generation_config = GenerationConfig.from_pretrained(
            path, config_file_name="config.json", _from_model_config=True, revision=revision
        )
    if Path(path).is_dir():
        module.name_or_path = module.config._name_or_path = ""


def _files(path: str, revision: str) -> list[Path]:
    """Return the files of tensors of a directory or a hub model."""
    from transformers.utils.hub import cached_file

    def found(name: str) -> str | None:
        return cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)

    if single := found(_SINGLE):
        return [Path(single)]
    if not (index := found(_INDEX)):
        raise OSError(f"it has neither {_SINGLE} nor {_INDEX}")
    names: set[str] = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    files = {name: found(name) for name in sorted(names)}
    if missing := [name for name, file in files.items() if file is None]:
        raise OSError(f"{_INDEX} names {missing[0]}, which is missing")
    return [Path(file) for file in files.values() if file is not None]


def _narrow(module: Any, sources: dict[int, _Source], dtype: torch.dtype) -> None:
    """Replace stand-ins by narrower ones, as cast_precision.narrow does with values."""
    for parameter in module.parameters():
        source = sources[_identity(parameter)]
        parameter.data = _stand_in(parameter.shape, dtype)
        sources[_identity(parameter)] = source._replace(stand_in=parameter.data)
    module.config.dtype = dtype


def _stand_in(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype).expand(*shape)


def _identity(tensor: Tensor) -> int:
    """Return a stand-in's identity, which its views and parameters share."""
    return tensor.untyped_storage().data_ptr()


def _unreadable(path: str, field: str, error: Exception) -> SpecError:
    return SpecError(f"{field} = '{path}': no causal language model can be loaded from it: {error}")
