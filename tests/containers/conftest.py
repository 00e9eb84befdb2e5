"""The containers tier: real images without a Docker daemon. Skipped, with the reason, unless it is asked for.

It takes minutes and gigabytes of disk, so it runs by `make test-containers` (NIBBLE_CONTAINERS=1), not with every run.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

TOOLS = {"buildah": "buildah", "mmdebstrap": "mmdebstrap", "docker-registry": "docker-registry"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = skip_reason()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.containers)
            item.add_marker(pytest.mark.timeout(1500))
            if reason:
                item.add_marker(pytest.mark.skip(reason=f"containers tier: {reason}"))


def skip_reason() -> str | None:
    """Why this machine can't run the tier, or wasn't asked to."""
    if os.environ.get("NIBBLE_CONTAINERS") != "1":
        return "run it with `make test-containers`"
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        return f"missing tools; as root: apt-get install {' '.join(missing)}"
    return None if os.geteuid() == 0 else "chroot isolation needs root"
