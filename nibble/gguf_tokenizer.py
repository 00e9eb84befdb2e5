"""The tokenizer of a GGUF that holds a SentencePiece vocabulary: pieces and scores, but no merges.

transformers' conversion of such a file splits words in the wrong places and forgets the beginning-of-sequence token.
The order of merges is in the scores: of two possible merges, the one whose result has the higher score comes first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPACE = "▁"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type, of llama.cpp


def read_sentencepiece(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer with bos, eos, pad and unk; bos stands first when the file asks for it."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    fields = {
        key.removeprefix("tokenizer.ggml."): field
        for key, field in GGUFReader(gguf).fields.items()
        if key.startswith("tokenizer.ggml.")
    }
    pieces: list[str] = fields["tokens"].contents()
    kinds: list[int] = fields["token_type"].contents()
    scores: list[float] = fields["scores"].contents()
    special = {name: pieces[fields[f"{key}_token_id"].contents()] for name, key in _SPECIAL.items()}

    ids = {piece: index for index, piece in enumerate(pieces)}
    model = BPE(ids, order_merges(pieces, kinds, scores), unk_token=special["unk_token"], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(p, normalized=False) for p in _of_kind(pieces, kinds, CONTROL)])
    tokenizer.add_tokens([AddedToken(p, normalized=False) for p in _of_kind(pieces, kinds, USER_DEFINED)])
    if _flag(fields, "add_bos_token"):
        bos = special["bos_token"]
        tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, ids[bos])])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def order_merges(pieces: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a normal piece, in the order in which SentencePiece would merge them."""
    known = set(pieces)
    made = [index for index, kind in enumerate(kinds) if kind == NORMAL]
    made.sort(key=lambda index: -scores[index])
    return [
        (pieces[index][:cut], pieces[index][cut:])
        for index in made
        for cut in range(1, len(pieces[index]))
        if pieces[index][:cut] in known and pieces[index][cut:] in known
    ]


def _of_kind(pieces: list[str], kinds: list[int], wanted: int) -> list[str]:
    return [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == wanted]


def _flag(fields: dict[str, Any], name: str) -> bool:
    return name in fields and bool(fields[name].contents())
