"""Which text is read: the same for both engines, spread over all texts, an error when there is too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.windows import TEXT_FOLDER, Text, WindowSet, choose_windows, cut_windows, read_texts, starting_token
from nibble.errors import NibbleError

TEXTS = [Text("a.txt", "abcdefghij" * 50), Text("b.txt", "klmnopqrst" * 20)]


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


class ByteTokenizer:
    """Enough of a transformers tokenizer: a token a byte, a BOS before texts if it is so made."""

    def __init__(self, bos_token_id: int | None, adds_bos: bool) -> None:
        self.bos_token_id, self._adds_bos = bos_token_id, adds_bos

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        start = [self.bos_token_id] if self._adds_bos and add_special_tokens else []
        return {"input_ids": [*start, *encode(text)]}  # type: ignore[list-item]

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(256)}


def test_inputs_and_next_tokens_are_one_apart() -> None:
    (window,) = cut_windows(TEXTS, encode, count=1, window_tokens=16, seed=0)
    assert len(window.inputs) == len(window.next_tokens) == 16
    assert window.inputs[1:] == window.next_tokens[:-1]


def test_windows_never_overlap_and_come_from_every_text_in_turn() -> None:
    windows = cut_windows(TEXTS, encode, count=20, window_tokens=19, seed=3)
    assert [window.text for window in windows[:4]] == ["a.txt", "b.txt", "a.txt", "b.txt"]
    starts = sorted((window.text, window.start) for window in windows)
    assert len(set(starts)) == 20
    assert all(start % 20 == 0 for _, start in starts)


def test_the_seed_decides_the_windows() -> None:
    first, again, other = (
        WindowSet(cut_windows(TEXTS, encode, count=6, window_tokens=16, seed=seed), TEXTS, None) for seed in (1, 1, 2)
    )
    assert first.sha256 == again.sha256 != other.sha256


def test_fewer_windows_are_the_first_ones_of_more() -> None:
    more = cut_windows(TEXTS, encode, count=9, window_tokens=16, seed=0)
    assert cut_windows(TEXTS, encode, count=4, window_tokens=16, seed=0) == more[:4]


def test_every_window_starts_with_the_bos_of_a_tokenizer_that_adds_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 30)
    chosen = choose_windows(ByteTokenizer(1, adds_bos=True), count=3, window_tokens=16, seed=0, folder=tmp_path)
    assert [window.inputs[0] for window in chosen.windows] == [1, 1, 1]
    assert {len(window.inputs) for window in chosen.windows} == {16}
    assert chosen.record.bos == 1


@pytest.mark.parametrize(("bos", "adds", "expected"), [(1, True, 1), (1, False, None), (None, False, None)])
def test_starting_token(bos: int | None, adds: bool, expected: int | None) -> None:
    assert starting_token(ByteTokenizer(bos, adds)) == expected


def test_too_little_text_says_how_much_there_is() -> None:
    with pytest.raises(NibbleError, match="hold only 40 such windows; ask for at most 40"):
        cut_windows(TEXTS, encode, count=42, window_tokens=16, seed=0)


@pytest.mark.parametrize(("count", "window_tokens"), [(0, 64), (1, 15), (-1, 64)])
def test_a_window_count_or_size_out_of_range_is_an_error(count: int, window_tokens: int) -> None:
    with pytest.raises(NibbleError, match="allowed 1 or more of at least 16"):
        cut_windows(TEXTS, encode, count=count, window_tokens=window_tokens, seed=0)


def test_no_texts_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match=r"put one there"):
        read_texts(tmp_path)


def test_the_shipped_texts_are_long_enough_for_long_windows() -> None:
    texts = read_texts(TEXT_FOLDER)
    assert sum(len(text.contents) for text in texts) > 1_000_000


def test_the_record_counts_windows_of_each_text() -> None:
    chosen = WindowSet(cut_windows(TEXTS, encode, count=5, window_tokens=16, seed=0), TEXTS, None)
    assert {text.name: text.windows for text in chosen.record.texts} == {"a.txt": 3, "b.txt": 2}
    assert chosen.positions == 80
