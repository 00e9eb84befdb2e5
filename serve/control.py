"""Change a running server: a live fallback to fp16 and back, engines unloaded and loaded again.

    python -m serve.control --port 8000 status
    python -m serve.control --port 8000 fallback fp16       new requests get an fp16 cache, running ones end as they are
    python -m serve.control --port 8000 fallback none       back to the cache that was built
    python -m serve.control --port 8000 unload fp16         the engine beside goes, after its last answer
    python -m serve.control --port 8000 load fp16

Triton does the switch: given a changed configuration, `load` starts a second engine, sends new requests to it, lets the
first one end its answers, and only then unloads it. For that time both are in memory. The changed configuration stays
in the model repository, so a restart of the server keeps it; a load that fails changes nothing.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from nibble.atomic import write_text
from nibble.errors import NibbleError
from nibble.recipes import load_serve_recipe
from nibble.stage import console, run_stage
from serve.leftovers import ServerRecord
from serve.server import ADMIN_HEADER
from serve.settings import RUN_ROOT
from serve.tensors import MODEL_NAME

BUILT = "none"
FALLBACKS = ("fp16", BUILT)
LOAD_TIMEOUT_S = 900.0


class Control:
    """Model control of one running server. Needs its admin.key, which only its own user can read."""

    def __init__(self, run_dir: Path, http_port: int, host: str = "127.0.0.1") -> None:
        self._models_dir = run_dir / "models"
        self._url = f"http://{host}:{http_port}/v2/repository"
        self._key = (run_dir / "admin.key").read_text()

    def status(self) -> list[dict[str, str]]:
        """Each engine in the repository: name, state, and the KV format that its configuration asks for."""
        index = self._post("index", {})
        return [{**entry, "kv": self._kv_of(entry["name"])} for entry in index]

    def fall_back(self, kv: str, model: str = MODEL_NAME) -> None:
        """Serve `model` with another cache from now on. Raises NibbleError when it can't; then nothing has changed."""
        if kv not in FALLBACKS:
            raise NibbleError(f"fallback: got {kv!r}, allowed {', '.join(FALLBACKS)}")
        path = self._models_dir / model / "config.pbtxt"
        before = path.read_text()
        config = text_format.Parse(before, ModelConfig())
        for key in ("kv_fallback", "kv_fallback_reason"):
            config.parameters.pop(key, None)
        if kv != BUILT:
            config.parameters["kv_fallback"].string_value = kv
            config.parameters["kv_fallback_reason"].string_value = f"live fallback to {kv} by the operator"
        write_text(path, text_format.MessageToString(config))
        try:
            self.load(model)
        except NibbleError:
            write_text(path, before)
            raise

    def load(self, model: str) -> None:
        """Load an engine, or load it anew when its configuration has changed."""
        self._post(f"models/{model}/load", {})

    def unload(self, model: str) -> None:
        """Take an engine out of service; it leaves memory when its last answer has ended."""
        self._post(f"models/{model}/unload", {})

    def _kv_of(self, model: str) -> str:
        path = self._models_dir / model / "config.pbtxt"
        if not path.is_file():
            return ""
        parameters = text_format.Parse(path.read_text(), ModelConfig()).parameters
        values = (parameters[key].string_value for key in ("kv_fallback", "built_kv") if key in parameters)
        return next(values, "")

    def _post(self, path: str, fields: dict[str, Any]) -> Any:
        request = urllib.request.Request(  # noqa: S310
            f"{self._url}/{path}", json.dumps(fields).encode(), {ADMIN_HEADER: self._key}
        )
        try:
            with urllib.request.urlopen(request, timeout=LOAD_TIMEOUT_S) as answer:  # noqa: S310
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise NibbleError(f"Triton refused {path}: {error.read().decode(errors='replace')}") from error
        except OSError as error:
            raise NibbleError(f"{self._url}: {error}; is the server still running?") from error


def find_server(http_port: int, run_root: Path = RUN_ROOT) -> Control:
    """The running server on a port of this machine. Raises NibbleError when there is none."""
    for path in sorted(run_root.glob("*/server.json")):
        record = ServerRecord.read(path)
        if record and record.http_port == http_port and record.supervisor.is_alive:
            return Control(path.parent, http_port)
    raise NibbleError(f"no server of this checkout runs on port {http_port}; see `make serve`, or give --port")


def main(argv: Sequence[str] | None = None) -> None:
    """Carry out one command. Raises NibbleError."""
    arguments = build_parser().parse_args(argv)
    control = find_server(arguments.port or load_serve_recipe().port)
    if arguments.command == "fallback":
        control.fall_back(arguments.kv)
        console.print(f"new requests are served with {'the cache as built' if arguments.kv == BUILT else arguments.kv}")
    elif arguments.command == "load":
        control.load(f"{MODEL_NAME}-{arguments.kv}")
    elif arguments.command == "unload":
        control.unload(f"{MODEL_NAME}-{arguments.kv}")
    for engine in control.status():
        console.print(f"  {engine['name']:12} {engine.get('state', 'NOT LOADED'):12} kv={engine['kv']}")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m serve.control", description="Change a running server.")
    parser.add_argument("--port", type=int, help="the server's HTTP port")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="the engines and their state")
    commands.add_parser("fallback", help="switch the cache live").add_argument("kv", choices=FALLBACKS)
    for name in ("load", "unload"):
        commands.add_parser(name, help=f"{name} an engine served beside the first").add_argument("kv")
    return parser


if __name__ == "__main__":
    run_stage(main)
