"""Applies the constraints of requests (constraints.py) to the logits of a dispatch.

A mask depends on the tokens before it, and only the host knows the grammar. Therefore a
row with a constraint draws no more tokens in a dispatch than its guide covers: the
tokens that are forced, of which the grammar allows one each, and a free one after them.
The other rows draw as many, so that no row waits for another. Rows for which one mask
holds for longer, as within a thought, do not shorten a dispatch.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from glm5_jax.inference import constraints

_NO_ID, _NO_LIMIT = -1, np.iinfo(np.int32).max
_ALL = np.uint32(2**constraints.WORD - 1)  # a word that allows all its tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guides:
    """The bounds on the tokens of each row in one dispatch."""

    allowed: UInt32[Array, "B words"]  # bit i % 32 of word i // 32 allows token i
    forced: Int[Array, "B n"]  # tokens that come before `allowed` holds; -1: none
    pause: Int[Array, " B"]  # id after which a row waits for the next dispatch; or -1
    limit: Int[Array, " B"]  # tokens that a row draws
    num_drawn: Int[Array, " B"]  # of them, those that it has drawn

    @property
    def is_open(self) -> Bool[Array, " B"]:
        """Returns whether each row may draw another token in this dispatch."""
        return self.num_drawn < self.limit


def make(
    found: Sequence[constraints.Guide | None], vocab_size: int, num_steps: int
) -> Guides:
    """Returns the arrays of guides.

    Args:
      found: of each row; None allows all tokens.
      vocab_size: of the model.
      num_steps: most tokens of a row that a guide knows.
    """
    num_rows = len(found)
    words = constraints.num_words(vocab_size)
    allowed = np.full((num_rows, words), _ALL)
    forced = np.full((num_rows, num_steps), _NO_ID, np.int32)
    pause = np.full(num_rows, _NO_ID, np.int32)
    limit = _NO_LIMIT
    for row, guide in enumerate(found):
        if guide is None:
            continue
        allowed[row] = guide.allowed[:words]
        forced[row, : len(guide.forced)] = guide.forced
        if guide.pause is not None:
            pause[row] = guide.pause
        limit = min(limit, guide.num_tokens or _NO_LIMIT)
    limits = np.full(num_rows, limit, np.int32)
    arrays = allowed, forced, pause, limits, np.zeros_like(limits)
    return Guides(*map(jnp.asarray, arrays))


def apply(logits: Float[Array, "B V"], guides: Guides) -> Float[Array, "B V"]:
    """Returns the logits of the next tokens, -inf for those that are not allowed."""
    ids = jnp.arange(logits.shape[1])
    place = jnp.minimum(guides.num_drawn, guides.forced.shape[1] - 1)
    forced = jnp.take_along_axis(guides.forced, place[:, None], axis=1)

    def masked(logits: Array) -> Array:
        words = guides.allowed[:, ids // constraints.WORD]
        bits = words >> (ids % constraints.WORD).astype(jnp.uint32)[None]
        is_allowed = (bits & 1) == 1
        is_allowed = jnp.where(forced == _NO_ID, is_allowed, ids[None] == forced)
        return jnp.where(is_allowed, logits, -jnp.inf)

    is_free = jnp.all(guides.allowed == _ALL)
    return jax.lax.cond(is_free, lambda x: x, masked, logits)


def after(
    guides: Guides, ids: Int[Array, " B"], is_drawn: Bool[Array, " B"] | None
) -> Guides:
    """Returns the guides after rows have drawn ids.

    Args:
      guides: of the rows.
      ids: of the next tokens.
      is_drawn: the rows that take their token; None for all.
    """
    is_over = ids == guides.pause
    number = guides.num_drawn + 1
    if is_drawn is not None:
        is_over &= is_drawn
        number = guides.num_drawn + is_drawn
    limit = jnp.where(is_over, number, guides.limit)
    return dataclasses.replace(guides, num_drawn=number, limit=limit)
