"""Do two served endpoints give the same greedy answers? Whatever serves them: native, or TensorRT-LLM's two.

    python -m eval.endpoint --first ensemble@10.0.0.1:8001 --second ensemble@10.0.0.2:8001 --prompts 32

Serve the same model twice, with the cache in question and with KV=fp16 on the same host, and compare. Prompts are
passages of the two novels, cut at words, so they need no tokenizer; answers are compared as text, since TensorRT-LLM's
endpoints return no token ids. The last line of stdout is the result as one JSON object. Exit codes: 0 done, 2 an error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from eval.windows import TEXT_FOLDER, Text
from nibble.errors import NibbleError
from nibble.stage import run_stage
from serve.client import TritonLLM
from serve.trtllm.client import ENSEMBLE, LLMAPI, TrtllmLLM

KINDS = ("native", "ensemble", "llmapi")
Ask = Callable[[str], str]


@dataclass(frozen=True)
class Agreement:
    """identical: answers that are equal. mean_common_share: of the shorter answer, how much is equal from its start."""

    prompts: int
    identical: int
    mean_common_share: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the endpoints that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m eval.endpoint", description="Compare two endpoints.")
    for name in ("first", "second"):
        parser.add_argument(f"--{name}", required=True, help=f"kind@host:grpc-port, kind one of {', '.join(KINDS)}")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--words", type=int, default=250, help="words of a prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    first, second = (connect(place, options.max_tokens) for place in (options.first, options.second))
    print(json.dumps(asdict(compare(first, second, passages(options.prompts, options.words)))), flush=True)


def connect(place: str, max_tokens: int) -> Ask:
    """The greedy answer of an endpoint. NibbleError for a place that is none."""
    kind, _, url = place.partition("@")
    if kind not in KINDS or ":" not in url:
        raise NibbleError(f"endpoint: got {place!r}, allowed kind@host:port with kind one of {', '.join(KINDS)}")
    if kind == "native":
        client = TritonLLM(url)
    else:
        client = TrtllmLLM(url, ENSEMBLE if kind == "ensemble" else LLMAPI)
    return lambda prompt: client.generate(prompt, max_tokens=max_tokens, temperature=0.0).text


def passages(count: int, words: int) -> list[str]:
    """Passages of the texts in turn, each of so many words, from their beginnings on."""
    texts = [Text(path.stem, path.read_text(encoding="utf-8")) for path in sorted(TEXT_FOLDER.glob("*.txt"))]
    found = [text.contents.split() for text in texts]
    places = [(number // len(found) * words, number % len(found)) for number in range(count)]
    cut = [" ".join(found[text][start : start + words]) for start, text in places]
    if not all(cut):
        raise NibbleError(f"prompts: got {count} of {words} words, the texts hold fewer; ask for fewer or shorter ones")
    return cut


def compare(first: Ask, second: Ask, prompts: Sequence[str]) -> Agreement:
    """Ask both the same."""
    pairs = [(first(prompt), second(prompt)) for prompt in prompts]
    shares = [_common_share(*pair) for pair in pairs]
    return Agreement(len(pairs), sum(left == right for left, right in pairs), sum(shares) / max(len(shares), 1))


def _common_share(first: str, second: str) -> float:
    shortest = min(len(first), len(second))
    equal = next((at for at in range(shortest) if first[at] != second[at]), shortest)
    return equal / max(shortest, 1)


if __name__ == "__main__":
    run_stage(main)
