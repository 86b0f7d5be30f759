"""Draws a token for each sequence, as its request asks.

Every program of the engine ends here, with the logits of one token of each sequence.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from glm5_jax.inference import adjustments as adjustments_lib
from glm5_jax.inference import guides as guides_lib
from glm5_jax.inference import sampling as sampling_lib
from glm5_jax.inference import verification


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings of the sequences; arrays, so that no value causes a recompilation."""

    keys: Key[Array, " B"]  # of the requests; key and position seed a token's draw
    sampling: sampling_lib.Sampling
    budget: Int[Array, " B"]  # tokens that may still be drawn; 0: the slot is idle
    stop_ids: Int[Array, "B n"]  # ids that end the sequence; -1 is padding
    adjustments: adjustments_lib.Adjustments | None = None
    guides: guides_lib.Guides | None = None  # of one dispatch, with adjustments

    @property
    def is_running(self) -> Bool[Array, " B"]:
        """Returns whether each sequence draws another token in this dispatch."""
        has_budget = self.budget > 0
        return has_budget if self.guides is None else has_budget & self.guides.is_open


def draw(
    logits: Float[Array, "B V"],
    positions: Int[Array, " B"],
    plan: Plan,
    is_drawn: Bool[Array, " B"] | None = None,
    draft: verification.Draft | None = None,
) -> tuple[Int[Array, " B"], Float[Array, " B"], adjustments_lib.Details | None, Plan]:
    """Draws a token at each position.

    Args:
      logits: of the model, float32.
      positions: of the new tokens in their sequences.
      plan: of the sequences.
      is_drawn: the sequences that take their token; the plan of the others stays.
        Default: all that have a budget.
      draft: to accept or reject by rejection sampling. Default: the token is drawn by
        key and position alone.

    Returns:
      Ids, log-probs, details with adjustments, and the plan with the new budgets.
    """
    raw, wishes, details = logits, plan.adjustments, None
    if wishes is not None:
        logits = adjustments_lib.apply(logits, wishes)
    if plan.guides is not None:
        logits = guides_lib.apply(logits, plan.guides)
    who = plan.keys, positions, plan.sampling
    if draft is None:
        ids, logprobs = sampling_lib.sample(logits, *who)
    else:
        ids, logprobs = verification.accept_or_redraw(logits, draft, *who)
    if wishes is not None:
        details = adjustments_lib.details(raw, ids, wishes)
        if is_drawn is not None:  # a position beyond every text is not written
            positions = jnp.where(is_drawn, positions, wishes.text.shape[1])
        wishes = adjustments_lib.with_tokens(wishes, positions, ids)
    is_stop = jnp.any(plan.stop_ids == ids[:, None], axis=1)
    budget = jnp.where(is_stop, 0, jnp.maximum(plan.budget - 1, 0))
    guides = plan.guides
    if guides is not None:
        guides = guides_lib.after(guides, ids, is_drawn)
    if is_drawn is not None:
        budget = jnp.where(is_drawn, budget, plan.budget)
    plan = dataclasses.replace(plan, budget=budget, adjustments=wishes, guides=guides)
    return ids, logprobs, details, plan
