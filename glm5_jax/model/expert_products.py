"""The feed-forward layer of experts: every group of rows through its own expert."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

import pallas_kernels
from glm5_jax.model import remat
from glm5_jax.quantization import leaf, products


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfLayer:
    """The matrices of a layer's experts, still within the stack of all layers.

    A kernel cannot take a slice of a stack: XLA would copy it, which moves as many
    bytes again twice. With the whole stack, the experts of other layers have no rows.
    """

    stack: Float[Array, "L E rows columns"] | leaf.Quantized
    layer: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the layer's matrices."""
        return self.stack.shape[1:]

    def astype(self, dtype: str) -> "OfLayer":
        """Returns the matrices in another dtype; codes stay codes."""
        if isinstance(self.stack, leaf.Quantized):
            return self
        return dataclasses.replace(self, stack=self.stack.astype(dtype))


def swiglu(
    params: dict,
    rows: Float[Array, "M D"],
    sizes: Int[Array, " E"],
    gates: Float[Array, " M"] | None = None,
) -> Float[Array, "M D"]:
    """Runs each group of rows through its expert; rows after the last give zeros.

    Args:
      params: of the experts: a stack for each matrix, or an `OfLayer`.
      rows: sorted by expert.
      sizes: rows of each expert.
      gates: factors of the rows; None for 1.
    """
    gate, up = (
        remat.named(product(rows, params[name], sizes), remat.EXPERTS)
        for name in ("gate_proj", "up_proj")
    )
    hidden = jax.nn.silu(gate) * up
    if gates is not None:
        hidden = hidden * gates[:, None]
    return product(hidden, params["down_proj"], sizes)


def product(
    rows: Float[Array, "M rows"],
    w: Float[Array, "E rows columns"] | OfLayer | leaf.Quantized,
    sizes: Int[Array, " E"],
) -> Float[Array, "M columns"]:
    """Multiplies each group of rows by its matrix."""
    if isinstance(w, leaf.Quantized):
        return products.grouped(rows, w, sizes)
    if not isinstance(w, OfLayer):
        return pallas_kernels.grouped_matmul(rows, w, sizes)
    if isinstance(w.stack, leaf.Quantized):
        return products.grouped(rows, w.stack, sizes, w.layer)
    num_layers, num_experts, *shape = w.stack.shape
    every = jnp.zeros(num_layers * num_experts, sizes.dtype)
    every = lax.dynamic_update_slice_in_dim(every, sizes, w.layer * num_experts, 0)
    # scale/hlo/hbm.py reads the name, and counts one layer's matrices.
    with jax.named_scope(f"layer_of_{num_layers}"):
        return pallas_kernels.grouped_matmul(rows, w.stack.reshape(-1, *shape), every)
