"""Schemes of quantization: which matrices are rounded, and to what.

All schemes round the projections of attention and indexer, the dense feed-forward
layers, and the experts: the matrices that the FP8 release has in FP8. Embedding and
head, norms, routers, the indexer's head weights and the projection of multi-token
prediction stay: they choose keys, experts and words, and have 1% of the weights.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from glm5_jax import config as config_lib
from glm5_jax.quantization import leaf

NAMES = config_lib.QUANTIZATION_SCHEMES
FP8_BLOCK = 128
GROUP = 128  # inputs that share a scale of an expert's int4 codes
WORD = 8  # int4 codes of an int32, in a Hugging Face folder

# Input dims of the matrices that are rounded; the dims after them are outputs.
NUM_IN = dict.fromkeys(
    (
        *("q_a_proj", "q_b_proj", "kv_a_proj", "k_b_proj", "v_b_proj"),
        *("q_proj", "k_proj", "v_proj", "g_proj"),
        *("wq_b", "wk"),
        *("gate_proj", "up_proj", "down_proj"),
    ),
    1,
) | {"o_proj": 2}
# The absorbed form contracts these along their outputs, where scales differ.
BOTH_WAYS = ("k_b_proj", "v_b_proj")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Codes of the experts and of all other matrices."""

    dense: leaf.Kind
    experts: leaf.Kind
    activations: leaf.Activations = "same"


SCHEMES: dict[str, Scheme] = {
    "int8": Scheme("int8", "int8"),
    "w8a8": Scheme("int8", "int8", "int8"),
    "fp8": Scheme("fp8", "fp8"),
    "w4a16": Scheme("int8", "int4"),
    # GLM-5's (arXiv 2602.15763, section 5).
    "w4a8": Scheme("int8", "int4", "int8"),
    "int4": Scheme("int4", "int4"),
}


def layout_of(
    scheme: Scheme, path: tuple[str, ...], shape: tuple[int, ...]
) -> leaf.Layout | None:
    """Returns the layout of a parameter's matrices; None if it stays as it is.

    Args:
      scheme: of the model.
      path: of the parameter in its tree.
      shape: of one matrix, without the dims of layers and experts.
    """
    is_layer = path[0].startswith("layers_") or path[:2] == ("mtp", "block")
    if not is_layer or path[-1] not in NUM_IN:
        return None
    num_in, kind = NUM_IN[path[-1]], kind_of(scheme, path, shape)
    activations = "same" if path[-1] in BOTH_WAYS else scheme.activations
    if kind == "fp8":
        return leaf.Layout(kind, tuple(_block(FP8_BLOCK, n) for n in shape), num_in)
    if has_groups(kind, path):
        group = _block(group_of(shape[0]), shape[0])
        return leaf.Layout(kind, (group, 1), num_in, activations)
    blocks = (leaf.WHOLE,) * num_in + (1,) * (len(shape) - num_in)
    return leaf.Layout(kind, blocks, num_in, activations)


def kind_of(scheme: Scheme, path: tuple[str, ...], shape: tuple[int, ...]) -> leaf.Kind:
    """Returns the codes of a parameter's matrices; see `layout_of`.

    Where int4 codes would not fill bytes of ours, or words of a Hugging Face folder,
    these are int8.
    """
    kind = scheme.experts if "experts" in path else scheme.dense
    num_inputs = math.prod(shape[: NUM_IN[path[-1]]])
    return "int8" if kind == "int4" and (shape[0] % 2 or num_inputs % WORD) else kind


def has_groups(kind: leaf.Kind, path: tuple[str, ...]) -> bool:
    """Returns whether only a group of an output's inputs share a scale, not all."""
    return kind == "int4" and "experts" in path


def group_of(num_inputs: int) -> int:
    """Returns how many inputs share a scale, where there are groups."""
    return math.gcd(GROUP, num_inputs)


def _block(size: int, whole: int) -> int:
    """Returns the size of a block; a dim that is one block may be sharded."""
    return size if size < whole else leaf.WHOLE


def quantized(params: Any, dims: Any, scheme: Scheme) -> Any:
    """Rounds the parameters that a scheme rounds; the others stay.

    Args:
      params: of the model.
      dims: logical dims of each parameter, as a tree.
      scheme: of the model.
    """

    def one(x: jax.Array, layout: leaf.Layout | None) -> Any:
        return x if layout is None else leaf.compiled_quantize(x, layout)

    return _with_layouts(one, params, dims, scheme)


def rounded(params: Any, dims: Any, scheme: Scheme) -> Any:
    """Returns parameters with the values that their codes stand for, in float32.

    Training on these is quantization-aware: the gradient is taken with respect to the
    rounded weights, and moves the parameters themselves (a straight-through estimate).
    """

    def one(x: jax.Array, layout: leaf.Layout | None) -> jax.Array:
        if layout is None:
            return x
        return leaf.dequantized(leaf.quantize(x, layout), jnp.float32)

    return _with_layouts(one, params, dims, scheme)


def abstract(shapes: Any, dims: Any, scheme: Scheme) -> Any:
    """Returns shapes and dtypes of `quantized`."""

    def one(x: Any, layout: leaf.Layout | None) -> Any:
        return x if layout is None else leaf.abstract(tuple(x.shape), layout)

    return _with_layouts(one, shapes, dims, scheme)


def _with_layouts(
    function: Callable[[Any, leaf.Layout | None], Any],
    params: Any,
    dims: Any,
    scheme: Scheme,
) -> Any:
    """Maps a function over parameters and their layouts."""

    def one(path: tuple, x: Any, dims: tuple[str, ...]) -> Any:
        names = tuple(str(key.key) for key in path)
        return function(x, layout_of(scheme, names, tuple(x.shape[stacks(dims) :])))

    return jax.tree_util.tree_map_with_path(one, params, dims)


def stacks(dims: tuple[str, ...]) -> int:
    """Counts the leading dims of a parameter that are layers and experts."""
    return len([*itertools.takewhile(lambda dim: dim in ("L", "E"), dims)])
