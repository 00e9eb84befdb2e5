"""Serve a built engine on Triton.

    python -m serve.run --model smollm2-135m --kv int4 [--port 8000] [--check]

Runs in the foreground until Ctrl-C or SIGTERM: checks, writes the model repository, starts tritonserver, watches it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from nibble.errors import NibbleError
from nibble.manifest import read_manifest
from nibble.paths import engine_dir
from nibble.recipes import ServeRecipe, load_kv_recipe, load_model_recipe
from nibble.stage import console, run_stage
from nibble.strict_yaml import validate
from serve import preflight
from serve.certificate_gate import ACTIONS, pass_gate
from serve.check import ask_one_question
from serve.leftovers import sweep
from serve.options import add_operations, with_operations
from serve.repository import write_repository
from serve.settings import RUN_ROOT, EngineOptions, ServeSettings
from serve.supervisor import StopRequest, Supervisor
from serve.tensors import MODEL_NAME

FALLBACKS = ("fp16",)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until asked to stop. Raises NibbleError for what a user can put right."""
    arguments = build_parser().parse_args(argv)
    settings = pass_gate(settings_from(arguments), arguments.certificate, console)
    settings = with_operations(settings, arguments, console)
    stop = StopRequest()
    stop.listen()
    serve(settings, console, stop, is_check=arguments.check)


def serve(settings: ServeSettings, console: Console, stop: StopRequest, *, is_check: bool) -> None:
    """Run a server from checks to a clean stop. Raises NibbleError."""
    for done in sweep(RUN_ROOT):
        console.print(f"[yellow]{done}[/]", soft_wrap=True)
    preflight.check(settings)
    write_repository(settings)
    with Supervisor(settings, console, stop) as supervisor:
        if not supervisor.start():
            return
        _print_endpoints(settings, console)
        if is_check:
            ask_one_question(f"{settings.client_host}:{settings.grpc_port}", console)
        else:
            supervisor.start_front()
            supervisor.watch()


def settings_from(arguments: argparse.Namespace) -> ServeSettings:
    """Resolve the engine, its limits, overrides and KV_FALLBACK. Raises NibbleError."""
    directory, name, build_command = _engine(arguments)
    preflight.check_engine(directory, build_command)
    limits = _limits(read_manifest(directory).limits, arguments)
    return ServeSettings(
        name=name,
        engine_dir=directory,
        host=arguments.host,
        http_port=limits.port,
        start_timeout_s=arguments.start_timeout,
        drain_timeout_s=arguments.drain_timeout,
        options=EngineOptions(
            max_context=limits.max_context,
            max_running=limits.max_running,
            chunk_tokens=limits.chunk_tokens,
            max_waiting=limits.max_waiting,
            threads=arguments.threads,
            pool_mb=arguments.pool_mb,
            kv_fallback=_fallback(arguments.kv_fallback),
        ),
    )


def build_parser() -> argparse.ArgumentParser:
    """The command line; limits left out are those that the engine was built with."""
    parser = argparse.ArgumentParser(prog="python -m serve.run", description="Serve a built engine on Triton.")
    parser.add_argument("--model", default="smollm2-135m", help="model recipe, folder or hub id")
    parser.add_argument("--kv", default="int4", help="KV recipe")
    parser.add_argument("--engine", type=Path, help="engine folder, instead of --model and --kv")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, help="HTTP port; gRPC is the next one, metrics the one after")
    parser.add_argument("--context", type=int, help="longest prompt and answer together, in tokens")
    parser.add_argument("--batch", type=int, help="sequences running at once")
    parser.add_argument("--queue", type=int, help="requests waiting at most")
    parser.add_argument("--pool-mb", type=int, help="size of the KV pool (default: fits --batch times --context)")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine (default: torch's choice)")
    parser.add_argument("--kv-fallback", help="fp16: run this engine with an fp16 cache (also KV_FALLBACK=fp16)")
    parser.add_argument(
        "--certificate", choices=ACTIONS, help="what to do without a valid certificate (default: as the KV recipe says)"
    )
    add_operations(parser)
    parser.add_argument("--check", action="store_true", help="ask one question, print the answer, stop")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds to become ready (default: 900)")
    parser.add_argument("--drain-timeout", type=float, default=30.0, help="seconds for running answers at a stop")
    return parser


def _engine(arguments: argparse.Namespace) -> tuple[Path, str, str]:
    """Folder, name and build command of the engine."""
    if arguments.engine is not None:
        directory = arguments.engine.resolve()
        return directory, f"{directory.parent.name}-{directory.name}", "make engine MODEL=<model> KV=<kv>"
    model, kv = load_model_recipe(arguments.model), load_kv_recipe(arguments.kv)
    hint = f"make engine MODEL={arguments.model} KV={arguments.kv}"
    return engine_dir(model.name, kv.name), f"{model.name}-{kv.name}", hint


def _limits(built: ServeRecipe, arguments: argparse.Namespace) -> ServeRecipe:
    """The limits that the engine was built with, and what the command line changes in them."""
    given = {
        "max_context": arguments.context,
        "max_running": arguments.batch,
        "max_waiting": arguments.queue,
        "port": arguments.port,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    return validate(ServeRecipe, {**built.model_dump(), **changes}, "command line")


def _fallback(flag: str | None) -> str | None:
    value = flag or os.environ.get("KV_FALLBACK") or None
    if value is not None and value not in FALLBACKS:
        raise NibbleError(f"KV_FALLBACK: got {value!r}, allowed {', '.join(FALLBACKS)} or nothing")
    return value


def _print_endpoints(settings: ServeSettings, console: Console) -> None:
    host, model_url = settings.client_host, f"http://{settings.client_host}:{settings.http_port}/v2/models/{MODEL_NAME}"
    endpoints = {
        "generate": f"{model_url}/generate",
        "stream": f"{model_url}/generate_stream",
        "gRPC": f"{host}:{settings.grpc_port}",
        "metrics": f"http://{host}:{settings.metrics_port}/metrics",
        **({"OpenAI": f"http://{settings.front.host}:{settings.front.port}/v1"} if settings.front else {}),
        "log": str(settings.log_path),
    }
    for name, where in endpoints.items():
        console.print(f"  {name:9} {where}", soft_wrap=True)
    if settings.options.kv_fallback:
        reason = settings.options.kv_fallback_reason or f"KV_FALLBACK={settings.options.kv_fallback}"
        console.print(f"[yellow]the cache is not the one that was built[/]: {escape(reason)}", soft_wrap=True)
    console.print("Ctrl-C stops the server")


if __name__ == "__main__":
    run_stage(main)
