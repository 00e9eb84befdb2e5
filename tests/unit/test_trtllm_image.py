"""What the image for TensorRT-LLM copies is enough to serve an engine there, with the packages that are in it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from nibble.paths import REPOSITORY_ROOT
from tests.unit.test_trtllm_serve import manifest

PACKAGE_OF = {"yaml": "PyYAML", "google": "protobuf", "annotated_types": "annotated-types"}
# What requirements.txt of TensorRT-LLM's 1.2 line brings, some of it through torch, nvidia-modelopt and cuda-python.
IN_THE_IMAGE = {
    "torch", "triton", "filelock", "numpy", "scipy", "safetensors", "pydantic", "annotated-types", "PyYAML", "rich",
    "cuda",
}  # fmt: skip


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image's /opt/nibblekv: the folders that the target copies, and nothing else of the repository."""
    folder = tmp_path_factory.mktemp("image")
    (stage,) = re.findall(r" AS trtllm\n(.*?)(?=^FROM |\Z)", (REPOSITORY_ROOT / "Dockerfile").read_text(), re.S | re.M)
    for name in re.findall(r"^COPY (\w+) \1$", stage, re.M):
        shutil.copytree(REPOSITORY_ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_the_folders_of_the_image_serve(image: Path, tmp_path: Path) -> None:
    manifest(tmp_path / "engine", "pytorch")
    command = [sys.executable, "-S", "-m", "serve.trtllm.run", "--engine", str(tmp_path / "engine"), "--dry-run"]
    paths = os.pathsep.join([str(image), sysconfig.get_path("purelib")])  # -S: no .pth file leads to the repository
    environment = {**os.environ, "PYTHONPATH": paths, "NIBBLE_RUN": str(tmp_path / "run")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (script,) = (tmp_path / "run").glob("*/rank.sh")
    assert f"nibble.trtllm.install --root {image}" in script.read_text()


def test_the_launcher_has_its_packages(image: Path) -> None:
    wanted = tomllib.loads((REPOSITORY_ROOT / "pyproject.toml").read_text())["tool"]["nibblekv"]["launcher"]
    assert packages(image, ["serve/trtllm/run.py", "serve/healthcheck.py"]) <= {*wanted, "torch"}


def test_the_cache_needs_nothing_that_tensorrt_llm_does_not_bring(image: Path) -> None:
    """Inside TensorRT-LLM's Python nothing is installed, and its transformers is not ours."""
    ours = [str(path.relative_to(image)) for path in sorted(image.glob("nibble/trtllm/*.py"))]
    assert packages(image, ours) - {"tensorrt_llm"} <= IN_THE_IMAGE


def packages(image: Path, files: list[str]) -> set[str]:
    """What others must bring for these files: imports of them and of all that they import."""
    seen, found = set[Path](), set[str]()
    waiting = [image / file for file in files]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for module in imports(path):
            top = module.split(".")[0]
            if (image / top).is_dir():
                waiting += modules(image, module)
            elif top not in sys.stdlib_module_names:
                found.add(PACKAGE_OF.get(top, top))
    assert not [path for path in seen if not path.is_file()]
    return found


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, at its top or later: `a.b` for both `import a.b` and `from a import b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(image: Path, name: str) -> list[Path]:
    """The files of a module of ours and of its packages; none for a name inside a module."""
    path = image.joinpath(*name.split("."))
    parents = [folder / "__init__.py" for folder in [path, *path.parents] if (folder / "__init__.py").is_file()]
    return [*parents, *([path.with_suffix(".py")] if path.with_suffix(".py").is_file() else [])]
