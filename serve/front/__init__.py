"""An OpenAI-compatible HTTP front over the Triton endpoint: schema, keys, limits, streaming; no model code."""

DEFAULT_PORT = 8003
