"""Write a deployable copy of a policy during training, in Hugging Face format: a whole model, or an adapter.

The trained values were copied before, and everything else never changes. So any thread can write it during the next
step.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

PROCESSOR = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)
"""The files that say how a model is given images; the template itself is the tokenizer's."""
_INNER = "base_model.model."  # PEFT's prefix of the wrapped module's names


class Deployer:
    def __init__(self, module: Any, adapter: Any, tokenizer: Any, processor: Mapping[str, bytes] | None = None) -> None:
        """`adapter`: PEFT's view of the module, if adapters are trained. `processor`: more files for the copy."""
        self._module, self._adapter = module, adapter
        trained = {tensor.data_ptr() for _, tensor in module.named_parameters() if tensor.requires_grad}
        self._fixed = [name for name, tensor in module.state_dict().items() if tensor.data_ptr() not in trained]
        # Read now, because a tokenizer is not thread-safe.
        self._files = {**tokenizer_files(tokenizer), **(processor or {})}

    def write(self, trained: Mapping[str, Tensor], directory: Path) -> None:
        """Write the copy. `trained`: values by the names of the policy's trainable parameters."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
        if self._adapter is None:
            live = self._module.state_dict()
            self._module.save_pretrained(directory, state_dict={name: live[name] for name in self._fixed} | {**trained})
        else:
            self._write_adapter(trained, directory)

    def _write_adapter(self, trained: Mapping[str, Tensor], directory: Path) -> None:
        from peft import get_peft_model_state_dict

        inner = {f"{_INNER}{name}": tensor for name, tensor in trained.items()}
        named = get_peft_model_state_dict(self._adapter, state_dict=inner, save_embedding_layers=False)
        save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(self._adapter.peft_config["default"])
        config.inference_mode = True
        config.save_pretrained(directory)


def name_ends(module: Any, tokenizer: Any, end_ids: Collection[int], never_ends: Collection[int]) -> None:
    """Add the ids that end an answer, and the padding id, to the configs that an export has. Without them another
    program would generate past the end. `never_ends`: ids that a config names and that end no answer."""
    for config in (module.config.get_text_config(), getattr(module, "generation_config", None)):
        if config is None or not end_ids:
            continue
        named = getattr(config, "eos_token_id", None)
        before = [named] if isinstance(named, int) else list(named or ())
        ends = [each for each in before if each not in never_ends]
        ends += sorted(set(end_ids) - set(ends))
        if ends != before:
            config.eos_token_id = ends[0] if len(ends) == 1 else ends
        if (pad := getattr(config, "pad_token_id", None)) is None or pad < 0:
            config.pad_token_id = tokenizer.pad_token_id


def processor_files(path: str, revision: str) -> dict[str, bytes]:
    """Return those of a directory or a hub model, as they are."""
    from transformers.utils.hub import cached_file

    options: Any = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    found = {name: cached_file(path, name, **options) for name in PROCESSOR}
    return {name: Path(file).read_bytes() for name, file in found.items() if file}


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        return files_of(Path(place))


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the files of a directory, by their path in it."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}
