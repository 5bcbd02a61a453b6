"""Write a policy of several ranks in Hugging Face format: each rank writes its rows, rank 0 everything else.

The files have the names and bytes of those of `export_copy.Deployer` and `save_pretrained`.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.errors import CheckpointError
from tandem.model.export_copy import files_of, tokenizer_files
from tandem.model.load_rows import refuse_converted
from tandem.types import Part

METADATA = {"format": "pt"}
_PATTERN, _INDEX, _MOST = "model{suffix}.safetensors", "model.safetensors.index.json", "50GB"
"""The defaults of `save_pretrained`."""


class RowDeployer:
    def __init__(self, module: Any, tokenizer: Any) -> None:
        """`module`: the whole model; its parameters may be on the meta device, its buffers have values."""
        refuse_converted(module, module.config._name_or_path, "model")
        names, self._buffers = _saved_names(module)
        types = {saved: _tensor(module, name) for saved, name in names.items()}
        from huggingface_hub import split_torch_state_dict_into_shards

        shapes = {name: torch.empty(like.shape, dtype=like.dtype, device="meta") for name, like in types.items()}
        split = split_torch_state_dict_into_shards(shapes, filename_pattern=_PATTERN, max_shard_size=_MOST)
        self._place = {names[saved]: (file, saved) for saved, file in split.tensor_to_filename.items()}
        self._files = list(split.filename_to_tensors)
        with tempfile.TemporaryDirectory() as place:
            module.save_pretrained(place, state_dict={})  # config and similar files
            self._companions = tokenizer_files(tokenizer) | files_of(Path(place))
        if split.is_sharded:
            metadata = {"total_parameters": module.num_parameters(), **split.metadata}
            index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
            self._companions[_INDEX] = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()

    def files(self, trained: Sequence[Part], rank: int) -> dict[str, list[Part]]:
        """Return what a rank writes into each file of tensors. `trained`: under the parameters' names."""
        found: dict[str, list[Part]] = {file: [] for file in self._files}
        whole = self._buffers if rank == 0 else {}
        buffers = [Part(name, tensor, 0, 0, tuple(tensor.shape)) for name, tensor in whole.items()]
        for part in [*trained, *buffers]:
            file, saved = self._place[part.name]
            found[file].append(part._replace(name=saved))
        if rank == 0 and (missing := self._place.keys() - {part.name for part in [*trained, *buffers]}):
            raise CheckpointError(f"export: '{min(missing)}' belongs to the model, but no rank has it")
        return found

    def names(self) -> dict[str, list[str]]:
        """Return the parameters and buffers in each file of tensors."""
        found: dict[str, list[str]] = {file: [] for file in self._files}
        for name, (file, _) in self._place.items():
            found[file].append(name)
        return found

    def saved(self, name: str) -> str:
        """Return the name of a parameter in its file."""
        return self._place[name][1]

    def write_companions(self, directory: Path) -> None:
        """Write everything except the tensors; on rank 0, on any thread."""
        for name, content in self._companions.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)


class MergedExport:
    """Merges adapters into a base whose rows are on several ranks; one tensor at a time is whole, on rank 0's host.

    Every rank creates one and iterates over the same parts. PEFT does the merging, as on one rank.
    """

    def __init__(
        self, adapted: Any, tokenizer: Any, trained: Mapping[str, Tensor], gathered: Callable[[str], Tensor]
    ) -> None:
        """`adapted`: PEFT's view of the module, its base on the meta device. `gathered(name)`: a whole parameter of the
        base, called by all ranks at once."""
        self._adapted, self._gathered = copy.deepcopy(adapted), gathered
        self._module = self._adapted.base_model.model
        with torch.no_grad():
            for name, tensor in trained.items():
                self._module.get_parameter(name).copy_(tensor)
        self._plain = copy.deepcopy(self._adapted).unload()
        self._files = RowDeployer(self._plain, tokenizer)

    def files(self) -> dict[str, list[Part]]:
        """Return the tensors of each file, without their values."""
        names = self._files.names()
        return {file: [self._part(name, _tensor(self._plain, name)) for name in those] for file, those in names.items()}

    def parts(self, file: str) -> Iterator[Part]:
        """Yield the tensors of a file with their values. Every rank goes through all of them."""
        for name in self._files.names()[file]:
            like = _tensor(self._plain, name)
            yield self._part(name, self._merged(name) if like.is_meta else like)

    def write_companions(self, directory: Path) -> None:
        """Write the separate adapters and everything that is no tensor; on rank 0."""
        self._adapted.save_pretrained(directory / "adapter")
        self._files.write_companions(directory)

    def _part(self, name: str, tensor: Tensor) -> Part:
        return Part(self._files.saved(name), tensor, 0, 0, tuple(tensor.shape))

    @torch.no_grad()
    def _merged(self, name: str) -> Tensor:
        owner, _, key = name.rpartition(".")
        layer = self._module.get_submodule(owner)
        if not hasattr(type(layer), "get_base_layer"):
            return self._gathered(name).cpu()
        base, empty = layer.base_layer, layer.base_layer._parameters[key]
        value = self._gathered(f"{owner}.base_layer.{key}").cpu()
        if key != "weight":
            return value
        base._parameters[key] = torch.nn.Parameter(value.clone(), requires_grad=False)
        layer.merge()
        merged = base._parameters[key].data
        base._parameters[key] = empty
        layer.merged_adapters.clear()
        return merged


def _saved_names(module: Any) -> tuple[dict[str, str], Mapping[str, Tensor]]:
    """Return the name of each parameter and saved buffer by its name in a file, and those buffers. Tied tensors are
    saved once, under the name that transformers chooses."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    names = {id(parameter): name for name, parameter in module.named_parameters()}
    buffers: dict[str, Tensor] = {}
    stand_ins: dict[str, Tensor] = {}  # one number each, whose address identifies the tensor
    by_name: dict[str, Tensor] = {}
    for key in module.state_dict():
        tensor = _tensor(module, key)
        name = names.get(id(tensor), key)
        if name == key and id(tensor) not in names:
            buffers[key] = tensor
        stand_ins[key] = by_name.setdefault(name, torch.zeros((), dtype=tensor.dtype).expand(tensor.shape))
    for ignored in module._keys_to_ignore_on_save or ():
        stand_ins.pop(ignored, None)
    saved = revert_weight_conversion(module, remove_tied_weights_from_state_dict(stand_ins, module))
    which = {tensor.untyped_storage().data_ptr(): name for name, tensor in by_name.items()}
    return {key: which[tensor.untyped_storage().data_ptr()] for key, tensor in saved.items()}, buffers


def _tensor(module: Any, name: str) -> Tensor:
    return module.get_parameter_or_buffer(name)
