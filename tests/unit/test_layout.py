"""The repository's shape: stage folders named build and eval are ours, make targets are commands, files stay short."""

from __future__ import annotations

import importlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TARGETS = re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE)
MAX_LINES = 400


def tracked_files(*patterns: str) -> list[Path]:
    """Files of the repository, not those of .venv and of what the stages write."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


@pytest.mark.parametrize("package", ["build", "calibrate", "eval", "serve", "nibble"])
def test_packages_are_ours(package: str) -> None:
    module = importlib.import_module(package)
    assert Path(str(module.__file__)) == ROOT / package / "__init__.py"
    assert module.__doc__


def test_packages_import_as_a_stage_does_it(tmp_path: Path) -> None:
    """The .pth file makes the repository importable from anywhere, as Triton's Python stub needs."""
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is missing: this is not a checkout that `make setup` has prepared")
    code = "import nibble, serve; print(nibble.__file__)"
    found = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == str(ROOT / "nibble" / "__init__.py"), found.stderr


def test_every_target_is_phony() -> None:
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].replace("\\\n", " ").split()) == set(TARGETS)


def test_bare_make_lists_every_target() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make ([a-z-]+) ", shown, re.MULTILINE)) == set(TARGETS)


@pytest.mark.parametrize("target", sorted(set(TARGETS) - {"help", "setup"}))
def test_every_target_is_one_command(target: str) -> None:
    rule = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert rule is not None
    (command,) = rule[1].replace("\\\n", " ").strip().splitlines()
    assert re.search(r"\$\(PY\) -m [a-z.]+|bash scripts/[a-z]+\.sh", command)


def test_variables_reach_a_stage_only_when_set() -> None:
    bare = make_dry_run("engine")
    assert "--" not in bare
    given = make_dry_run("engine", "MODEL=a b", "KV=int4", "CONTEXT=4096", "BATCH=2")
    assert given.endswith("-m build.run --model 'a b' --kv 'int4' --context '4096' --batch '2'")
    assert make_dry_run("serve", "KV_FALLBACK=fp16").endswith("-m serve.run --kv-fallback 'fp16'")
    assert make_dry_run("calibrate", "N=8", "SEED=3").endswith("-m calibrate.run --n '8' --seed '3'")


def make_dry_run(target: str, *variables: str) -> str:
    """The command of a target with single spaces, without its set-up."""
    command = ["make", "--no-print-directory", "-n", "-o", "setup", target, *variables]
    environment = {"PATH": "/usr/bin:/bin"}
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    return " ".join(shown.replace("\\\n", " ").split())


def test_no_source_file_is_too_long() -> None:
    sources = tracked_files("*.py", "*.sh", "*.cu", "*.cuh", "*.h", "*.hpp", "*.awk")
    assert sources
    long = {
        str(path.relative_to(ROOT)): n for path in sources if (n := path.read_text("utf-8").count("\n")) > MAX_LINES
    }
    assert not long, f"files of more than {MAX_LINES} lines: {long}"


@pytest.mark.parametrize("folder", ["engines", "triton_repo", "docker"])
def test_folders_of_files_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("name", [".gitignore", ".dockerignore"])
def test_build_is_never_ignored(name: str) -> None:
    path = ROOT / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    assert not [line for line in lines if re.fullmatch(r"/?build/?", line.strip())]


def test_no_script_removes_the_build_stage() -> None:
    for path in [ROOT / "Makefile", *tracked_files("scripts/*.sh", ".ci/run")]:
        assert not re.search(r"\brm\b.*[ /]build/?(?:\s|$)", path.read_text(encoding="utf-8")), path


def test_only_the_library_is_packaged() -> None:
    packages = PROJECT["tool"]["setuptools"]["packages"]
    assert all(name == "nibble" or name.startswith("nibble.") for name in packages)
    found = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in tracked_files("nibble/**/__init__.py")}
    assert {"nibble", *found} == set(packages)


def test_linters_see_the_build_stage() -> None:
    assert "build" not in PROJECT["tool"]["ruff"]["exclude"]
    assert {"build", "eval", "nibble", "calibrate", "serve"} <= set(PROJECT["tool"]["mypy"]["packages"])


def test_constraints_are_within_the_ranges() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonical(name): version for name, version in (line.split("==") for line in lines if "==" in line)}
    optional = PROJECT["project"]["optional-dependencies"]
    for line in [*PROJECT["project"]["dependencies"], *optional["dev"]]:
        requirement = Requirement(line)
        version = pinned[canonical(requirement.name)]
        assert requirement.specifier.contains(version), f"constraints.txt has {version} for {line}"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_ci_runs_the_readme_test_command() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert ci.rstrip().endswith("make test")
