"""Large biases of k_proj, as Qwen2 and Qwen2.5 have them, put into a model that has none, and what each remedy leaves.

In layer 0 of the model a few channel pairs get a bias. A pair's K rows are scaled up and its Q rows down by the same
factor first, so that the bias, however large, shifts the scores by what a bias of `RELATIVE` times the pair's own
spread would: as in the real models, where Q is small in those channels. The yardstick is the same biased model with an
fp32 cache. "as built" is what `make engine` makes of the format: the pre-flight reads the biased weights and may give
layer 0 another format, and scores of calibration text decide whether the bias is taken off K.

    python -m bench.quality_bias --biases 0,20,100,600,900 --windows 1 --tokens 640
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from bench.measured_commit import measured_commit
from bench.quality import merge
from bench.quality_measure import Bench
from bench.quality_models import load_subject
from bench.quality_schemes import EXACT, Scheme
from bench.quality_statistics import LayerStatistics
from bench.quality_table import BIAS, BUILT_UNDER_BIAS, UNDONE
from build.key_plan import MOST_ERROR, kept_bias_error
from build.preflight import Preflight, run_preflight
from build.real_pages import CHECKED_PAGES
from nibble.formats import FORMATS, PAGE_TOKENS, KVFormat
from nibble.key_transform import KeyBias
from nibble.paths import REPOSITORY_ROOT
from nibble.stage import console, run_stage

RESULTS = REPOSITORY_ROOT / "bench" / "results" / "key_bias.json"
RELATIVE = 3.0  # bias over the spread of the pair's K, after scaling (--relative)
PAIRS = (1, 8, 20)  # of head_dim / 2 rotary pairs: fast, middling, slow


def main() -> None:
    """Measure every remedy at every bias."""
    arguments = _parser().parse_args()
    records = []
    for bias in map(float, arguments.biases.split(",")):
        subject = load_subject(arguments.model, arguments.device)
        spreads = _pair_spread(subject.model, subject.calibration(1))
        if bias:
            inject_bias(subject.model, spreads, bias, arguments.relative)
        bench = Bench(subject.model, subject.calibration(arguments.calibration), arguments.batch)
        plain = bench.statistics
        windows = subject.windows("eval", arguments.windows, arguments.tokens)
        bench.reference_scheme = EXACT
        reference = bench.reference(windows)
        subtracted = [_with_bias(subject.model, layer, known) for layer, known in enumerate(plain)]
        flights = {name: _preflight(subject.model, FORMATS[name], arguments.context) for name in UNDONE}
        built = [_as_built(name, flight, subject.model, plain[0]) for name, flight in flights.items()]
        found = {scheme.name: _words(flights[name], scheme) for name, scheme in zip(flights, built, strict=True)}
        undone = [scheme for scheme in BIAS if scheme.name in UNDONE.values()]
        for scheme in [*(undone if arguments.as_built else BIAS), *built]:
            first = scheme.instead.get(0, scheme)
            bench.statistics = subtracted if first.subtract else _marked(plain, subtracted)
            record = bench.measure(windows, reference, scheme).record()
            records.append({"model": f"{subject.name} + bias {bias:g}", "format": scheme.name, **record,
                            "bias": bias, "relative": arguments.relative, "text": "eval",
                            **({"preflight": found[scheme.name]} if scheme.name in found else {}),
                            "commit": measured_commit()})  # fmt: skip
            console.print(f"bias {bias:<6g}{scheme.name:34} KL {record['kl_mean']:<10} p99.9 {record['kl_p999']:<8} "
                          f"ppl fp32 {record['ppl_fp16']} {found.get(scheme.name, '')}")  # fmt: skip
            merge(arguments.out, records)
    print(json.dumps({"records": len(records)}))


@torch.no_grad()
def inject_bias(model: PreTrainedModel, spreads: torch.Tensor, bias: float, relative: float, layer: int = 0) -> None:
    """Add the bias in place. spreads: of each KV head's pairs, [kv_heads, D / 2]."""
    attention = model.model.layers[layer].self_attn
    kv_heads, half = spreads.shape
    signs = torch.Generator().manual_seed(0)
    k = attention.k_proj.weight.unflatten(0, (kv_heads, 2, half))
    q = attention.q_proj.weight.unflatten(0, (kv_heads, -1, 2, half))
    bias_of = torch.zeros(kv_heads, 2, half, device=k.device)
    for head in range(kv_heads):
        for pair in (p for p in PAIRS if p < half):
            factor = bias / (relative * spreads[head, pair])
            k[head, :, pair] *= factor
            q[head, :, :, pair] /= factor
            bias_of[head, :, pair] = bias * torch.randn(2, generator=signs).sign().to(k.device)
    attention.k_proj.bias = nn.Parameter(bias_of.flatten(), requires_grad=False)


