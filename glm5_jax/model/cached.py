"""The model with a cache: whole prompts first, then token by token.

`prefill` runs whole prompts as training does. `decode` runs new tokens of cached
sequences: one token of each, or a chunk of a prompt. Both take parameters as they are
stored, and end with the last norm, as `transformer.forward` does.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.model import attention as attention_lib
from glm5_jax.model import block as block_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import embedding, expert_products, layers, transformer
from glm5_jax.model import experts as experts_lib
from pallas_kernels import dispatch, loops


class Choices(NamedTuple):
    """Experts and keys of the new tokens in each layer, in the stack's order."""

    experts: Int[Array, "expert_layers B T K"]
    selection: (
        Any  # the attention's shared value after each layer, stacked over all layers
    )


def empty(
    config: config_lib.ModelConfig,
    batch: int,
    capacity: int,
    pages: tuple[int, int] | None = None,
    with_mtp: bool = False,
) -> cache_lib.Cache:
    """Makes a cache for `batch` sequences of up to `capacity` tokens.

    Args:
      config: of the model; without states if there are pages.
      batch: number of sequences.
      capacity: most tokens of a sequence.
      pages: number of pages and rows of each; None gives each sequence `capacity` rows.
      with_mtp: whether the module of multi-token prediction has rows, too, behind those
        of the layers (mtp_cached.py).
    """
    number, size = pages or (batch, capacity)
    return cache_lib.Cache(
        entries={
            name: jnp.zeros((count, number, *entry.shape), entry.dtype)
            for name, (count, entry) in _entries(config, size, with_mtp).items()
        },
        lengths=jnp.zeros(batch, jnp.int32),
        capacity=capacity,
    )


def bytes_per_token(config: config_lib.ModelConfig, with_mtp: bool = False) -> int:
    """Counts what the cache of a sequence grows by with every token."""

    def size(capacity: int) -> int:
        entries = _entries(config, capacity, with_mtp).values()
        return sum(count * x.size * x.dtype.itemsize for count, x in entries)

    return size(2) - size(1)


def num_layers_with(config: config_lib.ModelConfig) -> dict[str, int]:
    """Returns how many layers of the stack have each entry of the cache."""
    return {name: count for name, (count, _) in _entries(config, 1).items()}


def _entries(
    config: config_lib.ModelConfig, capacity: int, with_mtp: bool = False
) -> dict[str, tuple[int, jax.ShapeDtypeStruct]]:
    """Returns how many layers have each entry, and what it is of one sequence."""
    found: dict[str, tuple[int, jax.ShapeDtypeStruct]] = {}
    kinds = depth.layer_kinds(config)
    for kind in (*kinds, depth.mtp_kind(config)) if with_mtp else kinds:
        entries = attention_lib.make(config, kind).cache_entries(capacity)
        for name, entry in entries.items():
            count, _ = found.get(name, (0, entry))
            found[name] = count + 1, entry
    return found


def prefill(
    params: dict,
    config: config_lib.ModelConfig,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    capacity: int,
) -> tuple[Float[Array, "B T D"], cache_lib.Cache, Int[Array, "expert_layers B T K"]]:
    """Runs prompts, padded on the right, and fills a cache with them.

    Args:
      params: of `transformer.table`.
      config: of the model.
      tokens: prompts; tokens beyond `lengths` are ignored.
      lengths: tokens of each prompt, at least 1.
      capacity: rows of the cache, at least T.

    Returns:
      Hidden states after the last norm, the cache, and the experts of `Choices`.
    """
    is_token = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    segments = is_token.astype(jnp.int32)
    out = transformer.forward(params, config, tokens, segments, with_traces=True)
    assert out.traces is not None
    stacks: dict[str, list[Array]] = {}
    for g, group in enumerate(depth.layer_groups(config)):
        found: dict[str, list[Array]] = {}
        traces = out.traces[f"layers_{g}"].values()
        for kind, trace in zip(group.unit, traces, strict=True):
            entries = attention_lib.make(config, kind).cached(trace.attended)
            for name, entry in entries.items():
                found.setdefault(name, []).append(entry)
        for name, unit in found.items():
            stacks.setdefault(name, []).append(_interleave(unit))
    cache = empty(config, tokens.shape[0], capacity)
    filled = {
        name: _padded(jnp.concatenate(stack), cache.entries[name].shape)
        for name, stack in stacks.items()
    }
    cache = dataclasses.replace(cache, entries=cache.entries | filled, lengths=lengths)
    return out.hidden, cache, chosen_experts(config, out.aux, tokens.shape)


