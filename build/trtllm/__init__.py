"""Engines for TensorRT-LLM 1.2.1: its checkpoint, its builder's call and rules, and what its runtime makes of them."""
