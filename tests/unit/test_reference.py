"""The oracle itself, held against a loop over single queries and keys that knows nothing of tensors' tricks."""

import math

import pytest
import torch

from nibble.formats import FORMATS, PAGE_TOKENS
from nibble.quantizer import static_parameters
from nibble.reference import LayerScales, reference_attention
from nibble.visibility import PagePolicy


def make_sequence(tokens: int, q_heads: int, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens + head_dim)
    q = torch.randn(tokens, q_heads, head_dim, generator=generator)
    k = torch.randn(tokens, kv_heads, head_dim, generator=generator).half() * 3
    v = torch.randn(tokens, kv_heads, head_dim, generator=generator).half()
    return q, k, v


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 257])
def test_without_quantization_it_is_plain_attention(tokens: int) -> None:
    q, k, v = make_sequence(tokens, 6, 2, 32)
    got = reference_attention(q, k, v, fmt=FORMATS["fp16"], policy=PagePolicy(), softmax_scale=0.2)
    repeat = [tensor.double().repeat_interleave(3, 1).transpose(0, 1) for tensor in (k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(
        q.double().transpose(0, 1), *repeat, is_causal=True, scale=0.2
    )
    torch.testing.assert_close(got.out, want.transpose(0, 1))


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (1, 0), (1, 1), (2, 1)])
@pytest.mark.parametrize("window", [None, 100])
def test_each_query_sees_each_page_in_the_right_precision(sinks: int, recent: int, window: int | None) -> None:
    """One query at a time, one key at a time: a page is read sealed when it is far and no sink."""
    q, k, v = make_sequence(4 * PAGE_TOKENS + 7, 2, 1, 16)
    fmt = FORMATS["int8-static"]
    scales = LayerScales(static_parameters(k.float().amin(0)[:, None], k.float().amax(0)[:, None], fmt.k))
    scales = LayerScales(scales.k, static_parameters(v.float().amin(0)[:, None], v.float().amax(0)[:, None], fmt.v))
    policy = PagePolicy(sinks, recent)
    got = reference_attention(q, k, v, fmt=fmt, policy=policy, softmax_scale=0.25, scales=scales, sliding_window=window)

    def read(x: float, scale: float, zero: float) -> float:
        return min(255, max(0, round((x - zero) / scale))) * scale + zero

    for i in (0, 63, 64, 130, 200, 262):
        weights, values = [], []
        for j in range(i + 1):
            if window is not None and i - j >= window:
                continue
            page = j // 64
            fp16 = page < sinks or i // 64 - page <= recent
            key, value = k[j, 0].tolist(), v[j, 0].tolist()
            if not fp16:
                assert scales.k is not None and scales.v is not None
                key = [
                    read(x, scales.k.scale[0, 0, d].item(), scales.k.zero[0, 0, d].item()) for d, x in enumerate(key)
                ]
                value = [
                    read(x, scales.v.scale[0, 0, d].item(), scales.v.zero[0, 0, d].item()) for d, x in enumerate(value)
                ]
            weights.append(math.exp(0.25 * sum(a * b for a, b in zip(q[i, 1].tolist(), key, strict=True))))
            values.append(value)
        want = [sum(w * value[d] for w, value in zip(weights, values, strict=True)) / sum(weights) for d in range(16)]
        torch.testing.assert_close(got.out[i, 1], torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=1e-5)
        assert got.log_sum_exp[i, 1].item() == pytest.approx(math.log(sum(weights)), abs=1e-5)


def test_the_answer_does_not_depend_on_how_many_queries_are_asked_at_once() -> None:
    q, k, v = make_sequence(300, 4, 2, 32)
    options = {"fmt": FORMATS["int4"], "policy": PagePolicy(), "softmax_scale": 0.2}
    whole = reference_attention(q, k, v, **options).out  # type: ignore[arg-type]
    last = reference_attention(q[-1:], k, v, **options).out  # type: ignore[arg-type]
    early = reference_attention(q[:200], k[:200], v[:200], **options).out  # type: ignore[arg-type]
    torch.testing.assert_close(whole[-1:], last)
    torch.testing.assert_close(whole[:200], early)
