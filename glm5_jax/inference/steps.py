"""Defines the engine's two programs: prefill reads prompts, decode draws tokens.

Both are pure functions of the parameters and a `State`; programs.py compiles them. A
state has B slots, each with room for one sequence. Sequences do not see each other, and
values beyond the end of a sequence are never read. On a mesh each device runs the
programs on its own slots. The rows of a sequence lie in its slot; or in pages, whose
table comes with each dispatch.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.inference import adjustments as adjustments_lib
from glm5_jax.inference import placement
from glm5_jax.inference import sampling as sampling_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import cached, transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings of the sequences; arrays, so that no value causes a recompilation."""

    keys: Key[Array, " B"]  # of the requests; key and position seed a token's draw
    sampling: sampling_lib.Sampling
    budget: Int[Array, " B"]  # tokens that may still be drawn; 0: the slot is idle
    stop_ids: Int[Array, "B n"]  # ids that end the sequence; -1 is padding
    adjustments: adjustments_lib.Adjustments | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of all slots between two dispatches."""

    cache: cache_lib.Cache
    tokens: Int[Array, " B"]  # the last tokens drawn, not yet in the cache
    plan: Plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts of the prompts of some slots, padded on the right."""

    tokens: Int[Array, "b T"]
    num_tokens: Int[Array, " b"]
    slots: Int[Array, " b"]  # slot on the device; the number of slots marks padding
    start: Int[Array, " b"]  # length of the prefix that is already in the cache
    is_last: Bool[Array, " b"]  # whether the prompt ends with this part
    plan: Plan
    table: Int[Array, "b n"] | None = None  # of `Cache`, if it has pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """The slots to decode; the others wait."""

    # Slot on the device; the number of slots marks padding. None: all slots.
    slots: Int[Array, " b"] | None
    table: Int[Array, "b n"] | None = None  # of `Cache`, if it has pages


class Drawn(NamedTuple):
    """The tokens that a dispatch drew, with their log-probs."""

    ids: Int[Array, "b n"]  # -1: no token
    logprobs: Float[Array, "b n"]  # in the distribution that was sampled
    experts: Int[Array, "expert_layers b t K"] | None  # of the tokens that were read
    details: adjustments_lib.Details | None = None  # with adjustments


_DRAWN = Drawn(placement.ROWS, placement.ROWS, placement.LAYERS_OF_ROWS, placement.ROWS)


def empty(
    config: config_lib.ModelConfig,
    slots: int,
    capacity: int,
    n: int,
    pages: tuple[int, int] | None = None,
    with_adjustments: bool = False,
) -> State:
    """Returns a state without sequences.

    Args:
      config: of the model.
      slots: number of slots.
      capacity: most tokens of a sequence.
      n: most stop ids of a sequence.
      pages: of `cached.empty`.
      with_adjustments: as in `Limits`.
    """
    zeros = jnp.zeros(slots, jnp.int32)
    wishes = None
    if with_adjustments:
        wishes = adjustments_lib.make([None] * slots, capacity)
    return State(
        cache=cached.empty(config, slots, capacity, pages),
        tokens=zeros,
        plan=Plan(
            keys=sampling_lib.request_keys(0, zeros),
            sampling=sampling_lib.make_sampling(slots),
            budget=jnp.zeros(slots, jnp.int32),
            stop_ids=jnp.full((slots, n), -1, jnp.int32),
            adjustments=wishes,
        ),
    )


def prefill(
    params: dict,
    config: config_lib.ModelConfig,
    state: State,
    parts: Parts,
    *,
    is_fresh: bool,
    with_experts: bool = False,
) -> tuple[State, Drawn]:
    """Reads parts of prompts; draws a token after each prompt that ends.

    Args:
      params: of `transformer.table`, in the dtypes of the computation.
      config: of the model.
      state: of all slots.
      parts: at most one for each slot; on a mesh each device has the rows of its slots.
      is_fresh: whether every part is the first of its prompt (start is 0). First parts
        use the expanded form of attention; later ones use the absorbed form over the
        cache.
      with_experts: whether to return the experts of each token.
    """
    local = functools.partial(_prefill, config, is_fresh, with_experts)
    return placement.on_shards(local, config, _DRAWN)(params, state, parts)


