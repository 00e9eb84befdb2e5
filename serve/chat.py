"""Talk to a running server in the terminal.

    python -m serve.chat [--port 8000]

Answers stream in. Ctrl-C ends the answer, not the chat; /reset forgets the conversation; /exit or Ctrl-D leaves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from nibble.errors import NibbleError
from nibble.recipes import load_serve_recipe
from nibble.stage import console, run_stage
from serve.client import Chunk, TritonLLM

HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C ends an answer"


@dataclass
class Chat:
    """One conversation. messages: all turns so far, the system prompt first if there is one."""

    llm: TritonLLM
    console: Console
    parameters: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        """Forget all turns."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> None:
        """Stream the answer to one turn and keep it; a turn without an answer is not kept."""
        self.messages.append({"role": "user", "content": text})
        chunks: list[Chunk] = []
        try:
            self._stream(chunks)
        except KeyboardInterrupt:
            self.console.print(" [yellow](cancelled)[/]", end="")
        except NibbleError as error:
            self.console.print(f"[red]{escape(str(error))}[/]", end="")
        self.console.print()
        answer = "".join(chunk.text for chunk in chunks)
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()
        self._print_counts(chunks)

    def _stream(self, chunks: list[Chunk]) -> None:
        stream = self.llm.stream(self.messages, **self.parameters)
        try:
            for chunk in stream:
                chunks.append(chunk)
                self.console.print(Text(chunk.text, style="cyan"), end="", soft_wrap=True)
        finally:
            stream.close()  # cancels the request on the server, now and not at some garbage collection

    def _print_counts(self, chunks: list[Chunk]) -> None:
        if chunks and chunks[-1].finish_reason:
            last = chunks[-1]
            notes = [
                f"{last.generated_tokens} tokens",
                f"{last.cached_tokens} of {last.prompt_tokens} prompt tokens cached",
                f"KV={last.kv_format}",
                *(["cut off at max_tokens or context"] if last.finish_reason == "length" else []),
                *([last.kv_fallback_reason] if last.kv_fallback_reason else []),
            ]
            self.console.print(Text("  ".join(notes), style="dim"), soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Chat until /exit or the end of input. Raises NibbleError when no server answers."""
    run(start_chat(build_parser().parse_args(argv), console))


def start_chat(arguments: argparse.Namespace, console: Console) -> Chat:
    """A chat with the server that the arguments name. Raises NibbleError when it doesn't answer."""
    port = arguments.port or load_serve_recipe().port
    llm = TritonLLM(f"{arguments.host}:{port + 1}", inactivity_timeout_s=arguments.timeout)
    if not llm.is_ready():
        raise NibbleError(
            f"no server answers on {llm.url} (gRPC of port {port}); start one with `make serve PORT={port}`"
        )
    parameters = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature, "top_p": arguments.top_p}
    chat = Chat(llm, console, parameters, arguments.system)
    chat.reset()
    return chat


def run(chat: Chat) -> None:
    """Read turns until /exit or the end of input; from a terminal with a prompt, from a pipe one turn a line."""
    if sys.stdin.isatty():
        chat.console.print(HELP, style="dim")
    while (text := _read_turn()) is not None:
        if text == "/exit":
            return
        if text == "/reset":
            chat.reset()
            chat.console.print("conversation forgotten", style="dim")
        elif text.startswith("/"):
            chat.console.print(HELP, style="dim")
        elif text:
            chat.ask(text)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m serve.chat", description="Talk to a running server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, help="the server's HTTP port")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds without a token before giving up")
    return parser


def _read_turn() -> str | None:
    """The next line; None at the end of input. Ctrl-C at the prompt starts a new line."""
    try:
        return input("you> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


if __name__ == "__main__":
    run_stage(main)
