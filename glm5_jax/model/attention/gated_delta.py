"""Gated DeltaNet: attention whose memory of the past is a state of constant size.

For each head, with sizes and formulas of transformers' Qwen3-Next:

    q, k, v  =  silu(conv(W x))                  conv: a channel's last four inputs
    q, k     =  q / |q| / sqrt(H), k / |k|
    beta     =  sigmoid(W_b x)                   writing strength
    g        =  -exp(A_log) softplus(W_a x + dt_bias)    log-decay, one for a head
    o        =  gated delta rule of these        delta_rule.py
    out      =  W_o (norm(o) * silu(W_g x))

Heads have the dims of MLA's (arXiv 2412.06464; GLM-5 2.1.2 compares such models with
DSA). No positions are needed: the convolution and the decay tell the order of tokens.

Two initial values are ours, the papers draw theirs: at W_a x = 0 the heads' memories
last 2 to 2048 tokens, evenly in their logarithm, and the convolution is the identity.
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

_MEMORIES = 2, 2048  # tokens after which the first and the last head keep 1 / e


class Attended(NamedTuple):
    """What the queries of a row read, and what a cache keeps of it."""

    k: Float[Array, "B T N H"]
    v: Float[Array, "B T N O"]
    log_decay: Float[Array, "B T N 1"]
    beta: Float[Array, "B T N"]
    state: Float[Array, "B N H O"]  # after the last token
    recent: Float[Array, "B N earlier width"]  # last inputs of the convolution


@dataclasses.dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention with gates; see `protocol.Attention` for the methods."""

    config: config_lib.ModelConfig

    def table(self) -> dict[str, Any]:
        """Declares projections, convolution, gates and the outputs' norm."""
        config = self.config
        d, n = config.hidden_size, config.num_attention_heads
        h, o = config.qk_head_dim, config.v_head_dim
        taps = config.variants.linear_conv_kernel_dim
        first, last = (-np.log(tokens) for tokens in _MEMORIES)
        steps = np.exp(np.linspace(first, last, n))  # softplus(dt_bias)
        bias = layers.bias(n, "N")
        gate = layers.Param((d, n), ("D", "N"))
        return {
            "self_attn": {
                "q_proj": layers.Param((d, n, h), ("D", "N", "H")),
                "k_proj": layers.Param((d, n, h), ("D", "N", "H")),
                "v_proj": layers.Param((d, n, o), ("D", "N", "O")),
                "g_proj": layers.Param((d, n, o), ("D", "N", "O")),
                "a_proj": gate,
                "b_proj": gate,
                "A_log": bias,
                "dt_bias": dataclasses.replace(
                    bias, fill=tuple(np.log(np.expm1(steps)).tolist())
                ),
                "conv1d": layers.Param(
                    (n, 2 * h + o, taps),
                    ("N", "H+H+O", "taps"),
                    fill=(0.0,) * (taps - 1) + (1.0,),
                    is_float32=True,
                ),
                "o_norm": layers.scale(o, "O"),
                "o_proj": layers.Param((n, o, d), ("N", "O", "D")),
            }
        }

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
        attn = params["self_attn"]
        q, own = self._inputs(attn, x, context)
        if attended is not None:
            own = attended
        with jax.named_scope("delta_rule"):
            out, state = delta_rule.over_documents(
                q, own.k, own.v, own.log_decay, own.beta, context
            )
        out = self._output(attn, x, out)
        return protocol.Output(out, shared, own._replace(state=state), None)

    def decode(
        self,
        params: dict,
        x: Float[Array, "b T D"],
        context: context_lib.Context,
        reader: cache_lib.Reader,
    ) -> tuple[Float[Array, "b T D"], cache_lib.Reader]:
        """Continues the states and the convolutions of the sequences."""
        attn = params["self_attn"]
        recent, before = (reader.sequences(n) for n in ("recent", "state"))
        q, own = self._inputs(attn, x, context, recent)
        out, state = delta_rule.over_documents(
            q, own.k, own.v, own.log_decay, own.beta, context, before
        )
        for name, value in self.cached(own._replace(state=state)).items():
            reader = reader.replace(name, value)
        return self._output(attn, x, out), reader

    def cache_entries(self, capacity: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Declares state and last inputs of each head of this device."""
        config = self.config
        n = config.num_attention_heads // collectives.size(collectives.SHARES)
        h, o = config.qk_head_dim, config.v_head_dim
        earlier = config.variants.linear_conv_kernel_dim - 1
        return {
            "state": jax.ShapeDtypeStruct((n, h, o), jnp.float32),
            "recent": jax.ShapeDtypeStruct(
                (n, earlier, 2 * h + o), jnp.dtype(config.dtype)
            ),
        }

    def cached(self, attended: Attended) -> dict[str, Array]:
        """Returns both after the last token."""
        return {"state": attended.state, "recent": attended.recent}

    def flops(self, length: int) -> float:
        """Counts the delta rule; products with the convolution are in the table."""
        config = self.config
        return delta_rule.flops(
            config.num_attention_heads, config.qk_head_dim, config.v_head_dim, length
        )

    def _inputs(
        self,
        params: layers.Params,
        x: Float[Array, "B T D"],
        context: context_lib.Context,
        recent: Float[Array, "B N earlier width"] | None = None,
    ) -> tuple[Float[Array, "B T N H"], Attended]:
        """Returns queries, and what they read; the state is an empty one.

        Args:
          params: of the attention.
          x: normed hidden states.
          context: documents and padding.
          recent: the convolution's inputs before x. Default: zeros.
        """
        h = self.config.qk_head_dim
        names = "q_proj", "k_proj", "v_proj"
        mixed = jnp.concatenate(
            [layers.linear(x, params[name]) for name in names], axis=-1
        )
        weight = params["conv1d"]
        if recent is None:
            shape = len(x), len(weight), weight.shape[-1] - 1, mixed.shape[-1]
            recent = jnp.zeros(shape, mixed.dtype)
        with jax.named_scope("conv"):
            mixed, recent = convolved(weight, mixed, recent, context)
        q, k, v = jnp.split(jax.nn.silu(mixed), [h, 2 * h], axis=-1)
        a, b = (
            layers.linear(x, params[name]).astype(jnp.float32)
            for name in ("a_proj", "b_proj")
        )
        rate, bias = (
            collectives.own_part(params[name], collectives.SHARES, a.shape[-1])[
                None, None
            ]
            for name in ("A_log", "dt_bias")
        )
        log_decay = -jnp.exp(rate) * jax.nn.softplus(a + bias)
        return delta_rule.unit(q) * h**-0.5, Attended(
            k=delta_rule.unit(k),
            v=v,
            log_decay=log_decay[..., None],
            beta=jax.nn.sigmoid(b),
            state=delta_rule.empty_state(k, v),
            recent=recent,
        )

    def _output(
        self,
        params: layers.Params,
        x: Float[Array, "B T D"],
        out: Float[Array, "B T N O"],
    ) -> Float[Array, "B T D"]:
        """Normalises each head's output, gates it and projects it."""
        out = layers.rms_norm(out, params["o_norm"], self.config.rms_norm_eps)
        gate = layers.linear(x, params["g_proj"]).astype(jnp.float32)
        return mla.output(params, (out * jax.nn.silu(gate)).astype(x.dtype))


def convolved(
    weight: Float[Array, "N width taps"],
    x: Float[Array, "B T N width"],
    recent: Float[Array, "B N earlier width"],
    context: context_lib.Context,
) -> tuple[Float[Array, "B T N width"], Float[Array, "B N earlier width"]]:
    """Sums the last inputs of each channel, those of the token's document only.

    Args:
      weight: of each channel; the last tap is the token's own.
      x: inputs.
      recent: inputs before x, of the document that it continues.
      context: documents and padding; padding follows the tokens of a row.

    Returns:
      The sums, float32, and the inputs before whatever follows the last token.
    """
    num_tokens, taps = x.shape[1], weight.shape[-1]
    before = jnp.moveaxis(recent, 1, 2).astype(x.dtype)
    x = jnp.concatenate([before, x], axis=1)
    total = jnp.zeros((), jnp.float32)
    for back in range(taps):
        start = taps - 1 - back
        earlier = x[:, start : start + num_tokens].astype(jnp.float32)
        is_seen = context.hi - 1 - back >= context.lo
        tap = weight[None, None, :, :, taps - 1 - back]
        total += jnp.where(is_seen[..., None, None], earlier * tap, 0)
    num_read = jnp.max(
        jnp.where(context.is_token, jnp.arange(1, num_tokens + 1)[None], 0), axis=1
    )
    places = num_read[:, None] + jnp.arange(taps - 1)[None]
    last = jnp.take_along_axis(x, places[..., None, None], axis=1)
    return total, jnp.moveaxis(last, 2, 1)
