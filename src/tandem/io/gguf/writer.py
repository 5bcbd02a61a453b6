"""Write a model directory in Hugging Face format as a GGUF file, for llama.cpp and what is built on it.

The file is written by the package `gguf`, a tensor at a time. Then Tandem's own reader reads it back, and config,
tokenizer and every tensor are compared with the directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from tandem.io.gguf.directory import PIECE, check, pieces
from tandem.io.gguf.families import (
    FREQUENCIES,
    architecture_of,
    config_of,
    is_changed,
    llama3_factors,
    names_of,
    store,
    stored_names,
)
from tandem.io.gguf.header import Gguf, read_gguf
from tandem.io.gguf.metadata import metadata_of, rope_of
from tandem.io.gguf.tokenizer_fields import tokenizer_fields
from tandem.io.safetensors_format import StoredTensor, read_header

GgufKind: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q4_1"]

_KINDS: Mapping[str, tuple[str, str, int]] = {
    "f32": ("F32", "F32", 0), "f16": ("F16", "F16", 1), "bf16": ("BF16", "BF16", 32), "q8_0": ("Q8_0", "Q8_0", 7),
    "q4_1": ("Q4_1", "Q8_0", 3),
}  # fmt: skip
"""Types of matrices, and of embeddings and head, which lose most by few bits; llama.cpp's number of such a file."""
_MOST_ERROR = {"F32": 1e-6, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.03, "Q4_1": 0.3}
"""Root mean square of a tensor's differences, of that of its values. A block of 32 numbers is rounded to steps of 1/127
of its largest, or 1/15 of its range; a tensor in another order differs by more than 1."""
_TINY = 1e-7
"""Below this float16 has no numbers, so differences of this size are no error."""
_NOT_SAID = (
    "token_id", "dtype", "architectures", "model_type", "_name_or_path", "transformers_version", "dropout", "use_cache",
    "initializer_range", "pretraining_tp", "attn_implementation", "max_window_layers",
)  # fmt: skip
"""Parts of names of settings that change no logit, or that the tokenizer's fields say."""


class GgufReport(NamedTuple):
    """What was written. `errors`: of each type of tensor, the largest relative difference that was read back."""

    path: Path
    kind: str
    size_bytes: int
    errors: Mapping[str, float]


