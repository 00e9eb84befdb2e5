"""The repositories for TensorRT-LLM in the real Triton, and our client against them; echoing models stand for NVIDIA's.

Triton itself checks that the steps of the ensemble fit together in names, types and shapes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.soak.server import free_port
from serve import wheel
from serve.client import ServerError
from serve.trtllm.client import ENSEMBLE, LLMAPI, Endpoint, TrtllmLLM
from serve.trtllm.repository import write_repository
from tests.triton.running_server import wait_for
from tests.unit.test_trtllm_serve import manifest

ECHO = Path(__file__).with_name("trtllm_echo.py")


@pytest.fixture(params=[ENSEMBLE, LLMAPI], ids=["ensemble", "llmapi"])
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrtllmLLM]:
    """A client of the endpoint; its repository is ours but for the Python files and the engine's backend."""
    endpoint: Endpoint = request.param
    runtime = "pytorch" if endpoint is LLMAPI else "tensorrt"
    models = tmp_path / "models"
    for name in write_repository(models, manifest(tmp_path / "engine", runtime), tmp_path / "engine"):
        if name != "ensemble":
            (models / name / "1" / "model.py").write_text(ECHO.read_text())
        config = models / name / "config.pbtxt"
        config.write_text(config.read_text().replace('backend: "tensorrtllm"', 'backend: "python"'))
    wheel.install_backends(tmp_path / "backends")
    port = free_port()
    command = [
        str(wheel.server_binary()), f"--model-repository={models}", f"--backend-directory={tmp_path / 'backends'}",
        f"--backend-config=python,shm-region-prefix-name=trtllm{port}_", "--disable-auto-complete-config",
        "--allow-gpu-metrics=false", "--exit-timeout-secs=1",
        *(f"--{name}-port={port + place}" for place, name in enumerate(("http", "grpc", "metrics"))),
    ]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=wheel.server_environment())
    client = TrtllmLLM(f"127.0.0.1:{port + 1}", endpoint, inactivity_timeout_s=20)
    try:
        wait_for(lambda: server.poll() is not None or client.is_ready(), 60, "a ready server")
        assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
        yield client
    finally:
        server.terminate()
        server.wait(30)


def test_an_endpoint_answers_our_client(llm: TrtllmLLM) -> None:
    """The echo answers with the prompt's own letters, one a token."""
    whole = llm.generate("abcdef", max_tokens=4, temperature=0.0, stop_words=["zz"], seed=3)
    assert whole.text == "abcd" and whole.finish_reason in (None, "length")
    chunks = list(llm.stream("abcdef", max_tokens=3, temperature=0.7, top_p=0.9))
    assert [chunk.text for chunk in chunks if chunk.text] == ["a", "b", "c"]
    if llm.endpoint is ENSEMBLE:
        assert (whole.prompt_tokens, whole.generated_tokens) == (6, 4)
    with pytest.raises(ServerError, match="no letters"):
        llm.generate("", max_tokens=1)
