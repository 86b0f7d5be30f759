"""What decoding remembers: a latent row a layer, and an indexer key a full layer.

The whole stack's cache travels through the scan over layers as one carry, so that a
step writes one row a layer in place and copies nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pallas_kernels
from glm5_jax import config as config_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import indexer
from pallas_kernels import dispatch, selection

FEW = 8  # new tokens of a sequence for which a decoding kernel is made
_LANES = 128  # of a TPU's tile


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Rows 0 .. lengths - 1 of each sequence are filled."""

    kv: Float[Array, "L B S c"]  # [latent | rotated key | zeros], see `width`
    k_index: Float[Array, "f B S J"]  # f = layers that own an indexer
    lengths: Int[Array, " B"]


def width(config: config_lib.ModelConfig) -> int:
    """Numbers of a row: C + R, on a TPU as many as fill its tiles.

    XLA would turn an argument with other rows to save their padding, and a program
    would turn it back, twice the cache's room: 1.12 GiB of 4 layers of GLM-5.
    """
    size = config.kv_lora_rank + config.qk_rope_head_dim
    return -(-size // _LANES) * _LANES if dispatch.platform() == "tpu" else size


def widened(x: Float[Array, "*b c"], size: int) -> Float[Array, "*b d"]:
    """Widens it with zeros behind."""
    missing = size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def empty(config: config_lib.ModelConfig, batch: int, capacity: int) -> Cache:
    """A cache for `capacity` tokens a sequence."""
    num_layers, num_full = config.num_hidden_layers, sum(config.is_full_index_layer)
    return Cache(
        kv=jnp.zeros((num_layers, batch, capacity, width(config)), config.dtype),
        k_index=jnp.zeros(
            (num_full, batch, capacity, config.index_head_dim), config.dtype
        ),
        lengths=jnp.zeros(batch, jnp.int32),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reader:
    """A cache, the layer that looks at it, and the selection that layers share."""

    cache: Cache  # of B sequences
    slots: Int[Array, " b"] | None  # those that the tokens belong to; None: all B
    layer: Int[Array, ""]
    full_layer: Int[Array, ""]
    selected: Int[Array, "b T K"] | None  # ascending, -1 padded; None: all keys

    def append(self, kv: Float[Array, "b T c"]) -> "Reader":
        """Writes the rows of the new tokens behind those of each sequence."""
        cache = self.cache
        kv = widened(kv, cache.kv.shape[-1])
        new = cache.kv.at[(self.layer, *self._grid(kv))].set(kv)
        return dataclasses.replace(self, cache=dataclasses.replace(cache, kv=new))

    def select(
        self,
        q: Float[Array, "b T I J"],
        k: Float[Array, "b T J"],
        w: Float[Array, "b T I"],
        context: context_lib.Context,
        topk: int,
    ) -> "Reader":
        """Writes the indexer's keys and selects anew, where there is a choice."""
        cache = self.cache
        k_index = cache.k_index.at[(self.full_layer, *self._grid(k))].set(k)
        selected = self.selected
        if selected is not None and q.shape[1] > FEW:
            keys = self._sequences(k_index, self.full_layer)
            # What is padding may lie behind the end; a query's keys, before the query.
            keys = jnp.pad(keys, [(0, 0), (0, q.shape[1]), (0, 0)])
            selected = pallas_kernels.indexer_topk(
                q, keys, w, context.lo, context.hi, topk=topk
            )
        elif selected is not None:
            keys, table = self._pages(k_index, self.full_layer)
            selected = pallas_kernels.decode_indexer_topk(
                q, keys, w, context.lo, context.hi, table, topk=topk
            )
        return dataclasses.replace(
            self,
            cache=dataclasses.replace(cache, k_index=k_index),
            full_layer=self.full_layer + 1,
            selected=selected,
        )

    def attend(
        self,
        q: Float[Array, "b T N c"],
        context: context_lib.Context,
        scale: float,
        value_dim: int,
    ) -> Float[Array, "b T N C"]:
        """Attention in the latent space to the selected rows, or to all visible."""
        q = widened(q, self.cache.kv.shape[-1])
        selected, options = self.selected, {"scale": scale, "value_dim": value_dim}
        if selected is not None and q.shape[1] <= FEW:
            rows, table = self._pages(self.cache.kv, self.layer)
            return pallas_kernels.decode_sparse_mla(
                q, rows, selected, table, **options
            )[0]
        kv = self._sequences(self.cache.kv, self.layer)
        if selected is not None:
            return pallas_kernels.sparse_mla(q, kv, selected, **options)[0]
        keep = selection.visible(context.lo, context.hi, kv.shape[1])
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        scores = dot("btnc,bsc->btns", q, kv)
        scores = jnp.where(keep[:, :, None], scores * scale, -1e30)
        probs = jax.nn.softmax(scores, axis=-1).astype(kv.dtype)
        return jnp.einsum("btns,bsc->btnc", probs, kv[..., :value_dim])

    def next(self) -> "Reader":
        """The same cache, seen by the next layer."""
        return dataclasses.replace(self, layer=self.layer + 1)

    def _grid(self, new: Float[Array, "b T x"]) -> tuple[Array, Array]:
        """Indices (sequence, position) of the new tokens; JAX drops those outside."""
        lengths, slots = self.cache.lengths, self.slots
        if slots is None:
            slots = jnp.arange(len(lengths))
        else:
            lengths = lengths[slots]
        return slots[:, None], lengths[:, None] + jnp.arange(new.shape[1])[None]

    def _sequences(
        self, stack: Float[Array, "L B S x"], layer: Int[Array, ""]
    ) -> Float[Array, "b S x"]:
        """A copy of a layer's rows; worth it where many tokens look at them."""
        rows = stack[layer]
        return rows if self.slots is None else rows[self.slots]

    def _pages(
        self, stack: Float[Array, "L B S x"], layer: Int[Array, ""]
    ) -> tuple[Float[Array, "P S x"], Int[Array, "b 1"]]:
        """The rows of all layers as pages, and where those of a layer are: no copy."""
        batch = stack.shape[1]
        slots = jnp.arange(batch) if self.slots is None else self.slots
        slots = jnp.minimum(slots, batch - 1)  # a kernel must find every page it reads
        table = layer * batch + slots[:, None]
        return stack.reshape(-1, *stack.shape[2:]), table


def reader(
    config: config_lib.ModelConfig,
    cache: Cache,
    shape: tuple[int, int],
    slots: Int[Array, " b"] | None = None,
) -> Reader:
    """A reader at the first layer, for `shape` = (b, T) new tokens."""
    zero = jnp.zeros((), jnp.int32)
    selected = None
    if indexer.selects(config, cache.kv.shape[2]):
        selected = jnp.full((*shape, config.index_topk), -1, jnp.int32)
    return Reader(cache, slots, zero, zero, selected)
