"""GLM-5 with a cache of what it has read: prompts at once, then token by token.

`prefill` runs whole prompts in expanded form, as training does. `decode` runs new
tokens behind cached ones in absorbed form: one a sequence, or a chunk of a prompt.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.model import block as block_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import embedding, layers, transformer


class Choices(NamedTuple):
    """What each layer chose for the new tokens, in the stack's order."""

    experts: Int[Array, "M B T K"]  # M layers with experts
    selected: Int[Array, "L B T K"] | None  # keys; None: every visible one


def prefill(
    params: dict,
    config: config_lib.ModelConfig,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    capacity: int,
) -> tuple[Float[Array, "B T D"], cache_lib.Cache, Int[Array, "M B T K"]]:
    """Runs prompts, padded on the right, and fills a cache with them.

    Args:
      params: of `transformer.table`.
      config: of the model.
      tokens: prompts; what lies beyond `lengths` is ignored.
      lengths: tokens of each prompt, at least 1.
      capacity: rows of the cache, at least T.

    Returns:
      Hidden states after the last norm, the cache, and the experts of `Choices`.
    """
    is_token = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    segments = is_token.astype(jnp.int32)
    out = transformer.forward(params, config, tokens, segments, with_traces=True)
    assert out.traces is not None
    kv, k_index = [], []
    for g, group in enumerate(depth.layer_groups(config)):
        unit = list(out.traces[f"layers_{g}"].values())
        kv.append(_interleave([jnp.concatenate(t.kv, axis=-1) for t in unit]))
        pairs = zip(unit, group.unit, strict=True)
        owned = [t.index for t, kind in pairs if kind.owns_indexer]
        full = [index.k for index in owned if index is not None and index.k is not None]
        if full:
            k_index.append(_interleave(full))
    room = [(0, 0), (0, 0), (0, capacity - tokens.shape[1]), (0, 0)]
    empty = cache_lib.empty(config, tokens.shape[0], capacity)
    cache = cache_lib.Cache(
        kv=jnp.pad(
            cache_lib.widened(jnp.concatenate(kv), cache_lib.width(config)), room
        ),
        k_index=jnp.pad(jnp.concatenate(k_index), room) if k_index else empty.k_index,
        lengths=lengths,
    )
    return out.hidden, cache, chosen_experts(config, out.aux, tokens.shape)


def decode(
    params: dict,
    config: config_lib.ModelConfig,
    cache: cache_lib.Cache,
    tokens: Int[Array, "b T"],
    num_tokens: Int[Array, " b"] | None = None,
    slots: Int[Array, " b"] | None = None,
) -> tuple[Float[Array, "b T D"], cache_lib.Cache, Choices]:
    """Runs new tokens behind the cached ones.

    Args:
      params: of `transformer.table`, or `unstacked`.
      config: of the model.
      cache: of B sequences, with room for the new tokens.
      tokens: of each sequence, padded on the right.
      num_tokens: that are no padding. Default: all. What padding writes is never
        read: later tokens are written over it.
      slots: the sequences in the cache that the tokens belong to; what names none (B
        or more) is computed and thrown away. Default: all of them.

    Returns:
      Hidden states after the last norm, the cache with the tokens in it, and the
      layers' choices.
    """
    if config.batch_invariant and tokens.size == 1:
        return _beside_padding(params, config, cache, tokens, num_tokens, slots)
    batch, num_new = tokens.shape
    lengths = cache.lengths if slots is None else cache.lengths[slots]
    positions = lengths[:, None] + jnp.arange(num_new)[None]
    context = context_lib.make_context(config, jnp.ones_like(tokens), positions)
    # Padding may lie beyond the cache, where a kernel must not look.
    hi = jnp.minimum(positions + 1, cache.kv.shape[2])
    context = context._replace(lo=jnp.zeros_like(tokens), hi=hi)
    x = embedding.embed(params["embed_tokens"], config, tokens)
    carry = (x, cache_lib.reader(config, cache, (batch, num_new), slots))
    found = []
    for g, group in enumerate(depth.layer_groups(config)):
        unit = functools.partial(_unit, config, len(group.unit), context)
        stack = params[f"layers_{g}"]
        run = _in_turn if isinstance(stack, tuple) else lax.scan
        carry, chosen = run(unit, carry, stack)
        found.append(chosen)
    x, read = carry
    hidden = layers.rms_norm(x, params["norm"], config.rms_norm_eps)
    new = num_new if num_tokens is None else num_tokens
    everyone = slice(None) if slots is None else slots
    lengths = cache.lengths.at[everyone].add(new, mode="drop")
    cache = dataclasses.replace(read.cache, lengths=lengths)
    experts = [_interleave(e) for e, _ in found if e]
    selected = None
    if read.selected is not None:
        selected = jnp.concatenate([_interleave(s) for _, s in found])
    none = no_experts(config, tokens.shape)
    return hidden, cache, Choices(jnp.concatenate([none[:0], *experts]), selected)


