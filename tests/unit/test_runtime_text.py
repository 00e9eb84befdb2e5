"""Text as it comes: characters spread over tokens, and stop strings spread over tokens."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nibble.models import load_tokenizer
from nibble.runtime.text import TextStream, text_decoder
from tests.conftest import write_byte_tokenizer


def decode_bytes(token_ids: list[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


def stream(text: str, *stop: str) -> tuple[list[str], bool]:
    """The pieces that a byte-by-byte stream of the text gives."""
    output = TextStream(decode_bytes, stop)
    pieces = []
    for byte in text.encode():
        pieces.append(output.push(byte))
        if output.stopped:
            break
    return [*pieces, output.flush()], output.stopped


@given(st.text())
def test_pieces_are_whole_characters_and_add_up(text: str) -> None:
    pieces, _ = stream(text)
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" in text or not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(st.text(alphabet="ab"), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_stop_string_comes_out(text: str, stop: list[str]) -> None:
    pieces, stopped = stream(text, *stop)
    ends = [at + len(s) for s in stop if (at := text.find(s)) >= 0]
    assert stopped == bool(ends)
    if not ends:
        assert "".join(pieces) == text
        return
    first = min(ends)  # the first stop string to be complete ends the answer
    seen = text[:first]
    assert "".join(pieces) == seen[: min(seen.find(s) for s in stop if s in seen)]


@pytest.mark.parametrize(("text", "pieces"), [("héllo", ["h", "", "é", "l", "l", "o", ""])])
def test_a_character_waits_for_its_last_byte(text: str, pieces: list[str]) -> None:
    assert stream(text)[0] == pieces


def test_broken_bytes_do_not_hold_the_stream_for_ever() -> None:
    output = TextStream(decode_bytes)
    assert sum(len(output.push(0xFF)) for _ in range(20)) > 0


def test_text_straight_from_the_library_is_what_transformers_makes(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    decode = text_decoder(tokenizer)
    assert getattr(decode, "func", None) == tokenizer.backend_tokenizer.decode
    ids = [*tokenizer.encode("One, two .  Größe 😀"), *range(len(tokenizer)), *tokenizer.all_special_ids]
    assert decode(ids) == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