def _prefill(
    config: config_lib.ModelConfig,
    is_fresh: bool,
    with_experts: bool,
    params: dict,
    state: State,
    parts: Parts,
) -> tuple[State, Drawn]:
    """Computes `prefill` for the rows of one device."""
    cache, slots = state.cache, parts.slots
    lengths = cache.lengths.at[slots].set(parts.start, mode="drop")
    cache = dataclasses.replace(cache, lengths=lengths, table=parts.table)
    if is_fresh:
        hidden, new, experts = cached.prefill(
            params,
            config,
            parts.tokens,
            jnp.maximum(parts.num_tokens, 1),
            parts.tokens.shape[1],
        )
        cache = _with_sequences(cache, new, slots, parts.num_tokens)
    else:
        hidden, cache, choices = cached.decode(
            params, config, cache, parts.tokens, parts.num_tokens, slots
        )
        experts = choices.experts
    last = jnp.maximum(parts.num_tokens - 1, 0)
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    ids, logprobs, details, plan = _draw(
        params, config, hidden, parts.start + parts.num_tokens, parts.plan
    )
    # Indices beyond the slots are dropped: unfinished prompts have no token yet.
    done = jnp.where(parts.is_last, slots, len(state.tokens))
    state = State(
        cache=dataclasses.replace(cache, table=None),
        tokens=state.tokens.at[done].set(ids, mode="drop"),
        plan=jax.tree.map(
            lambda old, new: old.at[done].set(new, mode="drop"), state.plan, plan
        ),
    )
    ids = jnp.where(parts.is_last, ids, -1)
    return state, Drawn(
        ids[:, None],
        logprobs[:, None],
        experts if with_experts else None,
        jax.tree.map(lambda x: x[:, None], details),
    )


def decode(
    params: dict,
    config: config_lib.ModelConfig,
    state: State,
    chosen: Chosen | None = None,
    *,
    num_steps: int,
    with_experts: bool = False,
) -> tuple[State, Drawn]:
    """Draws up to `num_steps` tokens for each slot that has a budget.

    Args:
      params: of `transformer.table`, or `cached.unstacked`.
      config: of the model.
      state: of all slots.
      chosen: the slots to compute, one row each; None for all slots.
      num_steps: upper bound on the tokens of a slot.
      with_experts: whether to return the experts of each token.
    """
    local = functools.partial(_decode, config, num_steps, with_experts)
    trees = (state,) if chosen is None else (state, chosen)
    return placement.on_shards(local, config, _DRAWN)(params, *trees)


def _decode(
    config: config_lib.ModelConfig,
    num_steps: int,
    with_experts: bool,
    params: dict,
    state: State,
    chosen: Chosen | None = None,
) -> tuple[State, Drawn]:
    """Computes `decode` for the slots of one device; all devices stop together."""
    slots, table = (None, None) if chosen is None else (chosen.slots, chosen.table)
    first = dataclasses.replace(state.cache, table=table)
    tokens, plan = _rows(first, state, slots)
    batch = len(tokens)

    def step(carry: tuple) -> tuple:
        n, cache, tokens, plan, drawn = carry
        is_running = plan.budget > 0
        hidden, cache, choices = cached.decode(
            params,
            config,
            cache,
            tokens[:, None],
            is_running.astype(jnp.int32),
            slots,
        )
        lengths = cache.lengths if slots is None else cache.lengths[slots]
        ids, logprobs, details, plan = _draw(
            params, config, hidden[:, 0], lengths, plan
        )
        tokens = jnp.where(is_running, ids, tokens)
        experts = drawn.experts
        if experts is not None:
            experts = lax.dynamic_update_slice_in_dim(experts, choices.experts, n, 2)
        drawn = Drawn(
            drawn.ids.at[:, n].set(jnp.where(is_running, ids, -1)),
            drawn.logprobs.at[:, n].set(logprobs),
            experts,
            jax.tree.map(lambda x, new: x.at[:, n].set(new), drawn.details, details),
        )
        return n + 1, cache, tokens, plan, drawn

    def has_budget(carry: tuple) -> Bool[Array, ""]:
        n, _, _, plan, _ = carry
        return (n < num_steps) & collectives.anywhere(
            jnp.any(plan.budget > 0), collectives.ROWS
        )

    nothing = _nothing(config, plan, (batch, num_steps), with_experts)
    carry = (jnp.zeros((), jnp.int32), first, tokens, plan, nothing)
    _, cache, tokens, plan, drawn = lax.while_loop(has_budget, step, carry)
    cache = dataclasses.replace(cache, table=None)
    if slots is not None:  # the other slots keep theirs
        changed = plan.budget, plan.adjustments, tokens
        budget, wishes, tokens = jax.tree.map(
            lambda old, new: old.at[slots].set(new, mode="drop"),
            (state.plan.budget, state.plan.adjustments, state.tokens),
            changed,
        )
        plan = dataclasses.replace(state.plan, budget=budget, adjustments=wishes)
    return State(cache, tokens, plan), drawn


