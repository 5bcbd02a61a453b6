"""One file of whole tensors, written by several ranks at once and read by rows: the same bytes as one writer's."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.errors import CheckpointDamaged, CheckpointError
from tandem.io import row_file, sealed_directory
from tandem.io.safetensors_format import KNOWN, header_of
from tandem.ops.parts import rows_of
from tandem.types import Part

TYPES = [getattr(torch, name) for name in KNOWN]


def tensors() -> dict[str, Tensor]:
    """Some of every type that weights and optimizer states have, with names and shapes that are hard to order."""
    generator = torch.Generator().manual_seed(0)

    def some(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randint(0, 2, shape, generator=generator).float().add(0.5).to(dtype)

    found = {f"{name}.{dtype}": some((7, 5), dtype) for name in ("b", "a", "layers.10", "layers.9") for dtype in TYPES}
    found |= {
        "embed.weight": torch.randn(259, 16, generator=generator),
        "embed.weight|master": torch.randint(-9, 9, (259, 16), generator=generator, dtype=torch.int16),
        "embed.weight|step": torch.tensor(3),
        "norm.weight": torch.randn(5, generator=generator),
        "experts": torch.randn(6, 3, 4, generator=generator),
        "one row": torch.randn(1, 4, generator=generator),
        "nothing": torch.zeros(0, 3),
        'odd "name"\x01 \u00fc \U0001f600': torch.ones(2),
    }
    return found


def parts_of(whole: Mapping[str, Tensor], rank: int, ranks: int) -> Iterator[Part]:
    """What a rank holds; scalars are rank 0's."""
    for name, tensor in whole.items():
        if not tensor.ndim:
            if rank == 0:
                yield Part(name, tensor, 0, 0, ())
            continue
        top, bottom = rows_of(tensor.shape[0], rank, ranks)
        yield Part(name, tensor[top:bottom].clone(), top, 0, tuple(tensor.shape))


def written(path: Path, whole: Mapping[str, Tensor], ranks: int, metadata: Mapping[str, str] | None = None) -> int:
    row_file.begin(path, parts_of(whole, 0, ranks), metadata)
    with ThreadPoolExecutor(ranks) as pool:
        return sum(pool.map(lambda rank: row_file.write_parts(path, parts_of(whole, rank, ranks)), range(ranks)))


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_file_of_any_number_of_ranks_is_save_files(
    tmp_path: Path, ranks: int, metadata: dict[str, str] | None
) -> None:
    whole = tensors()
    save_file(whole, tmp_path / "whole", metadata=metadata)
    written(tmp_path / "rows", whole, ranks, metadata)
    assert (tmp_path / "rows").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_file_without_tensors_is_save_files(tmp_path: Path) -> None:
    save_file({}, tmp_path / "whole")
    row_file.begin(tmp_path / "rows", ())
    assert (tmp_path / "rows").read_bytes() == (tmp_path / "whole").read_bytes()


def test_columns_are_written_and_read_where_they_belong(tmp_path: Path) -> None:
    whole = {"o": torch.randn(6, 8), "cube": torch.randn(5, 2, 3).to(torch.bfloat16), "scale": torch.randn(4)}
    save_file(whole, tmp_path / "whole")

    def columns(rank: int) -> Iterator[Part]:
        yield Part("o", whole["o"][:, 4 * rank : 4 * rank + 4], 0, 4 * rank, (6, 8))
        yield Part("cube", whole["cube"].flatten(1)[:, 3 * rank : 3 * rank + 3], 0, 3 * rank, (5, 2, 3))
        if rank == 0:
            yield Part("scale", whole["scale"], 0, 0, (4,))

    row_file.begin(tmp_path / "columns", columns(0))
    for rank in (1, 0):
        row_file.write_parts(tmp_path / "columns", columns(rank))
    assert (tmp_path / "columns").read_bytes() == (tmp_path / "whole").read_bytes()
    with row_file.opened(tmp_path / "columns") as file:
        assert torch.equal(file.read("o", (1, 5, 3, 6)), whole["o"][1:5, 3:6])
        assert torch.equal(file.read("cube", (0, 5, 3, 6)), whole["cube"].flatten(1)[:, 3:6])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_one_number_of_ranks_wrote_another_reads(tmp_path: Path, ranks: int) -> None:
    whole = tensors()
    written(tmp_path / "rows", whole, 3)
    for rank in range(ranks):
        with row_file.opened(tmp_path / "rows") as file:
            for part in parts_of(whole, rank, ranks):
                into = part._replace(tensor=torch.zeros_like(part.tensor))
                file.read_part(into)
                assert torch.equal(into.tensor.float(), part.tensor.float()), part.name


def test_all_ranks_together_write_every_byte(tmp_path: Path) -> None:
    whole = tensors()
    size = row_file.begin(tmp_path / "rows", parts_of(whole, 0, 2))
    assert written(tmp_path / "again", whole, 2) == size
    assert row_file.write_parts(tmp_path / "rows", parts_of(whole, 0, 2)) < size  # so a silent rank is seen


