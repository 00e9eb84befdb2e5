"""Run the OpenAI-compatible front over a Triton endpoint.

    python -m serve.front.run --triton 127.0.0.1:8001 --port 8003

`make serve` starts it beside Triton; alone it fronts any Triton that serves our model.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from nibble.errors import NibbleError
from nibble.stage import run_stage
from nibble.strict_yaml import validate
from serve.front.app import make_app
from serve.front.engines import parse_split
from serve.front.keys import Limits
from serve.front.settings import FrontSettings, check_open
from serve.json_log import JsonLog

MAX_CONNECTIONS = 2048


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C, then let running answers end. Raises NibbleError."""
    settings = settings_from(build_parser().parse_args(argv))
    asyncio.run(serve(settings))


async def serve(settings: FrontSettings) -> None:
    """Listen until a signal. Raises NibbleError when the port is taken."""
    log = JsonLog(settings.log_path)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # gRPC drops tasks of cancelled streams
    config = uvicorn.Config(
        make_app(settings, log),
        host=settings.host,
        port=settings.port,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="on",
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=max(1, int(settings.drain_timeout_s)),
    )
    log.write("front_start", host=settings.host, port=settings.port, triton=settings.triton_url)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn ends the answers, then raises the signal again
        signal.signal(number, lambda *_: None)
    server = uvicorn.Server(config)
    try:
        await server.serve()
    except SystemExit as error:  # how uvicorn says that it can't listen
        raise NibbleError(
            f"the front can't listen on {settings.host}:{settings.port}; is the port in use? take another with "
            "--port (OPENAI_PORT= with make)"
        ) from error
    finally:
        log.write("front_stop")
        log.close()


def settings_from(arguments: argparse.Namespace) -> FrontSettings:
    """Raises NibbleError for what can't be: a bad split, a limit below 1, an open front without keys."""
    given = {"requests_per_minute": arguments.requests_per_minute, "concurrent": arguments.concurrent}
    settings = FrontSettings(
        triton_url=arguments.triton,
        host=arguments.host,
        port=arguments.port,
        models=tuple(arguments.models.split(",")),
        split=parse_split(arguments.split),
        key_file=arguments.keys,
        limits=validate(Limits, {name: value for name, value in given.items() if value is not None}, "command line"),
        max_body_bytes=arguments.max_body_kb * 1024,
        inactivity_timeout_s=arguments.inactivity_timeout,
        drain_timeout_s=arguments.drain_timeout,
        record=arguments.record,
        log_path=arguments.log,
    )
    check_open(settings.host, settings.key_file, is_open=arguments.no_keys)
    return settings


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    defaults = FrontSettings()
    parser = argparse.ArgumentParser(prog="python -m serve.front.run", description="An OpenAI-compatible front.")
    parser.add_argument("--triton", default=defaults.triton_url, help="host:port of Triton's gRPC")
    parser.add_argument("--host", default=defaults.host, help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=defaults.port)
    parser.add_argument("--models", default="llm", help="Triton's names of the engines, comma-separated")
    parser.add_argument("--split", default="", help="shares of the engines side by side, such as int4=90,fp16=10")
    parser.add_argument("--keys", type=Path, help="YAML file of API keys (see serve/front/keys.py)")
    parser.add_argument("--no-keys", action="store_true", help="listen on other addresses than loopback without keys")
    parser.add_argument("--requests-per-minute", type=int, help="limit where there are no keys")
    parser.add_argument("--concurrent", type=int, help="requests at once where there are no keys")
    parser.add_argument("--max-body-kb", type=int, default=defaults.max_body_bytes // 1024)
    parser.add_argument("--inactivity-timeout", type=float, default=defaults.inactivity_timeout_s)
    parser.add_argument("--drain-timeout", type=float, default=defaults.drain_timeout_s)
    parser.add_argument("--record", type=Path, help="the supervisor's server.json")
    parser.add_argument("--log", type=Path, help="file for JSON lines (default: standard output)")
    return parser


if __name__ == "__main__":
    run_stage(main)
