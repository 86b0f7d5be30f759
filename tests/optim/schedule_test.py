"""The learning rate's schedule against its closed form."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.config import batches as batches_lib
from glm5_jax.optim import schedule
from tests import environment

PEAK, END = 2e-4, 4e-5
DECAY = {
    "cosine": lambda x: END + (PEAK - END) * (1 + np.cos(np.pi * x)) / 2,
    "linear": lambda x: PEAK + (END - PEAK) * x,
    "constant": lambda x: PEAK + 0 * x,
}


class LearningRateTest(parameterized.TestCase):
    @parameterized.product(kind=["cosine", "linear", "constant"], warmup=[0, 10])
    def test_closed_form(self, kind, warmup):
        config = config_lib.OptimConfig(
            learning_rate=PEAK,
            end_learning_rate=END,
            schedule=kind,
            warmup_steps=warmup,
        )
        steps = np.arange(51)
        rate = schedule.learning_rate(config, num_steps=50)
        expected = np.where(
            steps < warmup,
            PEAK * steps / max(warmup, 1),
            DECAY[kind]((steps - warmup) / (50 - warmup)),
        )
        got = [rate(step) for step in steps]
        np.testing.assert_allclose(got, expected, rtol=1e-5)  # float32

    def test_it_stays_at_the_end(self):
        config = config_lib.OptimConfig(learning_rate=PEAK, end_learning_rate=END)
        rate = schedule.learning_rate(config, num_steps=50)
        np.testing.assert_allclose(rate(80), END, rtol=1e-5)

    @parameterized.named_parameters(
        ("as_long", {"num_steps": 10}, "10 of 10"),
        (
            "of_updates",
            {
                "num_steps": 2,
                "stage": "rl",
                "rl": config_lib.RLConfig(updates_per_rollout=4, max_new_tokens=8),
            },
            "10 of 8",
        ),
    )
    def test_a_warm_up_without_end_is_refused_with_the_config(self, fields, message):
        optim = config_lib.OptimConfig(warmup_steps=10)
        message = f"optim.warmup_steps must be smaller than num_steps, got {message}"
        with self.assertRaisesRegex(config_lib.InputError, message):
            config_lib.TrainConfig(optim=optim, **fields)

    @parameterized.product(kind=["cosine", "linear"], in_tokens=[False, True])
    def test_growing_batches_count_by_their_tokens(self, kind, in_tokens):
        """16 tokens a step for 6 steps, then 64: the schedule of 128 * 8 tokens."""
        batches = batches_lib.growing((2,), 8, 96.0, sequence_length=8)
        warmup = {"warmup_tokens": 64.0} if in_tokens else {"warmup_steps": 4}
        config = config_lib.OptimConfig(
            learning_rate=PEAK, end_learning_rate=END, schedule=kind, **warmup
        )
        num_steps = 20
        rate = schedule.learning_rate(config, num_steps, batches)
        tokens = np.array([batches.tokens_before(s) for s in range(num_steps + 1)])
        x = (tokens - 64) / (tokens[-1] - 64)
        expected = np.where(tokens < 64, PEAK * tokens / 64, DECAY[kind](x))
        got = [rate(step) for step in range(num_steps + 1)]
        np.testing.assert_allclose(got, expected, rtol=1e-5)

    def test_a_warm_up_in_tokens_of_equal_batches_is_one_in_steps(self):
        batches = config_lib.DataConfig(sequence_length=8, batch_size=4).batches
        ends = {"learning_rate": PEAK, "end_learning_rate": END}
        in_steps = config_lib.OptimConfig(**ends, warmup_steps=3)
        in_tokens = config_lib.OptimConfig(**ends, warmup_tokens=3 * 32.0)
        rates = [schedule.learning_rate(c, 9, batches) for c in (in_steps, in_tokens)]
        for step in range(10):
            self.assertEqual(*(rate(step) for rate in rates))

    def test_a_value_changes_with_the_first_step_that_has_seen_the_tokens(self):
        batches = batches_lib.growing((2,), 8, 96.0, sequence_length=8)
        value = schedule.changing(0.3, ((97.0, 0.1), (200.0, 0.0)), batches)
        tokens = [batches.tokens_before(step) for step in range(12)]
        wanted = [0.3 if n < 97 else 0.1 if n < 200 else 0.0 for n in tokens]
        np.testing.assert_allclose([value(step) for step in range(12)], wanted)
        self.assertEqual(schedule.changing(0.3, (), batches)(5), 0.3)

    def test_steps_beyond_int32_are_never_reached(self):
        """GLM-4.5 changes a weight after 15 T tokens: 3.7e9 steps of a small batch."""
        step = jnp.int32(3)
        batches = batches_lib.growing((), 8, 0.0, sequence_length=8)
        value = jax.jit(schedule.changing(0.3, ((15e12, 0.1),), batches))
        self.assertEqual(value(step), np.float32(0.3))
        batches = batches_lib.growing((2, 4), 8, 15e12, sequence_length=8)
        config = config_lib.OptimConfig(warmup_steps=4)
        rate = schedule.learning_rate(config, 2**30, batches)
        self.assertGreater(jax.jit(rate)(step), 0.0)


if __name__ == "__main__":
    environment.main()
