"""What decoding remembers: a latent row a layer, and an indexer key a full layer.

The whole stack's cache travels through the scan over layers as one carry, so that a
step writes one row a layer in place and copies nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm5_jax import config as config_lib
from glm5_jax.model import context as context_lib
from pallas_kernels import indexer_topk


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Rows 0 .. lengths - 1 of each sequence are filled."""

    kv: Float[Array, "L B S c"]  # [latent | rotated key], c = C + R
    k_index: Float[Array, "f B S J"]  # f = layers that own an indexer
    lengths: Int[Array, " B"]


def empty(config: config_lib.ModelConfig, batch: int, capacity: int) -> Cache:
    """A cache for `capacity` tokens a sequence."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    num_layers, num_full = config.num_hidden_layers, sum(config.is_full_index_layer)
    return Cache(
        kv=jnp.zeros((num_layers, batch, capacity, width), config.dtype),
        k_index=jnp.zeros(
            (num_full, batch, capacity, config.index_head_dim), config.dtype
        ),
        lengths=jnp.zeros(batch, jnp.int32),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reader:
    """A cache, the layer that looks at it, and the selection that layers share."""

    cache: Cache
    layer: Int[Array, ""]
    full_layer: Int[Array, ""]
    selection: Int[Array, "B T K"] | None  # ascending, -1 padded; None: all keys

    def append(self, kv: Float[Array, "B T c"]) -> "Reader":
        """Writes the rows of the new tokens behind those of each sequence."""
        cache = self.cache
        new = cache.kv.at[(self.layer, *_grid(cache.lengths, kv))].set(kv)
        return dataclasses.replace(self, cache=dataclasses.replace(cache, kv=new))

    def select(
        self,
        q: Float[Array, "B T I J"],
        k: Float[Array, "B T J"],
        w: Float[Array, "B T I"],
        context: context_lib.Context,
        topk: int,
    ) -> "Reader":
        """Writes the indexer's keys and selects anew, where there is a choice."""
        cache = self.cache
        grid = _grid(cache.lengths, k)
        k_index = cache.k_index.at[(self.full_layer, *grid)].set(k)
        selection = self.selection
        if selection is not None:
            keys = k_index[self.full_layer]
            selection = indexer_topk(
                q,
                keys,
                w,
                context.lo,
                context.hi,
                topk=topk,
                implementation="reference",
            )
        return dataclasses.replace(
            self,
            cache=dataclasses.replace(cache, k_index=k_index),
            full_layer=self.full_layer + 1,
            selection=selection,
        )

    def rows(
        self, context: context_lib.Context
    ) -> tuple[Float[Array, "B _ S c"], Bool[Array, "B T S"]]:
        """Cached rows that each query attends to, and which of them are real.

        Where there is no selection one set of rows serves all queries: [B, 1, S, c].
        """
        cache = self.cache
        if self.selection is None:
            s = jnp.arange(cache.kv.shape[2])[None, None]
            keep = (s >= context.lo[..., None]) & (s < context.hi[..., None])
            return cache.kv[self.layer][:, None], keep
        batch = jnp.arange(cache.kv.shape[1])[:, None, None]
        chosen = jnp.maximum(self.selection, 0)
        return cache.kv[self.layer, batch, chosen], self.selection >= 0

    def next(self) -> "Reader":
        """The same cache, seen by the next layer."""
        return dataclasses.replace(self, layer=self.layer + 1)


def reader(config: config_lib.ModelConfig, cache: Cache, num_tokens: int) -> Reader:
    """A reader at the first layer, for `num_tokens` new tokens a sequence."""
    zero = jnp.zeros((), jnp.int32)
    batch, capacity = cache.kv.shape[1:3]
    selection = None
    if config.attention == "sparse" and config.index_topk < capacity:
        shape = (batch, num_tokens, config.index_topk)
        selection = jnp.full(shape, -1, jnp.int32)
    return Reader(cache, zero, zero, selection)


def _grid(lengths: Int[Array, " B"], new: Float[Array, "B T x"]) -> tuple[Array, Array]:
    """Indices (sequence, position) of the new tokens."""
    batch, num_tokens, _ = new.shape
    return jnp.arange(batch)[:, None], lengths[:, None] + jnp.arange(num_tokens)[None]
