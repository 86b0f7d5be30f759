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

    def test_a_warm_up_without_end_is_refused(self):
        config = config_lib.OptimConfig(warmup_steps=10)
        with self.assertRaisesRegex(
            config_lib.InputError, "optim.warmup_steps.*10 of 10"
        ):
            schedule.learning_rate(config, num_steps=10)


if __name__ == "__main__":
    environment.main()