def test_a_part_of_another_type_or_shape_is_refused_by_name(tmp_path: Path) -> None:
    row_file.begin(tmp_path / "rows", [Part("w", torch.zeros(2, 3), 0, 0, (4, 3))])
    for wrong in (
        Part("w", torch.zeros(2, 3, dtype=torch.bfloat16), 0, 0, (4, 3)),
        Part("w", torch.zeros(2, 3), 0, 0, (5, 3)),
        Part("w", torch.zeros(2, 3), 3, 0, (4, 3)),
        Part("v", torch.zeros(2, 3), 0, 0, (4, 3)),
    ):
        with pytest.raises(CheckpointError):
            row_file.write_parts(tmp_path / "rows", [wrong])
    assert (tmp_path / "rows").read_bytes()[-48:] == bytes(48)


def test_a_file_that_was_cut_or_is_no_safetensors_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    broken = {
        "short": content[:-1], "long": content + b"x", "empty": b"", "text": b"hello, this is not tensors",
        "shape": content.replace(b'"shape":[3]', b'"shape":[2]'), "json": content.replace(b'{"w"', b'{"w '),
    }  # fmt: skip
    for name, bytes_of in broken.items():
        (tmp_path / name).write_bytes(bytes_of)
        with pytest.raises(CheckpointError, match=name), row_file.opened(tmp_path / name):
            pass


def test_the_header_is_in_the_librarys_order(tmp_path: Path) -> None:
    """Widest types first, and by name within a type: another order gives other bytes."""
    whole = {"b": torch.zeros(2), "a": torch.zeros(2, dtype=torch.bfloat16), "c": torch.tensor(1)}
    save_file(whole, tmp_path / "whole")
    head, stored = header_of({name: (str(tensor.dtype)[6:], tuple(tensor.shape)) for name, tensor in whole.items()})
    assert (tmp_path / "whole").read_bytes().startswith(head)
    assert list(json.loads(head[8:])) == ["c", "b", "a"]
    assert [stored[name].offset - len(head) for name in "cba"] == [0, 8, 16]


_WRITER = """
import sys, time
from pathlib import Path
import torch
from tandem.io import row_file
from tandem.types import Part

def parts():
    yield Part("w", torch.ones(1000, 8), 1000, 0, (2000, 8))
    print("half", flush=True)
    time.sleep(60)

row_file.write_parts(Path(sys.argv[1]), parts())
"""


def test_a_writer_that_is_killed_leaves_no_sealed_directory(tmp_path: Path) -> None:
    """The seal comes last: rank 0 waits for all ranks, and what it began is removed."""

    def save() -> None:
        with sealed_directory.sealed(tmp_path / "step-1") as directory:
            fill(directory)

    def fill(directory: Path) -> None:
        half = [Part("w", torch.ones(1000, 8), 0, 0, (2000, 8))]
        row_file.begin(directory / "weights.safetensors", half)
        command = [sys.executable, "-c", _WRITER, str(directory / "weights.safetensors")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "half\n"
            os.kill(writer.pid, signal.SIGKILL)
        row_file.write_parts(directory / "weights.safetensors", half)
        if writer.returncode:
            raise RuntimeError("rank 1 was lost")

    with pytest.raises(RuntimeError, match="rank 1"):
        save()
    assert not list(tmp_path.iterdir())


def test_a_directory_without_its_seal_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    written(tmp_path / "step-1" / "weights.safetensors", tensors(), 2)
    with pytest.raises(CheckpointDamaged, match="MANIFEST"):
        sealed_directory.verify(tmp_path / "step-1")


_READER = """
import sys
from pathlib import Path
import torch
from tandem.io import row_file
from tandem.ops.parts import box_of_rank

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

Path("/proc/self/clear_refs").write_text("5")
before, held = status("VmRSS"), []
with row_file.opened(Path(sys.argv[1])) as file:
    for name, stored in file.tensors.items():
        held.append(file.read(name, box_of_rank(stored.shape, 1, 4)))
print(status("VmHWM") - before, sum(tensor.nbytes for tensor in held), max(s.size_bytes for s in file.tensors.values()))
"""


def test_a_rank_reads_its_rows_in_the_memory_of_its_rows(tmp_path: Path) -> None:
    """160 MB on 4 ranks: at most 1.2 times a rank's share and the largest tensor are in host memory."""
    save_file({f"layer.{n}": torch.ones(1024, 2048) for n in range(20)}, tmp_path / "whole")
    told = subprocess.run(
        [sys.executable, "-c", _READER, tmp_path / "whole"], capture_output=True, text=True, check=True
    )
    peak, share, largest = map(int, told.stdout.split())
    assert share == 160 * 2**20 // 4
    assert peak <= 1.2 * share + largest, (peak, share, largest)


def test_ten_writers_of_one_file_give_one_hash(tmp_path: Path) -> None:
    whole = {"w": torch.randn(97, 33), "v": torch.randn(13)}
    save_file(whole, tmp_path / "whole")
    expected = hashlib.sha256((tmp_path / "whole").read_bytes()).hexdigest()
    for ranks in (2, 5, 10):
        written(tmp_path / f"rows-{ranks}", whole, ranks)
        assert hashlib.sha256((tmp_path / f"rows-{ranks}").read_bytes()).hexdigest() == expected
    assert torch.equal(load_file(tmp_path / "rows-10")["w"], whole["w"])
