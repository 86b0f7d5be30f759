"""Makes gated_delta.npz: the weights and outputs of transformers' Gated DeltaNet.

    /tmp/oracle/bin/python tests/golden/make_gated_delta.py

in the environment of make_golden.py. Qwen3NextGatedDeltaNet with 2 heads: its weights
by name, an input x of two rows and the outputs of whole rows.
"""

import pathlib

import numpy as np
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

FILE = pathlib.Path(__file__).parent / "gated_delta.npz"
B, T, D, N, H, O, TAPS = 2, 9, 8, 2, 4, 3, 4


@torch.no_grad()
def main() -> None:
    """Writes the file."""
    torch.manual_seed(0)
    config = qwen3_next.Qwen3NextConfig(
        hidden_size=D,
        linear_num_value_heads=N,
        linear_num_key_heads=N,
        linear_key_head_dim=H,
        linear_value_head_dim=O,
        linear_conv_kernel_dim=TAPS,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=1e-5,
    )
    module = qwen3_next.Qwen3NextGatedDeltaNet(config, 0).eval()
    for name, weight in module.named_parameters():
        if name == "A_log":
            weight.copy_(torch.tensor([-1.0, 0.5]))
        elif name in ("dt_bias", "norm.weight"):
            weight.copy_(1 + 0.3 * torch.randn(weight.shape))
        else:
            weight.copy_(0.5 * torch.randn(weight.shape))
    x = torch.randn(B, T, D)
    arrays = {"x": x, "out": module(x)} | dict(module.named_parameters())
    np.savez_compressed(FILE, **{k: v.numpy() for k, v in arrays.items()})


if __name__ == "__main__":
    main()