def _preflight(model: PreTrainedModel, fmt: KVFormat, context: int) -> Preflight:
    """What the pre-flight of a build with one format says of the model's weights as they are now."""
    biases = {name: tensor.detach().cpu() for name, tensor in model.named_parameters() if name.endswith("k_proj.bias")}
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_file(biases or {"none": torch.zeros(1)}, Path(folder) / "model.safetensors")
        return run_preflight(Path(folder), [fmt] * model.config.num_hidden_layers, None, context)


def _as_built(name: str, flight: Preflight, model: PreTrainedModel, known: LayerStatistics) -> Scheme:
    """What a build makes of a format; known: of layer 0, the one with the bias."""
    whole, projection = BUILT_UNDER_BIAS[name], model.model.layers[0].self_attn.k_proj
    fmt = flight.formats[0][0] if 0 in flight.formats else FORMATS[name]
    first, subtract = BUILT_UNDER_BIAS[fmt.name], False
    if flight.bias_layers:
        values = projection.bias.view(known.k.shape[1], -1)
        bias = KeyBias(values, model.model.rotary_emb.inv_freq)
        pages = known.k[0, :, PAGE_TOKENS : (1 + CHECKED_PAGES) * PAGE_TOKENS].unflatten(1, (-1, PAGE_TOKENS))
        basis = known.basis("k", first.k.basis)
        times = kept_bias_error(pages.transpose(0, 1), bias, fmt, known.reader_moment("k"), basis)
        console.print(f"{name}: error of scores with the bias kept, over that without it: {times:.3g}")
        subtract = times > MOST_ERROR
    return replace(whole, instead={0: replace(first, subtract=subtract)})


def _words(flight: Preflight, scheme: Scheme) -> str:
    """What the pre-flight finds in biases of K, and what is done about it."""
    verdict = next(finding.verdict for finding in flight.findings if finding.check == "K bias")
    formats = [f"{fmt.name} in layer {layer}" for layer, (fmt, _) in flight.formats.items()]
    if flight.bias_layers:
        formats.append("bias taken off K" if scheme.instead[0].subtract else "bias kept")
    return ": ".join([verdict, *([", ".join(formats)] if formats else [])])


def rotated_bias(model: PreTrainedModel, layer: int, tokens: int) -> torch.Tensor | None:
    """What the bias of k_proj adds to K after RoPE, [kv_heads, tokens, D]."""
    bias = model.model.layers[layer].self_attn.k_proj.bias
    if bias is None:
        return None
    positions = torch.arange(tokens, device=bias.device)[None]
    cos, sin = model.model.rotary_emb(bias[None, None].float(), positions)
    rows = bias.float().view(-1, 1, cos.shape[-1])
    low, high = rows.chunk(2, -1)
    return rows * cos + torch.cat((-high, low), -1) * sin


def _with_bias(model: PreTrainedModel, layer: int, known):  # type: ignore[no-untyped-def]
    """Statistics of K less its bias (calibration at positions 0 ... tokens)."""
    bias = rotated_bias(model, layer, 8192)
    if bias is None:
        return known
    large = model.model.layers[layer].self_attn.k_proj.bias.view(bias.shape[0], -1).abs()
    return replace(known, k=known.k - bias[:, : known.k.shape[2]], bias=bias, biased=large > 0, _bases={})


def _marked(plain, subtracted):  # type: ignore[no-untyped-def]
    return [replace(a, biased=b.biased) for a, b in zip(plain, subtracted, strict=True)]


def _pair_spread(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Root mean square of each rotary pair of layer 0's K, [kv_heads, D / 2]."""
    known = Bench(model, ids).statistics[0]
    return known.k.square().mean((0, 2)).unflatten(-1, (2, -1)).mean(1).sqrt()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.quality_bias", description="Large K biases.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--biases", default="0,20,100,300,600,900")
    parser.add_argument("--relative", type=float, default=RELATIVE, help="bias over the spread of the pair's K")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--calibration", type=int, default=4)
    parser.add_argument("--as-built", action="store_true", help="only what is built, and the same with nothing done")
    parser.add_argument("--context", type=int, default=8192, help="longest sequence that the pre-flight allows for")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    run_stage(main)
