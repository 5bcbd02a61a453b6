"""A model in Hugging Face format of which every rank writes its rows: the files that one process writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_qwen import small_qwen

from tandem.errors import SpecError
from tandem.io import row_file
from tandem.model import export_rows
from tandem.model.export_copy import Deployer
from tandem.model.export_rows import METADATA, RowDeployer
from tandem.model.load_rows import opened_model
from tandem.model.rows_policy import to_meta
from tandem.ops.parts import rows_of
from tandem.text.tokenizer import byte_tokenizer
from tandem.types import Part

TOKENIZER = byte_tokenizer()


def skeleton_of(module: Any) -> Any:
    to_meta(module, lambda tensor: tensor.dtype)
    return module


def by_rows(skeleton: Any, whole: Any, directory: Path, ranks: int) -> None:
    """What `ranks` ranks write, one after the other. `skeleton` has no values."""
    deployer = RowDeployer(skeleton, TOKENIZER)
    for rank in range(ranks):
        trained: list[Part] = []
        for name, tensor in whole.named_parameters():
            top, bottom = rows_of(len(tensor), rank, ranks)
            if bottom > top:
                trained.append(Part(name, tensor.detach()[top:bottom], top, 0, tuple(tensor.shape)))
        for file, parts in deployer.files(trained, rank).items():
            if rank == 0:
                row_file.begin(directory / file, parts, METADATA)
            row_file.write_parts(directory / file, parts)
    deployer.write_companions(directory)


def files(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*")}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_files_are_those_of_one_process(tmp_path: Path, ranks: int, tied: bool, dtype: torch.dtype) -> None:
    whole, skeleton = small_qwen(tied=tied, dtype=dtype), skeleton_of(small_qwen(tied=tied, dtype=dtype))
    for name in ("rows", "whole", "deployed"):
        (tmp_path / name).mkdir()
    by_rows(skeleton, whole, tmp_path / "rows", ranks)
    whole.save_pretrained(tmp_path / "whole")
    TOKENIZER.save_pretrained(tmp_path / "whole")
    Deployer(whole, None, TOKENIZER).write(dict(whole.named_parameters()), tmp_path / "deployed")
    assert files(tmp_path / "rows") == files(tmp_path / "whole") == files(tmp_path / "deployed")


def test_a_model_that_was_read_by_rows_is_written_under_the_names_that_it_had(tmp_path: Path) -> None:
    small_qwen(tied=True).save_pretrained(tmp_path / "model")
    (tmp_path / "rows").mkdir()
    with opened_model(str(tmp_path / "model"), "main", "sdpa") as (skeleton, _):
        by_rows(skeleton, small_qwen(tied=True), tmp_path / "rows", 2)
    for name, content in files(tmp_path / "model").items():
        assert (tmp_path / "rows" / name).read_bytes() == content, name


def test_a_model_over_the_limit_of_a_file_is_cut_as_transformers_cuts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_rows, "_MOST", "30KB")
    whole, skeleton = small_qwen(tied=True), skeleton_of(small_qwen(tied=True))
    (tmp_path / "rows").mkdir()
    by_rows(skeleton, whole, tmp_path / "rows", 2)
    whole.save_pretrained(tmp_path / "whole", max_shard_size="30KB")
    TOKENIZER.save_pretrained(tmp_path / "whole")
    assert "model.safetensors.index.json" in files(tmp_path / "whole")
    assert files(tmp_path / "rows") == files(tmp_path / "whole")


def test_experts_that_transformers_cuts_apart_are_refused_by_name() -> None:
    import transformers

    library: Any = transformers
    config = library.Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with pytest.raises(SpecError, match=r"Qwen3Moe.*parallel.ranks = 1"):
        RowDeployer(library.Qwen3MoeForCausalLM(config), TOKENIZER)
