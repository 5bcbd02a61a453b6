from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tandem.serve.openai.text_stream import TextStream, token_bytes
from tandem.text.renderer import Renderer, cut_at_stop


class SentencePiece:
    """Decodes as SentencePiece tokenizers do: a leading space is dropped, bytes fall back one by one."""

    words = ("▁Hello", "▁world", "s", "▁", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "é")

    def token_text(self, token_id: int) -> str:
        return self.words[token_id]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        text, raw = "", b""
        for word in [*(self.words[token_id] for token_id in ids), ""]:
            if word.startswith("<0x"):
                raw += bytes([int(word[3:5], 16)])
                continue
            try:
                text += raw.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(raw)
            text, raw = text + word.replace("▁", " "), b""
        return text.removeprefix(" ")


@pytest.mark.parametrize("seed", range(50))
def test_pieces_of_any_bytes_join_to_the_decoded_whole(renderer: Renderer, seed: int) -> None:
    dice = random.Random(seed)
    alphabet = renderer.encode("ab€🦊é") + [dice.randrange(256) for _ in range(8)]
    ids = [dice.choice(alphabet) for _ in range(60)]
    for stop in ((), ("ab",), ("€", "ba")):
        stream = TextStream(renderer.decode, stop)
        pieces = [stream.push([token_id]) for token_id in ids]
        assert "".join(pieces) + stream.close() == cut_at_stop(renderer.decode(ids), stop)
        at_once = TextStream(renderer.decode, stop)
        assert at_once.push(ids) + at_once.close() == cut_at_stop(renderer.decode(ids), stop)


@pytest.mark.parametrize("seed", range(30))
def test_spaces_survive_a_tokenizer_that_drops_the_first(seed: int) -> None:
    names, dice = SentencePiece(), random.Random(seed)
    ids = [0, 1] + [dice.choice([0, 1, 2, 3, 8]) for _ in range(20)] + [4, 5, 6, 1]
    stream = TextStream(names.decode)
    assert "".join(stream.push([token_id]) for token_id in ids) + stream.close() == names.decode(ids)


def test_each_token_has_its_bytes(renderer: Renderer) -> None:
    said = "né🦊 x"
    raw = [token_bytes(renderer, token_id) for token_id in renderer.encode(said)]
    assert raw == [bytes([byte]) for byte in said.encode()]
    assert token_bytes(renderer, renderer.end_id) == b"<|end|>"
    names = SentencePiece()
    assert [token_bytes(names, token_id) for token_id in (0, 4, 8)] == [b" Hello", b"\xe2", "é".encode()]
