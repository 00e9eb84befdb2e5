"""The command line of `serve.run`: what it resolves, and its errors without a traceback."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from nibble.errors import NibbleError
from nibble.recipes import load_serve_recipe
from serve import run
from serve.server import command_line
from serve.settings import ServeSettings


@pytest.fixture(autouse=True)
def built_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engines/ folder where smollm2-135m/int4 is built with a context of 1,024 tokens."""
    monkeypatch.setenv("NIBBLE_ENGINES", str(tmp_path))
    monkeypatch.delenv("KV_FALLBACK", raising=False)
    folder = tmp_path / "smollm2-135m" / "int4"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    manifest = SimpleNamespace(limits=load_serve_recipe(max_context=1024))
    monkeypatch.setattr(run, "read_manifest", lambda directory: manifest)
    return tmp_path


def settings(*argv: str) -> ServeSettings:
    return run.settings_from(run.build_parser().parse_args(argv))


def test_defaults_are_the_engines(built_engines: Path) -> None:
    resolved = settings("--model", "smollm2-135m", "--kv", "int4")
    assert resolved.engine_dir == built_engines / "smollm2-135m" / "int4"
    assert resolved.name == "smollm2-135m-int4"
    assert resolved.ports == {"http": 8000, "grpc": 8001, "metrics": 8002}
    assert resolved.options.max_context == 1024
    assert resolved.options.kv_fallback is None


def test_overrides() -> None:
    resolved = settings("--port", "9000", "--context", "512", "--batch", "4", "--queue", "7", "--kv-fallback", "fp16")
    assert resolved.http_port == 9000
    options = resolved.options
    assert (options.max_context, options.max_running, options.max_waiting) == (512, 4, 7)
    assert options.kv_fallback == "fp16"


def test_fallback_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_FALLBACK", "fp16")
    assert settings().options.kv_fallback == "fp16"
    monkeypatch.setenv("KV_FALLBACK", "")
    assert settings().options.kv_fallback is None
    monkeypatch.setenv("KV_FALLBACK", "int8")
    with pytest.raises(NibbleError, match="KV_FALLBACK: got 'int8', allowed fp16"):
        settings()


def test_engine_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "k8v4"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    resolved = settings("--engine", str(folder))
    assert (resolved.engine_dir, resolved.name) == (folder, "mine-k8v4")


def test_every_endpoint_listens_where_it_was_told() -> None:
    command = command_line(settings("--host", "0.0.0.0", "--port", "9000"), "secret")
    assert {"--http-port=9000", "--grpc-port=9001", "--metrics-port=9002"} <= set(command)
    assert {f"--{name}-address=0.0.0.0" for name in ("http", "grpc", "metrics")} <= set(command)


BAD_COMMANDS = [
    (("--model", "nonsense"), "nonsense"),
    (("--kv", "int3"), "int3"),
    (("--kv", "k8v4"), "make engine MODEL=smollm2-135m KV=k8v4"),
    (("--context", "1"), "max_context"),
    (("--port", "99999"), "port"),
    (("--engine", "/nowhere/m/int4"), "make engine"),
]


@pytest.mark.parametrize(("argv", "message"), BAD_COMMANDS)
def test_user_errors(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        settings(*argv)
