"""The part of serve.run's command line about operations: the front, engines beside the first, tracing, the canary."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from nibble.errors import NibbleError
from nibble.manifest import Manifest, read_manifest
from serve import preflight
from serve.certificate_gate import pass_gate
from serve.front.engines import parse_split
from serve.front.settings import check_open
from serve.settings import BesideEngine, FrontOptions, ServeSettings

FRONT_OFFSET = 3  # after http, gRPC and metrics
FP16 = "fp16"


def add_operations(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `with_operations` reads."""
    front = parser.add_argument_group("OpenAI-compatible front")
    front.add_argument("--openai-port", type=int, help="its port (default: HTTP port + 3); 0: no front")
    front.add_argument("--openai-host", default="127.0.0.1", help="its address (default: this machine only)")
    front.add_argument("--keys", type=Path, help="YAML file of API keys (see serve/front/keys.py)")
    front.add_argument("--no-keys", action="store_true", help="listen on other addresses than loopback without keys")
    front.add_argument("--requests-per-minute", type=int, help="limit where there are no keys")
    front.add_argument("--concurrent", type=int, help="requests at once where there are no keys")
    front.add_argument("--max-body-kb", type=int, help="largest request (default: 1024)")
    beside = parser.add_argument_group("engines side by side")
    beside.add_argument("--beside", default="", help="more KV recipes to serve, such as fp16 (the same engine's twin)")
    beside.add_argument("--split", default="", help="shares of requests that name the model alone: int4=90,fp16=10")
    watching = parser.add_argument_group("watching")
    watching.add_argument("--canary-timeout", type=float, default=10.0, help="seconds; 0: no canary inference")
    watching.add_argument("--trace", help="file for Triton's traces, or URL of an OpenTelemetry collector")
    watching.add_argument("--metrics-host", help="address of the metrics endpoint (default: --host)")
    watching.add_argument("--log-stdout", action="store_true", help="JSON lines to standard output, not to files")


def with_operations(settings: ServeSettings, arguments: argparse.Namespace, console: Console) -> ServeSettings:
    """The settings with front, engines beside, tracing and canary. Raises NibbleError."""
    manifest = read_manifest(settings.engine_dir)
    wanted = [name for name in (part.strip() for part in arguments.beside.split(",")) if name]
    if len({manifest.kv.recipe.name, *wanted}) <= len(wanted):
        raise NibbleError(f"beside: got {arguments.beside!r}, allowed KV recipes other than the first, each once")
    return replace(
        settings,
        labels=labels(manifest),
        beside=tuple(_beside(settings, manifest, kv, arguments.certificate, console) for kv in wanted),
        front=_front(settings, arguments),
        trace=arguments.trace,
        canary_timeout_s=arguments.canary_timeout,
        log_to_stdout=arguments.log_stdout,
        metrics_host=arguments.metrics_host,
    )


def labels(manifest: Manifest, built_kv: str | None = None) -> dict[str, str]:
    """What the front learns of an engine through its configuration."""
    return {
        "model_name": manifest.model.name,
        "built_kv": built_kv or manifest.kv.recipe.name,
        "engine_hash": manifest.engine_hash,
    }


def _beside(
    settings: ServeSettings, manifest: Manifest, kv: str, certificate: str | None, console: Console
) -> BesideEngine:
    """Another engine of the same model; fp16 needs no build, it is the first engine with an fp16 cache."""
    options = replace(settings.options, kv_fallback=None, kv_fallback_reason=None, certificate=None)
    if kv == FP16:
        options = replace(options, kv_fallback=FP16, kv_fallback_reason=f"fp16 twin of {manifest.kv.recipe.name}")
        return BesideEngine(kv, settings.engine_dir, options, labels(manifest, FP16))
    directory = settings.engine_dir.parent / kv
    preflight.check_engine(directory, f"make engine MODEL={manifest.model.name} KV={kv}")
    gated = pass_gate(replace(settings, engine_dir=directory, options=options), certificate, console)
    return BesideEngine(kv, directory, gated.options, labels(read_manifest(directory)))


def _front(settings: ServeSettings, arguments: argparse.Namespace) -> FrontOptions | None:
    port = settings.http_port + FRONT_OFFSET if arguments.openai_port is None else arguments.openai_port
    if port == 0:
        return None
    check_open(arguments.openai_host, arguments.keys, is_open=arguments.no_keys)
    parse_split(arguments.split)
    values = {
        "--keys": arguments.keys,
        "--split": arguments.split or None,
        "--requests-per-minute": arguments.requests_per_minute,
        "--concurrent": arguments.concurrent,
        "--max-body-kb": arguments.max_body_kb,
    }
    given = [str(part) for pair in values.items() if pair[1] is not None for part in pair]
    return FrontOptions(arguments.openai_host, port, (*given, *(["--no-keys"] if arguments.no_keys else [])))
