"""CUDA kernels over the quantized cache: decode attention, append and seal.

Three layers: device code on raw pointers (`cuda/`), launchers that check every argument, and torch custom ops. The
compiler (NVRTC) needs no GPU, so that kernels are built ahead of time and CI compiles all of them. `layout.py` is the
plain PyTorch oracle of the byte order that the kernels read.
"""
