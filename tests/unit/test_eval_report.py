"""The report beyond one run: all its sections, shown by a browser; runs listed and compared; advice; trade-offs."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from eval import advise, runs, tradeoffs
from eval.config import EvalPlan, SpeedPlan
from eval.measures import PositionMeasures
from eval.records import (
    EngineRecord,
    EngineSpeed,
    Environment,
    Estimate,
    Footprint,
    Inputs,
    Latency,
    LayerCheck,
    LayerFigures,
    Memory,
    NeedleCell,
    NeedleFigures,
    Report,
    ServedCheck,
    Speed,
    Summary,
    TaskFigures,
)
from eval.report import render_html
from eval.statistics import summarise
from eval.windows import Window
from nibble.errors import NibbleError
from nibble.formats import FORMATS
from nibble.paths import REPOSITORY_ROOT
from nibble.recipes import CertificateRecipe

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
SCREENSHOT = REPOSITORY_ROOT / "results" / "report-screenshot.png"


def positions(kl: float, windows: int = 3) -> list[PositionMeasures]:
    generator = np.random.default_rng(0)
    return [
        PositionMeasures(generator.exponential(kl, 512), nll := generator.exponential(3.0, 512), nll + 0.001,
                         generator.random(512) > 0.02)
        for _ in range(windows)
    ]  # fmt: skip


def make_report(kv: str, kl: float, bytes_per_token: float) -> tuple[Report, list[PositionMeasures]]:
    measured = positions(kl)
    windows = [Window("emma.txt", at, (at,) * 513) for at in range(len(measured))]
    quality = summarise(windows, measured, seed=0, words=1000)
    foot, foot16 = (
        Footprint(tokens=512, sealed_bytes_per_token=b, sealed_bytes=int(b * 320), open_bytes=192 * 23040)
        for b in (bytes_per_token, 23040.0)
    )
    waits = [
        Latency(streams=n, decode_tokens_per_s=14.0 * n**0.5, ms_p50=70.0 * n**0.5, ms_p99=90.0 * n**0.5, tokens=31 * n)
        for n in (1, 2, 4, 8)
    ]
    speed = EngineSpeed(
        prefill_tokens_per_s=500.0, decode_tokens_per_s=14.0, decode_tokens_per_s_streams=40.0, latencies=waits
    )
    sound = {"error": 0.01, "expected": 0.01, "ratio": 0.98, "page_ratios": [1.0], "clipped": 0.0}
    layers = [
        LayerFigures.model_validate({"layer": at, "format": kv, "first_position": 192, **sound}) for at in range(8)
    ]
    cells = [
        NeedleCell(variant=v, length=n, depth=d, recall=1.0 if d else 0.5, recall_fp16=1.0, scored=True)
        for v in ("single", "multikey") for n in (1024, 2048) for d in (0, 50, 100)
    ]  # fmt: skip
    task = TaskFigures(
        task="copy", documents=8, accuracy=0.875, accuracy_fp16=1.0, difference=Estimate(value=-0.125, interval=None),
        standard_error=0.125, flips=1, same_text=0.9, sha256="x",
    )  # fmt: skip
    one = Estimate(value=0.25, interval=[0.0, 0.5])
    report = Report(
        created="2026-01-01T00:00:00+00:00",
        seconds=1.0,
        summary=Summary(
            model="tiny", kv=kv, tokens=quality.positions, kl_mean=quality.kl.mean, kl_p999=quality.kl.p999,
            ppl=quality.ppl, ppl_fp16=quality.ppl_fp16, ppl_delta_pct=quality.ppl_delta_pct.value,
            top1_agreement=quality.top1_agreement.value, bytes_per_token=bytes_per_token,
            bytes_per_token_fp16=23040.0, decode_tokens_per_s=14.0, decode_tokens_per_s_fp16=12.0,
        ),
        plan=EvalPlan(
            name="test", windows=3, window_tokens=512, seed=0, memory_tokens=512,
            speed=SpeedPlan(prompt_tokens=16, decode_tokens=4, streams=1, repeats=1),
        ),
        engines={name: EngineRecord(kv=name, engine_hash=name, fallback_reason=None) for name in ("quantized", "fp16")},
        inputs=Inputs(sha256="w", bos=None, texts=[]),
        quality=quality,
        memory=Memory(quantized=foot, fp16=foot16),
        speed=Speed(quantized=speed, fp16=speed, streams=8, repeats=1),
        served=ServedCheck(outcome="same", detail="", prompts=3),
        environment=Environment(commit="c", code_sha256="s", versions={}, machine={}),
        layers=LayerCheck(tokens=512, sha256="l", layers=layers),
        tasks=[task],
        needle=NeedleFigures(cells=cells, scored=12, recall=0.83, recall_fp16=1.0, drop=one),
    )  # fmt: skip
    return report, measured


@pytest.fixture(scope="module")
def page() -> str:
    report, measured = make_report("int4", 0.001, 6480.0)
    return render_html(report, measured, [make_report("int8", 0.00001, 12240.0)[0]], CertificateRecipe())


def test_the_page_has_every_plot_and_needs_nothing_else(page: str) -> None:
    assert page.count("<svg") == 9  # positions 4, layers, two needle maps, latency, cost against memory
    assert "int8" in page
    assert "perplexity (word, as lm-eval)" in page
    assert "task copy: 8 documents, 1 flips, same text 90%" in page
    assert 'recipe: <span class="same">passed' in page
    assert "ms to the next token, 8 streams: p50, p99 of 248" in page
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", page)


def test_the_page_of_a_bad_engine_says_what_is_past_its_threshold_and_where_it_starts() -> None:
    report, measured = make_report("int4", 0.1, 6480.0)
    assert report.layers is not None
    report.layers.layers[3] = report.layers.layers[3].model_copy(update={"ratio": 9.0, "page_ratios": [1.0, 9.0]})
    page = render_html(report, measured, [], CertificateRecipe())
    assert 'recipe: <span class="failed">failed' in page
    assert "mean KL: got 0.1" in page
    assert "it starts in layer 3 (int4), at position 256" in page


@pytest.mark.skipif(BROWSER is None, reason="no headless Chromium on this machine")
def test_a_browser_shows_the_page(page: str, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    SCREENSHOT.parent.mkdir(exist_ok=True)
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        f"--screenshot={SCREENSHOT}", "--window-size=1200,3200", (tmp_path / "report.html").as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode == 0, shown.stderr
    with Image.open(SCREENSHOT) as picture:
        assert picture.size == (1200, 3200)
        seen = picture.convert("RGB").getcolors(1 << 24)
    assert seen is not None and len(seen) > 500  # heat maps and clouds of points, not an empty page
    assert max(count for count, _ in seen) < 0.9 * 1200 * 3200


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of one model under a results folder, and one that can't be read."""
    monkeypatch.setenv("NIBBLE_RESULTS", str(tmp_path))
    for kv, kl, size in (("int4", 0.001, 6480.0), ("int8", 0.00001, 12240.0)):
        folder = tmp_path / "tiny" / kv / "20260101T000000Z"
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(make_report(kv, kl, size)[0].model_dump_json())
    (tmp_path / "tiny" / "int4" / "20250101T000000Z").mkdir()
    (tmp_path / "tiny" / "int4" / "20250101T000000Z" / "report.json").write_text("{}")
    return tmp_path


