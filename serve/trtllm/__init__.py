"""Serves engines for TensorRT-LLM with Triton: model repositories, launch commands, a client that speaks to both."""
