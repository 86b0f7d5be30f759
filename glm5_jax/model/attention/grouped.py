"""Grouped-query attention (arXiv 2305.13245), as GLM-4.5 has it, perhaps in a window.

N query heads share U heads of keys and values, N / U neighbours each:

    q_n = W_Q,n x    k_u = W_K,u x    v_u = W_V,u x    u = n U // N
    y = sum_n W_O,n sum_s softmax_s(q_n . k_u,s / sqrt(A)) v_u,s

The last R = qk_rope_head_dim of the A = head_dim dims of queries and keys are rotated
by the position: half of them in GLM-4.5 (128 and 64), all where the two are equal. The
order is that of MLA, so that an MLA can be converted (weights/to_variants.py). A token
caches 2 U A numbers: 2,048 in the GQA-8 of the paper's Table 1.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels
from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import layers, rope
from glm5_jax.model.attention import mla, protocol, window
from pallas_kernels import selection as forms


class Attended(NamedTuple):
    """The keys and values that the queries of a layer read."""

    k: Float[Array, "B S U A"]
    v: Float[Array, "B S U A"]


@dataclasses.dataclass(frozen=True)
class GroupedAttention:
    """Grouped-query attention; see `protocol.Attention` for the methods."""

    config: config_lib.ModelConfig
    window: int | None = None  # most keys of a query; None: all of its document

    def table(self) -> dict[str, Any]:
        """Declares the projections; key heads are sharded as query heads are."""
        d, n = self.config.hidden_size, self.config.num_attention_heads
        u, a = self.config.variants.num_key_value_heads, self.config.variants.head_dim
        projections = {
            "q_proj": layers.Param((d, n, a), ("D", "N", "A")),
            "k_proj": layers.Param((d, u, a), ("D", "N", "A")),
            "v_proj": layers.Param((d, u, a), ("D", "N", "A")),
            "o_proj": layers.Param((n, a, d), ("N", "A", "D")),
        }
        return {"self_attn": projections}

    def forward(
        self,
        params: dict,
        x: Float[Array, "B T D"],
        context: context_lib.Context,
        shared: Any = None,
        kl_weight: Float[Array, ""] | None = None,
        attended: Attended | None = None,
    ) -> protocol.Output:
        """Attends with a copy of the keys and values for each query head."""
        attn, context = params["self_attn"], self._narrowed(context)
        with jax.named_scope("attention"):
            q = self._rotated(x, attn["q_proj"], context)
            if attended is None:
                k, v = self._keys_and_values(attn, x, context)
                attended = Attended(collectives.all_keys(k), collectives.all_keys(v))
            copies = q.shape[2] // attended.k.shape[2]
            k, v = (jnp.repeat(rows, copies, axis=2) for rows in attended)
            out, _ = pallas_kernels.dense_attention(
                q, k, v, context.lo, context.hi, scale=self._scale
            )
            y = mla.output(attn, out)
        return protocol.Output(y, shared, attended, None)

    def decode(
        self,
        params: dict,
        x: Float[Array, "b T D"],
        context: context_lib.Context,
        reader: cache_lib.Reader,
    ) -> tuple[Float[Array, "b T D"], cache_lib.Reader]:
        """Attends to cached rows, each of which a group of query heads reads once."""
        attn, context = params["self_attn"], self._narrowed(context)
        k, v = self._keys_and_values(attn, x, context)
        reader = reader.append("k", k).append("v", v)
        size = reader.cache.capacity
        if self.window is not None:
            size = min(size, self.window + x.shape[1] - 1)
        (k, first), (v, _) = (reader.latest(name, size, x.shape[1]) for name in "kv")
        keep = forms.visible(context.lo - first, context.hi - first, size)
        q = self._rotated(x, attn["q_proj"], context)
        q_btuna = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        scores = dot("btuna,bsua->btuns", q_btuna, k) * self._scale
        scores = jnp.where(keep[:, :, None, None], scores, -1e30)
        probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("btuns,bsua->btuna", probs, v)
        return mla.output(attn, out.reshape(q.shape)), reader

    def queries_and_keys(
        self, params: dict, x: Float[Array, "B T D"], context: context_lib.Context
    ) -> tuple[Float[Array, "B T N A"], Float[Array, "B S N A"], context_lib.Context]:
        """Returns scaled queries, a key for each query head, and the keys in sight.

        For measurements: their products are the attention's logits.
        """
        attn, context = params["self_attn"], self._narrowed(context)
        q = self._rotated(x, attn["q_proj"], context) * self._scale
        k, _ = self._keys_and_values(attn, x, context)
        return q, jnp.repeat(k, q.shape[2] // k.shape[2], axis=2), context

    def cache_entries(self, capacity: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Declares a key and a value for each token and key head of this device."""
        sizes = self.config.variants
        heads = sizes.num_key_value_heads // collectives.size(collectives.SHARES)
        shape = capacity, heads, sizes.head_dim
        row = jax.ShapeDtypeStruct(shape, jnp.dtype(self.config.dtype))
        return {"k": row, "v": row}

    def cached(self, attended: Attended) -> dict[str, Array]:
        """Returns keys and values."""
        return attended._asdict()

    def flops(self, length: int) -> float:
        """Counts scores and values of every query head."""
        keys = window.mean_keys(length, self.window or length)
        heads = self.config.num_attention_heads
        return 2.0 * keys * heads * 2 * self.config.variants.head_dim

    @property
    def _scale(self) -> float:
        sizes = self.config.variants
        return sizes.head_dim**-0.5 * self.config.rope_scaling.score_factor

    def _narrowed(self, context: context_lib.Context) -> context_lib.Context:
        return context if self.window is None else window.narrowed(context, self.window)

    def _keys_and_values(
        self, attn: layers.Params, x: Array, context: context_lib.Context
    ) -> tuple[Float[Array, "B T U A"], Float[Array, "B T U A"]]:
        k = self._rotated(x, attn["k_proj"], context)
        return k, layers.linear(x, attn["v_proj"])

    def _rotated(
        self,
        x: Float[Array, "B T D"],
        weight: Float[Array, "D n A"],
        context: context_lib.Context,
    ) -> Float[Array, "B T n A"]:
        """Projects to heads, and rotates the last R dims of each."""
        plain = self.config.variants.head_dim - self.config.qk_rope_head_dim

        def arrange(w: Array) -> Array:
            ordered = rope.halves(w[..., plain:])
            return jnp.concatenate([w[..., :plain], ordered], axis=-1)

        (y,) = layers.linear_of_columns(x, weight, arrange)
        cos, sin = context.cos[:, :, None], context.sin[:, :, None]
        turned = rope.rotate(y[..., plain:], cos, sin)
        return jnp.concatenate([y[..., :plain], turned], axis=-1)
