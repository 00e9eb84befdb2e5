"""The tiny model of conftest loads through nibble.models like any other."""

from __future__ import annotations

from pathlib import Path

import torch

from nibble.models import ModelShape, load_model, load_tokenizer, read_shape


def test_tiny_llama_loads_and_its_tokenizer_round_trips(tiny_llama_dir: Path) -> None:
    model, tokenizer = load_model(tiny_llama_dir), load_tokenizer(tiny_llama_dir)
    text = "Grüße, 你好!\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == model.config.eos_token_id == 258
    assert read_shape(tiny_llama_dir) == ModelShape(num_layers=2, num_kv_heads=2, head_dim=32, max_positions=2048)
    assert torch.isfinite(model(torch.tensor([ids])).logits).all()
    assert not any(parameter.requires_grad for parameter in model.parameters())
