"""How a repository is started: two scripts beside it, and the command that runs them once or once a GPU.

    prepare.sh   links NVIDIA's Python files of the models out of the image (they are not in this repository)
    rank.sh      one process: rank 0 serves all models, every other rank loads tensorrt_llm alone and waits for work

Leader mode: as many processes as GPUs, through mpirun on one machine and srun on several. The PyTorch runtime starts
its own workers on one machine; on several, trtllm-llmapi-launch joins the processes.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from nibble.paths import REPOSITORY_ROOT
from nibble.trtllm.container import Runner
from nibble.trtllm.manifest import TrtllmManifest
from serve.trtllm.repository import PYTHON_MODELS

MODELS_IN_IMAGE = "/app/all_models"
TRITON = "/opt/tritonserver/bin/tritonserver"
RANK = "${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:-0}}"  # a shell variable: mpirun sets the first, srun the second


@dataclass(frozen=True)
class Launch:
    """A server to start. folder: holds models/ and the scripts. Ports of HTTP, gRPC and metrics follow each other."""

    manifest: TrtllmManifest
    folder: Path
    runner: Runner
    http_port: int = 8000

    @property
    def processes(self) -> int:
        """Processes that mpirun or srun starts."""
        parallel = self.manifest.parallel
        world = parallel.tensor * parallel.pipeline
        return 1 if self.manifest.runtime == "pytorch" and self.nodes == 1 else world

    @property
    def nodes(self) -> int:
        parallel = self.manifest.parallel
        return -(-parallel.tensor * parallel.pipeline // parallel.gpus_per_node)


def write_scripts(launch: Launch) -> None:
    """Write prepare.sh and rank.sh."""
    for name, text in (("prepare.sh", prepare_script(launch)), ("rank.sh", rank_script(launch))):
        path = launch.folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)


def commands(launch: Launch) -> list[list[str]]:
    """What starts the server: one command on one machine; on several, prepare once and then one task a GPU."""
    prepare, rank = str(launch.folder / "prepare.sh"), str(launch.folder / "rank.sh")
    environment = launch.manifest.environment
    if launch.nodes == 1:
        start = ["bash", rank]
        if launch.processes > 1:
            start = ["mpirun", "--allow-run-as-root", "-n", str(launch.processes), *start]
        both = f"bash {shlex.quote(prepare)} && exec {shlex.join(start)}"
        return [launch.runner.command(["bash", "-c", both], environment)]
    container = [f"--container-image={launch.runner.image}"] if launch.runner.image else []
    mounts = [f"--container-mounts={','.join(f'{path}:{path}' for path in launch.runner.folders)}"] if container else []
    exported = ",".join(["ALL", *(f"{name}={value}" for name, value in sorted(environment.items()))])
    srun = ["srun", "--mpi=pmix", f"--export={exported}", *container, *mounts]
    tasks = [f"-N{launch.nodes}", f"--ntasks={launch.processes}"]
    tasks.append(f"--ntasks-per-node={min(launch.processes, launch.manifest.parallel.gpus_per_node)}")
    return [[*srun, "-N1", "-n1", "bash", prepare], [*srun, *tasks, "bash", rank]]


def prepare_script(launch: Launch) -> str:
    """prepare.sh: NVIDIA's Python files into the version folders."""
    models = launch.folder / "models"
    if launch.manifest.runtime == "pytorch":
        sources = {f"{MODELS_IN_IMAGE}/llmapi/tensorrt_llm/1": models / "tensorrt_llm" / "1"}
    else:
        sources = {f"{MODELS_IN_IMAGE}/inflight_batcher_llm/{name}/1": models / name / "1" for name in PYTHON_MODELS}
    lines = ["#!/usr/bin/env bash", "set -euo pipefail"]
    for source, target in sources.items():
        lines.append(f"for file in {source}/*; do")
        lines.append(f'  case "$file" in *model.yaml) ;; *) cp -r "$file" {shlex.quote(str(target))}/ ;; esac')
        lines.append("done")
    return "\n".join(lines) + "\n"


def rank_script(launch: Launch) -> str:
    """rank.sh: our cache into this machine's Python when the engine has it, then Triton."""
    options = [
        f"--model-repository={launch.folder / 'models'}",
        *(f"--{name}-port={launch.http_port + place}" for place, name in enumerate(("http", "grpc", "metrics"))),
        "--disable-auto-complete-config",
    ]
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", f'rank="{RANK}"', f"options=({shlex.join(options)})"]
    lines.append('options+=("--backend-config=python,shm-region-prefix-name=rank${rank}_")')
    if launch.manifest.runtime == "pytorch":
        root = shlex.quote(str(REPOSITORY_ROOT))
        lines.append(f"PYTHONPATH={root} python3 -m nibble.trtllm.install --root {root}")
        start = "trtllm-llmapi-launch " if launch.nodes > 1 else ""
    else:
        lines.append('[ "$rank" = 0 ] || options+=(--model-control-mode=explicit --load-model=tensorrt_llm)')
        start = ""
    lines.append(f'exec {start}{TRITON} "${{options[@]}}"')
    return "\n".join(lines) + "\n"
