"""From nothing to tokens: a Debian base, the cpu image with an engine in it, a registry, a pull by digest, an answer.

    mmdebstrap -> base image -> `make image` (buildah, chroot) -> `make push` -> docker-registry on loopback
               -> buildah pull by digest, from empty storage -> run as the image's user -> the openai client

Everything lies in one temporary folder. Wheels come from pip's cache of this machine, as an index may be out of reach
from inside a build.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from bench.soak.server import free_port
from nibble.paths import REPOSITORY_ROOT
from tests.triton.running_server import wait_for

SUITE = "bookworm"
PACKAGES = "python3,python3-venv,libpython3.11,libexpat1,libstdc++6,zlib1g,ca-certificates"
START_S = 180.0


def run(*command: str, environment: dict[str, str] | None = None) -> str:
    """Run a command to its end; its output. Fails with that output."""
    done = subprocess.run(
        command,
        cwd=REPOSITORY_ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("containers")
    yield folder
    for storage in ("build", "pulled"):
        for command in ("umount", "rm"):
            subprocess.run([*buildah(folder, storage), command, "--all"], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def buildah(folder: Path, storage: str = "build") -> list[str]:
    return ["buildah", "--root", str(folder / storage), "--runroot", str(folder / f"{storage}-run"), *STORAGE]


CHROOT = ["--isolation", "chroot", "--volume", "/dev/shm:/dev/shm"]
STORAGE = ["--storage-driver", "overlay"]


@pytest.fixture(scope="module")
def wheels() -> Iterator[Path]:
    """docker/wheels filled with what the image needs."""
    folder = REPOSITORY_ROOT / "docker" / "wheels"
    requirements = [
        run(sys.executable, "scripts/requirements.py", mode).split() for mode in ("torch", "image", "no-deps")
    ]
    constraints = ["--constraint", "constraints.txt"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--prefer-binary"]
    torch, image, no_deps = requirements
    run(*pip, "--no-deps", *torch)
    run(*pip, *constraints, "--find-links", str(folder), *torch, *image)
    run(*pip, "--no-deps", *(name for name in no_deps if "pytriton" in name))
    yield folder
    for wheel in folder.glob("*.whl"):
        wheel.unlink()


@pytest.fixture(scope="module")
def base(work: Path) -> str:
    """A Debian base image from the distribution's own packages."""
    tar = work / "base" / "rootfs.tar"
    tar.parent.mkdir()
    run("mmdebstrap", "--variant=minbase", "--quiet", f"--include={PACKAGES}", SUITE, str(tar))
    (work / "base" / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
    name = "localhost/debian:nibble"
    run(*buildah(work), "build", "--tag", name, str(work / "base"))
    tar.unlink()
    return name


@pytest.fixture(scope="module")
def engines(work: Path, make_tiny_llama: Callable[..., None]) -> Path:
    """An engines/ tree with tiny/int4 and the model that it runs."""
    root = work / "engines"
    make_tiny_llama(root / "tiny" / "source")
    build = [sys.executable, "-m", "build.run", "--model", str(root / "tiny" / "source"), "--kv", "int4"]
    run(*build, environment={"NIBBLE_ENGINES": str(work / "built")})
    (built,) = (work / "built").glob("*/int4")
    shutil.copytree(built, root / "tiny" / "int4")
    manifest = root / "tiny" / "int4" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["model"]["source"] = "../source"
    manifest.write_text(json.dumps(content))
    return root


@pytest.fixture(scope="module")
def registry(work: Path) -> Iterator[str]:
    """Debian's docker-registry on loopback."""
    port = free_port()
    config = work / "registry.yaml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {work / 'registry'}}}}}\n"
        f"http: {{addr: 127.0.0.1:{port}}}\nlog: {{level: error}}\n"
    )
    process = subprocess.Popen(
        ["docker-registry", "serve", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def answers() -> bool:
        try:
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=2).status == 200)
        except OSError:
            return False

    wait_for(answers, 30, "the registry")
    yield f"127.0.0.1:{port}/team"
    process.terminate()
    process.wait()


