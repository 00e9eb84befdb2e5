"""NibbleKV: an int8 or int4 KV cache for language models, with a measured statement of what it costs.

The library under the stages (`calibrate`, `build`, `serve`, `eval`). Dependencies run one way:
formats -> quantizer, packing -> reference -> runtime -> the stages.
"""

__version__ = "0.1.0"
