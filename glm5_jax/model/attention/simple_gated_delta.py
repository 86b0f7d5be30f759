"""SimpleGDN: the projections of a trained MLA, read by a linear recurrence.

GLM-5 2.1.2 (arXiv 2602.15763): no convolution, no gates, the pretrained projections of
queries, keys and values plugged straight into the recurrence, no new parameter. So the
parameters are MLA's without an indexer, and a layer of a trained model needs no
conversion. The paper leaves open what takes the place of the gates. We chose, with
q, k and v of each head as in mla.py:

    q, k  <-  q / |q|, k / |k|    keys of length 1 keep the state bounded; a query that
                                  equals a key gets its value back, as from a softmax
    beta   =  1                   a value replaces what the state answered to its key
    g_n    =  -1 / memory_n       fixed; memories of 16 to 4096 tokens, one for each
                                  head, evenly in their logarithm (as in RetNet, arXiv
                                  2307.08621)

Keys and queries stay rotated by their positions (RoPE): their product is the cosine of
the angle that the softmax was trained on. The output is not normalised, so that values
reach o_proj at their trained size.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import layers
from glm5_jax.model.attention import delta_rule, mla, protocol

_MEMORIES = 16, 4096  # tokens after which the first and the last head keep 1 / e


class Attended(NamedTuple):
    """What the queries of a row read, and what a cache keeps of it."""

    k: Float[Array, "B T N H"]
    v: Float[Array, "B T N O"]
    state: Float[Array, "B N H O"]  # after the last token


@dataclasses.dataclass(frozen=True)
class SimpleGatedDeltaNet:
    """Linear attention without own parameters; see `protocol.Attention`."""

    config: config_lib.ModelConfig

    def table(self) -> dict[str, Any]:
        """Declares MLA's projections."""
        return {"self_attn": mla.table(self.config)}

    def forward(
        self,
        params: dict,
        x: Float[Array, "B T D"],
        context: context_lib.Context,
        shared: Any = None,
        kl_weight: Float[Array, ""] | None = None,
        attended: Attended | None = None,
    ) -> protocol.Output:
        """Runs the delta rule over each document; there is no indexer."""
        out, attended = self._run(params["self_attn"], x, context, attended=attended)
        return protocol.Output(out, shared, attended, None)

    def decode(
        self,
        params: dict,
        x: Float[Array, "b T D"],
        context: context_lib.Context,
        reader: cache_lib.Reader,
    ) -> tuple[Float[Array, "b T D"], cache_lib.Reader]:
        """Continues the states of the sequences."""
        out, attended = self._run(
            params["self_attn"], x, context, reader.sequences("state")
        )
        return out, reader.replace("state", attended.state)

    def cache_entries(self, capacity: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Declares the state of each head of this device."""
        config = self.config
        heads = config.num_attention_heads // collectives.size(collectives.SHARES)
        shape = heads, config.qk_head_dim, config.v_head_dim
        return {"state": jax.ShapeDtypeStruct(shape, jnp.float32)}

    def cached(self, attended: Attended) -> dict[str, Array]:
        """Returns the state after the last token."""
        return {"state": attended.state}

    def flops(self, length: int) -> float:
        """Counts the delta rule."""
        config = self.config
        return delta_rule.flops(
            config.num_attention_heads, config.qk_head_dim, config.v_head_dim, length
        )

    def _run(
        self,
        params: layers.Params,
        x: Float[Array, "B T D"],
        context: context_lib.Context,
        state: Float[Array, "B N H O"] | None = None,
        attended: Attended | None = None,
    ) -> tuple[Float[Array, "B T D"], Attended]:
        """Reads the state, or zeros; `attended` replaces the keys and values of x."""
        config = self.config
        c_q = mla.query_latent(params, config, x)
        q = jnp.concatenate(mla.queries(params, config, c_q, context), axis=-1)
        if attended is None:
            k, v = mla.keys_and_values(params, mla.latent(params, config, x, context))
        else:
            k, v = attended.k, attended.v
        shape = q.shape[:3]
        with jax.named_scope("delta_rule"):
            out, state = delta_rule.over_documents(
                delta_rule.unit(q),
                delta_rule.unit(k),
                v,
                jnp.broadcast_to(self._log_decays(shape[2]), (*shape, 1)),
                jnp.ones(shape, jnp.float32),
                context,
                state,
            )
        return mla.output(params, out.astype(x.dtype)), Attended(k, v, state)

    def _log_decays(self, num_heads: int) -> Float[Array, "1 1 N 1"]:
        """Returns g of the heads on this device."""
        first, last = np.log(_MEMORIES)
        memories = np.exp(np.linspace(first, last, self.config.num_attention_heads))
        log_decays = jnp.asarray(-1 / memories, jnp.float32)
        own = collectives.own_part(log_decays, collectives.SHARES, num_heads)
        return own[None, None, :, None]
