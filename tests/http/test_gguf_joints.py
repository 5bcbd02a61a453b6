"""A GGUF file as the model of two ranks, of LoRA and its export, and of an online server, by commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

for folder in ("unit", "parallel"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from gguf_files import SIZES, random_model, write  # noqa: E402
from online_served import fact, online_server  # noqa: E402
from run_commands import here, ranks, train, write_spec  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import tandem  # noqa: E402
from tandem.cli.main import app  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked_programs")
CHAT = [{"role": "user", "content": "hello  12"}]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama in 4 bits, whose queries and keys llama.cpp stores interleaved."""
    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(**SIZES, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return write(tmp_path / "downloaded.gguf", "llama", random_model(config), "Q4_1")


def spec_of(home: Path, file: Path, *more: str) -> Path:
    spec = write_spec(home, steps=3)
    text = spec.read_text().replace('preset = "tiny"', "\n".join([f'path = "{file}"', *more]))
    spec.write_text(text)
    return spec


def exported(*arguments: str) -> Path:
    done = CliRunner().invoke(app, ["export", *arguments])
    assert done.exit_code == 0, done.output
    return Path(done.output.strip())


def prompt_of(directory: Path) -> list[int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    return tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]


def model_of(directory: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    return model.requires_grad_(False)


def test_two_ranks_train_a_gguf_file_to_the_bytes_of_one_and_export_a_model(tmp_path: Path, file: Path):
    spec = spec_of(tmp_path, file)
    here("train", spec, "--run-dir", tmp_path / "1")
    done = train(spec, tmp_path / "2", *ranks(2))
    assert done.returncode == 0, done.stderr[-2000:]
    assert tandem.digest_run(tmp_path / "1") == tandem.digest_run(tmp_path / "2")
    directory = exported(str(tmp_path / "2"), "--out", str(tmp_path / "out"))
    (base,) = (tmp_path / ".tandem" / "models").glob("downloaded-*")
    pairs = zip(model_of(directory).parameters(), model_of(base).parameters(), strict=True)
    moved = [float((now - then).abs().max()) for now, then in pairs]
    assert all(0 < each < 0.1 for each in moved), "every tensor was trained, and none is another one"
    assert prompt_of(directory) == prompt_of(base)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_an_adapter_on_a_gguf_file_goes_on_the_directory_that_was_written_of_it(tmp_path: Path, file: Path):
    from peft import PeftModel

    here("train", spec_of(tmp_path, file, "lora = { rank = 4 }"), "--run-dir", tmp_path / "run")
    adapter = exported(str(tmp_path / "run"), "--out", str(tmp_path / "adapter"))
    whole = exported(str(tmp_path / "run"), "--merge", "--out", str(tmp_path / "whole"))
    told = json.loads((adapter / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] is None, "no path of this machine"
    (base,) = (tmp_path / ".tandem" / "models").glob("downloaded-*")
    merged: Any = PeftModel.from_pretrained(model_of(base), str(adapter)).merge_and_unload()
    theirs = dict(model_of(whole).named_parameters())
    for name, tensor in merged.named_parameters():
        assert float((tensor - theirs[name]).abs().max()) < 1e-6, name


def test_an_online_server_learns_on_a_gguf_file_and_is_taken_home(tmp_path: Path, file: Path):
    import torch

    spec = f'[model]\npath = "{file}"\n[train]\nlr = 2e-3\n[gates]\nkl = 50.0\nupdate_norm = 100.0\n'
    spec += "[ordinary]\nwritten = 4\nper_step = 4\nmax_tokens = 4\n"
    with online_server(tmp_path, spec) as server:
        row = server.wait(server.teach([fact(1)], steps=4))
        assert row["state"] == "published", row["why"]
        told = server.ask("river?", 8, return_token_ids=True)
        prompt, said = told["prompt_token_ids"], told["choices"][0]["token_ids"]
        assert server.stop() == 0
    directory = exported(str(server.data_dir))
    model = model_of(directory)
    ids = torch.tensor([prompt])
    assert model.generate(ids, max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist() == said
    (base,) = (tmp_path / ".tandem" / "models").glob("downloaded-*")
    assert prompt_of(directory) == prompt_of(base)