def write_gguf(directory: Path, path: Path, kind: GgufKind, name: str = "") -> GgufReport:
    """Write the model of `directory` to `path`, and compare it. ValueError with the reason if it cannot be written, or
    if another model is read back; the file is then of no use."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    architecture = architecture_of(config)
    source = _Weights(directory)
    if config.get("tie_word_embeddings", False):
        source.places.pop("lm_head.weight", None)
    named = stored_names(architecture, source.places)
    said = {"general.architecture": architecture, "general.type": "model", "general.name": name or directory.name}
    said |= {"general.file_type": _KINDS[kind][2], "general.quantization_version": 2}
    said |= metadata_of(architecture, config)
    said |= tokenizer_fields(directory, said, source.places["model.embed_tokens.weight"][1].shape[0])
    _write(path, said, source, named, kind, rope_of(config))
    return GgufReport(path, kind, path.stat().st_size, _compare(read_gguf(path), source, config))


class _Weights:
    """The tensors of a directory's safetensors files. `places`: file and place of each, by its name in transformers."""

    def __init__(self, directory: Path) -> None:
        self.places: dict[str, tuple[Path, StoredTensor]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with path.open("rb") as file:
                self.places |= {name: (path, place) for name, place in read_header(file.fileno(), path).items()}
        if "model.embed_tokens.weight" not in self.places:
            raise ValueError("it has no token embeddings in safetensors files")

    def shape(self, name: str) -> tuple[int, ...]:
        return self.places[name][1].shape

    def read(self, name: str, top: int = 0, rows: int | None = None) -> Any:
        """Return rows of a tensor in float32."""
        path, place = self.places[name]
        types = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
        if place.dtype not in types:
            raise ValueError(f"its tensor {name} is {place.dtype}; those that are written are {', '.join(types)}")
        whole = np.memmap(path, types[place.dtype], "r", place.offset, place.shape)
        part = np.array(whole[top : None if rows is None else top + rows])
        if place.dtype == "bfloat16":
            return (part.astype(np.uint32) << 16).view(np.float32)
        return part.astype(np.float32, copy=False)


def _write(
    path: Path, said: Mapping[str, Any], source: _Weights, named: Mapping[str, str], kind: str, rope: Mapping[str, Any]
) -> None:
    gguf: Any = import_module("gguf")
    writer = _writer(gguf, path, said)
    types = {name: _type_of(source.shape(name), name, kind) for name in named}
    for name, stored in named.items():
        as_type, shape = gguf.GGMLQuantizationType[types[name]], source.shape(name)
        block, block_bytes = gguf.GGML_QUANT_SIZES[as_type]
        size = int(np.prod(shape)) // block * block_bytes
        writer.add_tensor_info(stored, shape, np.dtype(np.float32), size, raw_dtype=as_type)
    factors = None
    if rope["rope_type"] == "llama3":
        factors = llama3_factors(rope, said[f"{said['general.architecture']}.rope.dimension_count"]).astype(np.float32)
        writer.add_tensor_info(FREQUENCIES, factors.shape, factors.dtype, factors.nbytes)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        header = Gguf(path, said, {})
        for name, stored in named.items():
            writer.write_tensor_data(_stored(gguf, header, source, name, stored, types[name]))
        if factors is not None:
            writer.write_tensor_data(factors)
    finally:
        writer.close()


def _writer(gguf: Any, path: Path, said: Mapping[str, Any]) -> Any:
    """Return the package's writer with all fields."""
    writer: Any = gguf.GGUFWriter(str(path), said["general.architecture"])
    adders: dict[Any, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in said.items():
        if key != "general.architecture":  # the writer has written it
            adders.get(type(value), writer.add_array)(key, value)
    return writer


def _type_of(shape: tuple[int, ...], name: str, kind: str) -> str:
    """Return the type of a tensor: vectors in float32, and float16 for rows that are no multiple of a block."""
    matrices, ends, _ = _KINDS[kind]
    if len(shape) == 1:
        return "F32"
    found = ends if name in ("model.embed_tokens.weight", "lm_head.weight") else matrices
    return "F16" if found.startswith("Q") and shape[-1] % 32 else found


def _stored(gguf: Any, header: Gguf, source: _Weights, name: str, stored: str, as_type: str) -> Any:
    """Return a tensor as it stands in the file. Rows are taken in pieces, unless the file has them in another order."""
    shape = source.shape(name)
    take = shape[0] if is_changed(header, stored) else max(1, PIECE // shape[-1])
    kind, found = gguf.GGMLQuantizationType[as_type], list[Any]()
    for top in range(0, shape[0], take):
        values = np.ascontiguousarray(store(header, stored, source.read(name, top, take)))
        with np.errstate(over="ignore"):
            part = gguf.quantize(values, kind)
        if as_type == "F16" and not np.isfinite(part).all():
            raise ValueError(f"its tensor {name} has numbers beyond float16; choose bf16 or q8_0")
        found.append(part)
    return np.concatenate(found)


def _compare(file: Gguf, source: _Weights, config: Mapping[str, Any]) -> dict[str, float]:
    """Read the file as any other. Return the errors, or raise ValueError if it is another model."""
    gguf: Any = import_module("gguf")
    check(file.path)
    if other := [*_other_settings(config, config_of(file))]:
        raise ValueError(f"a GGUF file cannot say its config: {'; '.join(other)}")
    errors: dict[str, float] = {}
    with file.path.open("rb") as opened:
        for stored, name in names_of(file).items():
            as_type = gguf.GGMLQuantizationType(file.tensors[stored].kind).name
            top, missed, square = 0, 0.0, 0.0
            for piece in pieces(file, stored, opened):
                read = _as_float32(piece if len(source.shape(name)) > 1 else piece.reshape(-1))
                values = source.read(name, top, len(read))
                missed += float(np.square(read - values, dtype=np.float64).sum())
                square += float(np.square(values, dtype=np.float64).sum())
                top += len(read)
            error = (missed / max(square, 1e-30)) ** 0.5
            rms = (missed / max(1, int(np.prod(source.shape(name))))) ** 0.5
            if (error > _MOST_ERROR[as_type] and rms > _TINY) or not np.isfinite(error):
                raise ValueError(f"its tensor {name} was read back with an error of {error:.3g}: it is not the same")
            errors[as_type] = max(errors.get(as_type, 0.0), error)
    return errors


def _as_float32(piece: Any) -> Any:
    return (piece.astype(np.uint32) << 16).view(np.float32) if piece.dtype == np.uint16 else piece.astype(np.float32)


def _other_settings(config: Mapping[str, Any], read: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of transformers in which the two differ."""
    from transformers import AutoConfig

    def whole(told: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: value for key, value in told.items() if key not in ("model_type", "transformers_version")}
        maker: Any = AutoConfig
        made = maker.for_model(str(told["model_type"]), **given)
        return made.to_dict()

    mine, theirs = whole(config), whole(read)
    for key in theirs.keys() & mine.keys():
        if not any(part in key for part in _NOT_SAID) and not _alike(mine[key], theirs[key]):
            yield f"{key} is {mine[key]}, and would be {theirs[key]}"


def _alike(mine: Any, theirs: Any) -> bool:
    """Return whether two settings are the same in the file, which has numbers in float32."""
    if isinstance(mine, float) and isinstance(theirs, float):
        return bool(np.float32(mine) == np.float32(theirs))
    return mine == theirs
