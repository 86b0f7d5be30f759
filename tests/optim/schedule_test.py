"""The learning rate's schedule against its closed form."""

import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
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


if __name__ == "__main__":
    environment.main()
