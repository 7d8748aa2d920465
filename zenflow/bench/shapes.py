"""The models that are timed: Qwen2.5's shapes with random weights, and random tokens to feed them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VOCABULARY = 151936
N_BATCHES = 16

# hidden, layers, intermediate, heads, key-value heads
SHAPES = {
    "0.5B": (896, 24, 4864, 14, 2),
    "1.5B": (1536, 28, 8960, 12, 2),
    "3B": (2048, 36, 11008, 16, 2),
    "tiny": (64, 2, 128, 4, 2),
}
TINY_VOCABULARY = 512


def vocabulary(shape: str) -> int:
    """Number of tokens; `tiny` has fewer, so that a CPU can run it."""
    return TINY_VOCABULARY if shape == "tiny" else VOCABULARY


def build_model(shape: str, length: int, device: torch.device, checkpointing: bool) -> torch.nn.Module:
    """A causal model in training mode, weights bf16 on `device`, seeded; embeddings tied, attention by torch's sdpa."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, layers, intermediate, heads, key_value_heads = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=vocabulary(shape),
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=max(4096, length),
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model.train()


def make_batches(shape: str, batch: int, length: int, device: torch.device) -> list[Tensor]:
    """`N_BATCHES` int64 `[batch, length]` of seeded random tokens, on the device: no trainer waits for its data."""
    import torch

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary(shape), (N_BATCHES, batch, length), generator=generator)
    return list(tokens.to(device))
