"""Writes compressed.npz: codes as the package compressed-tensors packs and reads them.

python tests/golden/make_compressed.py    # with compressed-tensors 0.20.0 and torch
"""

import pathlib

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.base import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import dequantize

FOLDER = pathlib.Path(__file__).parent
GROUP = 8


def main():
    """Packs codes of 4 bits, and multiplies codes of 4 and 8 bits by their scales."""
    rng = np.random.default_rng(0)
    int4 = rng.integers(-7, 8, (6, 32)).astype(np.int8)
    int8 = rng.integers(-127, 128, (6, 32)).astype(np.int8)
    by_group = rng.uniform(0.01, 1, (6, 32 // GROUP)).astype(np.float32)
    by_channel = rng.uniform(0.01, 1, (6, 1)).astype(np.float32)
    group = QuantizationArgs(
        num_bits=4, strategy=QuantizationStrategy.GROUP, group_size=GROUP
    )
    channel = QuantizationArgs(num_bits=8, strategy=QuantizationStrategy.CHANNEL)
    np.savez(
        FOLDER / "compressed.npz",
        int4=int4,
        int8=int8,
        by_group=by_group,
        by_channel=by_channel,
        packed=pack_to_int32(torch.from_numpy(int4), 4).numpy(),
        int4_weights=dequantize(
            torch.from_numpy(int4), torch.from_numpy(by_group), args=group
        ).numpy(),
        int8_weights=dequantize(
            torch.from_numpy(int8), torch.from_numpy(by_channel), args=channel
        ).numpy(),
    )


if __name__ == "__main__":
    main()
