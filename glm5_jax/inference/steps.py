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
from jaxtyping import Array, Bool, Float, Int

from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.inference import adjustments as adjustments_lib
from glm5_jax.inference import draws, placement
from glm5_jax.inference import guides as guides_lib
from glm5_jax.inference import sampling as sampling_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import cached, mtp_cached, transformer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state of all slots between two dispatches."""

    cache: cache_lib.Cache
    tokens: Int[Array, " B"]  # the last tokens drawn, not yet in the cache
    plan: draws.Plan
    # With drafts (rounds.py): the model's state of each last token in the cache.
    hidden: Float[Array, "B D"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts of the prompts of some slots, padded on the right."""

    tokens: Int[Array, "b T"]
    num_tokens: Int[Array, " b"]
    slots: Int[Array, " b"]  # slot on the device; the number of slots marks padding
    start: Int[Array, " b"]  # length of the prefix that is already in the cache
    is_last: Bool[Array, " b"]  # whether the prompt ends with this part
    plan: draws.Plan  # with guides, if it has adjustments
    table: Int[Array, "b n"] | None = None  # of `Cache`, if it has pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """The slots to decode; the others wait."""

    # Slot on the device; the number of slots marks padding. None: all slots.
    slots: Int[Array, " b"] | None
    table: Int[Array, "b n"] | None = None  # of `Cache`, if it has pages
    guides: guides_lib.Guides | None = None  # with adjustments


class Tally(NamedTuple):
    """Counts of the rounds of a dispatch with drafts."""

    rounds: Int[Array, " b"]  # in which the sequence drew tokens
    judged: Int[Array, "b k"]  # of them, those whose end did not cut the k-th draft off
    accepted: Int[Array, "b k"]  # of these, those that kept the k-th draft


class Drawn(NamedTuple):
    """The tokens that a dispatch drew, with their log-probs."""

    ids: Int[Array, "b n"]  # -1: no token
    logprobs: Float[Array, "b n"]  # in the distribution that was sampled
    experts: Int[Array, "expert_layers b t K"] | None  # of the tokens that were read
    details: adjustments_lib.Details | None = None  # with adjustments
    tally: Tally | None = None  # with drafts


DRAWN = Drawn(  # how a mesh shards it
    ids=placement.ROWS,
    logprobs=placement.ROWS,
    experts=placement.LAYERS_OF_ROWS,
    details=placement.ROWS,
    tally=placement.ROWS,
)


