"""Sliding windows over MLA: a query reads the last keys of its document only.

Parameters and cached rows are those of MLA without an indexer (mla.py), so that a layer
of a trained model needs no conversion to become a sliding one (GLM-5 2.1.2, arXiv
2602.15763, compares such models with DSA).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glm5_jax import config as config_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model.attention import (
    cache_rows,
    dsa,
    dsa_cached,
    mla,
    protocol,
    window,
)


@dataclasses.dataclass(frozen=True)
class SlidingLatentAttention:
    """MLA over a window of keys; see `protocol.Attention` for the methods."""

    config: config_lib.ModelConfig

    @property
    def _dense(self) -> dsa.SparseLatentAttention:
        """Returns MLA over all the keys that it is shown."""
        config = dataclasses.replace(self.config, attention="dense")
        return dsa.SparseLatentAttention(config, owns_indexer=False)

    def table(self) -> dict[str, Any]:
        """Declares the projections."""
        return self._dense.table()

    def forward(
        self,
        params: dict,
        x: Float[Array, "B T D"],
        context: context_lib.Context,
        shared: Any = None,
        kl_weight: Float[Array, ""] | None = None,
        attended: Any = None,
    ) -> protocol.Output:
        """Attends to the window; it has no indexer, and so no loss of one."""
        context = window.narrowed(context, self.config.variants.sliding_window)
        out = self._dense.forward(params, x, context, attended=attended)
        return out._replace(shared=shared)

    def decode(
        self,
        params: dict,
        x: Float[Array, "b T D"],
        context: context_lib.Context,
        reader: cache_lib.Reader,
    ) -> tuple[Float[Array, "b T D"], cache_lib.Reader]:
        """Runs the absorbed form over the window's rows; the shared value stays."""
        attn, config = params["self_attn"], self.config
        num_new, size = x.shape[1], config.variants.sliding_window
        context = window.narrowed(context, size)
        c_q = mla.query_latent(attn, config, x)
        row = jnp.concatenate(mla.latent(attn, config, x, context), axis=-1)
        form = cache_rows.of_latents(config)
        reader = reader.append("kv", form.store(row))
        num_rows = min(reader.cache.capacity, size + num_new - 1)
        kv, first = reader.latest("kv", num_rows, num_new)
        q = mla.latent_queries(attn, config, c_q, context)
        out = dsa_cached.attend_to_visible(
            cache_rows.padded(q, form.num_numbers),
            form.restore(kv),
            context.lo - first,
            context.hi - first,
            scale=config.softmax_scale,
            value_dim=config.kv_lora_rank,
        )
        return mla.from_latent(attn, out), reader

    def cache_entries(self, capacity: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Declares a latent row for each token."""
        return self._dense.cache_entries(capacity)

    def cached(self, attended: Any) -> dict[str, Array]:
        """Joins latent and rotated key to one row."""
        return self._dense.cached(attended)

    def flops(self, length: int) -> float:
        """Counts scores and values of every head, over the window."""
        config = self.config
        keys = window.mean_keys(length, config.variants.sliding_window)
        width = config.qk_head_dim + config.v_head_dim
        return 2.0 * keys * config.num_attention_heads * width
