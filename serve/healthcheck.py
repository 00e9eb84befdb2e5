"""For a container's HEALTHCHECK: exit code 0 when the front of this machine says that it is ready, 1 otherwise.

python -m serve.healthcheck [--port 8003] [--path /health/ready]      Triton itself: --port 8000 --path /v2/health/ready
"""

from __future__ import annotations

import argparse
import sys
import urllib.request

from serve.front import DEFAULT_PORT

FRONT_PATH = "/health/ready"


def is_ready(port: int, path: str = FRONT_PATH, timeout_s: float = 4.0) -> bool:
    """Ask once."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m serve.healthcheck", description="Is the server ready?")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--path", default=FRONT_PATH)
    options = parser.parse_args()
    sys.exit(0 if is_ready(options.port, options.path) else 1)
