"""Special tokens that a tokenizer lacks or names wrongly: mended, said, and right in what is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizers import CHATML, chatml_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from tandem.build import built_model, training
from tandem.errors import TemplateError
from tandem.spec.model import LoraSpec, PathModel
from tandem.spec.precision import Float32Precision
from tandem.text.renderer import Renderer

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def odd(eos: str | None, template: str = CHATML, pad: str | None = None) -> Any:
    """The tokenizer with another end of sequence."""
    tokenizer = chatml_tokenizer(template)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token=eos, pad_token=pad, chat_template=template
    )


def test_an_end_of_sequence_that_opens_turns_is_replaced_by_the_end_of_a_turn():
    tokenizer = odd(START)
    renderer = Renderer(tokenizer)
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, TEXT_END)
    assert renderer.end_ids == {tokenizer.convert_tokens_to_ids(END)}
    eos, pad = renderer.mended
    assert f"'{START}' does not end a turn in its chat template; '{END}' does, and is used" in eos
    assert pad == f"the tokenizer names no padding token; '{TEXT_END}' is used"


ASKS = "{{ '<|im_start|>' + message.content }}"
ANSWERS = "{{ 'answer: ' + message.content + '<|im_end|>' }}"
OPENS_QUESTIONS = (
    f"{{% for message in messages %}}{{% if message.role == 'user' %}}{ASKS}{{% else %}}{ANSWERS}{{% endif %}}"
    "{% endfor %}"
)
ONE_QUESTION = "{{ raise_exception('one question only') if messages | length > 2 }}" + OPENS_QUESTIONS


def test_an_end_of_sequence_that_opens_the_users_turns_only_is_replaced_too():
    """A prompt of one question has it as its first token, where others have their beginning of sequence."""
    tokenizer = odd(START, OPENS_QUESTIONS, pad=TEXT_END)
    renderer = Renderer(tokenizer)
    assert tokenizer.eos_token == END
    assert renderer.end_ids == {tokenizer.convert_tokens_to_ids(END)}
    assert tokenizer.convert_tokens_to_ids(START) in renderer.never_ends


def test_an_end_of_sequence_that_only_begins_a_conversation_is_left_alone():
    tokenizer = odd(TEXT_END, "<|endoftext|>" + CHATML, pad=TEXT_END)
    assert Renderer(tokenizer).mended == ()
    tokenizer = odd(START, ONE_QUESTION, pad=TEXT_END)
    assert Renderer(tokenizer).mended == ()


def test_a_missing_end_of_sequence_is_the_end_of_a_turn():
    tokenizer = odd(None, pad=TEXT_END)
    renderer = Renderer(tokenizer)
    assert tokenizer.eos_token == END
    assert renderer.mended == (
        f"the tokenizer names no end of sequence; '{END}' is used, which ends a turn in its chat template",
    )


def test_another_end_of_sequence_beside_the_end_of_a_turn_is_left_alone():
    tokenizer = odd(TEXT_END, pad=TEXT_END)
    renderer = Renderer(tokenizer)
    assert renderer.mended == ()
    assert renderer.end_ids == {tokenizer.convert_tokens_to_ids(each) for each in (END, TEXT_END)}


SPACED = CHATML.replace("{{- '<|im_end|>\\n' -}}", "{{- ' <|im_end|>\\n' -}}")


def test_a_template_with_a_space_before_the_end_of_a_turn_joins_turns_without_loss():
    assert SPACED != CHATML
    tokenizer = odd(END, SPACED, pad=TEXT_END)
    renderer = Renderer(tokenizer)
    asked, answered = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}
    ids, trained = renderer.conversation([asked, answered, asked, answered])
    spoken = [token for token, mine in zip(ids, trained, strict=True) if mine]
    assert tokenizer.decode(spoken) == f"ok {END}ok {END}"
    sampled = [*renderer.encode("ok "), renderer.end_id]
    joined = renderer.prompt([asked]) + sampled + renderer.glue([asked], renderer.end_id)
    assert joined == ids[: len(joined)]


def test_a_template_that_ends_a_turn_with_words_is_still_refused():
    with pytest.raises(TemplateError, match="does not close an assistant turn with a special token"):
        Renderer(
            odd(END, CHATML.replace("{{- '<|im_end|>\\n' -}}\n{%- elif", "{{- ' over<|im_end|>\\n' -}}\n{%- elif"))
        )


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["all weights", "lora"])
def test_an_export_ends_where_the_template_ends_a_turn(lora: LoraSpec | None, tmp_path: Path):
    tokenizer = odd(START)
    start, end, text_end = (tokenizer.convert_tokens_to_ids(each) for each in (START, END, TEXT_END))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=[start, text_end], pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "odd")
    tokenizer.save_pretrained(tmp_path / "odd")
    model = built_model.model(
        PathModel(path=str(tmp_path / "odd"), lora=lora), Float32Precision(), 0, torch.device("cpu")
    )
    training.export(model, tmp_path / "export")
    model.policy.deployer()(dict(model.policy.trainable()), tmp_path / "deployed")
    for place in ("export", "deployed"):
        saved: Any = AutoTokenizer.from_pretrained(tmp_path / place)
        assert (saved.eos_token, saved.pad_token) == (END, TEXT_END)
        for name in ("generation_config.json", "config.json"):
            if (file := tmp_path / place / name).exists():
                said = json.loads(file.read_text())
                assert (said["eos_token_id"], said["pad_token_id"]) == ([text_end, end], text_end)
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert plain.generation_config.eos_token_id == [text_end, end]
