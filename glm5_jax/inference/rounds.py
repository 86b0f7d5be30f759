"""Defines the program of speculative decoding: rounds of drafts and their check.

A round of a sequence with L tokens in the cache and token L drawn:

1. the module of multi-token prediction drafts tokens L + 1 to L + k (mtp_cached.py);
2. one pass of the model reads tokens L to L + k;
3. tokens are drawn at L + 1, L + 2, ... as without drafts, budget, stop ids and
   adjustments included, up to the first that differs from its draft: 1 to k + 1 tokens.

Cached rows of rejected drafts lie behind the sequence's length, where the next tokens
overwrite them before anybody reads them. Why what is drawn has the model's distribution
is in verification.py.
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
from glm5_jax.inference import draws, placement, steps, verification
from glm5_jax.inference import sampling as sampling_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import cached, mtp_cached, transformer


@dataclasses.dataclass(frozen=True)
class Settings:
    """The static sizes of a dispatch."""

    num_rounds: int  # most rounds
    num_drafts: int  # of a round; 0 decodes as without drafts
    by_rejection: bool  # how drafts are accepted, see verification.py

    @property
    def most_drawn(self) -> int:
        """Returns the most tokens of a sequence."""
        return self.num_rounds * (self.num_drafts + 1)


class _Drafts(NamedTuple):
    """The drafts of a round."""

    ids: Int[Array, "b k"]
    logits: Float[Array, "b k V"] | None  # to accept them by rejection


class _Progress(NamedTuple):
    """The sequences between two rounds."""

    cache: cache_lib.Cache
    tokens: Int[Array, " b"]  # the last ones drawn, not yet in the cache
    hidden: Float[Array, "b D"]  # the model's state of the token before
    plan: draws.Plan
    num_drawn: Int[Array, " b"]
    drawn: steps.Drawn


class _New(NamedTuple):
    """The tokens of a round, of which the first few are drawn."""

    ids: Int[Array, "b n"]
    logprobs: Float[Array, "b n"]
    details: adjustments_lib.Details | None
    is_drawn: Bool[Array, "b n"]
    is_judged: Bool[Array, "b n"]
    is_accepted: Bool[Array, "b n"]


def decode(
    params: dict,
    config: config_lib.ModelConfig,
    state: steps.State,
    chosen: steps.Chosen | None = None,
    *,
    settings: Settings,
    with_experts: bool = False,
) -> tuple[steps.State, steps.Drawn]:
    """Draws tokens for each slot that has a budget, in rounds.

    Args:
      params: as in `steps.decode`.
      config: of the model.
      state: of all slots, made with_drafts.
      chosen: as in `steps.decode`.
      settings: of the dispatch.
      with_experts: as in `steps.decode`.
    """
    local = functools.partial(_decode, config, settings, with_experts)
    trees = (state,) if chosen is None else (state, chosen)
    return placement.on_shards(local, config, steps.DRAWN)(params, *trees)


def _decode(
    config: config_lib.ModelConfig,
    settings: Settings,
    with_experts: bool,
    params: dict,
    state: steps.State,
    chosen: steps.Chosen | None = None,
) -> tuple[steps.State, steps.Drawn]:
    """Computes `decode` for the slots of one device; all devices stop together."""
    chosen = chosen or steps.Chosen(None)
    slots = chosen.slots
    first = dataclasses.replace(state.cache, table=chosen.table)
    tokens, plan = steps.rows_of(first, state, chosen)
    assert state.hidden is not None
    hidden = state.hidden if slots is None else state.hidden[slots]
    batch, k = len(tokens), settings.num_drafts
    drawn = steps.nothing(config, plan, (batch, settings.most_drawn), with_experts)
    none = jnp.zeros((batch, k), jnp.int32)
    drawn = drawn._replace(tally=steps.Tally(jnp.zeros_like(tokens), none, none))
    start = _Progress(first, tokens, hidden, plan, jnp.zeros_like(tokens), drawn)

    def body(carry: tuple) -> tuple:
        return carry[0] + 1, _round(params, config, settings, slots, carry[1])

    def has_budget(carry: tuple) -> Bool[Array, ""]:
        is_left = jnp.any(carry[1].plan.is_running)
        return (carry[0] < settings.num_rounds) & collectives.anywhere(
            is_left, collectives.ROWS
        )

    carry = jnp.zeros((), jnp.int32), start
    _, end = lax.while_loop(has_budget, body, carry)
    state = steps.after(state, slots, end.cache, end.tokens, end.plan, end.hidden)
    return state, end.drawn


def _round(
    params: dict,
    config: config_lib.ModelConfig,
    settings: Settings,
    slots: Int[Array, " b"] | None,
    now: _Progress,
) -> _Progress:
    """Runs a round of all sequences; those without a budget stay as they are."""
    is_running = now.plan.is_running
    lengths = now.cache.lengths if slots is None else now.cache.lengths[slots]
    drafts, cache = _drafted(params, config, settings, slots, now, lengths + 1)
    read = jnp.concatenate([now.tokens[:, None], drafts.ids], axis=1)
    nothing = jnp.zeros_like(lengths)
    states, cache, choices = cached.decode(params, config, cache, read, nothing, slots)
    logits = transformer.logits(params, config, states)
    plan, new = _verified(logits, drafts, lengths + 1, now.plan)
    if settings.num_drafts:  # the first draft has filled the row of the token before
        behind = dataclasses.replace(cache, lengths=cache.lengths + 1)
        cache = mtp_cached.fill(
            params, config, behind, read[:, 1:], states[:, :-1], slots
        )
    num_new = jnp.sum(new.is_drawn, axis=1)
    everyone = slice(None) if slots is None else slots
    lengths = now.cache.lengths.at[everyone].add(num_new, mode="drop")
    last = num_new[:, None] - 1  # of a sequence without a budget nobody reads it
    tokens = jnp.take_along_axis(new.ids, last, axis=1)[:, 0]
    hidden = jnp.take_along_axis(states, last[..., None], axis=1)[:, 0]
    return _Progress(
        cache=dataclasses.replace(cache, lengths=lengths),
        tokens=jnp.where(is_running, tokens, now.tokens),
        hidden=jnp.where(is_running[:, None], hidden, now.hidden),
        plan=plan,
        num_drawn=now.num_drawn + num_new,
        drawn=_written(now, new, choices.experts),
    )


@jax.named_scope("draft")
def _drafted(
    params: dict,
    config: config_lib.ModelConfig,
    settings: Settings,
    slots: Int[Array, " b"] | None,
    now: _Progress,
    positions: Int[Array, " b"],
) -> tuple[_Drafts, cache_lib.Cache]:
    """Drafts the tokens of a round; fills the row of the token before them.

    Args:
      params: of `decode`.
      config: of the model.
      settings: of the dispatch.
      slots: of the sequences.
      now: the sequences.
      positions: of the first drafts.
    """
    tokens, hidden, plan, k = now.tokens, now.hidden, now.plan, settings.num_drafts
    if k == 0:
        cache = mtp_cached.fill(
            params, config, now.cache, tokens[:, None], hidden[:, None], slots
        )
        return _Drafts(jnp.zeros((len(tokens), 0), tokens.dtype), None), cache

    def propose(draft: mtp_cached.Draft, ahead: Array | int) -> tuple[Array, ...]:
        logits = transformer.logits(params, config, draft.hidden)
        if plan.adjustments is not None:
            logits = adjustments_lib.apply(logits, plan.adjustments)
        logits = sampling_lib.scaled_logits(logits, plan.sampling)
        ids, _ = sampling_lib.choose(
            logits, plan.keys, positions + ahead, plan.sampling
        )
        return (ids, logits) if settings.by_rejection else (ids,)

    def later(carry: tuple, step: Array) -> tuple:
        draft, ids = carry
        draft = mtp_cached.later(params, config, draft, ids, step, slots)
        found = propose(draft, step - 1)
        return (draft, found[0]), found

    draft = mtp_cached.first(params, config, now.cache, tokens, hidden, slots)
    found = propose(draft, 0)
    (draft, _), rest = lax.scan(later, (draft, found[0]), jnp.arange(2, k + 1))
    ids, *logits = (
        jnp.moveaxis(jnp.concatenate([x[None], xs]), 0, 1)
        for x, xs in zip(found, rest, strict=True)
    )
    return _Drafts(ids, logits[0] if logits else None), draft.cache


@jax.named_scope("verify")
def _verified(
    logits: Float[Array, "b n V"],
    drafts: _Drafts,
    positions: Int[Array, " b"],
    plan: draws.Plan,
) -> tuple[draws.Plan, _New]:
    """Draws tokens until one differs from its draft, or the sequence ends.

    Args:
      logits: of the model, at the drafts and one position more.
      drafts: of the round.
      positions: of the first drafts.
      plan: of the sequences.
    """
    ids = jnp.pad(drafts.ids, ((0, 0), (0, 1)), constant_values=-1)

    def step(carry: tuple, i: Array) -> tuple:
        plan, is_next, is_over = carry
        own, draft = ids[:, i], None
        if drafts.logits is not None:
            # Behind the drafts there is none, and the index stops at the last one.
            at = lax.dynamic_index_in_dim(drafts.logits, i, axis=1, keepdims=False)
            draft = verification.Draft(own, at)
        is_drawn = is_next & plan.is_running
        drawn, logprobs, details, plan = draws.draw(
            logits[:, i], positions + i, plan, is_drawn, draft
        )
        is_accepted = is_drawn & (drawn == own)
        new = _New(drawn, logprobs, details, is_drawn, ~is_over, is_accepted)
        is_over |= is_drawn & ~plan.is_running
        return (plan, is_accepted, is_over), new

    is_running = plan.is_running
    carry = plan, is_running, ~is_running
    (plan, _, _), new = lax.scan(step, carry, jnp.arange(logits.shape[1]))
    return plan, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), new)


def _written(
    now: _Progress, new: _New, experts: Int[Array, "expert_layers b n K"]
) -> steps.Drawn:
    """Returns what was drawn, with the tokens of a round behind those before."""
    drawn, tally = now.drawn, now.drawn.tally
    assert tally is not None
    batch, num_new = new.ids.shape
    rows = jnp.arange(batch)[:, None]
    beyond = drawn.ids.shape[1]  # what is not drawn is dropped
    places = now.num_drawn[:, None] + jnp.arange(num_new)[None]
    places = jnp.where(new.is_drawn, places, beyond)

    def put(x: Array, values: Array) -> Array:
        return x.at[rows, places].set(values, mode="drop")

    read = drawn.experts
    if read is not None:
        read = read.at[:, rows, places].set(experts, mode="drop")
    return steps.Drawn(
        ids=put(drawn.ids, new.ids),
        logprobs=put(drawn.logprobs, new.logprobs),
        experts=read,
        details=jax.tree.map(put, drawn.details, new.details),
        tally=steps.Tally(
            rounds=tally.rounds + new.is_drawn[:, 0],
            judged=tally.judged + new.is_judged[:, :-1],
            accepted=tally.accepted + new.is_accepted[:, :-1],
        ),
    )
