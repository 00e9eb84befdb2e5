"""The quantizer, the packing and the rotation: properties over formats, head sizes and awkward ranges."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nibble.errors import NibbleError
from nibble.formats import FORMATS, PAGE_TOKENS, KVFormat, ScaleKind, SealedPageLayout, TensorFormat
from nibble.packing import pack_codes, seal_pages, unpack_codes, unseal_pages
from nibble.quantizer import SMALLEST_SCALE, ScaleZero, dequantize, quantize, round_trip, static_parameters
from nibble.rotation import hadamard_matrix

HEAD_DIMS = [16, 48, 64, 80, 96, 128, 192, 256]
QUANTIZED = [fmt for fmt in FORMATS.values() if not fmt.is_fp16]


def random_pages(*leading: int, head_dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*leading, PAGE_TOKENS, head_dim, generator=torch.Generator().manual_seed(seed)).half()


def static_for(page: torch.Tensor, fmt: TensorFormat) -> ScaleZero | None:
    if fmt.scale is not ScaleKind.STATIC_CHANNEL:
        return None
    flat = (
        page.float().transpose(-3, -2).flatten(0, -3) if page.dim() == 3 else page.float().transpose(1, 2).flatten(0, 1)
    )
    return static_parameters(flat.amin(0)[:, None], flat.amax(0)[:, None], fmt)


@pytest.mark.parametrize("fmt", QUANTIZED, ids=lambda f: f.name)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_sealed_page_reads_back_within_half_a_step(fmt: KVFormat, head_dim: int) -> None:
    k = random_pages(2, 3, head_dim=head_dim)
    k[..., 1] *= 50  # K ranges 50 times V's
    k[..., 2] += 600  # a bias of 600 in a channel
    v = random_pages(2, 3, head_dim=head_dim, seed=1)
    scales = static_for(k, fmt.k), static_for(v, fmt.v)
    sealed = seal_pages(k, v, fmt, *scales)
    layout = SealedPageLayout(fmt, head_dim)
    assert sealed.shape == (2, 3, layout.page_bytes)
    for read, page, tensor_format, static in zip(
        unseal_pages(sealed, layout, *scales), (k, v), (fmt.k, fmt.v), scales, strict=True
    ):
        step = quantize(page, tensor_format, static).parameters.scale.float()
        assert torch.equal(read, round_trip(page, tensor_format, static))
        # half a step, and the fp32 rounding of (x - zero) next to a large zero point
        assert ((read - page.float()).abs() <= step * 0.5001 + page.float().abs() * 1e-6).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_fp16_pages_are_kept_bit_for_bit(head_dim: int) -> None:
    k, v = random_pages(4, head_dim=head_dim), random_pages(4, head_dim=head_dim, seed=1)
    fmt = KVFormat.named("fp16")
    k_read, v_read = unseal_pages(seal_pages(k, v, fmt), SealedPageLayout(fmt, head_dim))
    assert torch.equal(k_read.half(), k) and torch.equal(v_read.half(), v)


@given(
    minimum=st.floats(-6e4, 6e4, width=16),
    width=st.floats(0, 6e4, width=16),
    bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_any_fp16_range_is_within_half_a_step(minimum: float, width: float, bits: int, seed: int) -> None:
    uniform = torch.rand(PAGE_TOKENS, 4, generator=torch.Generator().manual_seed(seed))
    page = (minimum + width * uniform).clamp(-65504, 65504).half()
    quantized = quantize(page, TensorFormat(bits, ScaleKind.PAGE_CHANNEL))
    error = (dequantize(quantized) - page.float()).abs()
    assert (error <= quantized.parameters.scale.float() * 0.5001 + page.float().abs() * 1e-6).all()


def test_a_constant_channel_is_exact() -> None:
    page = torch.full((PAGE_TOKENS, 2), 600.0).half()
    quantized = quantize(page, TensorFormat(4, ScaleKind.PAGE_CHANNEL))
    assert torch.equal(dequantize(quantized), page.float())
    assert (quantized.parameters.scale == SMALLEST_SCALE).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_is_reversible(bits: int) -> None:
    codes = torch.arange(0, 1 << bits, dtype=torch.uint8).repeat(3, 2)
    assert torch.equal(unpack_codes(pack_codes(codes, bits), bits), codes)


def test_strided_views_seal_like_copies() -> None:
    k, v = random_pages(4, 6, head_dim=64)[::2, 1::2], random_pages(4, 6, head_dim=64, seed=1)[::2, 1::2]
    fmt = KVFormat.named("int4")
    assert torch.equal(seal_pages(k, v, fmt), seal_pages(k.contiguous(), v.contiguous(), fmt))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_layout_is_gapless_and_as_documented(name: str, head_dim: int) -> None:
    layout = SealedPageLayout(FORMATS[name], head_dim)
    places = [layout.k_codes, layout.v_codes, layout.k_parameters, layout.v_parameters]
    assert places[0].start == 0 and places[-1].stop == layout.page_bytes
    assert all(a.stop == b.start for a, b in pairwise(places))
    assert all(place.start % 16 == 0 for place in places)  # 16-byte loads


@pytest.mark.parametrize(("name", "size"), [("fp16", 512), ("int8", 264), ("k8v4", 204), ("int4", 140)])
def test_bytes_per_token_at_128_channels(name: str, size: int) -> None:
    assert SealedPageLayout(FORMATS[name], 128).bytes_per_token == size


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_rotation_is_orthogonal(head_dim: int) -> None:
    rotation = hadamard_matrix(head_dim)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(head_dim, dtype=torch.float64))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorFormat(5, ScaleKind.TOKEN), "allowed 4, 8 or 16"),
        (lambda: TensorFormat(16, ScaleKind.TOKEN), "takes 'none'"),
        (lambda: KVFormat.named("int3"), "allowed fp16, int8"),
        (lambda: SealedPageLayout(FORMATS["int4"], 72), "multiples of 16"),
        (lambda: quantize(random_pages(head_dim=64), FORMATS["int4-static"].k), "make calibrate"),
        (lambda: seal_pages(torch.zeros(63, 64), torch.zeros(63, 64), FORMATS["int4"]), r"allowed \[..., 64, D\]"),
        (lambda: pack_codes(torch.zeros(2, 3, dtype=torch.uint8), 4), "even numbers"),
    ],
)
def test_bad_input_says_what_is_allowed(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(NibbleError, match=message):
        make()
