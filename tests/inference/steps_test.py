"""The states of the engine's programs, as far as no program has to be compiled."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from glm5_jax.inference import steps
from tests import environment
from tests.inference import engine_test

MODEL = engine_test.COUNTED


def make_state(pages=None):
    """Returns a state of two slots with budgets."""
    state = steps.empty(MODEL, 2, 16, 1, pages)
    plan = dataclasses.replace(state.plan, budget=jnp.array([5, 7]))
    return dataclasses.replace(state, plan=plan, tokens=jnp.array([3, 4]))


class StepsTest(absltest.TestCase):
    def test_a_state_has_no_more_than_is_asked_for(self):
        state = steps.empty(MODEL, 2, 16, 1)
        self.assertIsNone(state.plan.adjustments)
        self.assertIsNone(state.hidden)
        np.testing.assert_array_equal(state.plan.budget, [0, 0])

    def test_rows_without_a_slot_draw_nothing(self):
        state = make_state()
        chosen = steps.Chosen(jnp.array([1, 2]))  # two is the number of slots
        tokens, plan = steps.rows_of(state.cache, state, chosen)
        self.assertEqual(tokens[0], 4)
        np.testing.assert_array_equal(plan.budget, [7, 0])

    def test_slots_without_pages_wait(self):
        state = make_state(pages=(6, 4))
        table = jnp.array([[5, 6, 6, 6], [6, 6, 6, 6]])
        cache = dataclasses.replace(state.cache, table=table)
        _, plan = steps.rows_of(cache, state, steps.Chosen(None))
        np.testing.assert_array_equal(plan.budget, [5, 0])
        self.assertFalse(plan.is_running[1])


if __name__ == "__main__":
    environment.main()
