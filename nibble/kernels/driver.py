"""Loading cubins and launching kernels through the CUDA driver, on torch's context and current stream."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch

from nibble.errors import NibbleError
from nibble.kernels.compiler import KernelSource, architecture_of, compile_kernel


@lru_cache
def device_architecture(device_index: int) -> str:
    """The architecture to compile for on that GPU."""
    return architecture_of(torch.cuda.get_device_capability(device_index))


@lru_cache
def multiprocessors(device_index: int) -> int:
    """How many multiprocessors that GPU has."""
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


@cache
def load_function(source: KernelSource, name: str, device_index: int, shared_bytes: int = 0) -> Any:
    """The kernel on that GPU, compiled if it is not in the cache; shared_bytes: dynamic shared memory it may use."""
    from cuda.bindings import driver

    cubin = compile_kernel(source, device_architecture(device_index))
    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # the primary context exists and is current
        module = _checked(driver.cuModuleLoadData(cubin.code), source.title)
        function = _checked(driver.cuModuleGetFunction(module, name.encode()), source.title)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes), source.title)
    return function


def launch(
    function: Any,
    blocks: int,
    threads: int,
    shared_bytes: int,
    parameters: ctypes.Structure,
    *,
    overlaps: bool = False,
    rows: int = 1,
) -> None:
    """Launch on the current stream a kernel that takes one structure, on a grid of blocks x rows.

    overlaps: the kernel waits by itself for the one before it (griddepcontrol), so its launch may overlap that.
    """
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, rows, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = torch.cuda.current_stream().cuda_stream
    if overlaps and torch.cuda.get_device_capability()[0] >= 9:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
    _checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(arguments), 0), "launch")


def _checked(result: tuple[Any, ...], what: str) -> Any:
    error, *values = result
    if int(error) != 0:
        raise NibbleError(f"CUDA driver: {error.name} ({what})")
    return values[0] if values else None
