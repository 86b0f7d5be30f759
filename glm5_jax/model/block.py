"""One decoder layer: x + attention(norm(x)), then x + feed_forward(norm(x)).

A block computes with fetched parameters: gathered from their shards, in the dtype of
the computation. Its caller calls `Block.fetched` where these copies should live: inside
the scan over layers, or before the loop over the steps of MTP, which share them.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.model import attention as attention_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import layers, moe, remat
from glm5_jax.model.attention import protocol


class BlockAux(NamedTuple):
    """A layer's auxiliary outputs, for the losses; None where there is none."""

    indexer_kl: Float[Array, ""] | None  # mean over tokens
    routing: moe.Routing | None


class BlockOutput(NamedTuple):
    """A layer's outputs over whole rows."""

    x: Float[Array, "B T D"]
    shared: Any  # for the next layer, see `protocol.Attention.forward`
    attended: Any  # what its queries read, for a cache or later MTP steps
    aux: BlockAux


@dataclasses.dataclass(frozen=True)
class Block:
    """A layer with its attention and its kind of feed-forward layer."""

    config: config_lib.ModelConfig
    attention: protocol.Attention
    has_experts: bool

    def table(self) -> dict:
        """Declares the parameters."""
        hidden = self.config.hidden_size
        if self.has_experts:
            mlp = moe.table(self.config)
        else:
            mlp = layers.swiglu_table(hidden, self.config.intermediate_size)
        return {
            "input_layernorm": layers.scale(hidden, "D"),
            "post_attention_layernorm": layers.scale(hidden, "D"),
            "mlp": mlp,
            **self.attention.table(),
        }

    def fetched(self, params: dict, num_rows: int | None = None) -> dict:
        """Returns stored parameters as the block computes with them.

        Shards are gathered, matrices are in the activations' dtype; norms, router and
        the indexer's head weights are in float32.

        Args:
          params: the layer's, as stored.
          num_rows: rows of this device, which may go to the shards instead, see
            `layers.fetched`; None for batch-invariant sums.
        """
        if self.config.batch_invariant:
            num_rows = None
        return layers.fetched(params, self.table(), self.config.dtype, num_rows)

    def forward(
        self,
        params: dict,
        x: Float[Array, "B T D"],
        context: context_lib.Context,
        shared: Any = None,
        *,
        kl_weight: Float[Array, ""] | None = None,
        attended: Any = None,
        experts: Int[Array, "B T K"] | None = None,
    ) -> BlockOutput:
        """Runs the layer over whole rows.

        Args:
          params: the layer's, from `fetched`.
          x: hidden states.
          context: positions and documents.
          shared: what the layer before hands on (IndexShare); None in GLM-5.
          kl_weight: weight of this layer in the loss of its indexer: 1, or 1 / m where
            m layers use one index. None computes no loss.
          attended: keys and index of the first MTP step, for the later ones (mtp.py).
          experts: experts of each token, instead of the router's choice.
        """
        h = layers.rms_norm(x, params["input_layernorm"], self.config.rms_norm_eps)
        out = self.attention.forward(params, h, context, shared, kl_weight, attended)
        # Norm, then experts or a dense feed-forward layer; the sum with its input.
        x = remat.named(x + out.x, remat.ATTENDED)
        x, routing = self._feed_forward(params, x, context, experts)
        aux = BlockAux(out.indexer_kl, routing)
        return BlockOutput(x, out.shared, out.attended, aux)

    def decode(
        self,
        params: dict,
        x: Float[Array, "b T D"],
        context: context_lib.Context,
        reader: cache_lib.Reader,
    ) -> tuple[Float[Array, "b T D"], cache_lib.Reader, moe.Routing | None]:
        """Runs the layer over new tokens of cached sequences.

        Args:
          params: the layer's, from `fetched`.
          x: hidden states of the new tokens.
          context: their positions; lo to hi - 1 are the cached keys that each may see.
          reader: the cache at this layer.
        """
        h = layers.rms_norm(x, params["input_layernorm"], self.config.rms_norm_eps)
        out, reader = self.attention.decode(params, h, context, reader)
        x, routing = self._feed_forward(params, x + out, context)
        entries = self.attention.cache_entries(reader.cache.capacity)
        return x, reader.after(entries), routing

    def _feed_forward(
        self,
        params: dict,
        x: Float[Array, "B T D"],
        context: context_lib.Context,
        experts: Int[Array, "B T K"] | None = None,
    ) -> tuple[Float[Array, "B T D"], moe.Routing | None]:
        """Runs the second half of the layer."""
        eps = self.config.rms_norm_eps
        h = layers.rms_norm(x, params["post_attention_layernorm"], eps)
        if not self.has_experts:
            with jax.named_scope("mlp"):
                return x + layers.swiglu(params["mlp"], h), None
        with jax.named_scope("moe"):
            out, routing = moe.moe(
                params["mlp"], self.config, h, context.is_token, experts
            )
        return x + out, routing


def make(config: config_lib.ModelConfig, kind: depth.Kind) -> Block:
    """Builds a layer of this kind."""
    return Block(config, attention_lib.make(config, kind), kind.has_experts)
