"""A policy of several ranks in Hugging Face format: each rank writes its rows, rank 0 all that is no tensor.

The files are those of `export_copy.Deployer` and of `save_pretrained`: same names, same bytes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
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
"""As `save_pretrained` has them by itself."""


class RowDeployer:
    def __init__(self, module: Any, tokenizer: Any) -> None:
        """`module`: of the whole model; its parameters may be on the meta device, its buffers have their values."""
        refuse_converted(module, module.config._name_or_path, "model")
        names, self._buffers = _saved_names(module)
        types = {saved: _tensor(module, name) for saved, name in names.items()}
        from huggingface_hub import split_torch_state_dict_into_shards

        shapes = {name: torch.empty(like.shape, dtype=like.dtype, device="meta") for name, like in types.items()}
        split = split_torch_state_dict_into_shards(shapes, filename_pattern=_PATTERN, max_shard_size=_MOST)
        self._place = {names[saved]: (file, saved) for saved, file in split.tensor_to_filename.items()}
        self._files = list(split.filename_to_tensors)
        with tempfile.TemporaryDirectory() as place:
            module.save_pretrained(place, state_dict={})  # config and the like
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
            raise CheckpointError(f"export: '{min(missing)}' belongs to the model, and is not there to be written")
        return found

    def write_companions(self, directory: Path) -> None:
        """Rank 0: everything but the tensors. On any thread."""
        for name, content in self._companions.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)


def _saved_names(module: Any) -> tuple[dict[str, str], Mapping[str, Tensor]]:
    """Return, by the name in a file, the name of each parameter and saved buffer; and those buffers. What is tied is
    saved once, under the name that transformers chooses."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    names = {id(parameter): name for name, parameter in module.named_parameters()}
    buffers: dict[str, Tensor] = {}
    stand_ins: dict[str, Tensor] = {}  # one number each, whose memory says which tensor it stands for
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
