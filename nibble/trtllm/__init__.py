"""Our KV cache inside TensorRT-LLM 1.2.1's PyTorch runtime, as an outside package.

Nothing of TensorRT-LLM is edited and nothing of it is imported before it is needed: `bootstrap` waits for its modules
and puts our classes where it looks them up. docs/trtllm.md says what has been run of this.
"""
