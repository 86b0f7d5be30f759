"""DeepSeek Sparse Attention: MLA over the keys that an indexer selects.

MLA (mla.py) makes latents: c_q for the queries, kv for keys and values. The indexer
(indexer.py) makes an Index: the selected keys, and what its loss needs.
config.attention is "sparse"; "dense_with_indexer_loss" in the stage dsa_warmup, in
which the indexer selects nothing (attention reads all visible keys) and learns; or
"dense", without any index. Layers may share an index (IndexShare, arXiv 2603.12201):
each hands it to the next as `shared`. The cached form is in dsa_cached.py.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels
from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import indexer
from glm5_jax.model import selection as selection_lib
from glm5_jax.model.attention import cache_rows, dsa_cached, mla, protocol


class Attended(NamedTuple):
    """The latents and the index that the queries of a layer read."""

    kv: mla.Latent
    index: indexer.Index | None  # None: attention is dense


@dataclasses.dataclass(frozen=True)
class SparseLatentAttention:
    """The attention of GLM-5; see `protocol.Attention` for the methods."""

    config: config_lib.ModelConfig
    owns_indexer: bool  # otherwise it uses the index of an earlier layer

    def table(self) -> dict[str, Any]:
        """Declares the projections, and the indexer where the layer owns one."""
        params = {"self_attn": mla.table(self.config)}
        if self.owns_indexer:
            params["indexer"] = indexer.table(self.config)
        return params

    def forward(
        self,
        params: dict,
        x: Float[Array, "B T D"],
        context: context_lib.Context,
        shared: indexer.Index | None = None,
        kl_weight: Float[Array, ""] | None = None,
        attended: Attended | None = None,
    ) -> protocol.Output:
        """Selects keys, attends to them, and compares the indexer with the attention.

        With `attended`, a later step of MTP reads the keys of the first step again.
        """
        config, attn = self.config, params["self_attn"]
        c_q = mla.query_latent(attn, config, x)
        if attended is None:
            attended = self._attended(params, x, c_q, context, shared)
        kv, index = attended
        selection = selection_lib.AllVisible() if index is None else index.selection
        with jax.named_scope("attention"):
            out, softmax = mla.attend(attn, config, c_q, kv, context, selection)
        kl = None
        if index is not None and kl_weight is not None:
            with jax.named_scope("indexer_loss"):
                kl = kl_weight * _indexer_kl(config, softmax, index, context)
        shared = _handed_on(config, index, with_projections=kl_weight is not None)
        return protocol.Output(x=out, shared=shared, attended=attended, indexer_kl=kl)

    def _attended(
        self,
        params: dict,
        x: Float[Array, "B T D"],
        c_q: Float[Array, "B T Q"],
        context: context_lib.Context,
        index: indexer.Index | None,
    ) -> Attended:
        """Makes the latents; and an index, unless the layer uses the given one.

        The given index is that of an earlier layer (IndexShare), or None.
        """
        config = self.config
        if self.owns_indexer and config.attention != "dense":
            with jax.named_scope("indexer"):
                index = indexer.select(params["indexer"], config, x, c_q, context)
        with jax.named_scope("attention"):
            kv = mla.latent(params["self_attn"], config, x, context)
            kv = mla.Latent(*map(collectives.all_keys, kv))  # of the whole row
        return Attended(kv=kv, index=index)

    def decode(
        self,
        params: dict,
        x: Float[Array, "b T D"],
        context: context_lib.Context,
        reader: cache_lib.Reader,
    ) -> tuple[Float[Array, "b T D"], cache_lib.Reader]:
        """Runs the absorbed form; the reader's `shared` is the selection."""
        own = params.get("indexer") if self.config.attention == "sparse" else None
        return dsa_cached.decode(
            params["self_attn"], own, self.config, x, context, reader
        )

    def cache_entries(self, capacity: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Declares a latent row for each token, and its indexer key if there is one."""
        return dsa_cached.entries(self.config, self.owns_indexer, capacity)

    def cached(self, attended: Attended) -> dict[str, Array]:
        """Joins latent and rotated key to one row."""
        form = cache_rows.of_latents(self.config)
        rows = {"kv": form.store(jnp.concatenate(attended.kv, axis=-1))}
        index = attended.index
        if self.owns_indexer and index is not None and index.projections is not None:
            rows |= cache_rows.of_index_keys(self.config, index.projections.k)
        return rows

    def flops(self, length: int) -> float:
        """Counts scores and values of every head, and the indexer's scores.

        The indexer scores all visible keys, half of the document in the mean.
        """
        config = self.config
        keys = visible = (length + 1) / 2
        if config.attention == "sparse":
            keys = min(visible, config.index_topk)
        width = config.qk_head_dim + config.v_head_dim
        total = 2.0 * keys * config.num_attention_heads * width
        if self.owns_indexer and config.attention != "dense":
            total += 2.0 * visible * config.index_n_heads * config.index_head_dim
        return total


def first_shared(
    config: config_lib.ModelConfig,
    batch: int,
    num_tokens: int,
    with_indexer_loss: bool,
) -> indexer.Index | None:
    """Returns an empty index, or None where no layers share one."""
    if not config.shares_index:
        return None
    return indexer.empty(config, batch, num_tokens, with_projections=with_indexer_loss)


def first_cached_shared(
    config: config_lib.ModelConfig, batch: int, num_tokens: int, capacity: int
) -> selection_lib.Selection:
    """Returns empty lists of cached keys, or all keys where there is no choice."""
    if not (config.has_indexer and indexer.selects(config, capacity)):
        return selection_lib.AllVisible()
    shape = batch, num_tokens, config.index_topk
    return selection_lib.Listed(jnp.full(shape, -1, jnp.int32))


def _handed_on(
    config: config_lib.ModelConfig, index: indexer.Index | None, with_projections: bool
) -> indexer.Index | None:
    """Returns the index for the next layer, or None where no layers share one."""
    if index is None or not config.shares_index:
        return None
    return index if with_projections else index._replace(projections=None)


def _indexer_kl(
    config: config_lib.ModelConfig,
    softmax: mla.Softmax,
    index: indexer.Index,
    context: context_lib.Context,
) -> Float[Array, ""]:
    """Returns KL(attention || indexer), the mean over tokens; padding does not count.

    For each query the kernels compute p, the mean over heads of exp(scale q.k - lse),
    and softmax(I), both over the selected keys, and sum p log(p / softmax(I)). p is
    constant: `mla.all_heads` stops its gradient. `indexer.project` stops those of x
    and c_q, so the gradient ends in the parameters of the indexer.
    """
    selection, weight = index.selection, context.is_token.astype(jnp.float32)
    is_listed = isinstance(selection, selection_lib.Listed)
    attention = tuple(mla.all_heads(softmax, is_latent=is_listed))
    assert index.projections is not None
    projections, scale = tuple(index.projections), config.softmax_scale
    if isinstance(selection, selection_lib.Listed):
        options = {"scale": scale, "indices_are_sorted": True}
        loss = pallas_kernels.sparse_indexer_kl_loss(
            attention, projections, selection.indices, weight, **options
        )
    else:
        mask = selection_lib.dense_argument(selection)
        loss = pallas_kernels.indexer_kl_loss(
            attention, projections, context.lo, context.hi, mask, weight, scale=scale
        )
    loss, weight = collectives.total((loss, jnp.sum(weight)), collectives.TOKENS)
    return loss / jnp.maximum(weight, 1)
