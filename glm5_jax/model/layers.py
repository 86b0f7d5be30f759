"""Norms, the gated feed-forward layer, and declarations of parameters."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.model import expert_products, stationary
from glm5_jax.quantization import leaf, products, shards
from pallas_kernels import dispatch

# What `linear` multiplies by.
Weight = Array | stationary.Stationary | leaf.Quantized
Params = dict[str, Any]  # of a layer: arrays, and such weights


@dataclasses.dataclass(frozen=True)
class Param:
    """One array of the parameter tree."""

    shape: tuple[int, ...]
    dims: tuple[str, ...]  # letters of glm5_jax/shapes.py, one an axis
    # One number, or one for each index of the last axis. None: drawn from N(0,
    # initializer_range^2).
    fill: float | tuple[float, ...] | None = None
    is_float32: bool = False  # computed in float32 whatever the activations' dtype
    is_kept_float32: bool = False  # and stored in it, whatever param_dtype
    # Of a matrix that decoding multiplies by with `linear` alone, the dims of its
    # input, which come first; 0 for all else.
    num_in: int = 0

    def dtype(self, config: config_lib.ModelConfig) -> str:
        """Storage dtype."""
        return "float32" if self.is_kept_float32 else config.param_dtype

    def stacked(self, repeats: int) -> "Param":
        """Declares the same array for each layer of a scan, stacked."""
        return dataclasses.replace(
            self, shape=(repeats, *self.shape), dims=("L", *self.dims)
        )


def scale(size: int, dim: str) -> Param:
    """A norm's weight."""
    return Param((size,), (dim,), fill=1.0, is_float32=True)


def bias(size: int, dim: str) -> Param:
    """An additive vector."""
    return Param((size,), (dim,), fill=0.0, is_float32=True)


def cast(params: Any, table: Any, dtype: str) -> Any:
    """Casts parameters to their dtypes of computation; codes stay codes."""

    def to(param: Param, x: Any) -> Any:
        if isinstance(x, leaf.Quantized):
            return x
        return x.astype(jnp.float32 if param.is_float32 else dtype)

    return jax.tree.map(to, table, params, is_leaf=lambda x: isinstance(x, Param))


def fetched(params: Any, table: Any, dtype: str, num_rows: int | None = None) -> Any:
    """Casts parameters, then gathers their shards from other devices.

    Args:
      params: the tree.
      table: declares them.
      dtype: of the computation.
      num_rows: rows of this device, to which matrices need not come if it takes fewer
        bytes to send the rows to them; None gathers all.
    """

    def join(param: Param, x: Any) -> Any:
        dims, num_in = param.dims, param.num_in
        if isinstance(x, expert_products.OfLayer):
            return x
        of_rows = "float32" if param.is_float32 else dtype
        if num_rows is not None and stationary.pays(x, dims, num_in, num_rows, of_rows):
            return stationary.stored(x, dims, num_in)
        if isinstance(x, leaf.Quantized):
            return shards.fetched(x, dims)
        return collectives.fetched(x, dims)

    params = cast(params, table, dtype)
    return jax.tree.map(join, table, params, is_leaf=lambda x: isinstance(x, Param))


def linear(
    x: Float[Array, "*input"],
    w: Weight,
    num_in: int = 1,
    precision: lax.Precision | None = None,
) -> Float[Array, "*output"]:
    """Contracts the last `num_in` dims of x with the first of w.

    It is one product of two matrices, since XLA on CPU lays out the gradient of a
    product with several free dims so that it takes twice as long (117 against 57 ms,
    docs/log.md). A quantized matrix knows the number of its input dims.
    """
    if isinstance(w, leaf.Quantized):
        return products.dot(x, w)
    if isinstance(w, stationary.Stationary):
        return stationary.linear(x, w, functools.partial(_float32, precision=precision))
    free = x.ndim - num_in
    if dispatch.platform() != "cpu":
        contracted = tuple(range(free, x.ndim)), tuple(range(num_in))
        return lax.dot_general(x, w, (contracted, ((), ())), precision=precision)
    size = math.prod(w.shape[:num_in])
    y = jnp.matmul(x.reshape(-1, size), w.reshape(size, -1), precision=precision)
    return y.reshape(*x.shape[:free], *w.shape[num_in:])


def einsum(
    formula: str, x: Float[Array, "*input"], w: Array | leaf.Quantized
) -> Float[Array, "*output"]:
    """Contracts x with a weight over any dims, where `linear` cannot."""
    if isinstance(w, leaf.Quantized):
        w = leaf.dequantized(w, x.dtype)
    return jnp.einsum(formula, x, w)


def linear_of_columns(
    x: Float[Array, "*input"],
    w: Weight,
    *arrangements: Callable[[Array], Array],
) -> list[Array]:
    """Returns linear(x, arrange(w)) for functions that select and order columns of w.

    The columns of the product can be arranged instead, with the same result; in
    decoding this is cheaper, as x has fewer rows than w.
    """
    is_array = not isinstance(w, stationary.Stationary | leaf.Quantized)
    if not is_array or math.prod(x.shape[:-1]) < w.shape[0]:
        y = linear(x, w)
        return [arrange(y) for arrange in arrangements]
    return [linear(x, arrange(w)) for arrange in arrangements]


def _float32(
    x: Float[Array, "t input"],
    w: Float[Array, "input output"],
    precision: lax.Precision | None,
) -> Float[Array, "t output"]:
    """Returns a product that other devices' products are added to."""
    return jnp.matmul(x, w, precision=precision, preferred_element_type=jnp.float32)


def rms_norm(
    x: Float[Array, "*n D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "*n D"]:
    """Divides x by its root mean square, in float32: bfloat16 squares are inexact."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * _last(weight, y)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*n D"],
    weight: Float[Array, " D"],
    shift: Float[Array, " D"],
    eps: float,
) -> Float[Array, "*n D"]:
    """Computes (x - mean) / std * weight + shift, in float32."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * _last(weight, y) + _last(shift, y)).astype(x.dtype)


def _last(vector: Float[Array, " D"], x: Float[Array, "*n D"]) -> Array:
    """Gives a vector the rank of x."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def swiglu_table(hidden: int, width: int) -> dict[str, Param]:
    """Declares the parameters of `swiglu`."""
    return {
        "gate_proj": Param((hidden, width), ("D", "F"), num_in=1),
        "up_proj": Param((hidden, width), ("D", "F"), num_in=1),
        "down_proj": Param((width, hidden), ("F", "D"), num_in=1),
    }


def swiglu(params: Params, x: Float[Array, "*n D"]) -> Float[Array, "*n D"]:
    """Computes W_down (silu(W_gate x) * W_up x)."""
    gate = jax.nn.silu(linear(x, params["gate_proj"]))
    y = linear(gate * linear(x, params["up_proj"]), params["down_proj"])
    return collectives.total(y, collectives.SHARES)
