"""The kernels' host side without a GPU: compiling, planning, and structures that C++ and Python must agree on."""

import ctypes
import re
from pathlib import Path

import pytest

from nibble.errors import NibbleError
from nibble.formats import FORMATS, KVFormat, ScaleKind, TensorFormat
from nibble.kernels import compile as compile_stage
from nibble.kernels.compiler import ARCHITECTURES, SOURCE_DIR, KernelSource, architecture_of, compile_kernel
from nibble.kernels.decode import (
    FEWEST_SPLIT_PAGES,
    MOST_SPLIT_PAGES,
    SPLITS_AIMED,
    DecodeParams,
    max_splits,
    num_splits,
)
from nibble.kernels.instances import (
    MERGERS,
    SHARED_BYTES,
    SPILL_LIMIT,
    DecodeInstance,
    all_decode_instances,
    all_sources,
    combine_source,
    plan_decode,
    seal_shared_bytes,
    seal_source,
)
from nibble.kernels.seal import AppendParams, SealParams

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling kernels needs cuda-bindings and nvidia-cuda-nvrtc")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_KERNEL_CACHE", str(tmp_path))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_default_format_compiles_for_every_architecture(architecture: str) -> None:
    """The rest: test_kernels_compile_all.py."""
    instance = DecodeInstance.for_shape(FORMATS["int4"], 128, group=8)
    cubin = compile_kernel(instance.source, architecture)
    assert cubin.registers <= instance.registers_on(architecture) and cubin.spill_bytes <= SPILL_LIMIT
    for source in (combine_source(128), seal_source(FORMATS["int4"], 128), KernelSource("append.cu")):
        assert compile_kernel(source, architecture).spill_bytes == 0


@pytest.mark.parametrize(
    "instance", all_decode_instances(), ids=lambda i: f"{i.k.bits}-{i.v.bits}-{i.head_dim}-{i.head_tiles}"
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_launch_fits_the_multiprocessor(instance: DecodeInstance, architecture: str) -> None:
    plan = plan_decode(instance, architecture)
    assert plan.shared_bytes <= SHARED_BYTES[architecture] - 1024
    assert 1 <= plan.consumers <= instance.consumers_on(architecture) and plan.stages > plan.consumers
    assert plan.threads == 32 * (plan.consumers + 2 + MERGERS) <= 32 * instance.max_warps
    assert seal_shared_bytes(instance.fmt, instance.head_dim) + 8192 <= SHARED_BYTES[architecture]


@pytest.mark.parametrize(
    ("file", "structure", "mirror"),
    [
        ("config.cuh", "DecodeParams", DecodeParams),
        ("seal.cu", "SealParams", SealParams),
        ("append.cu", "AppendParams", AppendParams),
    ],
)
def test_parameters_are_mirrored_field_by_field(file: str, structure: str, mirror: type[ctypes.Structure]) -> None:
    body = re.search(rf"struct {structure} {{(.*?)}};", (SOURCE_DIR / file).read_text(), re.DOTALL)
    assert body is not None
    fields = re.findall(r"^\s+(?:const )?(\w+(?: long)?)(\*?) (\w+);", body[1], re.MULTILINE)
    types = {"int": ctypes.c_int, "float": ctypes.c_float, "long long": ctypes.c_longlong}
    assert [(name, ctypes.c_void_p if star else types[kind]) for kind, star, name in fields] == list(mirror._fields_)


def test_a_cubin_is_compiled_once_and_keyed_by_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_kernel(KernelSource("append.cu"), "sm_90a")
    monkeypatch.setattr("nibble.kernels.compiler._compile", lambda *_: pytest.fail("compiled again"))
    assert compile_kernel(KernelSource("append.cu"), "sm_90a") == first
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        compile_kernel(KernelSource("append.cu", (("OTHER", 1),)), "sm_90a")


def test_a_compile_error_carries_the_log() -> None:
    with pytest.raises(NibbleError, match=r"could not compile decode.cu HEAD_DIM=128(.|\n)*K_BITS"):
        compile_kernel(KernelSource("decode.cu", (("HEAD_DIM", 128),)), "sm_90a")


def test_the_stage_reports_a_kernel_that_uses_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_stage, "all_sources", lambda _: [(KernelSource("append.cu"), 1)])
    assert compile_stage.main(["--arch", "sm_90a", "--check", "--jobs", "1"]) == 1
    assert compile_stage.main(["--arch", "sm_90a", "--jobs", "1"]) == 0


def test_all_sources_are_different() -> None:
    titles = [source.title for source, _ in all_sources("sm_90a")]
    assert len(titles) == len(set(titles))


def test_splits_depend_on_the_length_alone() -> None:
    assert [num_splits(pages, 64) for pages in (1, 64, 65, 512)] == [1, 1, 2, 8]
    assert [num_splits(pages) for pages in (0, 1, 64, 65, 128, 512, 1024, 4096)] == [1, 1, 1, 3, 4, 16, 16, 64]


@pytest.mark.parametrize("split_pages", [None, 8])
def test_a_workspace_holds_the_splits_of_every_length(split_pages: int | None) -> None:
    for max_pages in (1, 24, 300, 384, 385, 1024, 1025, 3000):
        assert max_splits(max_pages, split_pages) == max(num_splits(n, split_pages) for n in range(max_pages + 1))


def test_the_kernel_has_the_same_rule_of_splits() -> None:
    text = (SOURCE_DIR / "schedule.cuh").read_text()
    rule = {"kSplitsAimed": SPLITS_AIMED, "kFewestSplitPages": FEWEST_SPLIT_PAGES, "kMostSplitPages": MOST_SPLIT_PAGES}
    assert dict(re.findall(r"constexpr int (k\w*Split\w*) = (\d+);", text)) == {k: str(v) for k, v in rule.items()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DecodeInstance.for_shape(FORMATS["int4"], 72, 8), "head size: got 72"),
        (lambda: DecodeInstance.for_shape(FORMATS["int4"], 128, 17), "query heads per KV head: got 17"),
        (
            lambda: DecodeInstance.for_shape(
                KVFormat("x", TensorFormat(4, ScaleKind.TOKEN), TensorFormat(8, ScaleKind.TOKEN)), 128, 8
            ),
            "bits of K and V: got 4, 8",
        ),
        (
            lambda: DecodeInstance.for_shape(
                KVFormat("x", TensorFormat(4, ScaleKind.TOKEN), TensorFormat(4, ScaleKind.PAGE_CHANNEL)), 128, 8
            ),
            "V scale: got 'page_channel'",
        ),
        (lambda: compile_kernel(KernelSource("append.cu"), "sm_70"), "architecture: got 'sm_70'"),
        (lambda: architecture_of((7, 0)), "compute capability 7.0"),
    ],
)
def test_what_is_unsupported_is_named(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(NibbleError, match=message):
        make()
