"""FP8 checkpoints: codes of 8 bits (e4m3) and a float32 scale for 128x128 of them.

    w = code * scale              rounded to float32, then to the dtype wanted
    scale = max |w| / 448         of the block; 448 is the largest code
    code = e4m3(w / scale)

Blocks at the lower and right border may be smaller. `quantize` recovers the original
scale from weights that are such products in float32. The export of an import therefore
has the same values, and the same bytes where a block uses the code 448. The proof is in
docs/huggingface.md. Other weights get the codes and scales of `leaf.quantize`, bit for
bit, with which quantization-aware training has computed.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float

from glm5_jax import config as config_lib
from glm5_jax.quantization import leaf

BLOCK = 128
MAX_CODE = np.float32(448)
SCALE_SUFFIX = "_scale_inv"  # of the scale's name: it multiplies the codes
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_VALUES = np.frombuffer(bytes(range(256)), _FP8).astype(np.float32)  # of each code
_LARGEST_CODE = int(np.nanargmax(_VALUES))
_LEAST_SCALE = np.finfo(np.float32).smallest_subnormal
_SAMPLE = 4  # weights of a block that reject most wrong scales


def scale_shape(shape: tuple[int, ...], block: tuple[int, ...]) -> list[int]:
    """Returns the number of blocks along each dim of a weight."""
    return [-(-n // b) for n, b in zip(shape, block, strict=True)]


def block_size(config: Any) -> tuple[int, int] | None:
    """Returns height and width of a block, from config.json's quantization_config.

    Raises:
      InputError: the weights are quantized differently.
    """
    if config is None:
        return None
    block = config.get("weight_block_size") if isinstance(config, dict) else None
    known = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    is_pair = isinstance(block, list) and [type(b) for b in block] == [int, int]
    if (
        not is_pair
        or min(block) < 1
        or any(config.get(name, value) != value for name, value in known.items())
        or "quant_method" not in config
    ):
        raise config_lib.InputError(
            f"quantization_config must have {known} and a weight_block_size such as "
            f"[{BLOCK}, {BLOCK}], got {config!r:.300}; take the BF16 release."
        )
    return tuple(block)


def quantization_config(kept: list[str]) -> dict[str, Any]:
    """Returns config.json's quantization_config; `kept` modules are not quantized."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }


class Codes(NamedTuple):
    """Codes [m, n] and the scales of their blocks."""

    codes: np.ndarray
    scales: np.ndarray


def quantize(weights: Float[np.ndarray, "rows columns"]) -> Codes:
    """Quantizes a float32 matrix to codes and scales.

    Where a block's weights are exact float32 products of codes and a scale, that scale
    is used, and nothing is lost. Others get scale and codes of `leaf.quantize`.
    """
    height, width = scale_shape(weights.shape, (BLOCK, BLOCK))
    padded = np.zeros((height * BLOCK, width * BLOCK), np.float32)
    padded[: weights.shape[0], : weights.shape[1]] = weights
    blocks = padded.reshape(height, BLOCK, width, BLOCK).swapaxes(1, 2)
    codes = np.empty(blocks.shape, _FP8)
    scales = np.empty((height, width), np.float32)
    for row in range(height):  # one row of blocks at a time bounds memory
        codes[row], scales[row] = _quantize_blocks(blocks[row])
    whole = codes.swapaxes(1, 2).reshape(padded.shape)
    return Codes(whole[: weights.shape[0], : weights.shape[1]], scales)


def _quantize_blocks(blocks: np.ndarray) -> Codes:
    """Quantizes blocks [n, height, width]."""
    largest = np.abs(blocks).max(axis=(1, 2))
    scales = np.maximum(largest / MAX_CODE, _LEAST_SCALE)
    scales[largest == 0] = 1
    codes = _codes(blocks, scales)
    left = np.flatnonzero(~_are_products(blocks, codes, scales))
    candidates = _possible_scales(largest[left])
    samples = blocks[left, 0, :_SAMPLE][:, None]
    fits = _are_products(samples, _codes(samples, candidates), candidates)
    for i, n in enumerate(left):
        here = slice(n, n + 1)
        for scale in candidates[i, fits[i], None]:
            tried = _codes(blocks[here], scale)
            if _are_products(blocks[here], tried, scale).all():
                codes[here], scales[here] = tried, scale
                break
        else:
            codes[here], scales[here] = _nearest(blocks[here])
    return Codes(codes, scales)


def _nearest(blocks: np.ndarray) -> Codes:
    """Returns codes and scales of blocks, in the operations of `leaf.quantize`."""
    largest = np.abs(blocks).max(axis=(1, 2))
    scales = np.maximum(largest * (1 / MAX_CODE), leaf.TINY)
    ratios = blocks * _beside(1 / scales, blocks)
    return Codes(np.clip(ratios, -MAX_CODE, MAX_CODE).astype(_FP8), scales)


def _possible_scales(largest: np.ndarray) -> np.ndarray:
    """Returns the scales [n, 378] that can have made a block with this largest weight.

    Product and quotient are both rounded to float32, so the scale is the quotient or
    one of its neighbours. Large codes come first, since scales are chosen to use them.
    """
    with np.errstate(over="ignore"):
        quotients = largest[:, None] / _VALUES[_LARGEST_CODE:0:-1]
    above = np.nextafter(quotients, np.float32(np.inf))
    below = np.nextafter(quotients, np.float32(0))
    candidates = np.stack([quotients, above, below], axis=2)
    candidates = candidates.reshape(len(largest), 3 * _LARGEST_CODE)
    return np.clip(candidates, _LEAST_SCALE, np.finfo(np.float32).max)


def _codes(weights: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the nearest codes; weights may have one or two more dims than scales."""
    with np.errstate(over="ignore"):  # too small a scale gives NaN
        return (weights / _beside(scales, weights)).astype(_FP8)


def _are_products(
    weights: np.ndarray, codes: np.ndarray, scales: np.ndarray
) -> np.ndarray:
    """Returns whether codes and scale give exactly the weights, for each scale."""
    with np.errstate(over="ignore"):
        products = _VALUES[codes.view(np.uint8)] * _beside(scales, weights)
    return (products == weights).all(axis=tuple(range(np.ndim(scales), weights.ndim)))


def _beside(scales: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.reshape(scales, np.shape(scales) + (1,) * (weights.ndim - scales.ndim))
