"""Text as it comes: characters spread over tokens, and stop strings spread over tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nibble.runtime.text import TextStream


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
