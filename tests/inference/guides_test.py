"""The bounds of rows on their next tokens, against lists of ids."""

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax.inference import constraints, guides
from tests import environment

VOCAB, STEPS = 70, 4  # three words, of which the last is not full
LOGITS = np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32)
EVERY = list(range(VOCAB))
FIRST, LATER = [0, 31, 32, 69], [5, 64]
_apply, _after = jax.jit(guides.apply), jax.jit(guides.after)


def guide(forced=(), allowed=EVERY, pause=None):
    mask = constraints.mask_of(frozenset(allowed), VOCAB + 40)  # larger than the model
    return constraints.Guide(tuple(forced), mask, pause)


def allowed(made):
    """Returns the ids that each row may draw, checking the logits of these."""
    found = np.asarray(_apply(LOGITS, made))
    is_allowed = np.isfinite(found)
    np.testing.assert_array_equal(found[is_allowed], LOGITS[is_allowed])
    np.testing.assert_array_equal(found[~is_allowed], -np.inf)
    return [np.flatnonzero(row).tolist() for row in is_allowed]


def draw(made, *ids, is_drawn=None):
    is_drawn = None if is_drawn is None else np.array(is_drawn)
    return _after(made, np.array(ids), is_drawn)


class GuidesTest(parameterized.TestCase):
    def test_forced_tokens_come_first_and_then_those_that_are_allowed(self):
        found = [guide([1, 69, 0], FIRST), guide([7], LATER), None, guide([], FIRST)]
        made = guides.make(found, VOCAB, STEPS)
        wanted = [[[1], [69], [0], FIRST], [[7], LATER], [EVERY], [FIRST]]
        for place in range(STEPS + 2):
            self.assertEqual(
                allowed(made), [row[min(place, len(row) - 1)] for row in wanted]
            )
            # The row with an empty guide limits all of them to a token.
            self.assertEqual(made.is_open.tolist(), [place < 1] * 4)
            made = draw(made, 0, 0, 0, 0)

    def test_the_shortest_guide_limits_all_rows(self):
        for found, limit in (
            ([guide([1, 2]), guide([5]), None, guide([1, 2, 3])], 2),
            ([guide([1, 2]), guide([], pause=3), None, None], 3),
        ):
            made = guides.make(found, VOCAB, STEPS)
            for place in range(4):
                self.assertEqual(made.is_open.tolist(), [place < limit] * 4)
                made = draw(made, 0, 0, 0, 0)

    def test_without_a_limit_rows_stay_open_until_they_pause(self):
        made = guides.make(
            [guide([], LATER, 5), None, guide([], FIRST, 1), None], VOCAB, 2
        )
        for _ in range(9):
            self.assertEqual(allowed(made), [LATER, EVERY, FIRST, EVERY])
            self.assertTrue(made.is_open.all())
            made = draw(made, 64, 1, 5, 5)
        made = draw(made, 5, 5, 5, 5)
        self.assertEqual(made.is_open.tolist(), [False, True, True, True])
        made = draw(made, 64, 5, 1, 1)
        self.assertEqual(made.is_open.tolist(), [False, True, False, True])

    def test_tokens_that_are_not_drawn_count_for_nothing(self):
        made = guides.make(
            [guide([7], LATER), None, guide([], pause=1), None], VOCAB, 2
        )
        is_drawn = [False, True, False, True]
        made = draw(made, 7, 7, 1, 1, is_drawn=is_drawn)
        self.assertEqual(allowed(made)[0], [7])
        self.assertEqual(made.is_open.tolist(), [True] * 4)
        made = draw(made, 7, 7, 1, 1, is_drawn=is_drawn)
        self.assertEqual(made.is_open.tolist(), [True, False, True, False])
        made = draw(made, 7, 7, 1, 1, is_drawn=[True, False, True, False])
        self.assertEqual(allowed(made)[0], LATER)
        self.assertEqual(made.is_open.tolist(), [True, False, False, False])

    def test_rows_without_guides_are_free(self):
        made = guides.make([None] * 4, VOCAB, STEPS)
        self.assertEqual(allowed(made), [EVERY] * 4)
        self.assertTrue(made.is_open.all())


if __name__ == "__main__":
    environment.main()