def decode(
    params: dict,
    config: config_lib.ModelConfig,
    cache: cache_lib.Cache,
    tokens: Int[Array, "b T"],
    num_tokens: Int[Array, " b"] | None = None,
    slots: Int[Array, " b"] | None = None,
) -> tuple[Float[Array, "b T D"], cache_lib.Cache, Choices]:
    """Runs the next tokens of cached sequences.

    Args:
      params: of `transformer.table`, or `unstacked`.
      config: of the model.
      cache: of B sequences, with room for the new tokens.
      tokens: of each sequence, padded on the right.
      num_tokens: of each sequence, without padding. Default: all. Rows of padding are
        never read: later tokens overwrite them. States skip padding.
      slots: the sequences in the cache that the tokens belong to; those of no sequence
        (B or more) are computed and dropped. Default: all of them.

    Returns:
      Hidden states after the last norm, the cache with the tokens in it, and the
      layers' choices.
    """
    if config.batch_invariant and tokens.size == 1:
        return _beside_padding(params, config, cache, tokens, num_tokens, slots)
    num_new = tokens.shape[1]
    lengths = cache.lengths if slots is None else cache.lengths[slots]
    positions = lengths[:, None] + jnp.arange(num_new)[None]
    context = context_lib.make_context(config, jnp.ones_like(tokens), positions)
    # Padding may lie beyond the cache, where a kernel must not look.
    hi = jnp.minimum(positions + 1, cache.capacity)
    context = context._replace(lo=jnp.zeros_like(tokens), hi=hi)
    if config.is_recurrent and num_tokens is not None:  # a state is not overwritten
        is_token = jnp.arange(num_new)[None] < num_tokens[:, None]
        context = context._replace(is_token=is_token)
    x = embedding.embed(params["embed_tokens"], config, tokens)
    carry = (x, _first_reader(config, cache, tokens, slots))
    found = []
    for g, group in enumerate(depth.layer_groups(config)):
        blocks = tuple(block_lib.make(config, kind) for kind in group.unit)
        unit = functools.partial(_unit, blocks, context)
        stack = params[f"layers_{g}"]
        run = _in_turn if isinstance(stack, tuple) else _scan
        carry, chosen = run(unit, carry, stack)
        found.append(chosen)
    x, reader = carry
    hidden = layers.rms_norm(x, params["norm"], config.rms_norm_eps)
    new = num_new if num_tokens is None else num_tokens
    everyone = slice(None) if slots is None else slots
    lengths = cache.lengths.at[everyone].add(new, mode="drop")
    cache = dataclasses.replace(reader.cache, lengths=lengths)
    experts = [_interleave(e) for e, _ in found if e]
    none = no_experts(config, tokens.shape)
    selections = [
        jax.tree.map(lambda *layers: _interleave([*layers]), *unit) for _, unit in found
    ]
    stacked = jax.tree.map(lambda *units: jnp.concatenate(units), *selections)
    return hidden, cache, Choices(jnp.concatenate([none[:0], *experts]), stacked)


def _first_reader(
    config: config_lib.ModelConfig,
    cache: cache_lib.Cache,
    tokens: Int[Array, "b T"],
    slots: Int[Array, " b"] | None,
) -> cache_lib.Reader:
    """Returns the reader at the first layer, for these new tokens."""
    return cache_lib.Reader(
        cache=cache,
        slots=slots,
        layers={name: jnp.zeros((), jnp.int32) for name in cache.entries},
        shared=attention_lib.first_cached_shared(
            config, tokens.shape[0], tokens.shape[1], cache.capacity
        ),
    )


def _beside_padding(
    params: dict,
    config: config_lib.ModelConfig,
    cache: cache_lib.Cache,
    token: Int[Array, "1 1"],
    num_tokens: Int[Array, " 1"] | None,
    slots: Int[Array, " 1"] | None,
) -> tuple[Float[Array, "1 1 D"], cache_lib.Cache, Choices]:
    """Decodes a lone token in two rows: XLA on CPU sums a single row differently."""
    tokens = jnp.pad(token, ((0, 0), (0, 1)))
    new = jnp.ones(1, jnp.int32) if num_tokens is None else num_tokens
    hidden, cache, choices = decode(params, config, cache, tokens, new, slots)
    return hidden[:, :1], cache, jax.tree.map(lambda x: x[:, :, :1], choices)


