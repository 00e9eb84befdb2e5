"""The README tells the truth: its commands exist, its tree is there, its table of environment variables is whole."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
TREE = next(block for block in BLOCKS if block.startswith("recipes/"))
COMMANDS = [line for block in [*BLOCKS, *re.findall(r"^```\n(.*?)^```", CONTRIBUTING, re.MULTILINE | re.DOTALL)]
            if block != TREE for line in block.splitlines()]  # fmt: skip
TESTED_ELSEWHERE = {
    "curl -N -d": "tests/triton: the same request over generate_stream",
    "curl http://127.0.0.1:8002/metrics": "tests/triton: metrics",
}
# What the operating system, Python and Triton define; the rest is ours to document.
NOT_OURS = {
    "PATH",
    "LD_LIBRARY_PATH",
    "HOME",
    "TOKENIZERS_PARALLELISM",
    "CUDA_VISIBLE_DEVICES",
    "CI",
    "TERM",
    "COLUMNS",
}


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_commands_exist(command: str) -> None:
    made = re.fullmatch(r"(?:[A-Z_]+=\S+ )*make ([a-z-]+)((?: [A-Z_]+=\S+)*)", command)
    if made is None:
        assert any(command.startswith(start) for start in TESTED_ELSEWHERE), f"untested: {command}"
        return
    assert made[1] in targets()
    used = (ROOT / "Makefile").read_text(encoding="utf-8")
    for variable in re.findall(r"([A-Z_]+)=", made[2]):
        assert re.search(rf"\b{variable}\b", used), f"the Makefile does not pass {variable}"


def test_recipes_in_commands_exist() -> None:
    for kind, variable in (("models", "MODEL"), ("kv", "KV")):
        for name in {value for command in COMMANDS for value in re.findall(rf"\b{variable}=(\S+)", command)}:
            assert (ROOT / "recipes" / kind / f"{name}.yaml").is_file()


def tree_entries() -> list[tuple[str, str]]:
    """Path and description of each line of the tree; two spaces of indent are one folder down."""
    entries, folders = [], [""]
    for line in TREE.splitlines():
        indent, name, description = re.fullmatch(r"( *)(\S+)\s+(.+)", line).groups()  # type: ignore[union-attr]
        folders = folders[: len(indent) // 2 + 1]
        entries.append((folders[-1] + name, description))
        folders.append(folders[-1] + name if name.endswith("/") else folders[-1])
    return entries


@pytest.mark.parametrize(("path", "description"), tree_entries())
def test_tree(path: str, description: str) -> None:
    assert (ROOT / path).exists()
    assert (ROOT / path).is_dir() == path.endswith("/")
    assert len(description.split()) <= 8


def test_tree_has_every_folder() -> None:
    command = ["git", "ls-files", "*/*"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    folders = {name.split("/")[0] + "/" for name in listed if not name.startswith(".")}
    assert folders <= {path for path, _ in tree_entries()}


def test_links_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / link).exists(), f"{page}: {link}"


def documented() -> set[str]:
    return set(re.findall(r"^\| `([A-Z_]+)` \|", README, re.MULTILINE))


def test_every_environment_variable_is_documented() -> None:
    read = re.compile(r"""(?:environ(?:\.get|\.setdefault|\.pop)?[\[(]|getenv\()\s*["']([A-Z_0-9]+)["']""")
    folders = ("nibble", "calibrate", "build", "serve", "eval", "bench", "triton_repo")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    used = {name for path in sources for name in read.findall(path.read_text(encoding="utf-8"))}
    used |= set(re.findall(r"\$\{([A-Z_]+):-", (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")))
    assert used - NOT_OURS <= documented(), "document them in the README's table"


def test_readme_opens_with_what_it_is() -> None:
    title, empty, *lines = README.splitlines()[:6]
    assert (title, empty, lines[3]) == ("# NibbleKV", "", "")
