"""Writes grouped.npz: grouped-query attention by transformers' Glm4MoeAttention.

It is GLM-4.5's, without QK-norm: half of a head's dims are rotated. Run by hand, with
transformers 5.23.0 and torch:

    python tests/golden/make_grouped.py
"""

import pathlib

import numpy as np
import torch
from transformers.models.glm4_moe import configuration_glm4_moe, modeling_glm4_moe

FILE = pathlib.Path(__file__).parent / "grouped.npz"
TOKENS, WINDOW = 11, 4


def main() -> None:
    """Draws weights and states, and writes the outputs over all keys and a window."""
    torch.manual_seed(0)
    config = configuration_glm4_moe.Glm4MoeConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 2 / 3,
        },
        attn_implementation="eager",
    )
    module = modeling_glm4_moe.Glm4MoeAttention(config, 0).double()
    x = torch.randn(1, TOKENS, config.hidden_size, dtype=torch.float64)
    positions = torch.arange(TOKENS)[None]
    rotations = modeling_glm4_moe.Glm4MoeRotaryEmbedding(config)(x, positions)
    distance = positions.T - positions
    outputs = {}
    for name, window in (("full", TOKENS), ("window", WINDOW)):
        hidden = (distance < 0) | (distance >= window)
        mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, -1e30)
        outputs[name] = module(x, rotations, mask[None, None])[0][0]
    weights = {name: w.T for name, w in module.named_parameters()}
    arrays = {"x": x[0], **outputs, **weights}
    np.savez(FILE, **{k: v.detach().numpy() for k, v in arrays.items()})


if __name__ == "__main__":
    main()
