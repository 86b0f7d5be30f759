"""The engine's copy of the parameters."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from glm5_jax.inference import weights
from tests import environment


class SampleTest(absltest.TestCase):
    def test_it_has_the_first_numbers_of_each_parameter(self):
        """Eight, or as many as there are."""
        params = {
            "a": np.arange(48, dtype=np.float32).reshape(2, 2, 12),
            "b": np.array([5, 6, 7], np.int8),
        }
        made = weights.Weights({n: jnp.asarray(x) for n, x in params.items()}, {}, 0)
        wanted = params["a"][0, 0, :8].tobytes() + params["b"].tobytes()
        self.assertEqual(made.sample, wanted)


if __name__ == "__main__":
    environment.main()
