"""Parameters whose tensors hold codes, as quantized leaves that are read in windows."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.quantization import leaf as quantized
from glm5_jax.quantization import schemes
from glm5_jax.weights import coded_tensor, huggingface
from glm5_jax.weights import huggingface_names as names_lib


def opened(
    path: leaves_lib.Path, leaf: huggingface.StoredLeaf
) -> leaves_lib.Leaf | quantized.Quantized:
    """Returns a leaf with leaves for codes and scales; unchanged if it has no codes.

    A parameter that is only partly coded, or that no product takes as codes, is read
    as floats. Codes that no sum of integers takes are multiplied by unrounded rows.
    """
    pieces = leaf.pieces
    tensors = [tensor for tensor, _, _ in pieces.values()]
    if not all(isinstance(tensor, coded_tensor.CodedTensor) for tensor in tensors):
        return leaf
    forms = {(x.kind, x.block, x.activations) for x in tensors}
    if len(forms) > 1 or path[-1] not in schemes.NUM_IN:
        return leaf
    tensor, stored, part = next(iter(pieces.values()))
    num_in = schemes.NUM_IN[path[-1]]
    layout = coded_tensor.layout(tensor, stored, part, num_in)
    has_groups_of_heads = num_in > 1 and any(layout.blocks[:num_in])
    if path[-1] in schemes.BOTH_WAYS or has_groups_of_heads:
        # Sums of integers take groups of a single input dim.
        layout = dataclasses.replace(layout, activations="same")
    codes = {index: (x.codes, own, p) for index, (x, own, p) in pieces.items()}
    kind = np.dtype(jnp.float8_e4m3fn if layout.kind == "fp8" else np.int8)
    values: leaves_lib.Leaf = huggingface.StoredLeaf(leaf.shape, kind, codes)
    if layout.packed_axis is not None:
        values = _PackedLeaf(values, layout)
    scales = _ScaleLeaf(quantized.scale_shape(leaf.shape, layout), pieces, layout)
    return quantized.Quantized(values, scales, layout)


class _PackedLeaf(leaves_lib.Leaf):
    """int4 codes, two a byte."""

    def __init__(self, codes: leaves_lib.Leaf, layout: quantized.Layout) -> None:
        """Takes the codes, one a byte."""
        assert layout.packed_axis is not None
        self._codes, self._layout = codes, layout
        shape = quantized.abstract(codes.shape, layout).values.shape
        self.shape, self.dtype = shape, np.dtype(np.uint8)
        self._axis = len(shape) + layout.packed_axis

    def read(self, window: leaves_lib.Window) -> np.ndarray:
        """Reads twice as many codes, and packs them."""
        axis = self._axis
        cut = slice(2 * window[axis].start, 2 * window[axis].stop)
        codes = self._codes.read((*window[:axis], cut, *window[axis + 1 :]))
        return np.asarray(quantized.packed(jnp.asarray(codes), self._layout))


@dataclasses.dataclass
class _ScaleLeaf(leaves_lib.Leaf):
    """Scales of a parameter's matrices."""

    shape: tuple[int, ...]
    # Index in the parameter's stack -> tensor, its layout, and the part of it.
    pieces: dict[
        tuple[int, ...], tuple[coded_tensor.CodedTensor, names_lib.Layout, int]
    ]
    layout: quantized.Layout
    dtype: np.dtype = dataclasses.field(default_factory=lambda: np.dtype(np.float32))

    def read(self, window: leaves_lib.Window) -> np.ndarray:
        """Reads the scale of the first weight of each block."""
        depth = len(self.shape) - len(self.layout.blocks)
        out = np.empty([w.stop - w.start for w in window], np.float32)
        for index in itertools.product(
            *(range(w.start, w.stop) for w in window[:depth])
        ):
            here = tuple(i - w.start for i, w in zip(index, window, strict=False))
            out[here] = self._matrix(index)[window[depth:]]
        return out

    def _matrix(self, index: tuple[int, ...]) -> np.ndarray:
        """Returns all scales of a matrix."""
        tensor, stored, part = self.pieces[index]
        sizes = stored.parts[part]
        whole: Any = tuple(slice(0, n) for n in sizes)
        scales = stored.read(tensor.whole_scales, part, whole)
        steps = zip(self.layout.blocks, sizes, strict=True)
        return scales[tuple(slice(None, None, block or n) for block, n in steps)]
