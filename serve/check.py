"""`--check`: one question to a server that just came up, streamed through tritonclient."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from nibble.errors import NibbleError
from serve.client import TritonLLM

QUESTION = "What is the capital of France? Answer in one short sentence."


def ask_one_question(url: str, console: Console) -> None:
    """Print the answer as it comes. Raises NibbleError when there is none."""
    console.print(f"[bold]question[/] {QUESTION}")
    console.print("[bold]answer[/] ", end="")
    last = None
    for last in TritonLLM(url).stream([{"role": "user", "content": QUESTION}], max_tokens=48):
        console.print(Text(last.text), end="", soft_wrap=True)
    console.print()
    if last is None or last.finish_reason not in ("stop", "length") or not last.generated_tokens:
        raise NibbleError(f"check: the server gave no whole answer: {last}")
    console.print(f"[green]check passed[/]: {last.generated_tokens} tokens through KV={last.kv_format}")
