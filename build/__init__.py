"""The build stage: a model, its calibration and a KV recipe in, an engine out (`python -m build.run`)."""
