"""Chat to token ids: what stands between turns, what is trained, what others see, and which templates are refused."""

from __future__ import annotations

import pytest
from chat_tokenizers import CHATML, chatml_tokenizer, written

from tandem.errors import TemplateError, TextTooLong
from tandem.text.renderer import Renderer, cut_at_stop
from tandem.text.tokenizer import byte_tokenizer

BYTES = byte_tokenizer()
PLAIN, THINKS = Renderer(BYTES), Renderer(BYTES, thinking=True)
CHATML_PLAIN, CHATML_THINKS = Renderer(chatml_tokenizer()), Renderer(chatml_tokenizer(), thinking=True)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def tool(text: str) -> dict:
    return {"role": "tool", "content": text}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_the_byte_tokenizer_has_an_id_a_byte_and_survives_a_round_trip():
    text = "sum 4+2 = 6\n\tä€ 😀"
    ids = PLAIN.encode(text)
    assert len(ids) == len(text.encode())
    assert PLAIN.decode(ids) == text


class Counted:
    """The byte tokenizer, and how many characters it was given."""

    def __init__(self) -> None:
        self.num_chars = 0

    def __getattr__(self, name: str):
        return getattr(BYTES, name)

    def __len__(self) -> int:
        return len(BYTES)

    def encode(self, text: str, **options):
        self.num_chars += len(text)
        return BYTES.encode(text, **options)


def test_within_a_context_a_text_is_encoded_as_ever_and_one_that_cannot_fit_costs_no_more_than_the_context():
    counted = Counted()
    bounded = Renderer(counted).within(70_000)
    text = "ab " * 23_000  # more than one piece, and 1,000 tokens less than the context
    assert bounded.encode(text) == PLAIN.encode(text)
    assert bounded.prompt([user("hi")]) == PLAIN.prompt([user("hi")])
    longest = max(map(len, BYTES.get_vocab()))
    for length, most_read in ((70_000 * longest + 1, 0), (70_000 * longest, 2 * 2**16), (70_001, 2 * 70_001)):
        counted.num_chars = 0
        with pytest.raises(TextTooLong):
            bounded.encode("a" * length)
        assert counted.num_chars <= most_read
    counted.num_chars = 0
    with pytest.raises(TextTooLong):
        bounded.prompt([user("a" * 70_000)] * longest + [user("b")])
    assert counted.num_chars == 0
    assert len(Renderer(counted).encode("a" * 70_001)) == 70_001, "by itself a renderer has no bound"


# --- recordings: the mask, token by token

RECORDINGS = {
    "one turn": (
        PLAIN, [user("hi"), assistant("42")],
        "<|user|>hi<|end|><|assistant|>[[42<|end|>]]",
    ),
    "two turns, with a system": (
        PLAIN,
        [{"role": "system", "content": "s"}, user("hi"), assistant("42"), user("so?"), assistant("ok")],
        "<|system|>s<|end|><|user|>hi<|end|><|assistant|>[[42<|end|>]]<|user|>so?<|end|><|assistant|>[[ok<|end|>]]",
    ),
    "two assistants in a row": (
        PLAIN, [user("hi"), assistant("a"), assistant("b")],
        "<|user|>hi<|end|><|assistant|>[[a<|end|>]]<|assistant|>[[b<|end|>]]",
    ),
    "what follows the last answer is left out": (
        PLAIN, [user("hi"), assistant("a"), user("never answered")],
        "<|user|>hi<|end|><|assistant|>[[a<|end|>]]",
    ),
    "an empty answer": (PLAIN, [user("hi"), assistant("")], "<|user|>hi<|end|><|assistant|>[[<|end|>]]"),
    "a tool": (
        PLAIN, [user("hi"), assistant(None, tool_calls=[CALL]), tool("1"), assistant("ok")],
        '<|user|>hi<|end|><|assistant|>[[<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>]]'
        "<|tool|>1<|end|><|assistant|>[[ok<|end|>]]",
    ),
    "chatml: one turn": (
        CHATML_PLAIN, [user("hi"), assistant("low")],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[low<|im_end|>]]",
    ),
    "chatml: two turns": (
        CHATML_PLAIN, [user("hi"), assistant("low"), user("42"), assistant("ok")],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[low<|im_end|>]]"
        "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[ok<|im_end|>]]",
    ),
    "chatml: thoughts of the first turn stay": (
        CHATML_THINKS,
        [user("hi"), assistant("<think>\nlow\n</think>\n\nok"), user("42"), assistant("<think>\n\n</think>\n\nok")],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[<think>\nlow\n</think>\n\nok<|im_end|>]]"
        "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n[[<think>\n\n</think>\n\nok<|im_end|>]]",
    ),
    "chatml: a tool": (
        CHATML_PLAIN, [user("hi"), assistant("low", tool_calls=[CALL]), tool("42"), assistant("ok")],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        '[[low\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>]]'
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n[[ok<|im_end|>]]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("renderer", "messages", "text"), RECORDINGS.values(), ids=RECORDINGS.keys())
def test_a_recording_trains_the_assistants_tokens_and_no_other(renderer, messages, text):
    assert renderer.conversation(messages) == written(renderer.tokenizer, text)


