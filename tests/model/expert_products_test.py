"""Experts within the stack of all layers, against those of the layer alone."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from glm5_jax.model import expert_products, expert_rounds
from tests import environment

L, E, D, F, M = 3, 4, 8, 6, 24  # layers, experts, widths, rows


class OfLayerTest(absltest.TestCase):
    def test_equals_the_layer_alone(self):
        rng = np.random.default_rng(0)
        shapes = {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}
        stacks = {
            k: jnp.float32(rng.normal(size=(L, E, *s))) for k, s in shapes.items()
        }
        rows = jnp.float32(rng.normal(size=(M, D)))
        sizes = jnp.asarray([5, 0, 9, 4])  # the last rows have no expert

        @jax.jit
        def both(layer):
            own = jax.tree.map(lambda x: x[layer], stacks)
            views = {k: expert_products.OfLayer(x, layer) for k, x in stacks.items()}
            return [expert_products.swiglu(p, rows, sizes) for p in (own, views)]

        for layer in range(L):
            np.testing.assert_allclose(*both(jnp.int32(layer)), rtol=1e-6, atol=1e-6)


class RoomTest(absltest.TestCase):
    def test_twice_an_even_load_in_whole_tiles(self):
        for num_rows, num_devices, wanted in (
            (4096, 8, 1024),
            (100, 8, 32),  # 13 each: 26 of 4 tiles
            (8, 64, 8),
            (6, 2, 6),  # never more than there can be
        ):
            found = expert_rounds.room(num_rows, num_devices)
            self.assertEqual(found, wanted, (num_rows, num_devices))

    def test_without_rounds_there_is_room_for_every_load(self):
        for transport, num_devices, wanted in (
            ("rounds", 8, 2),
            ("rounds", 1, 1),
            ("gather", 8, 8),
            ("exchange", 4, 4),
        ):
            found = expert_rounds.spare(transport, num_devices)
            self.assertEqual(found, wanted, (transport, num_devices))


if __name__ == "__main__":
    environment.main()
