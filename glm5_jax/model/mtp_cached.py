"""Multi-token prediction with a cache: drafts of the next tokens of sequences.

Row r of the module's layer in the cache is made of token r and of the main model's
state of token r - 1, and row 0 is never read. A row so depends on the tokens up to r
alone, and sequences that begin alike can share it. Its position is r - 1, as in
training.

With tokens 0 to L - 1 cached, token L drawn and h_0 the main model's state of token
L - 1, step k drafts token L + k:

    h_k = layer(W [norm(emb(t_{L+k-1})); norm(h_{k-1})])

Step 1 computes what training computes. A later step of training reads keys that the
step itself made at all earlier tokens. Here it reads rows made with the main model's
states, which h_{k-1} imitates, as vLLM and SGLang do: one cache serves all steps. With
index_share_for_mtp_iteration (GLM-5.2) later steps read what the first one read, in
training and here, and both compute the same.

A layer's rows depend on its input alone, so that `fill` needs neither attention nor
experts: the compiler drops them, as nobody reads their results.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.model import attention as attention_lib
from glm5_jax.model import block as block_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import cached, layers, mtp
from glm5_jax.model import context as context_lib


class Draft(NamedTuple):
    """A step's results."""

    hidden: Float[Array, "b D"]  # for the head, and for the next step
    cache: cache_lib.Cache
    shared: Any  # the selection of the first step, if the later ones read it again


def first(
    params: dict,
    config: config_lib.ModelConfig,
    cache: cache_lib.Cache,
    tokens: Int[Array, " b"],
    hidden: Float[Array, "b D"],
    slots: Int[Array, " b"] | None,
) -> Draft:
    """Runs step 1, which also fills the row of the token.

    Args:
      params: of `transformer.table`, or `cached.unstacked`.
      config: of the model, which has one module of multi-token prediction.
      cache: of B sequences, made with_mtp; its lengths stay as they are.
      tokens: the last token of each sequence, which is not cached yet.
      hidden: the main model's state of the token before it, after the last norm.
      slots: as in `cached.decode`.
    """
    x, reader = _run(params, config, cache, tokens[:, None], hidden[:, None], slots)
    shared = reader.shared if config.index_share_for_mtp_iteration else None
    return Draft(x[:, 0], _with_lengths(reader.cache, cache), shared)


def later(
    params: dict,
    config: config_lib.ModelConfig,
    draft: Draft,
    tokens: Int[Array, " b"],
    step: Int[Array, ""] | int,
    slots: Int[Array, " b"] | None,
) -> Draft:
    """Runs step 2 or a later one, after the step before it.

    Args:
      params: as in `first`.
      config: as in `first`.
      draft: of the step before.
      tokens: that were drafted from it.
      step: its number.
      slots: as in `first`.
    """
    before, shared = draft.hidden[:, None], draft.shared
    # A step that reads the first one's rows again has none of its own: its row is
    # written behind the last visible one, where the next token's will be.
    offset = 1 if config.index_share_for_mtp_iteration else step - 1
    x, reader = _run(
        params, config, draft.cache, tokens[:, None], before, slots, offset, shared
    )
    return Draft(x[:, 0], _with_lengths(reader.cache, draft.cache), shared)


def fill(
    params: dict,
    config: config_lib.ModelConfig,
    cache: cache_lib.Cache,
    tokens: Int[Array, "b T"],
    hidden: Float[Array, "b T D"],
    slots: Int[Array, " b"] | None,
) -> cache_lib.Cache:
    """Fills the rows of tokens behind `cache.lengths`.

    Args:
      params: as in `first`.
      config: as in `first`.
      cache: as in `first`.
      tokens: to fill rows of; rows of padding are overwritten later.
      hidden: the main model's state of the token before each of them.
      slots: as in `first`.
    """
    _, reader = _run(params, config, cache, tokens, hidden, slots)
    return _with_lengths(reader.cache, cache)


@jax.named_scope("mtp")
def _run(
    params: dict,
    config: config_lib.ModelConfig,
    cache: cache_lib.Cache,
    tokens: Int[Array, "b T"],
    before: Float[Array, "b T D"],
    slots: Int[Array, " b"] | None,
    offset: Int[Array, ""] | int = 0,
    shared: Any = None,
) -> tuple[Float[Array, "b T D"], cache_lib.Reader]:
    """Runs the module over tokens whose rows lie `offset` behind the cached ones.

    With `shared`, of step 1, they read the rows that step 1 read.
    """
    num_new = tokens.shape[1]
    lengths = cache.lengths if slots is None else cache.lengths[slots]
    first_row = lengths[:, None] + (offset if shared is None else 0)
    rows = first_row + jnp.arange(num_new)[None]
    context = context_lib.make_context(
        config, jnp.ones_like(tokens), jnp.maximum(rows - 1, 0)
    )
    hi = jnp.minimum(rows + 1, cache.capacity)  # padding may lie beyond the cache
    context = context._replace(lo=jnp.ones_like(tokens), hi=hi)
    block = block_lib.make(config, depth.mtp_kind(config))
    table = {name: p for name, p in mtp.table(config).items() if name != "block"}
    own = {name: params["mtp"][name] for name in table}
    own = layers.fetched(own, table, config.dtype)
    block_params = block.fetched(params["mtp"]["block"], num_rows=tokens.size)
    if shared is None:
        shared = attention_lib.first_cached_shared(
            config, tokens.shape[0], num_new, cache.capacity
        )
    else:
        block_params = {n: p for n, p in block_params.items() if n != "indexer"}
    counts = cached.num_layers_with(config)
    reader = cache_lib.Reader(
        cache=dataclasses.replace(cache, lengths=cache.lengths + offset),
        slots=slots,
        layers={name: jnp.asarray(counts[name]) for name in cache.entries},
        shared=shared,
    )
    x = mtp.joined(own, config, params["embed_tokens"], tokens, before)
    x, reader, _ = block.decode(block_params, x, context, reader)
    return layers.rms_norm(x, own["norm"], config.rms_norm_eps), reader


def _with_lengths(new: cache_lib.Cache, old: cache_lib.Cache) -> cache_lib.Cache:
    return dataclasses.replace(new, lengths=old.lengths)