def _beside_padding(
    params: dict,
    config: config_lib.ModelConfig,
    cache: cache_lib.Cache,
    token: Int[Array, "1 1"],
    num_tokens: Int[Array, " 1"] | None,
    slots: Int[Array, " 1"] | None,
) -> tuple[Float[Array, "1 1 D"], cache_lib.Cache, Choices]:
    """`decode` of a lone token: XLA on CPU adds up a product of one row otherwise."""
    tokens = jnp.pad(token, ((0, 0), (0, 1)))
    new = jnp.ones(1, jnp.int32) if num_tokens is None else num_tokens
    hidden, cache, choices = decode(params, config, cache, tokens, new, slots)
    return hidden[:, :1], cache, jax.tree.map(lambda x: x[:, :, :1], choices)


def chosen_experts(
    config: config_lib.ModelConfig, aux: dict, shape: tuple[int, ...]
) -> Int[Array, "M B T K"]:
    """The experts of `Choices`, from what `transformer.forward` tells of its layers."""
    experts = []
    for g, _ in enumerate(depth.layer_groups(config)):
        routings = [block.routing for block in aux[f"layers_{g}"].values()]
        mixtures = [routing.experts for routing in routings if routing is not None]
        if mixtures:
            experts.append(_interleave(mixtures))
    return jnp.concatenate([no_experts(config, shape)[:0], *experts])


def no_experts(
    config: config_lib.ModelConfig, shape: tuple[int, ...]
) -> Int[Array, "M B T K"]:
    """The experts of `Choices` before any token was read."""
    num_mixtures = sum(group.num_mixtures for group in depth.layer_groups(config))
    return jnp.zeros((num_mixtures, *shape, config.num_experts_per_tok), jnp.int32)


def unstacked(params: dict, config: config_lib.ModelConfig) -> dict:
    """Parameters with a tuple, a step of the scan each, in place of every stack."""
    out = dict(params)
    for g, group in enumerate(depth.layer_groups(config)):
        name = f"layers_{g}"
        steps = range(group.repeats)
        out[name] = tuple(
            jax.tree.map(lambda x, i=i: x[i], params[name]) for i in steps
        )
    return out


def _unit(
    config: config_lib.ModelConfig,
    size: int,
    context: context_lib.Context,
    carry: tuple,
    params: dict,
) -> tuple[tuple, tuple]:
    """The layers of one step of a scan; returns their choices too."""
    experts, selected = [], []
    for p in range(size):
        x, read = carry
        x, read, routing = block_lib.decode(
            params[f"block_{p}"], config, x, context, read
        )
        carry = x, read
        selected.append(read.selected)
        if routing is not None:
            experts.append(routing.experts)
    return carry, (experts, selected)


def _in_turn(unit: Callable, carry: tuple, steps: tuple) -> tuple:
    """Returns what lax.scan computes, unrolled."""
    chosen = []
    for step in steps:
        carry, choice = unit(carry, step)
        chosen.append(choice)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *chosen)


def _interleave(arrays: list[Array]) -> Array:
    """Layers of a unit's positions, each [repeats, ...], in the stack's order."""
    stacked = jnp.stack(arrays, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])
