"""The calibration stage: model and prompts in, the range of each channel of K and V out (`python -m calibrate.run`)."""
