"""The serve stage: a built engine behind the real Triton Inference Server."""
