"""Our cache under TensorRT-LLM's executor, played on a stand-in: on a CPU with the oracle's kernels, on a GPU ours."""

from __future__ import annotations

import pytest
import torch

from nibble.balance import BasisChange
from nibble.errors import NibbleError
from nibble.formats import KVFormat
from nibble.key_transform import KeyTransform
from nibble.quantizer import ScaleZero
from nibble.reference import LayerScales
from nibble.trtllm import manager as manager_module
from nibble.trtllm.cache_engine import CacheEngine, local_heads
from nibble.trtllm.kernels import PageKernels
from nibble.trtllm.manager import flat_pages
from nibble.visibility import PagePolicy
from tests.trtllm import stand_in
from tests.trtllm.executor import Executor, Model
from tests.trtllm.torch_kernels import TorchKernels

DEFAULT = PagePolicy()
CPU = Model()
GPU = Model(layers=2, q_heads=16, kv_heads=2, head_dim=128, max_tokens=64 * 1024, max_batch=64, chunk=512)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where pools and kernels are."""
    monkeypatch.setattr(stand_in, "DEVICE", "cpu" if request.param == "cpu" else "cuda")
    return str(request.param)


def make_engine(
    model: Model, kv: str = "int4", policy: PagePolicy = DEFAULT, basis: bool = False, seed: int = 0
) -> CacheEngine:
    fmt, transforms = KVFormat.named(kv), {}
    generator = torch.Generator().manual_seed(seed)
    if basis:
        forward = torch.linalg.qr(torch.randn(model.kv_heads, model.head_dim, model.head_dim, generator=generator)).Q
        transforms = {layer: KeyTransform(BasisChange(forward, forward.clone())) for layer in range(model.layers)}
    part = ScaleZero(
        torch.full((model.kv_heads, 1, model.head_dim), 0.11), torch.full((model.kv_heads, 1, model.head_dim), -14.0)
    )
    scales = LayerScales(part, part) if fmt.needs_calibration else LayerScales()
    return CacheEngine(fmt, policy, model.layers, model.kv_heads, model.head_dim, [scales] * model.layers, transforms)


def make_executor(device: str, kv: str = "int4", dtype: torch.dtype = torch.float16, **options: object) -> Executor:
    model = CPU if device == "cpu" else GPU
    engine = make_engine(model, kv, **options)  # type: ignore[arg-type]
    kernels: PageKernels | None = TorchKernels() if device == "cpu" else None
    return Executor(engine, model, kernels, dtype)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 11 + index * index * 3 + index * 5) % 37 for index in range(length)]


@pytest.mark.parametrize("kv", ["int4", "int8", "k8v4", "int8-static"])
def test_chunks_and_generation_are_the_oracle(device: str, kv: str) -> None:
    """A prompt of several chunks beside short ones; generation across two page borders, through a graph and not."""
    executor = make_executor(device, kv)
    for request, length in enumerate((442, 63, 64)):
        executor.submit(request, prompt(length, request))
    executor.prefill(0, 1, 2)
    executor.generate(2)
    executor.generate(8, graph=True)
    executor.generate(2)
    assert executor.checked > 2 * 3 * 12  # layers, requests, tokens; and chunks


@pytest.mark.parametrize("policy", [PagePolicy(0, 0), PagePolicy(2, 3)], ids=str)
def test_other_page_policies(device: str, policy: PagePolicy) -> None:
    executor = make_executor(device, policy=policy)
    executor.submit(0, prompt(380))
    executor.prefill(0)
    executor.generate(8, graph=True)


def test_a_basis_of_k_and_bfloat16(device: str) -> None:
    executor = make_executor(device, dtype=torch.bfloat16, basis=True)
    executor.submit(0, prompt(316))
    executor.prefill(0)
    executor.generate(6, graph=True)


def test_graphs_that_were_captured_on_dummies(device: str) -> None:
    """Pages that no dummy ever wrote are read in the warm-up; the graphs then serve requests with the same ids."""
    executor = make_executor(device)
    for batch in (1, 2):
        executor.warm_up(batch, 700)
    for request in range(2):
        executor.submit(request, prompt(250, request))
    executor.prefill(0, 1)
    executor.generate(8, graph=True)


def test_a_prefix_is_reused_and_changes_nothing(device: str) -> None:
    """The second request takes over whole pages of the first one's prompt and answer; outputs are the oracle's."""
    executor = make_executor(device)
    executor.submit(0, prompt(378))
    executor.prefill(0)
    executor.submit(1, prompt(378) + prompt(20, 5))  # while the first one runs
    executor.prefill(1)
    assert executor.started == {0: 0, 1: 320}
    executor.generate(9, graph=True)
    answered = list(executor.running[0].tokens)
    executor.finish(0)
    executor.submit(2, answered + prompt(9, 3))
    executor.prefill(2)
    assert executor.started[2] == len(answered) // 64 * 64
    executor.generate(5, graph=True)


def test_a_match_without_its_fp16_pages_is_computed_again(device: str) -> None:
    """TensorRT-LLM still matches a prefix whose fp16 pages are gone; then the prompt starts further back, exactly."""
    executor = make_executor(device)
    executor.submit(0, prompt(330))
    executor.prefill(0)
    executor.finish(0)
    ledger = executor.manager.ledger
    blocks = list(ledger._slot_of)
    for block in blocks:  # as if other requests had needed all slots
        ledger._free.append(ledger._slot_of.pop(block))
    executor.submit(1, prompt(330) + prompt(4, 1))
    executor.submit(2, prompt(330) + prompt(7, 2))  # shares blocks with the one before, in the same step
    executor.prefill(1, 2)
    executor.generate(10)
    assert executor.started[1] == 0 and executor.started[2] in (0, 256)  # a chunk later, pages are there again


@pytest.mark.parametrize("batch", [1, 3, pytest.param(64, marks=pytest.mark.gpu)])
def test_batches_that_come_and_go(device: str, batch: int) -> None:
    """Requests end and begin; graphs of several sizes, filled up with a dummy; slots run over many requests."""
    executor = make_executor(device, "int8")
    if batch > executor.model.max_batch:
        pytest.skip("a batch of 64 is for the GPU")
    for turn in range(3):
        for place in range(batch):
            executor.submit(10 * turn * batch + place, prompt(70 + 9 * place % 200, turn + place))
        executor.prefill(*executor.running, check=turn == 0)
        executor.generate(6, graph=True)
        for request in list(executor.running)[: batch // 2 + 1]:
            executor.finish(request)
        for request in list(executor.running):
            executor.generate(1, check=turn == 0)
            executor.finish(request)


def test_blocks_and_slots_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that holds two prompts, fp16 pages for hardly more: everything is handed out again and again."""
    model = Model(max_tokens=64 * 14, max_batch=2)
    monkeypatch.setattr(manager_module, "count_slots", lambda *_: 8)
    executor = Executor(make_engine(model), model, TorchKernels(), torch.float16)
    for turn in range(4):
        executor.submit(2 * turn, prompt(318, turn))
        executor.prefill(2 * turn)
        executor.submit(2 * turn + 1, prompt(318, turn % 2))  # a prefix that may have been evicted by now
        executor.prefill(2 * turn + 1)
        executor.generate(4)
        for request in list(executor.running):
            executor.finish(request)