def test_five_recorded_turns_train_five_answers_with_their_ends():
    messages = [each for turn in range(5) for each in (user(f"q{turn}"), assistant(f"answer {turn}"))]
    ids, trained = PLAIN.conversation(messages)
    assert PLAIN.decode([i for i, on in zip(ids, trained, strict=True) if on], skip_special=False) == "".join(
        f"answer {turn}<|end|>" for turn in range(5)
    )
    assert sum(trained) == 5 * (len("answer 0") + 1)
    assert len(ids) == 5 * (1 + 2 + 1 + 1 + 8 + 1)


def test_a_single_recorded_turn_is_what_the_template_itself_writes():
    messages = [user("hi"), assistant("low")]
    for renderer in (PLAIN, CHATML_PLAIN):
        whole = renderer.tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=False)
        ids, _ = renderer.conversation(messages)
        assert renderer.decode(ids, skip_special=False) == whole.removesuffix("\n")


# --- seams


@pytest.mark.parametrize("renderer", [PLAIN, CHATML_PLAIN, CHATML_THINKS])
def test_a_terminator_is_neither_doubled_nor_missing_at_a_seam(renderer):
    sampled_end = renderer.glue([user("hi")], renderer.end_id)
    cut_short = renderer.glue([user("hi")], renderer.encode("x")[0])
    assert renderer.end_id not in sampled_end[:1]
    assert cut_short == [renderer.end_id, *sampled_end]
    assert sampled_end.count(renderer.end_id) == 1  # the user's own


def test_glue_is_what_the_template_writes_between_two_turns():
    glue = CHATML_PLAIN.glue([tool("42"), user("hi")], CHATML_PLAIN.end_id)
    assert CHATML_PLAIN.decode(glue, skip_special=False) == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert THINKS.decode(THINKS.glue([], THINKS.end_id), skip_special=False) == "<|assistant|><think>"


def test_a_message_may_say_anything_even_what_the_renderer_looks_for():
    glue = PLAIN.glue([user("Q7sentinelQ7 and more")], PLAIN.end_id)
    assert PLAIN.decode(glue, skip_special=False) == "<|user|>Q7sentinelQ7 and more<|end|><|assistant|>"


# --- what others see


@pytest.mark.parametrize(
    ("renderer", "sampled", "stop", "text"),
    [
        (PLAIN, "42<|end|>", (), "42"),
        (PLAIN, "42", (), "42"),
        (PLAIN, " 42\n<|end|>", (), " 42\n"),
        (PLAIN, "42\nUser:", ("\nUser:",), "42"),
        (PLAIN, "4 2 4", ("4", " "), ""),
        (PLAIN, "<think>6*7</think>\n42<|end|>", (), "42"),
        (PLAIN, "  <think>6*7", (), ""),
        (THINKS, "6*7</think>42<|end|>", (), "42"),
        (THINKS, "6*7 is", (), ""),
        (THINKS, "</think><|end|>", (), ""),
        (CHATML_PLAIN, "42<|im_end|>", (), "42"),
        (CHATML_PLAIN, "42<|endoftext|>", (), "42"),
        (CHATML_THINKS, "<think>\nlow\n</think>\n\n42<|im_end|>", (), "42"),
        (CHATML_THINKS, "<think>\nlow", (), ""),
        (CHATML_THINKS, "42<|im_end|>", (), "42"),  # it may answer without a thought
    ],
)
def test_visible_text_has_no_thought_no_stop_and_no_end(renderer, sampled, stop, text):
    assert renderer.visible(renderer.encode(sampled), stop) == text


def test_text_is_cut_at_the_first_stop_string_in_it():
    assert cut_at_stop("a;b.c", (".", ";")) == "a"
    assert cut_at_stop("abc", ("x",)) == "abc"
    assert cut_at_stop("abc", ()) == "abc"


# --- templates that cannot work

NO_TERMINATOR = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
FORGETFUL = (
    "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
STRICT = (
    "{{ raise_exception('roles must alternate') if messages | length > 1 and messages[1].role == 'user' }}" + CHATML
)


def test_a_template_that_does_not_close_a_turn_with_a_special_token_is_refused():
    with pytest.raises(TemplateError, match="does not close an assistant turn with a special token"):
        Renderer(chatml_tokenizer(NO_TERMINATOR))


def test_a_template_that_drops_earlier_assistant_turns_is_refused():
    with pytest.raises(TemplateError, match="drops earlier assistant turns"):
        Renderer(chatml_tokenizer(FORGETFUL))


def test_what_a_template_refuses_is_named_with_the_roles_it_was_given():
    renderer = Renderer(chatml_tokenizer(STRICT))
    with pytest.raises(TemplateError, match=r"refuses the roles user, user: .*roles must alternate"):
        renderer.prompt([user("a"), user("b")])


def test_a_turn_is_decoded_once_for_its_answer_and_its_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(chatml_tokenizer())
    turns = [renderer.encode(text) for text in ("<think>one</think>1", "<think>two</think>2", "three")]
    decoded, decode = list[list[int]](), renderer.decode
    monkeypatch.setattr(renderer, "decode", lambda ids, **more: (decoded.append(list(ids)), decode(ids, **more))[1])
    assert [renderer.visible(turn) for turn in turns] == ["1", "2", "three"]
    assert decoded == turns
    assert renderer.thought(turns[2]) is None
    assert decoded == turns
    thought = renderer.thought(turns[0])
    assert thought is not None
    assert thought.closed
    assert renderer.visible(turns[0]) == "1"
    assert renderer.visible([*turns[1], renderer.end_id]) == "2"
