"""Reasons in tritonserver's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve import server_log

MODEL_ERROR = r"""
E1130 08:26:35.574792 7537 server.cc:241] "CudaDriverHelper has not been initialized."
E1130 08:26:36.1 7537 model_lifecycle.cc:642] "failed to load 'llm' version 1: Internal: TritonModelException: engine: \
hash differs; run\n\"make engine\"\n\nAt:\n  /x/model.py(25): initialize\n"
I1130 08:26:36.2 7537 model_lifecycle.cc:777] "failed to load 'llm'"
""".replace("\\\n", "")
CASES = [
    (MODEL_ERROR, 'engine: hash differs; run\n"make engine"'),
    (
        "x: error while loading shared libraries: libpython3.11.so.1.0: cannot open shared object file\n",
        "libpython3.11.so.1.0: cannot open shared object file",
    ),
    ('I1130 08:26:36.2 7537 server.cc:1] "fine"\n', None),
    ("", None),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_failure_reason(tmp_path: Path, text: str, expected: str | None) -> None:
    log = tmp_path / "triton.log"
    log.write_text(text)
    found = server_log.failure_reason(log)
    assert found is None if expected is None else expected == found


def test_no_log_yet(tmp_path: Path) -> None:
    log = tmp_path / "triton.log"
    assert server_log.failure_reason(log) is None
    assert server_log.progress(log) == ""


def test_progress_is_the_models_newest_line(tmp_path: Path) -> None:
    log = tmp_path / "triton.log"
    log.write_text('I1130 1 model.cc:1] "nibble: loading"\nI1130 2 model.cc:1] "nibble: loaded in 2 s"\nother\n')
    assert server_log.progress(log) == "loaded in 2 s"


def test_tail_leaves_the_noise_of_a_machine_without_a_gpu_out(tmp_path: Path) -> None:
    log = tmp_path / "triton.log"
    log.write_text("CUDA driver version is insufficient for\n+----+\n| x |\n\nreal trouble\n")
    assert server_log.tail(log) == "real trouble"
