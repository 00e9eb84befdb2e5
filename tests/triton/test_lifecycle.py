"""Kills, restarts and stops of the real server: each leaves a state from which the next command works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nibble.paths import REPOSITORY_ROOT
from serve.client import ServerError
from tests.triton.running_server import START_S, RunningServer, free_port, serve_command, wait_for

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
    server.wait_ready()
    killed = server.stub
    stream = server.llm.stream("Once", max_tokens=450, ignore_eos=True)
    next(stream)
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(ServerError):
        list(stream)
    wait_for(lambda: "restarting" in server.output, 20, "the supervisor to notice")
    server.wait_ready()
    wait_for(lambda: server.output.count("ready after") == 2, 20, "the supervisor to see it ready")
    assert server.stub != killed
    assert server.llm.generate("Two and two", max_tokens=4).generated_tokens


def test_second_server_on_a_used_port_is_refused_and_harms_nothing(server: RunningServer) -> None:
    server.wait_ready()
    second = run_to_end(serve_command(server.port))
    assert second.returncode == 2
    assert f"port {server.port} (http) is in use" in second.stderr
    assert server.llm.generate("Two and two", max_tokens=4).generated_tokens


def test_chat_from_a_pipe(server: RunningServer) -> None:
    server.wait_ready()
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


def test_sigterm_lets_a_running_answer_end(start_server: START) -> None:
    server = start_server()
    server.wait_ready()
    wait_for(lambda: "Ctrl-C stops" in server.output, 20, "the supervisor to see it ready")
    stream = server.llm.stream("Once", max_tokens=60, ignore_eos=True)
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    assert len(list(stream)) == 59
    assert server.process.wait(60) == 0
    assert "killed" not in server.output
    assert not server.shared_memory
    assert not server.settings.record_path.exists()


def test_next_command_works_after_everything_was_killed(start_server: START) -> None:
    """kill -9 of supervisor, tritonserver and stub; then `--check` on the same port, with KV_FALLBACK."""
    server = start_server()
    server.wait_ready()
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
    assert not server.shared_memory
    assert not server.settings.record_path.exists()


def test_orphaned_server_is_ended_by_the_next_start(start_server: START) -> None:
    """kill -9 of the supervisor alone: tritonserver drains by itself, and the next start does not wait for it."""
    server = start_server("--kv-fallback", "fp16")
    server.wait_ready()
    assert server.metric_labels("nibble_kv_info")["kv"] == "fp16"
    assert server.metric_labels("nibble_kv_info")["fallback_reason"]
    answer = server.llm.generate("Two and two", max_tokens=4)
    assert answer.kv_format == "fp16"
    assert answer.kv_fallback_reason
    triton = server.triton
    server.process.kill()
    server.process.wait()
    again = start_server(port=server.port)
    again.wait_ready()
    wait_for(lambda: "ready after" in again.output, 20, "the supervisor to see it ready")
    assert not triton.is_alive
    assert again.terminate() == 0


def test_engine_that_does_not_load_gives_the_reason(built_engine: Path) -> None:
    failed = run_to_end(serve_command(free_port(), "--context", "100000"))
    assert failed.returncode == 2
    assert "Triton did not start: max_context: got 100000, allowed up to" in failed.stderr
    assert "Traceback" not in failed.stderr
