"""Whole runs of a model that sees, on an environment in workers: stopped, and resumed to the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tandem
from families.family_images import TOKENIZER, seeing_sizes, write_processor
from tandem.errors import OwnCodeFailed
from tandem.io.image_store import ImageStore
from tandem.types import text_of

pytestmark = pytest.mark.usefixtures("one_thread")

STOPS = """
class Stops:
    def on_step(self, step):
        assert step.version < 23, "as planned"
"""
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.1,
    "eos_token_id": TOKENIZER.eos_token_id, "pad_token_id": TOKENIZER.pad_token_id,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = seeing_sizes(TEXT)
    sizes["vision_config"]["out_hidden_size"] = TEXT["hidden_size"]
    transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(**sizes)).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    write_processor(path)
    return path


def spec(model: Path, callbacks: list[str], workers: int = 0) -> dict[str, Any]:
    counted = {"grid": 2, "cell": 16, "most": 1, "kinds": 2, "images": 100}
    return {
        "recipe": "rl", "model": {"path": str(model)}, "callbacks": callbacks,
        "environment": {"name": "count", "params": counted, "workers": workers}, "checkpoint": {"every": 2},
        "warmup": {"steps": 20, "batch_size": 8, "lr": 3e-3, "data": {"kind": "demonstrations"}},
        "train": {"steps": 4, "lr": 1e-4, "groups_per_step": 2, "group_size": 4, "max_tokens": 3},
        "eval": {"tasks": 4},
    }  # fmt: skip


def test_a_run_that_sees_is_resumed_to_the_same_bytes_with_changed_images_written_again(model: Path, tmp_path: Path):
    (tmp_path / "stops.py").write_text(STOPS)
    stops = [f"{tmp_path}/stops.py:Stops"]
    never = [f"{tmp_path}/never.py:Stops"]
    (tmp_path / "never.py").write_text(STOPS.replace("< 23", "< 99"))
    whole, stopped, changed = (tmp_path / name for name in ("whole", "stopped", "changed"))
    assert tandem.run(spec(model, never, workers=1), whole).status["state"] == "succeeded"
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["sync/logprob_gap"] for row in rows if "sync/logprob_gap" in row]
    assert gaps
    assert max(gaps) < 1e-5  # engine and trainer saw the same image at the same places
    with pytest.raises(OwnCodeFailed, match="as planned"):
        tandem.run(spec(model, stops), stopped)
    shutil.copytree(stopped, changed)
    (tmp_path / "stops.py").write_text(STOPS.replace("< 23", "< 99"))
    tandem.resume(stopped)
    assert tandem.digest_run(stopped) == tandem.digest_run(whole)

    store = ImageStore(whole / "images")
    for row in tandem.samples(whole):
        (image, text) = row["messages"][0]["content"]
        digest = image["image"].removeprefix("sha256:")
        assert row["prompt"] == f"[image {digest[:12]} 32x32] {text['text']}" == text_of([image, text])
        assert store.size(digest) == (32, 32)
    assert "sha256:" not in (whole / "report.html").read_text()
    card = (tandem.export_run(whole, directory=tmp_path / "copy") / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    assert 'pipeline("image-text-to-text", model="DIR")' in card

    other = next((whole / "images").iterdir()).read_bytes()
    for image in (changed / "images").iterdir():
        image.write_bytes(other + b"!")
    tandem.resume(changed)  # its environment shows them again, and they are written again
    assert tandem.digest_run(changed) == tandem.digest_run(whole)
