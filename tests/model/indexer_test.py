"""The indexer's own numbers, which no golden model is fine enough to show."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from glm5_jax.model import context, indexer
from tests import environment
from tests.model import tiny

EPS = 1e-6  # of the layer norm of keys in the released code
RTOL = 1e-4  # float32 products of small numbers


class KeyNormTest(absltest.TestCase):
    def test_small_keys_are_normalised_with_the_released_eps(self):
        config = tiny.model()
        rng = np.random.default_rng(0)
        hidden, dim = config.hidden_size, config.index_head_dim
        params = {
            "wq_b": jnp.zeros((config.q_lora_rank, config.index_n_heads, dim)),
            "wk": jnp.asarray(rng.normal(size=(hidden, dim)), jnp.float32),
            "k_norm_scale": jnp.ones(dim),
            "k_norm_bias": jnp.zeros(dim),
            "weights_proj": jnp.zeros((hidden, config.index_n_heads)),
        }
        x = 2e-4 * rng.normal(size=(1, 3, hidden))  # keys of a size like EPS ** 0.5
        made = context.make_context(
            config, jnp.ones((1, 3), int), jnp.arange(3, dtype=int)[None]
        )
        c_q = jnp.zeros((1, 3, config.q_lora_rank))
        x32 = jnp.asarray(x, jnp.float32)
        project = jax.jit(
            lambda *args: indexer.project(*args, made)[1], static_argnums=1
        )
        k = project(params, config, x32, c_q)
        variance = np.var(x @ np.asarray(params["wk"], np.float64), axis=-1)
        self.assertBetween(np.median(variance) / EPS, 0.2, 5)
        # Rotations keep the length, which shows the eps.
        got = np.mean(np.asarray(k, np.float64) ** 2, axis=-1)
        np.testing.assert_allclose(got, variance / (variance + EPS), rtol=RTOL)


if __name__ == "__main__":
    environment.main()
