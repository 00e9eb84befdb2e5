"""For a container's HEALTHCHECK: exit code 0 when the front of this machine says that it is ready, 1 otherwise.

python -m serve.healthcheck [--port 8003]
"""

from __future__ import annotations

import argparse
import sys
import urllib.request

from serve.front import DEFAULT_PORT


def is_ready(port: int, timeout_s: float = 4.0) -> bool:
    """Ask /health/ready once."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m serve.healthcheck", description="Is the front ready?")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    sys.exit(0 if is_ready(parser.parse_args().port) else 1)