def empty(
    config: config_lib.ModelConfig,
    slots: int,
    capacity: int,
    n: int,
    pages: tuple[int, int] | None = None,
    with_adjustments: bool = False,
    with_drafts: bool = False,
) -> State:
    """Returns a state without sequences.

    Args:
      config: of the model.
      slots: number of slots.
      capacity: most tokens of a sequence.
      n: most stop ids of a sequence.
      pages: of `cached.empty`.
      with_adjustments: as in `Limits`.
      with_drafts: whether multi-token prediction drafts tokens.
    """
    zeros = jnp.zeros(slots, jnp.int32)
    wishes = None
    if with_adjustments:
        wishes = adjustments_lib.make([None] * slots, capacity)
    hidden = None
    if with_drafts:
        hidden = jnp.zeros((slots, config.hidden_size), config.dtype)
    return State(
        hidden=hidden,
        cache=cached.empty(config, slots, capacity, pages, with_drafts),
        tokens=zeros,
        plan=draws.Plan(
            keys=sampling_lib.request_keys(0, zeros),
            sampling=sampling_lib.make_sampling(slots),
            budget=jnp.zeros(slots, jnp.int32),
            stop_ids=jnp.zeros((slots, n), jnp.int32),
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
    with_experts: bool,
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
    return placement.on_shards(local, config, DRAWN)(params, state, parts)


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
    states, last = hidden, jnp.maximum(parts.num_tokens - 1, 0)
    hidden = jnp.take_along_axis(states, last[:, None, None], axis=1).squeeze(1)
    logits = transformer.logits(params, config, hidden)
    ids, logprobs, details, plan = draws.draw(
        logits, parts.start + parts.num_tokens, parts.plan
    )
    kept = state.hidden
    if kept is not None:
        cache = _with_mtp(params, config, cache, parts, states, kept)
        kept = kept.at[slots].set(hidden, mode="drop")
    # Indices beyond the slots are dropped: unfinished prompts have no token yet.
    done = jnp.where(parts.is_last, slots, len(state.tokens))
    plan = dataclasses.replace(plan, guides=None)
    state = State(
        cache=dataclasses.replace(cache, table=None),
        tokens=state.tokens.at[done].set(ids, mode="drop"),
        plan=jax.tree.map(
            lambda old, new: old.at[done].set(new, mode="drop"), state.plan, plan
        ),
        hidden=kept,
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
    with_experts: bool,
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
    return placement.on_shards(local, config, DRAWN)(params, *trees)


def _decode(
    config: config_lib.ModelConfig,
    num_steps: int,
    with_experts: bool,
    params: dict,
    state: State,
    chosen: Chosen | None = None,
) -> tuple[State, Drawn]:
    """Computes `decode` for the slots of one device; all devices stop together."""
    chosen = chosen or Chosen(None)
    slots = chosen.slots
    first = dataclasses.replace(state.cache, table=chosen.table)
    tokens, plan = rows_of(first, state, chosen)
    batch = len(tokens)

    def step(carry: tuple) -> tuple:
        n, cache, tokens, plan, drawn = carry
        is_running = plan.is_running
        hidden, cache, choices = cached.decode(
            params,
            config,
            cache,
            tokens[:, None],
            is_running.astype(jnp.int32),
            slots,
        )
        lengths = cache.lengths if slots is None else cache.lengths[slots]
        logits = transformer.logits(params, config, hidden.squeeze(1))
        ids, logprobs, details, plan = draws.draw(logits, lengths, plan, is_running)
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
        is_any = collectives.anywhere(jnp.any(plan.is_running), collectives.ROWS)
        return (n < num_steps) & is_any

    drawn = nothing(config, plan, (batch, num_steps), with_experts)
    carry = (jnp.zeros((), jnp.int32), first, tokens, plan, drawn)
    _, cache, tokens, plan, drawn = lax.while_loop(has_budget, step, carry)
    return after(state, slots, cache, tokens, plan), drawn


def after(
    state: State,
    slots: Int[Array, " b"] | None,
    cache: cache_lib.Cache,
    tokens: Int[Array, " b"],
    plan: draws.Plan,
    hidden: Float[Array, "b D"] | None = None,
) -> State:
    """Returns the state after these slots were decoded; the others keep theirs."""
    cache = dataclasses.replace(cache, table=None)
    plan = dataclasses.replace(plan, guides=None)
    if slots is not None:
        changed = plan.budget, plan.adjustments, tokens, hidden
        budget, wishes, tokens, hidden = jax.tree.map(
            lambda old, new: old.at[slots].set(new, mode="drop"),
            (state.plan.budget, state.plan.adjustments, state.tokens, state.hidden),
            changed,
        )
        plan = dataclasses.replace(state.plan, budget=budget, adjustments=wishes)
    return State(cache, tokens, plan, hidden)


def nothing(
    config: config_lib.ModelConfig,
    plan: draws.Plan,
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


def rows_of(
    cache: cache_lib.Cache, state: State, chosen: Chosen
) -> tuple[Int[Array, " b"], draws.Plan]:
    """Returns last tokens and plans of the chosen slots; others have no budget."""
    tokens, plan, slots = state.tokens, state.plan, chosen.slots
    if slots is not None:
        tokens, plan = jax.tree.map(lambda x: x[slots], (tokens, plan))
        is_slot = slots < len(state.tokens)
        budget = jnp.where(is_slot, plan.budget, 0)
        plan = dataclasses.replace(plan, budget=budget)
    if cache.table is not None:  # a slot without pages waits
        num_pages = next(iter(cache.entries.values())).shape[1]
        budget = jnp.where(cache.table[:, 0] < num_pages, plan.budget, 0)
        plan = dataclasses.replace(plan, budget=budget)
    return tokens, dataclasses.replace(plan, guides=chosen.guides)


def _with_mtp(
    params: dict,
    config: config_lib.ModelConfig,
    cache: cache_lib.Cache,
    parts: Parts,
    states: Float[Array, "b T D"],
    before: Float[Array, "B D"],
) -> cache_lib.Cache:
    """Fills the rows of multi-token prediction for parts of prompts.

    Args:
      params: of `prefill`.
      config: of the model.
      cache: with the parts in it.
      parts: of prompts.
      states: of their tokens, after the last norm.
      before: the state of each slot's last token before. If a slot begins with rows of
        another sequence, it is that of another token, and one row is inexact: a draft
        may get worse, what is drawn does not change.
    """
    firsts = before.at[parts.slots].get(mode="clip")
    states = jnp.concatenate([firsts[:, None], states[:, :-1]], axis=1)
    starts = cache.lengths.at[parts.slots].set(parts.start, mode="drop")
    filled = mtp_cached.fill(
        params,
        config,
        dataclasses.replace(cache, lengths=starts),
        parts.tokens,
        states,
        parts.slots,
    )
    return dataclasses.replace(filled, lengths=cache.lengths)


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
        num_layers = len(part)  # without the one of multi-token prediction
        if cache.table is None:
            stack = stack.at[:num_layers, slots, : part.shape[2]].set(part, mode="drop")
        else:
            size, places = stack.shape[2], jnp.arange(part.shape[2])
            pages = cache.table[:, places // size]
            stack = stack.at[:num_layers, pages, places % size].set(part, mode="drop")
        entries[name] = stack
    lengths = cache.lengths.at[slots].set(num_tokens, mode="drop")
    return dataclasses.replace(cache, entries=entries, lengths=lengths)
