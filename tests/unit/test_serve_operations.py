"""What an operator can change: engines beside the first, live fallback, tracing, who may control the model."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from google.protobuf import text_format
from rich.console import Console
from tritonclient.grpc.model_config_pb2 import ModelConfig

from nibble.errors import NibbleError
from serve import front_process, options, run
from serve import settings as settings_module
from serve.control import Control, find_server
from serve.front.engines import ServedEngine
from serve.repository import write_repository
from serve.server import ADMIN_HEADER, _write_secret, command_line
from serve.settings import EngineOptions, FrontOptions, ServeSettings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServeSettings:
    """A server of tiny/int4 whose manifest is a stand-in, with everything that it writes in a temporary folder."""
    monkeypatch.setattr(settings_module, "RUN_ROOT", tmp_path / "run")
    manifest = SimpleNamespace(
        model=SimpleNamespace(name="tiny"),
        kv=SimpleNamespace(recipe=SimpleNamespace(name="int4")),
        engine_hash="ab" * 32,
    )
    monkeypatch.setattr(options, "read_manifest", lambda directory: manifest)
    return ServeSettings(
        "tiny-int4", tmp_path / "tiny" / "int4", http_port=9000, options=EngineOptions(max_context=512)
    )


def operated(settings: ServeSettings, *argv: str) -> ServeSettings:
    arguments = run.build_parser().parse_args(argv)
    return options.with_operations(settings, arguments, Console(quiet=True))


def served(settings: ServeSettings, model: str) -> ServedEngine:
    config = text_format.Parse((settings.models_dir / model / "config.pbtxt").read_text(), ModelConfig())
    return ServedEngine.from_parameters(model, {key: value.string_value for key, value in config.parameters.items()})


def test_the_front_learns_of_engines_through_their_configuration(settings: ServeSettings) -> None:
    both = operated(settings, "--beside", "fp16")
    assert both.triton_models == ("llm", "llm-fp16")
    write_repository(both)
    first, twin = served(both, "llm"), served(both, "llm-fp16")
    assert (first.name, first.kv, first.max_context, first.fingerprint) == (
        "tiny-int4",
        "int4",
        512,
        "int4-" + "ab" * 6,
    )
    assert (twin.name, twin.kv) == ("tiny-fp16", "fp16")


def test_live_fallback_changes_the_configuration_and_a_failed_one_does_not(
    settings: ServeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = operated(settings)
    write_repository(first)
    _write_secret(first, "secret")
    assert stat.S_IMODE(first.admin_key_path.stat().st_mode) == 0o600
    control = Control(first.run_dir, first.http_port)
    loaded: list[str] = []
    monkeypatch.setattr(Control, "load", lambda self, model: loaded.append(model))
    control.fall_back("fp16")
    assert (served(first, "llm").kv, served(first, "llm").name, loaded) == ("fp16", "tiny-int4", ["llm"])
    control.fall_back("none")
    assert served(first, "llm").kv == "int4"

    def fail(self: Control, model: str) -> None:
        raise NibbleError("out of memory")

    monkeypatch.setattr(Control, "load", fail)
    with pytest.raises(NibbleError, match="out of memory"):
        control.fall_back("fp16")
    assert served(first, "llm").kv == "int4"
    with pytest.raises(NibbleError, match="allowed fp16, none"):
        control.fall_back("int8")


def test_nobody_controls_a_server_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(NibbleError, match="no server of this checkout runs on port 9000"):
        find_server(9000, tmp_path)


def test_model_control_asks_for_the_key_and_traces_go_where_they_are_told(settings: ServeSettings) -> None:
    traced = replace(operated(settings), trace="http://collector:4318/v1/traces", metrics_host="0.0.0.0")
    command = command_line(traced, "secret")
    restricted = [option for option in command if f":{ADMIN_HEADER}=secret" in option]
    assert len(restricted) == 2 and all("model-repository" in option for option in restricted)
    assert {"--load-model=llm", "--metrics-address=0.0.0.0", "--http-address=127.0.0.1"} <= set(command)
    assert "--trace-config=opentelemetry,url=http://collector:4318/v1/traces" in command
    assert "--trace-config=triton,file=t.json" in command_line(replace(traced, trace="t.json"), "secret")


def test_the_front_is_told_of_this_server(settings: ServeSettings) -> None:
    both = operated(settings, "--beside", "fp16", "--split", "int4=1,fp16=1", "--concurrent", "4")
    assert both.front == FrontOptions("127.0.0.1", 9003, ("--split", "int4=1,fp16=1", "--concurrent", "4"))
    command = front_process.command_line(both, both.front)
    assert command[command.index("--triton") + 1] == "127.0.0.1:9001"
    assert command[command.index("--models") + 1] == "llm,llm-fp16"
    assert operated(settings, "--openai-port", "0").front is None


BAD = [
    (("--beside", "int4"), "beside"),
    (("--beside", "fp16,fp16"), "beside"),
    (("--beside", "k8v4"), "make engine MODEL=tiny KV=k8v4"),
    (("--split", "int4"), "split"),
    (("--openai-host", "0.0.0.0"), "no API keys"),
]


@pytest.mark.parametrize(("argv", "message"), BAD)
def test_user_errors(settings: ServeSettings, argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(NibbleError, match=message):
        operated(settings, *argv)