def _nothing(
    config: config_lib.ModelConfig,
    plan: Plan,
    shape: tuple[int, int],
    with_experts: bool,
) -> Drawn:
    """Returns arrays of this shape without tokens."""
    return Drawn(
        jnp.full(shape, -1, jnp.int32),
        jnp.zeros(shape, jnp.float32),
        cached.no_experts(config, shape) if with_experts else None,
        None
        if plan.adjustments is None
        else adjustments_lib.no_details(*shape, config.vocab_size),
    )


def _rows(
    cache: cache_lib.Cache, state: State, slots: Int[Array, " b"] | None
) -> tuple[Int[Array, " b"], Plan]:
    """Returns last tokens and plans of the chosen slots; others have no budget."""
    tokens, plan = state.tokens, state.plan
    if slots is not None:
        tokens, plan = jax.tree.map(lambda x: x[slots], (tokens, plan))
        is_slot = slots < len(state.tokens)
        budget = jnp.where(is_slot, plan.budget, 0)
        plan = dataclasses.replace(plan, budget=budget)
    if cache.table is not None:  # a slot without pages waits
        num_pages = next(iter(cache.entries.values())).shape[1]
        budget = jnp.where(cache.table[:, 0] < num_pages, plan.budget, 0)
        plan = dataclasses.replace(plan, budget=budget)
    return tokens, plan


def _with_sequences(
    cache: cache_lib.Cache,
    new: cache_lib.Cache,
    slots: Int[Array, " b"],
    num_tokens: Int[Array, " b"],
) -> cache_lib.Cache:
    """Returns the cache with whole sequences written into some of its slots."""
    entries = dict(cache.entries)
    for name, stack in cache.entries.items():
        part = new.entries[name]
        if cache.table is None:
            stack = stack.at[:, slots, : part.shape[2]].set(part, mode="drop")
        else:
            size, places = stack.shape[2], jnp.arange(part.shape[2])
            pages = cache.table[:, places // size]
            stack = stack.at[:, pages, places % size].set(part, mode="drop")
        entries[name] = stack
    lengths = cache.lengths.at[slots].set(num_tokens, mode="drop")
    return dataclasses.replace(cache, entries=entries, lengths=lengths)


def _draw(
    params: dict,
    config: config_lib.ModelConfig,
    hidden: Float[Array, "B D"],
    positions: Int[Array, " B"],
    plan: Plan,
) -> tuple[Int[Array, " B"], Float[Array, " B"], adjustments_lib.Details | None, Plan]:
    """Draws a token at each position.

    Returns:
      Ids, log-probs, details with adjustments, and the plan with the new budgets.
    """
    raw = logits = transformer.logits(params, config, hidden)
    wishes, details = plan.adjustments, None
    if wishes is not None:
        logits = adjustments_lib.apply(logits, wishes)
    ids, logprobs = sampling_lib.sample(logits, plan.keys, positions, plan.sampling)
    if wishes is not None:
        details = adjustments_lib.details(raw, ids, wishes)
        wishes = adjustments_lib.with_tokens(wishes, positions, ids)
    is_stop = jnp.any(plan.stop_ids == ids[:, None], axis=1)
    budget = jnp.where(is_stop, 0, jnp.maximum(plan.budget - 1, 0))
    plan = dataclasses.replace(plan, budget=budget, adjustments=wishes)
    return ids, logprobs, details, plan