def test_runs_are_listed_shown_and_compared(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = io.StringIO()
    runs.list_runs(stored, None, None, Console(file=said, width=200))
    assert said.getvalue().count("20260101T000000Z") == 2
    assert "not readable by this version" in said.getvalue()
    assert {report.summary.kv for report in runs.latest_reports(stored, "tiny")} == {"int4", "int8"}
    first, second = (str(stored / "tiny" / kv / "20260101T000000Z") for kv in ("int4", "int8"))
    runs.main(["show", first])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kv"] == "int4"
    runs.main(["compare", "tiny/int4/20260101T000000Z", second])
    out = capsys.readouterr().out
    assert "over 3 windows in common" in out
    assert re.search(r"0\.00\d+ nats, 95 % interval \+0\.00", out)
    with pytest.raises(NibbleError, match="no run there"):
        runs.main(["show", str(stored / "nothing")])


def test_the_schema_is_a_schema_of_the_report() -> None:
    schema = json.loads(runs.schema_text())
    assert {"summary", "quality", "layers", "tasks", "needle"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_advice_adds_up_and_names_its_sources(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    advise.main(["--model", "llama-8b", "--gpu", "h100", "--context", "32768", "--concurrency", "64"])
    rows = {row["kv"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])}
    assert set(rows) == set(FORMATS)
    fp16 = 32 * 8 * 128 * 2 * 2 * 32768 / 1e9
    assert rows["fp16"]["request_gb"] == pytest.approx(fp16)
    assert rows["fp16"]["fit"] == int((80 * 0.9 - 16.06) / fp16)
    assert rows["int4"]["fit"] > 3 * rows["fp16"]["fit"]
    assert rows["int4"]["source"].startswith("smollm2-135m")
    assert (stored / "advice-llama-8b-h100-32768-64.svg").read_text().startswith("<svg")
    with pytest.raises(NibbleError, match="allowed a100-40, a100-80"):
        advise.main(["--gpu", "tpu"])
    with pytest.raises(NibbleError, match="got 0 requests of 8192 tokens"):
        advise.main(["--concurrency", "0"])
    assert advise.quality_of("tiny")["int8"][2] == "tiny, 3 × 512 tokens"


def test_the_page_of_trade_offs_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tradeoffs, "PAGE", tmp_path / "tradeoffs.md")
    tradeoffs.main()
    assert (tmp_path / "tradeoffs.md").read_text() == (REPOSITORY_ROOT / "docs" / "tradeoffs.md").read_text()
