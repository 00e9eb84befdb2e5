"""The names that Gluon, which is young, changed between Triton 3.6 and 3.9."""

from __future__ import annotations

# Functions for the device have no types to check: Triton traces them.
# mypy: disable-error-code="no-untyped-def"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

wait_for_warpgroup = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
start_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(memory, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory as fp16 of another shape."""
    if REINTERPRETS:
        view = memory.reinterpret(gl.float16, shape, layout)
    else:
        view = memory._reinterpret(gl.float16, shape, layout)
    return view
