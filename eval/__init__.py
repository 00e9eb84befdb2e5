"""Evaluation stage: what a quantized KV cache costs in quality, memory and speed against the fp16 cache."""
