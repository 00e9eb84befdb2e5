"""What an evaluation writes down: report.json as typed records, frozen and strict, with a schema version.

`Report.model_json_schema()` is the schema. `summary` is flat on purpose: it is what scripts and dashboards read.
Units are in the names: nats for KL and losses, bytes for memory, `_pct` for per cent; shares are 0 to 1.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eval.config import EvalPlan
from nibble.strict_yaml import StrictModel

SCHEMA_VERSION = 1  # of Report; a change of meaning makes it 2


class Summary(StrictModel):
    """The figures of a run on one level. tokens: positions measured. bytes_per_token: sealed, whole model."""

    model: str
    kv: str
    tokens: int
    kl_mean: float
    kl_p999: float
    ppl: float
    ppl_fp16: float
    ppl_delta_pct: float
    top1_agreement: float
    bytes_per_token: float
    bytes_per_token_fp16: float
    decode_tokens_per_s: float
    decode_tokens_per_s_fp16: float


class Estimate(StrictModel):
    """A figure and its 95 % interval [low, high] over windows; None with fewer than two windows."""

    value: float
    interval: list[float] | None


class Distribution(StrictModel):
    """KL over positions, nats."""

    mean: float
    p50: float
    p99: float
    p999: float
    max: float


class Bucket(StrictModel):
    """The positions [start, end) of every window. flips: positions whose top token differs."""

    start: int
    end: int
    positions: int
    kl: Distribution
    kl_mean: Estimate | None = None
    ppl_delta_pct: float
    top1_agreement: float
    flips: int = 0


class WindowFigures(StrictModel):
    """One window: where it is from and its means (kept so that two runs can be compared in pairs)."""

    text: str
    start: int
    sha256: str
    kl_mean: float
    nll: float
    nll_fp16: float
    top1_agreement: float


class Quality(StrictModel):
    """Both engines on the same text. ppl: token perplexity, exp(loss a token). word_ppl: lm-eval's convention,
    exp(loss a word), words being what white space separates; the two must never be compared with each other."""

    positions: int
    windows: int
    kl: Distribution
    kl_mean: Estimate
    kl_p999: Estimate | None = None
    ppl: float
    ppl_fp16: float
    word_ppl: float | None = None
    word_ppl_fp16: float | None = None
    words: int | None = None
    ppl_delta_pct: Estimate
    top1_agreement: Estimate
    buckets: list[Bucket]
    per_window: list[WindowFigures]


class Footprint(StrictModel):
    """Cache memory of one engine with one running sequence of `tokens` tokens, read from its allocator.

    sealed_bytes_per_token: the manifest's figure, all layers. *_bytes: pages in use times their size.
    """

    tokens: int
    sealed_bytes_per_token: float
    sealed_bytes: int
    open_bytes: int

    @property
    def bytes_per_token(self) -> float:
        """Sealed and open pages together, over the sequence."""
        return (self.sealed_bytes + self.open_bytes) / self.tokens


class Memory(StrictModel):
    """Both engines' footprints at the same length."""

    quantized: Footprint
    fp16: Footprint


class Latency(StrictModel):
    """What a stream waits for its next token while `streams` decode together: percentiles over `tokens` waits."""

    streams: int
    decode_tokens_per_s: float
    ms_p50: float
    ms_p99: float
    tokens: int


class EngineSpeed(StrictModel):
    """Tokens per second, medians: one prompt read, one stream decoding, many streams decoding together."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    decode_tokens_per_s_streams: float
    latencies: list[Latency] = Field(default_factory=list)


class Speed(StrictModel):
    """Both engines timed in turn in one process."""

    quantized: EngineSpeed
    fp16: EngineSpeed
    streams: int
    repeats: int


class LayerFigures(StrictModel):
    """One layer's attention, as the engine does it and as its format explains it (eval/layers.py).

    error, expected: relative to the fp16 output. page_ratios: of every page of positions from `first_position` on.
    clipped: share of K's or V's values (the larger) outside static scales; 0 for formats that carry theirs in pages.
    stored_errors: the largest error of a value of K or V in each sealed page, in half steps of the exact quantizer: 1
    for codes that are rounded right. A page is first read at the position of its place in `page_ratios`.
    """

    layer: int
    format: str
    error: float
    expected: float
    ratio: float
    first_position: int
    page_ratios: list[float]
    clipped: float
    stored_errors: list[float] = Field(default_factory=list)

    @property
    def stored_error(self) -> float:
        """Of the worst page."""
        return max(self.stored_errors, default=0.0)


class LayerCheck(StrictModel):
    """Every layer's figures over one text of `tokens` tokens."""

    tokens: int
    sha256: str
    layers: list[LayerFigures]


class TaskFigures(StrictModel):
    """One task on both engines. difference: quantized less fp16, over documents in pairs. flips: documents whose
    outcome differs. same_text: mean share of the answers up to which both engines write the same (generation only)."""

    task: str
    documents: int
    accuracy: float
    accuracy_fp16: float
    difference: Estimate
    standard_error: float
    flips: int
    same_text: float | None
    sha256: str


class NeedleCell(StrictModel):
    """A cell's haystacks on both engines: the share of their numbers found. scored: fp16 found all."""

    variant: str
    length: int
    depth: int
    recall: float
    recall_fp16: float
    scored: bool


class NeedleFigures(StrictModel):
    """The grid, and recall over its scored cells (None when fp16 passes none). drop: fp16 less quantized.

    sha256: of every haystack with its question; empty in reports that were made before it was kept.
    """

    cells: list[NeedleCell]
    scored: int
    recall: float | None
    recall_fp16: float | None
    drop: Estimate | None
    sha256: str = ""


class ServedCheck(StrictModel):
    """Whether the served endpoint gave the in-process engine's greedy tokens; failed: it gave none."""

    outcome: Literal["same", "different", "failed", "skipped"]
    detail: str
    prompts: int


class EngineRecord(StrictModel):
    """Which engine it was. fallback_reason: why it ran with an fp16 cache, if it did."""

    kv: str
    engine_hash: str
    fallback_reason: str | None


class TextRecord(StrictModel):
    """One text file and how many windows came from it."""

    name: str
    sha256: str
    windows: int


class Inputs(StrictModel):
    """The text that was read. bos: the token id put before every window, if the tokenizer does that."""

    sha256: str
    bos: int | None
    texts: list[TextRecord]


class Environment(StrictModel):
    """Where and with what it ran."""

    commit: str
    code_sha256: str
    versions: dict[str, str]
    machine: dict[str, str | int]


class Report(StrictModel):
    """report.json."""

    schema_version: Literal[1] = 1
    created: str
    seconds: float
    summary: Summary
    plan: EvalPlan
    engines: dict[str, EngineRecord]
    inputs: Inputs
    quality: Quality
    memory: Memory
    speed: Speed
    served: ServedCheck
    environment: Environment
    layers: LayerCheck | None = None
    tasks: list[TaskFigures] = Field(default_factory=list)
    needle: NeedleFigures | None = None
