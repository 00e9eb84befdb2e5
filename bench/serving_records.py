"""What the serving bench writes of each measurement, and what every measurement needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from nibble.runtime import Engine
from nibble.runtime.decoder_weights import DecoderWeights


@dataclass(frozen=True)
class Record:
    """Times in milliseconds, memory in bytes; None is not measured.

    tpot: of a request, the mean time between its tokens; itl: between two tokens of any request. max_running: requests
    that fit. roofline_ratio: a step's time over that of reading weights and cache once. host_share: of a step, what the
    device does not work. chunk_tokens: of a prompt in a step. weight_bytes, peak_bytes: of one GPU.
    """

    section: str
    model: str
    weights: str
    kv: str
    gpus: int
    input: int
    output: int
    concurrency: int
    tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    max_running: int | None
    chunk_tokens: int
    kv_bytes: int
    weight_bytes: int
    peak_bytes: int
    roofline_ratio: float | None
    host_share: float | None
    card: str
    torch: str
    commit: str


@dataclass(frozen=True)
class Bench:
    """kind: of the weights; ceiling: bytes a second of plain reading."""

    model: str
    kind: str
    weights: DecoderWeights
    ceiling: float
    commit: str

    def record(self, section: str, engine: Engine, **values: float | int | None) -> Record:
        """A record; what is not measured is None."""
        names = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "itl_p50_ms", "itl_p99_ms")
        fixed = dict.fromkeys((*names, "max_running", "roofline_ratio", "host_share")) | {
            "section": section,
            "model": self.model,
            "weights": f"{self.kind} dummy",
            "kv": engine.kv_name,
            "gpus": self.weights.shards.size,
            "chunk_tokens": engine.limits.step_tokens,
            "kv_bytes": engine.pool_sizes.bytes(engine.spec),
            "weight_bytes": self.weights.num_bytes,
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "commit": self.commit,
        }
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}
        record = Record(**{**fixed, **rounded})  # type: ignore[arg-type]
        shown = {key: value for key, value in asdict(record).items() if key in values or key in ("section", "kv")}
        if self.weights.shards.rank == 0:
            print(shown, flush=True)
        return record


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all are below."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
