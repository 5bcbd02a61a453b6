"""A model directory that is read by rows: what `load_model` loads, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_qwen import small_qwen

from tandem.errors import SpecError
from tandem.model.cast_precision import narrow
from tandem.model.load_checkpoint import load_model
from tandem.model.load_rows import opened_model
from tandem.model.lora import add_lora
from tandem.ops.parts import box_of_rank
from tandem.spec.model import LoraSpec

MAIN = "main"


def made(directory: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    module = small_qwen(tied=tied, dtype=dtype)
    module.generation_config.temperature = 0.5
    module.generation_config.do_sample = True
    module.save_pretrained(directory, **options)
    return directory


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"tied": False}, {"dtype": torch.bfloat16}, {"max_shard_size": "20KB"}],
    ids=["tied", "untied", "bf16", "sharded"],
)
def test_the_rows_of_all_ranks_are_the_model(tmp_path: Path, ranks: int, options: dict[str, Any]) -> None:
    path = str(made(tmp_path / "model", **options))
    whole = load_model(path, MAIN, "sdpa")
    with opened_model(path, MAIN, "sdpa") as (module, rows_of_parameter):
        names = dict(module.named_parameters())
        assert list(names) == list(dict(whole.named_parameters()))
        for name, exact in whole.named_parameters():
            parts = [rows_of_parameter(names[name], box_of_rank(exact.shape, rank, ranks)) for rank in range(ranks)]
            assert torch.equal(torch.cat(parts), exact), name
            assert torch.cat(parts).dtype == torch.float32
    for name, buffer in whole.named_buffers():
        assert torch.equal(module.get_buffer(name), buffer), name
    assert module.config.to_dict() == whole.config.to_dict()
    assert module.generation_config.to_dict() == whole.generation_config.to_dict()
    assert (module.name_or_path, module.training) == (whole.name_or_path, whole.training)
    assert module.config._attn_implementation == whole.config._attn_implementation


def test_parameters_take_no_memory_until_they_are_read(tmp_path: Path) -> None:
    with opened_model(str(made(tmp_path)), MAIN, "sdpa") as (module, _):
        assert sum(tensor.untyped_storage().nbytes() for tensor in module.parameters()) < 1000


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    with opened_model(str(made(tmp_path)), MAIN, "sdpa") as (module, _):
        assert module.lm_head.weight is module.model.embed_tokens.weight


def test_adapters_stand_around_a_model_that_is_read_by_rows(tmp_path: Path) -> None:
    """They are made whole, with the values that they have on one rank, and rename what they stand around."""
    path, lora = str(made(tmp_path)), LoraSpec(rank=4)
    whole = load_model(path, MAIN, "sdpa")
    torch.manual_seed(1)
    add_lora(whole, lora)
    with opened_model(path, MAIN, "sdpa") as (module, rows_of_parameter):
        torch.manual_seed(1)
        add_lora(module, lora)
        names = dict(module.named_parameters())
        assert list(names) == list(dict(whole.named_parameters()))
        for name, exact in whole.named_parameters():
            mine = names[name] if ".lora_" in name else rows_of_parameter(names[name], box_of_rank(exact.shape, 0, 1))
            assert torch.equal(mine, exact), name


def test_adapters_on_a_narrow_base_begin_as_on_one_rank(tmp_path: Path) -> None:
    """peft gives them values of the base's type."""
    path, lora = str(made(tmp_path)), LoraSpec(rank=4)
    whole = load_model(path, MAIN, "sdpa")
    narrow(whole, torch.device("cpu"), None)
    with opened_model(path, MAIN, "sdpa", dtype=torch.bfloat16) as (module, rows_of_parameter):
        assert sum(tensor.untyped_storage().nbytes() for tensor in module.parameters()) < 1000
        for each in (whole, module):
            torch.manual_seed(1)
            add_lora(each, lora)
        assert module.config.to_dict() == whole.config.to_dict()
        names = dict(module.named_parameters())
        for name, there in whole.named_parameters():
            mine = (
                names[name]
                if ".lora_" in name
                else rows_of_parameter(names[name], box_of_rank(there.shape, 0, 1)).to(there.dtype)
            )
            assert torch.equal(mine, there), name
            assert names[name].dtype == there.dtype


def changed(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


_NORM = "model.norm.weight"
BROKEN: dict[str, tuple[Any, str]] = {
    "missing": (lambda p: changed(p, lambda t: t.pop(_NORM)), "1 missing from it"),
    "mismatched": (lambda p: changed(p, lambda t: t.update({_NORM: torch.ones(7)})), "1 of another shape in it"),
    "quantised": (
        lambda p: (p / "config.json").write_text(
            json.dumps({**json.loads((p / "config.json").read_text()), "quantization_config": {"quant_method": "fp8"}})
        ),
        "quantised",
    ),
    "adapter": (lambda p: (p / "adapter_config.json").write_text('{"peft_type": "LORA"}'), "is an adapter"),
    "cut": (
        lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-9]),
        "can be loaded from it",
    ),
    "no tensors": (lambda p: (p / "model.safetensors").unlink(), "can be loaded from it"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_loaded_whole_cannot_be_loaded_by_rows(tmp_path: Path, name: str) -> None:
    breaks, text = BROKEN[name]
    breaks(made(tmp_path))
    with pytest.raises(SpecError, match=text):
        load_model(str(tmp_path), MAIN, "sdpa")
    with pytest.raises(SpecError, match=text), opened_model(str(tmp_path), MAIN, "sdpa"):
        pass


def test_a_shard_that_its_index_names_and_is_gone_is_refused(tmp_path: Path) -> None:
    made(tmp_path, max_shard_size="20KB")
    next(tmp_path.glob("model-00002-*")).unlink()
    with pytest.raises(SpecError, match="model-00002"), opened_model(str(tmp_path), MAIN, "sdpa"):
        pass


def test_experts_that_transformers_stacks_are_refused_by_name(tmp_path: Path) -> None:
    import transformers

    library: Any = transformers
    config = library.Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    library.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=r"Qwen3Moe.*parallel.ranks = 1"), opened_model(str(tmp_path), MAIN, "sdpa"):
        pass


_READER = """
import sys
from pathlib import Path
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from tandem.model.load_rows import opened_model
from tandem.ops.parts import box_of_rank

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

with opened_model(sys.argv[2], "main", "sdpa"):  # what is imported on the way is no weight
    pass
Path("/proc/self/clear_refs").write_text("5")
before, held = status("VmRSS"), []
with opened_model(sys.argv[1], "main", "sdpa") as (module, rows):
    largest = max(tensor.numel() * 4 for tensor in module.parameters())
    for parameter in module.parameters():
        held.append(rows(parameter, box_of_rank(parameter.shape, 1, 4)))
print(status("VmHWM") - before, sum(tensor.nbytes for tensor in held), largest)
"""


def test_a_rank_loads_its_rows_in_the_memory_of_its_rows(tmp_path: Path) -> None:
    """A model of 150 MB on 4 ranks: at most 1.2 times a rank's share and the largest tensor are in host memory."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=8192, hidden_size=512, intermediate_size=2048, num_hidden_layers=9, num_attention_heads=4,
        num_key_value_heads=4, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    made(tmp_path / "small")
    told = subprocess.check_output([sys.executable, "-c", _READER, tmp_path / "model", tmp_path / "small"], text=True)
    peak, share, largest = map(int, told.split())
    assert share > 35 * 2**20
    assert peak <= 1.2 * share + largest, (peak, share, largest)
