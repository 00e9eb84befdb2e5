"""Where TensorRT-LLM's programs run: on this host when it is installed here, else inside NVIDIA's container.

Versions are pinned (pins.json): engines are tied to the TensorRT-LLM that built them, and 1.2.1 is the last one
with an engine builder that Triton's containers ship.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nibble.errors import NibbleError
from nibble.paths import REPOSITORY_ROOT, engines_root

DOCKER = "docker run --rm --gpus all --ipc=host --network=host --ulimit memlock=-1 --ulimit stack=67108864"


@dataclass(frozen=True)
class Runner:
    """Runs commands on the host (image None) or in a container of `image`.

    Folders have the same path in the container. mounts: further folders that it sees, beside engines/ and this one.
    """

    image: str | None
    mounts: tuple[Path, ...] = ()

    @property
    def folders(self) -> list[Path]:
        """What a container sees of this host, under the same paths."""
        return list(dict.fromkeys([engines_root().resolve(), REPOSITORY_ROOT, *self.mounts]))

    def seeing(self, folder: Path) -> Runner:
        """The same, which sees a model's folder too: of the hub's cache the whole model, since its files are links."""
        is_cached = folder.parent.name == "snapshots"
        root = folder.parent.parent if is_cached else folder
        is_seen = any(root.resolve().is_relative_to(known) for known in self.folders)
        return self if is_seen else Runner(self.image, (*self.mounts, root.absolute()))

    def command(self, words: list[str], environment: dict[str, str]) -> list[str]:
        """The whole command line. environment: set for the program."""
        settings = [f"{name}={value}" for name, value in sorted(environment.items())]
        if self.image is None:
            return ["env", *settings, *words] if settings else words
        return [
            *DOCKER.split(),
            *(word for folder in self.folders for word in ("-v", f"{folder}:{folder}")),
            *(word for setting in settings for word in ("-e", setting)),
            self.image,
            *words,
        ]

    def run(self, words: list[str], environment: dict[str, str], log: Path) -> None:
        """Run it, output into `log`. NibbleError with the end of the log when it fails."""
        line = self.command(words, environment)
        try:
            with log.open("w", encoding="utf-8") as stream:
                ended = subprocess.run(line, stdout=stream, stderr=subprocess.STDOUT, check=False)
        except OSError as error:
            raise NibbleError(f"{line[0]}: can't be run ({error}); {self.remedy}") from error
        if ended.returncode:
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
            raise NibbleError(f"{words[0]} ended with {ended.returncode}; its log {log} ends with\n{tail}")

    @property
    def remedy(self) -> str:
        return "install docker with the NVIDIA container toolkit" if self.image else "install tensorrt_llm 1.2.1"


def choose_runner(tag: str | None = None, *, is_dry_run: bool = False) -> Runner:
    """The host where its tensorrt_llm is the pinned one, else docker with the pinned image.

    tag: of tritonserver, the newest pinned one when None. Raises NibbleError: other version, unknown tag, no docker.
    """
    pins = read_pins()
    found = installed_version()
    if tag is None and found is not None:
        if found != pins["tensorrt_llm"]:
            raise NibbleError(
                f"tensorrt_llm: got {found} on this host, allowed {pins['tensorrt_llm']}: engines and interfaces of "
                "other versions differ. Uninstall it, or name an image with IMAGE_TAG=" + pins["default_tag"]
            )
        return Runner(None)
    tag = tag or pins["default_tag"]
    if tag not in pins["tags"]:
        older = pins["older_tags"].get(tag)
        holds = f"holds TensorRT-LLM {older}" if older else "is not known to hold TensorRT-LLM 1.2.1"
        raise NibbleError(f"IMAGE_TAG: got {tag}, which {holds}; allowed {', '.join(pins['tags'])}")
    if shutil.which("docker") is None and not is_dry_run:
        raise NibbleError(
            "HOST=trtllm: there is neither tensorrt_llm nor docker on this machine. Install docker with the NVIDIA "
            "container toolkit; DRY_RUN=1 shows what would be run"
        )
    return Runner(pins["image"].format(tag=tag))


@cache
def read_pins() -> dict[str, Any]:
    """The pinned versions and images, and where they are from."""
    return dict(json.loads(Path(__file__).with_name("pins.json").read_text(encoding="utf-8")))


def installed_version() -> str | None:
    """The version of tensorrt_llm on this host; None when it is not installed."""
    for name in ("tensorrt_llm", "tensorrt-llm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def shell_line(words: list[str]) -> str:
    """A command as a person would type it."""
    return shlex.join(words)
