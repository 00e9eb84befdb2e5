"""`--check`: one question to a server that just came up, streamed through tritonclient.

A model without a chat template is asked to go on with a text instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from nibble.errors import NibbleError
from serve.client import Chunk, ServerError, TritonLLM

QUESTION = "What is the capital of France? Answer in one short sentence."
TEXT = "The capital of France is"


def ask_one_question(url: str, console: Console) -> None:
    """Print the answer as it comes. Raises NibbleError when there is none."""
    console.print(f"[bold]question[/] {QUESTION}")
    console.print("[bold]answer[/] ", end="")
    last = None
    for last in _ask(TritonLLM(url)):
        console.print(Text(last.text), end="", soft_wrap=True)
    console.print()
    if last is None or last.finish_reason not in ("stop", "length") or not last.generated_tokens:
        raise NibbleError(f"check: the server gave no whole answer: {last}")
    console.print(f"[green]check passed[/]: {last.generated_tokens} tokens through KV={last.kv_format}")


def _ask(llm: TritonLLM) -> Iterator[Chunk]:
    try:
        yield from llm.stream([{"role": "user", "content": QUESTION}], max_tokens=48)
    except ServerError as error:
        if "no chat template" not in str(error):
            raise
        yield from llm.stream(TEXT, max_tokens=48)
