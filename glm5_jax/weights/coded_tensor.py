"""A stored matrix of codes and scales, as a Hugging Face folder holds it.

It reads as the float32 products of the two, in windows, or gives codes and scales for a
quantized leaf of the model (quantization/leaf.py).
"""

import dataclasses
import math
from typing import Any, Literal

import numpy as np

from glm5_jax.quantization import leaf
from glm5_jax.weights import huggingface_names as names_lib


@dataclasses.dataclass(frozen=True)
class CodedTensor:
    """Codes and scales of a file.

    Attributes:
      codes: reads windows [rows, columns] of codes, as a safetensors tensor does.
      scales: reads windows of the scales, one a block.
      block: height and width of a block; the last ones may be smaller.
      kind: of the codes.
      activations: how a product rounds its other factor.
    """

    codes: Any
    scales: Any
    block: tuple[int, int] = (128, 128)
    kind: leaf.Kind = "fp8"
    activations: Literal["same", "int8"] = "same"

    @property
    def dtype(self) -> str:
        """Returns the dtype that `[]` gives, float32."""
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the weight."""
        return self.codes.shape

    def __getitem__(self, window: tuple[slice, ...]) -> np.ndarray:
        """Reads and multiplies a window, which may cut through blocks."""
        return self.codes[window].astype(np.float32) * self.whole_scales[window]

    @property
    def whole_scales(self) -> "RepeatedScales":
        """Returns a view with a scale for every weight."""
        return RepeatedScales(self)


@dataclasses.dataclass(frozen=True)
class RepeatedScales:
    """The scale of each weight, read in windows."""

    tensor: CodedTensor

    def __getitem__(self, window: tuple[slice, ...]) -> np.ndarray:
        """Reads the scales of a window of weights."""
        (height, width), shape = self.tensor.block, self.tensor.shape
        (top, bottom, _), (left, right, _) = (
            cut.indices(n) for cut, n in zip(window, shape, strict=True)
        )
        scales = self.tensor.scales[
            top // height : -(-bottom // height), left // width : -(-right // width)
        ]
        rows = np.arange(top, bottom) // height - top // height
        columns = np.arange(left, right) // width - left // width
        return scales.astype(np.float32)[rows][:, columns]


@dataclasses.dataclass(frozen=True)
class PackedCodes:
    """int4 codes of a tensor whose int32 hold eight each, the first in the lowest bits.

    A code is stored as code + 8 (the format "pack-quantized" of compressed-tensors).
    """

    words: Any
    shape: tuple[int, ...]

    def __getitem__(self, window: tuple[slice, ...]) -> np.ndarray:
        """Reads a window of codes, int8."""
        rows, columns = window
        left, right, _ = columns.indices(self.shape[1])
        words = self.words[rows, left // 8 : -(-right // 8)].view(np.uint32)
        codes = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
        codes = codes.reshape(len(words), 8 * words.shape[1]).astype(np.int8) - 8
        return codes[:, left % 8 : left % 8 + right - left]


def packed(codes: np.ndarray) -> np.ndarray:
    """Returns the int32 of int4 codes [rows, columns], as `PackedCodes` reads them."""
    parts = (codes.astype(np.int16) + 8).astype(np.uint32)
    parts = parts.reshape(len(codes), codes.shape[1] // 8, 8)
    parts = parts << np.arange(0, 32, 4, dtype=np.uint32)
    return np.bitwise_or.reduce(parts, axis=-1).view(np.int32)


def layout(
    tensor: CodedTensor, stored: names_lib.Layout, part: int, num_in: int
) -> leaf.Layout:
    """Returns the layout of the leaf whose matrices are stored so.

    A stored dim may hold two dims of the leaf, as the rows of q_b_proj hold heads and
    their dims. Blocks that cross from head to head are cut: every weight keeps its
    scale, and some scales are repeated.

    Args:
      tensor: codes and scales.
      stored: how the tensor holds the matrix.
      part: of a tensor that holds several matrices.
      num_in: input dims of the matrix.
    """
    sizes = dict(zip(stored.natural, stored.parts[part], strict=True))
    blocks = {}
    for letters, size, block in zip(
        stored.groups, stored.shape, tensor.block, strict=True
    ):
        first, *others = letters
        if block >= size:
            blocks |= dict.fromkeys(letters, leaf.WHOLE)
        elif not others:
            blocks[first] = block
        else:
            last = others[-1]
            own = math.gcd(block, stored.sizes[last], sizes[last], stored.starts[part])
            blocks |= dict.fromkeys(letters, 1) | {last: own}
    return leaf.Layout(
        tensor.kind,
        tuple(blocks[letter] for letter in stored.natural),
        num_in,
        tensor.activations,
    )
