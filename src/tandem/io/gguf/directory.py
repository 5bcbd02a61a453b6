"""Write the model of a GGUF file as a directory in Hugging Face format, one tensor at a time.

The directory is in `.tandem/models` of the working directory. It is written once for each state of the file. Weights of
few bits are written as float32, exactly as they are dequantised; float16 and bfloat16 stay as they are.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tandem.errors import SpecError
from tandem.io import atomic_write
from tandem.io.gguf.families import config_of, is_changed, names_of, restore
from tandem.io.gguf.header import Gguf, GgufTensor, read_gguf
from tandem.io.gguf.source import gguf_of
from tandem.io.gguf.tokenizer import check_tokenizer, end_ids_of, write_tokenizer
from tandem.io.safetensors_format import header_of

_log = logging.getLogger(__name__)

_FORMAT = 1
"""Counted up when the same file would be written as another directory."""
PLAIN = {0: ("float32", "<f4"), 1: ("float16", "<f2"), 30: ("bfloat16", "<u2")}
"""Kinds of tensors that are not quantised: the type, and numpy's type of the same width."""
PIECE = 1 << 24
"""Numbers that are dequantised at once."""


def check(path: Path) -> Gguf:
    """Return the header of a GGUF file that can be read as a model; ValueError with the reason if it cannot."""
    file = read_gguf(path)
    if int(file.fields.get("split.count", 1)) > 1:
        raise ValueError("it is one part of several; join them with `llama-gguf-split --merge`")
    if "token_embd.weight" not in file.tensors:
        raise ValueError("it has no token embeddings, so it is no language model")
    config_of(file)
    names_of(file)
    check_tokenizer(file)
    if find_spec("gguf") is None and any(tensor.kind not in PLAIN for tensor in file.tensors.values()):
        raise ValueError(
            'its weights are quantised, and the package gguf is missing; run: pip install "tandem-rl[train]"'
        )
    return file


def model_directory(source: str, field: str = "model.path") -> str:
    """Return the directory in Hugging Face format of a GGUF file, written now if it is not there yet; any other source
    as it is. `field`: the field of the spec that errors name."""
    try:
        path = gguf_of(source)
        if path is None:
            return source
        return str(_written(path.resolve()))
    except ValueError as error:
        raise SpecError(f"{field} = '{source}': {error}") from error
    except OSError as error:
        raise SpecError(
            f"{field} = '{source}': its directory in Hugging Face format cannot be written: {error}; run the command "
            "from a directory that can be written to"
        ) from error


def _written(path: Path) -> Path:
    status = path.stat()
    state = f"{path}|{status.st_size}|{status.st_mtime_ns}|{_FORMAT}"
    mark = hashlib.blake2b(state.encode(), digest_size=6).hexdigest()
    place = Path.cwd() / ".tandem" / "models" / f"{path.stem}-{mark}"
    if (place / "config.json").exists():
        return place
    file = check(path)
    with _alone(place.parent):
        need = sum(math.prod(tensor.shape) for tensor in file.tensors.values()) * 4
        if shutil.disk_usage(place.parent).free < need:
            raise ValueError(f"its {need / 1e9:.1f} GB as a directory do not fit on the disk of {place.parent}")
        if not (place / "config.json").exists():
            _log.info("%s is written as %s, once", path, place)
            with atomic_write.directory(place) as directory:
                _write(file, directory)
    return place


@contextmanager
def _alone(directory: Path) -> Generator[None]:
    """Hold a lock, so that of several ranks or processes one writes and the others wait."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(file: Gguf, directory: Path) -> None:
    write_tokenizer(file, directory)
    _write_weights(file, directory / "model.safetensors")
    config = config_of(file)
    ends = end_ids_of(file)
    generation = {key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config}
    generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    atomic_write.write_json(directory / "generation_config.json", generation)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_weights(file: Gguf, place: Path) -> None:
    """Write the weights. Memory: one tensor, or the part of it that is dequantised at once."""
    names = names_of(file)
    types = {name: _type_of(file, name) for name in names}
    header, placed = header_of(
        {names[name]: (types[name], file.tensors[name].shape) for name in names}, {"format": "pt"}
    )
    with file.path.open("rb") as source, place.open("wb") as out:
        out.write(header)
        for name in sorted(names, key=lambda name: placed[names[name]].offset):
            for piece in pieces(file, name, source):
                out.write(np.ascontiguousarray(piece).data)


def _type_of(file: Gguf, name: str) -> str:
    kind = file.tensors[name].kind
    exact = kind in PLAIN and not (is_changed(file, name) and "norm" in name)  # 1 is subtracted in float32
    return PLAIN[kind][0] if exact else "float32"


def pieces(file: Gguf, name: str, source: Any) -> Iterator[Any]:
    """Yield a tensor's values as transformers has them, some rows at a time where rows do not depend on each other."""
    tensor = file.tensors[name]
    width = tensor.shape[-1]
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    changed = is_changed(file, name)
    take = rows if changed else max(1, PIECE // width)
    read = _reader(tensor, width)
    source.seek(tensor.offset)
    for top in range(0, rows, take):
        values = read(source, min(take, rows - top))
        if _type_of(file, name) == "float32" and values.dtype != np.float32:
            values = _as_float32(values)
        yield restore(file, name, values.reshape(tensor.shape)) if changed else values


def _reader(tensor: GgufTensor, width: int) -> Any:
    """Return a function that reads rows: plain ones as they are, others dequantised."""
    if tensor.kind in PLAIN:
        dtype = np.dtype(PLAIN[tensor.kind][1])

        def read_plain(source: Any, rows: int) -> Any:
            return _exactly(source, rows * width * dtype.itemsize).view(dtype).reshape(rows, width)

        return read_plain
    gguf: Any = import_module("gguf")
    kind = gguf.GGMLQuantizationType(tensor.kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    row_bytes = width // block * block_bytes

    def read(source: Any, rows: int) -> Any:
        stored = _exactly(source, rows * row_bytes).reshape(rows, row_bytes)
        try:
            return gguf.dequantize(stored, kind).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise ValueError(f"its weights are {kind.name}, which the package gguf cannot dequantise") from error

    return read


def _exactly(source: Any, count: int) -> Any:
    data = source.read(count)
    if len(data) != count:
        raise ValueError("it ends before its last tensor; download it again")
    return np.frombuffer(data, np.uint8)


def _as_float32(values: Any) -> Any:
    """Return float16, or the bits of bfloat16, as float32."""
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values.astype(np.float32)
