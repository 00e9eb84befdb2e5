"""`make serve HOST=trtllm`: writes the repository of an engine, shows how it is started, and starts it.

python -m serve.trtllm.run --model llama-70b --kv int8 [--port 8000] [--dry-run]

triton_repo/run/<model>-<kv>-trtllm-<port>/   models/, prepare.sh, rank.sh
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from nibble.errors import NibbleError
from nibble.paths import engine_dir
from nibble.recipes import load_model_recipe
from nibble.stage import console, run_stage
from nibble.trtllm.container import choose_runner, shell_line
from nibble.trtllm.manifest import read_trtllm_manifest
from serve.settings import RUN_ROOT
from serve.trtllm.launch import Launch, commands, write_scripts
from serve.trtllm.repository import write_repository

DEFAULT_PORT = 8000


@dataclass(frozen=True)
class TrtllmServe:
    """Values of the command line. engine: a folder in place of model and kv."""

    model: str
    kv: str
    engine: Path | None = None
    port: int | None = None
    tag: str | None = None
    is_dry_run: bool = False


def main(argv: Sequence[str] | None = None) -> None:
    """Serve what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m serve.trtllm.run", description="Serve on TensorRT-LLM.")
    parser.add_argument("--model", default="llama-8b", help="model recipe, folder or hub id")
    parser.add_argument("--kv", default="int8", help="KV recipe of HOST=trtllm")
    parser.add_argument("--engine", type=Path, help="engine folder, instead of --model and --kv")
    parser.add_argument("--port", type=int, help="HTTP port; gRPC is the next one, metrics the one after")
    parser.add_argument("--kv-fallback", help="fp16: serve the model's fp16 engine (also KV_FALLBACK=fp16)")
    parser.add_argument("--image-tag", help="tritonserver's release, such as 26.07")
    parser.add_argument("--dry-run", action="store_true", help="write the repository and show the command")
    found = parser.parse_args(argv)
    fallback = found.kv_fallback or os.environ.get("KV_FALLBACK") or None
    if fallback not in (None, "fp16"):
        raise NibbleError(f"KV_FALLBACK: got {fallback!r}, allowed fp16 or nothing")
    kv = fallback or found.kv
    serve_trtllm(TrtllmServe(found.model, kv, found.engine, found.port, found.image_tag, found.dry_run), console)


def serve_trtllm(request: TrtllmServe, output: Console) -> None:
    """Write, explain, and unless it is a dry run, run in the foreground. Raises NibbleError."""
    launch, models = prepare_launch(request)
    many = launch.processes > 1
    output.print(
        Text(
            f"{launch.folder}: {', '.join(models)}; {launch.processes} process{'es' if many else ''} on {launch.nodes} "
            f"machine{'s' if launch.nodes > 1 else ''}. prepare.sh takes NVIDIA's Python files out of the image, "
            "rank.sh is run once a process: rank 0 serves, the others load tensorrt_llm alone."
        )
    )
    for command in commands(launch):
        output.print(Text(f"$ {shell_line(command)}"), soft_wrap=True)
    endpoint = "tensorrt_llm" if launch.manifest.runtime == "pytorch" else "ensemble"
    output.print(Text(f"  http://127.0.0.1:{launch.http_port}/v2/models/{endpoint}/generate_stream"), soft_wrap=True)
    if request.is_dry_run:
        output.print("[bold]DRY_RUN=1: nothing was started.[/]")
        return
    if launch.nodes > 1:
        raise NibbleError(
            f"this engine spans {launch.nodes} machines: run the two srun commands above inside an allocation of them "
            "(`salloc`); the run folder must be on a file system that all of them see"
        )
    (command,) = commands(launch)
    ended = subprocess.run(command, check=False).returncode
    if ended:
        raise NibbleError(f"the server ended with {ended}; docs/trtllm.md lists what usually is the cause")


def prepare_launch(request: TrtllmServe) -> tuple[Launch, list[str]]:
    """The launch of an engine, its repository and scripts written; the names of its models."""
    folder = request.engine or engine_dir(load_model_recipe(request.model).name, f"{request.kv}-trtllm")
    folder = folder.resolve()
    manifest = read_trtllm_manifest(folder)
    runner = choose_runner(request.tag, is_dry_run=request.is_dry_run)
    port = request.port or DEFAULT_PORT
    target = RUN_ROOT / f"{manifest.model.name}-{folder.name}-{port}"
    launch = Launch(manifest, target, runner.seeing(Path(manifest.source)), port)
    models = write_repository(target / "models", manifest, folder)
    write_scripts(launch)
    return launch, models


if __name__ == "__main__":
    run_stage(main)
