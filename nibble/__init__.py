"""NibbleKV: an int8 or int4 KV cache for language models, with a measured statement of what it costs.

The library under the stages (`calibrate`, `build`, `serve`, `eval`). Dependencies run one way:
formats -> quantizer, packing -> reference -> runtime -> the stages.
"""

import os

__version__ = "0.1.0"

# torch's CPU threads wait for each other by spinning, for milliseconds unless told otherwise before torch is loaded.
# Where the server, its clients or a second engine share the cores, a spinning thread keeps the core from the thread it
# waits for, and a step takes ten times as long. A few microseconds of spinning keep what it is good for.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