def shim(work: Path) -> dict[str, str]:
    """A PATH on which docker does not work and `buildah` keeps its storage in the test's folder."""
    folder = work / "bin"
    folder.mkdir(exist_ok=True)
    real = shutil.which("buildah")
    script = f'#!/bin/sh\nexec {real} --root {work}/build --runroot {work}/build-run {" ".join(STORAGE)} "$@"\n'
    (folder / "buildah").write_text(script)
    (folder / "docker").write_text("#!/bin/sh\nexit 1\n")
    (folder / "podman").write_text("#!/bin/sh\nexit 1\n")
    for path in folder.iterdir():
        path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_build_push_pull_and_tokens(work: Path, wheels: Path, base: str, engines: Path, registry: str) -> None:
    environment = {**shim(work), "NIBBLE_ENGINES": str(engines)}
    build_flags = f"--build-arg CPU_BASE={base} --isolation chroot --layers=false"
    built = run(
        "make", "image", "TARGET=cpu", "ENGINE=tiny/int4", environment={**environment, "IMAGE_FLAGS": build_flags}
    )
    assert "built localhost/nibblekv:" in built
    digest_file = work / "digest"
    push_flags = f"--tls-verify=false --digestfile {digest_file} --compression-format gzip --compression-level 1"
    run("make", "push", "TARGET=cpu", f"REGISTRY={registry}", environment={**environment, "PUSH_FLAGS": push_flags})
    digest = digest_file.read_text().strip()
    shutil.rmtree(work / "build", ignore_errors=True)  # what is started below can only come from the registry
    container = run(
        *buildah(work, "pulled"), "from", "--quiet", "--tls-verify=false", f"{registry}/nibblekv@{digest}"
    ).split()[-1]
    check_contents(work, container)
    answer, log = ask_container(work, container)
    assert answer.usage is not None and answer.usage.completion_tokens == 8
    assert str(answer.system_fingerprint).startswith("int4-")
    assert '"event": "ready"' in log and '"event": "stopped"' in log


def check_contents(work: Path, container: str) -> None:
    """A user without rights, a health check, versions, and nothing to build with."""
    config = json.loads(run(*buildah(work, "pulled"), "inspect", container))["Docker"]["config"]
    assert config["User"] == "10001"
    assert config["Healthcheck"]["Test"][-1] == "serve.healthcheck"
    assert re.fullmatch(r"[0-9a-f]{40}", config["Labels"]["org.opencontainers.image.revision"])
    mounted = Path(run(*buildah(work, "pulled"), "mount", container).strip())
    for tool in ("usr/bin/gcc", "usr/bin/make", "opt/venv/bin/pip"):
        assert not (mounted / tool).exists(), tool
    assert not list((mounted / "opt/venv").rglob("site-packages/pip"))


def ask_container(work: Path, container: str) -> tuple[openai.types.Completion, str]:
    """Start the container's entry point as its user, ask through the front, stop it with SIGTERM."""
    port = free_port()
    arguments = ["--engine", "/engines/tiny/int4", "--certificate", "ignore", "--no-keys"]
    arguments += ["--port", str(port), "--openai-port", str(port + 3), "--context", "512", "--batch", "4"]
    entry = ["python", "-m", "serve.run", "--openai-host", "127.0.0.1", "--metrics-host", "127.0.0.1", "--log-stdout"]
    log_path = work / "container.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [*buildah(work, "pulled"), "run", *CHROOT, container, "--", *entry, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return ask(port + 3, process, log_path), stop(process, log_path, port)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def ask(port: int, process: subprocess.Popen[bytes], log_path: Path) -> openai.types.Completion:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log_path.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5) as ready:
                if ready.status == 200:
                    break
        except OSError:
            time.sleep(0.5)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", timeout=60)
    model = client.models.list().data[0].id
    return client.completions.create(
        model=model, prompt="Once", max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )


def stop(process: subprocess.Popen[bytes], log_path: Path, port: int) -> str:
    """SIGTERM to the server itself, which buildah's wrapper does not pass on; its whole log."""
    servers = run("pgrep", "-f", f"serve.run .*--port {port} ").split()
    for pid in servers:
        if "python" in Path(f"/proc/{pid}/comm").read_text():
            os.kill(int(pid), signal.SIGTERM)
    process.wait(90)
    return log_path.read_text()