def test_what_attention_can_not_do(device: str) -> None:
    executor = make_executor(device)
    executor.submit(0, prompt(10))
    executor.prefill(0)
    layer, q = executor.layers[0], torch.zeros(1, executor.model.q_heads * executor.model.head_dim)
    for options in ({"attention_window_size": 128}, {"attention_mask": stand_in.PredefinedAttentionMask.FULL}):
        with pytest.raises(NibbleError, match="allowed causal attention over the whole sequence"):
            layer.forward(q, q, q, executor.metadata, **options)
    with pytest.raises(NibbleError, match="sparse attention, allowed plain causal"):
        type(layer)(0, 4, 32, 2, sparse_attention_config=object())
    with pytest.raises(NibbleError, match="rewinding 2 tokens"):
        executor.manager.rewind_kv_cache(executor.running[0], 2)


def test_blocks_have_exactly_a_page() -> None:
    engine = make_engine(CPU)
    manager = Executor(engine, CPU, TorchKernels(), torch.float16).manager
    pages = manager.layer_pages(1).sealed_pool
    assert pages.is_contiguous() and pages.shape[1:] == (2, engine.page_bytes)
    pages[manager.ledger.page_of(3)] = 7
    whole = manager.impl._pool.view(torch.uint8)
    assert (whole[3, 1] == 7).all() and int((whole == 7).sum()) == whole[3, 1].numel()
    with pytest.raises(NibbleError, match="KV pool of TensorRT-LLM"):
        flat_pages(manager.impl._pool[:, 0], 5, engine)
    assert manager.get_cache_bytes_per_token() == 2 * 2 * engine.page_bytes // 64
    assert type(manager).get_cache_size_per_token(None, stand_in.Mapping()) == manager.get_cache_bytes_per_token()


def test_ranks_take_their_own_heads() -> None:
    assert [local_heads(8, 4, rank) for rank in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert [local_heads(2, 4, rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    engine = make_engine(CPU, "int8-static", basis=True).for_heads(1, 1)
    assert engine.scales[0].k is not None and engine.scales[0].k.scale.shape == (1, 1, 32)
    assert engine.transforms[0].basis is not None and engine.transforms[0].basis.forward.shape == (1, 32, 32)
    odd = make_engine(Model(head_dim=80))
    with pytest.raises(NibbleError, match="head size 80 with int4"):
        odd.check_block()
