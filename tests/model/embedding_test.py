"""Looks up words of a table that devices share."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax import collectives, sharding
from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.model import embedding
from tests import environment
from tests.model import tiny

B, V, D = 8, 80, 32


class EmbeddingTest(parameterized.TestCase):
    @parameterized.parameters(
        {"expert": 2, "tensor": 4}, {"tensor": 2, "data": 4}, {"expert": 8}, {"data": 8}
    )
    def test_every_word_has_its_row(self, **axes):
        """Also the first and the last one that a device holds."""
        config = tiny.model(vocab_size=V)
        table = np.random.default_rng(0).normal(size=(V, D)).astype(np.float32)
        tokens = np.random.default_rng(1).permutation(V).reshape(B, -1)

        def local(table, tokens):
            return embedding.embed(table, config, tokens)

        rows = sharding.spec(("B", "T"))
        with jax.set_mesh(mesh_lib.make_mesh(config_lib.MeshConfig(**axes))):
            specs = sharding.spec(("V", "D")), rows
            run = jax.jit(collectives.on_shards(local, specs, rows))
            found = run(jnp.asarray(table), jnp.asarray(tokens))
        np.testing.assert_array_equal(found, table[tokens])


if __name__ == "__main__":
    environment.main()