def chosen_experts(
    config: config_lib.ModelConfig, aux: dict, shape: tuple[int, ...]
) -> Int[Array, "expert_layers B T K"]:
    """Collects the experts of `Choices` from outputs of `transformer.forward`."""
    experts = []
    for g, _ in enumerate(depth.layer_groups(config)):
        routings = [block.routing for block in aux[f"layers_{g}"].values()]
        chosen = [routing.experts for routing in routings if routing is not None]
        if chosen:
            experts.append(_interleave(chosen))
    return jnp.concatenate([no_experts(config, shape)[:0], *experts])


def no_experts(
    config: config_lib.ModelConfig, shape: tuple[int, ...]
) -> Int[Array, "expert_layers B T K"]:
    """Returns zeros of the shape of the experts of `Choices`."""
    num_expert_layers = sum(
        group.num_expert_layers for group in depth.layer_groups(config)
    )
    return jnp.zeros((num_expert_layers, *shape, config.num_experts_per_tok), jnp.int32)


def unstacked(params: dict, config: config_lib.ModelConfig) -> dict:
    """Replaces every stack of layers by a tuple, with an entry a step of the scan."""
    out = dict(params)
    for g, group in enumerate(depth.layer_groups(config)):
        name = f"layers_{g}"
        steps = range(group.repeats)
        out[name] = tuple(
            jax.tree.map(lambda x, i=i: x[i], params[name]) for i in steps
        )
    return out


def _unit(
    blocks: tuple[block_lib.Block, ...],
    context: context_lib.Context,
    carry: tuple,
    params: dict,
) -> tuple[tuple, tuple]:
    """Runs the layers of one step of a scan; returns their choices too."""
    experts, shared = [], []
    x, reader = carry
    for p, block in enumerate(blocks):
        own = block.fetched(params[f"block_{p}"], num_rows=context.is_token.size)
        x, reader, routing = block.decode(own, x, context, reader)
        shared.append(reader.shared)
        if routing is not None:
            experts.append(routing.experts)
    return (x, reader), (experts, shared)


def _scan(unit: Callable, carry: tuple, stack: dict) -> tuple:
    """Scans over stacked layers, whose experts stay where they are if kernels run.

    XLA copies what it slices out of a stack for a kernel.
    """
    experts = {}
    if dispatch.platform() != "cpu" and experts_lib.are_whole():
        experts = {k: v["mlp"]["experts"] for k, v in stack.items() if _has_experts(v)}

    def step(carry: tuple, xs: tuple) -> tuple:
        layer, params = xs
        for name, own in experts.items():
            views = {k: expert_products.OfLayer(x, layer) for k, x in own.items()}
            block = params[name]
            params = params | {name: block | {"mlp": block["mlp"] | {"experts": views}}}
        return unit(carry, params)

    for name in experts:
        mlp = {k: v for k, v in stack[name]["mlp"].items() if k != "experts"}
        stack = stack | {name: stack[name] | {"mlp": mlp}}
    length = len(jax.tree.leaves(stack)[0])
    return loops.scan(step, carry, (jnp.arange(length), stack))


def _has_experts(block: dict) -> bool:
    """Returns whether a stack's parameters have experts."""
    return bool(block["mlp"].get("experts"))


def _in_turn(unit: Callable, carry: tuple, steps: tuple) -> tuple:
    """Computes what a scan computes, unrolled."""
    chosen = []
    for step in steps:
        carry, choice = unit(carry, step)
        chosen.append(choice)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *chosen)


def _interleave(arrays: list[Array]) -> Array:
    """Joins arrays [repeats, ...], one for each layer of a unit, in layer order."""
    stacked = jnp.stack(arrays, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])


def _padded(x: Array, shape: tuple[int, ...]) -> Array:
    """Zero-pads at the end of each dim."""
    return jnp.pad(x, [(0, to - size) for size, to in zip(x.shape, shape, strict=True)])
