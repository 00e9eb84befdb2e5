"""A SentencePiece vocabulary in a GGUF: merges in the order of scores, spaces, bytes and special tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter

from nibble.gguf_tokenizer import order_merges, read_sentencepiece

# llama.cpp's kinds: 1 normal, 2 unknown, 3 control, 4 user defined, 6 byte
SPECIAL = [("<pad>", 3), ("<eos>", 3), ("<bos>", 3), ("<unk>", 2), ("\n\n", 4), ("<0xC3>", 6), ("<0xA9>", 6)]
NORMAL = ["ca", "at", "cat", "▁cat", "▁", "c", "a", "t", "\n"]  # the best first


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "vocabulary.gguf"
    writer = GGUFWriter(path, "gemma3")
    writer.add_token_list([piece for piece, _ in SPECIAL] + NORMAL)
    writer.add_token_types([kind for _, kind in SPECIAL] + [1] * len(NORMAL))
    writer.add_token_scores([-1000.0] * len(SPECIAL) + [-float(rank) for rank in range(len(NORMAL))])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_words_are_merged_by_score_and_bos_stands_first(gguf: Path) -> None:
    tokenizer = read_sentencepiece(gguf)
    assert tokenizer.convert_ids_to_tokens(tokenizer("cat cat")["input_ids"]) == ["<bos>", "cat", "▁cat"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1, 0)


@pytest.mark.parametrize("text", ["cat\n\ncat", "  cat ", "caté", "tac\n"])
def test_text_comes_back_as_it_was(gguf: Path, text: str) -> None:
    tokenizer = read_sentencepiece(gguf)
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_the_better_merge_of_a_piece_comes_first() -> None:
    merges = order_merges(["a", "b", "ab", "abb"], [1, 1, 1, 1], [-3.0, -4.0, -1.0, -0.5])
    assert merges == [("ab", "b"), ("a", "b")]
