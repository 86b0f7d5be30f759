"""Logits of the cache and of the Flax module against transformers' GlmMoeDsa.

XLA's optimizations, which golden_test.py compiles with, change their errors of 3e-6 and
6e-6 by less than 2e-6, so these programs do without them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax.model import cached, transformer
from tests import environment
from tests.model import golden_test


class DecodeTest(parameterized.TestCase):
    def test_prefill_and_decode_give_the_logits_of_the_full_pass(self):
        """Without shared indices: properties_test.py, against the full pass."""
        config, params, reference = golden_test.load("glm5_2")
        tokens = jnp.asarray(reference["input_ids"], jnp.int32)
        start = 20
        prefill = jax.jit(cached.prefill, static_argnums=(1, 4))
        hidden, cache, _ = prefill(
            params, config, tokens[:, :start], jnp.full(2, start), tokens.shape[1]
        )

        @jax.jit
        def decode(params, cache, tokens):
            def step(cache, token):
                hidden, cache, _ = cached.decode(params, config, cache, token[:, None])
                return cache, hidden[:, 0]

            return jax.lax.scan(step, cache, tokens.T)

        _, rest = decode(params, cache, tokens[:, start:])
        hidden = jnp.concatenate([hidden, rest.swapaxes(0, 1)], axis=1)
        head = jax.jit(transformer.logits, static_argnums=1)
        logits = head(params, config, hidden)
        np.testing.assert_allclose(
            logits, reference["logits"], rtol=0, atol=golden_test.ATOL
        )


class ModuleTest(parameterized.TestCase):
    def test_flax_module_equals_forward(self):
        config, params, reference = golden_test.load("glm5")
        tokens = jnp.asarray(reference["input_ids"], jnp.int32)
        module = transformer.Transformer(config)
        logits = jax.jit(module.apply)({"params": params}, tokens)
        np.testing.assert_allclose(
            logits, reference["logits"], rtol=0, atol=golden_test.ATOL
        )


if __name__ == "__main__":
    environment.main()
