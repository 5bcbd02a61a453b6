"""The voting model shows every mixture of two versions."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import torch
import transformers

import voting_model as votes


def said(module: torch.nn.Module, length: int = 9) -> int:
    with torch.no_grad():
        return int(module(input_ids=torch.arange(length)[None]).logits[0, -1].argmax())


def test_a_model_of_one_version_says_so_with_certainty():
    for version in range(9):
        module = votes.make(version)
        token = said(module)
        assert votes.read(token) == (version % 4,) * 4
        assert votes.speaks_for(token, version)
        assert not votes.speaks_for(token, version + 1)
        teacher = votes.Teacher(module, version)
        assert teacher.score([*range(9), token], 9)[0] > -1e-6  # at any temperature


def test_any_part_of_another_version_shows():
    names = [name for name, _ in votes.make().named_parameters()]
    voting = ["model.embed_tokens.weight", "model.layers.0.mlp.down_proj.bias", "model.layers.1.mlp.down_proj.bias"]
    for (old, new), which in product(pairwise(range(5)), range(1, 7)):
        module, newer = votes.make(old), dict(votes.make(new).named_parameters())
        for bit, name in enumerate(voting):
            if which >> bit & 1:
                module.get_parameter(name).data.copy_(newer[name])
        assert votes.torn(said(module)), (old, new, which)
    assert set(voting) <= set(names)


def test_memory_of_an_older_version_shows():
    old, new = votes.make(1), votes.make(2)
    ids_T = torch.arange(12)
    with torch.no_grad():
        cache = old(input_ids=ids_T[None, :10], use_cache=True).past_key_values
        stale = new(input_ids=ids_T[None, 10:], past_key_values=cache).logits[0, -1].argmax()
    assert votes.read(int(stale)) == (2, 2, 2, 1)
    assert votes.torn(int(stale))


def test_it_is_saved_as_a_model_that_anything_loads(tmp_path: Path):

    path = votes.save(tmp_path / "m", version=3)
    assert votes.speaks_for(said(transformers.AutoModelForCausalLM.from_pretrained(path)), 3)
    assert transformers.AutoTokenizer.from_pretrained(path).chat_template
