"""Kills, restarts and stops of the real server: each leaves a state from which the next command works."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.soak.server import free_port
from nibble.paths import REPOSITORY_ROOT
from serve.client import ServerError
from serve.settings import ServeSettings
from tests.triton.running_server import KV, MODEL, START_S, RunningServer, serve_command

START = Callable[..., RunningServer]


def run_to_end(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=REPOSITORY_ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=START_S + 60,
        check=False,
    )


def test_killed_stub_breaks_its_streams_and_is_replaced(server: RunningServer) -> None:
    killed, times_ready = server.stub, server.output.count("ready after")
    stream = server.llm.stream("Once", max_tokens=450, ignore_eos=True)
    next(stream)
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(ServerError):
        list(stream)
    server.wait_ready(times_ready + 1)
    assert server.stub != killed
    assert server.llm.generate("Two and two", max_tokens=4).generated_tokens


def test_second_server_on_a_used_port_is_refused_and_harms_nothing(server: RunningServer) -> None:
    second = run_to_end(serve_command(server.port))
    assert second.returncode == 2
    assert f"port {server.port} (http) is in use" in second.stderr
    assert server.llm.generate("Two and two", max_tokens=4).generated_tokens


def test_chat_from_a_pipe(server: RunningServer) -> None:
    command = [sys.executable, "-m", "serve.chat", "--port", str(server.port), "--max-tokens", "12"]
    chat = subprocess.run(
        command,
        cwd=REPOSITORY_ROOT,
        input="Name a colour.\n/reset\nName a river.\n/exit\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.count("KV=int4") == 2
    assert "conversation forgotten" in chat.stdout


def test_orphan_is_replaced_and_sigterm_lets_a_running_answer_end(start_server: START) -> None:
    """kill -9 of the supervisor alone: the next start on that port ends its tritonserver. Then a clean stop."""
    orphan = start_server("--kv-fallback", "fp16")
    orphan.wait_ready()
    check_fallback(orphan)
    triton = orphan.triton
    orphan.process.kill()
    orphan.process.wait()
    server = start_server(port=orphan.port)
    server.wait_ready()
    assert not triton.is_alive
    assert server.metric_labels("nibble_kv_info")["kv"] == "int4"
    stream = server.llm.stream("Once", max_tokens=60, ignore_eos=True)
    first = next(stream)
    server.process.send_signal(signal.SIGTERM)
    assert sum(len(chunk.token_ids) for chunk in (first, *stream)) == 60
    assert server.process.wait(60) == 0
    assert "killed" not in server.output.partition("ready after")[2]
    assert_nothing_left(server)


def test_next_command_works_after_everything_was_killed(server: RunningServer) -> None:
    """kill -9 of supervisor, tritonserver and stub; then `--check` on the same port, with KV_FALLBACK."""
    triton, stub = server.triton, server.stub
    for pid in (server.process.pid, triton.pid, stub.pid):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()
    assert server.shared_memory
    check = run_to_end(serve_command(server.port, "--check"), KV_FALLBACK="fp16")
    assert check.returncode == 0, check.stdout + check.stderr
    assert "cleaned up after a killed" in check.stdout
    assert "KV_FALLBACK=fp16" in check.stdout
    assert "through KV=fp16" in check.stdout
    assert_nothing_left(server)


def check_fallback(server: RunningServer) -> None:
    labels = server.metric_labels("nibble_kv_info")
    assert labels["kv"] == "fp16"
    answer = server.llm.generate("Two and two", max_tokens=4)
    assert answer.kv_format == "fp16"
    assert answer.kv_fallback_reason == labels["fallback_reason"] != ""
    assert answer.kv_fallback_reason in server.settings.log_path.read_text()


def assert_nothing_left(server: RunningServer) -> None:
    assert not server.shared_memory
    assert not server.settings.record_path.exists()


def test_engine_that_does_not_load_gives_the_reason(built_engine: Path) -> None:
    settings = ServeSettings(f"{MODEL}-{KV}", built_engine, http_port=free_port())
    failed = run_to_end(serve_command(settings.http_port, "--context", "100000"))
    shutil.rmtree(settings.run_dir)
    assert failed.returncode == 2
    assert "Triton did not start: max_context: got 100000, allowed up to" in failed.stderr
    assert "Traceback" not in failed.stderr
