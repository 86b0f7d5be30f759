"""Which tensors of a Hugging Face folder hold codes, and which belong to them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from glm5_jax.quantization import leaf
from glm5_jax.weights import (
    coded_tensor,
    compressed_tensors,
    fp8_blocks,
    safetensors_file,
)

FLOATS = ("F32", "BF16", "F16")
FP8_DTYPE = "F8_E4M3"
Tensors = Mapping[str, safetensors_file.Tensor]


@dataclasses.dataclass(frozen=True)
class Coding:
    """How the weights of a folder are coded.

    Attributes:
      block: height and width of FP8 blocks; None without FP8 weights.
      is_compressed: whether it has int8 and int4 weights (compressed_tensors.py).
      activations: of products with these.
    """

    block: tuple[int, int] | None = None
    is_compressed: bool = False
    activations: leaf.Activations = "same"

    def expected(
        self, shapes: Mapping[str, tuple[int, ...]], found: Tensors
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[str, ...]]]:
        """Returns shapes and dtypes of all tensors, those of codes and scales included.

        Args:
          shapes: of the weights, by name.
          found: tensors of the folder.
        """
        all_shapes, dtypes = {}, {}
        for name, shape in shapes.items():
            own = self._entries(name, shape, found)
            all_shapes |= {n: x for n, (x, _) in own.items()}
            dtypes |= {n: kinds for n, (_, kinds) in own.items()}
        return all_shapes, dtypes

    def opened(self, name: str, shape: tuple[int, ...], found: Tensors) -> Any:
        """Returns a weight, to be read lazily: a tensor, or a CodedTensor."""
        own = self._entries(name, shape, found)
        if len(own) == 1:
            return found[name]
        if self.block is not None:
            scales = found[name + fp8_blocks.SCALE_SUFFIX]
            return coded_tensor.CodedTensor(found[name], scales, self.block)
        scales = found[name + compressed_tensors.SCALE]
        block = 1, shape[1] // scales.shape[1]
        words = found.get(name + compressed_tensors.PACKED)
        codes, kind = (
            (found[name], "int8")
            if words is None
            else (coded_tensor.PackedCodes(words, shape), "int4")
        )
        return coded_tensor.CodedTensor(codes, scales, block, kind, self.activations)

    def _entries(
        self, name: str, shape: tuple[int, ...], found: Tensors
    ) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Returns shape and dtypes of the tensors that hold a weight."""
        dtype = found[name].dtype if name in found else ""
        if len(shape) == 2 and self.block is not None and dtype == FP8_DTYPE:
            scales = tuple(fp8_blocks.scale_shape(shape, self.block))
            return {
                name: (shape, (FP8_DTYPE,)),
                name + fp8_blocks.SCALE_SUFFIX: (scales, ("F32",)),
            }
        scales = name + compressed_tensors.SCALE
        words = name + compressed_tensors.PACKED
        if len(shape) == 2 and self.is_compressed and words in found:
            given = found[scales].shape if scales in found else ()
            is_valid = len(given) == 2 and given[1] and shape[1] % given[1] == 0
            return {
                words: ((shape[0], -(-shape[1] // 8)), ("I32",)),
                name + compressed_tensors.SHAPE: ((2,), ("I64",)),
                scales: ((shape[0], given[1] if is_valid else 1), FLOATS),
            }
        if len(shape) == 2 and self.is_compressed and dtype == "I8":
            return {name: (shape, ("I8",)), scales: ((shape[0], 1), FLOATS)}
        return {name: (shape, FLOATS)}


def coding(settings: Any) -> Coding:
    """Returns how a folder's weights are coded, from its quantization_config.

    Raises:
      InputError: they are coded in an unknown way.
    """
    if isinstance(settings, dict) and (
        settings.get("quant_method") == compressed_tensors.METHOD
    ):
        activations = compressed_tensors.activations(settings)
        return Coding(is_compressed=True, activations=activations)
    return Coding(block=fp8_blocks.block_size(settings))
