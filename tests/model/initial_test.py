"""Initial values: each device draws its own part, and the mesh changes nothing."""

import functools
import math

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import mesh as mesh_lib
from glm5_jax import sharding
from glm5_jax.config import MeshConfig
from glm5_jax.model import initial, layers
from tests import environment, runs
from tests.model import tiny

CONFIG = tiny.model(initializer_range=0.02)
STACKS = [layers.Param((1, 8, 512, 1024), ("L", "E", "D", "F"))] * 2
PARAMS = [
    layers.Param((80, 256), ("V", "D")),
    layers.scale(256, "D"),
    *STACKS,
    layers.Param((256, 80), ("D", "V")),
]
COPIES = 6  # of what is drawn at once: counters, two words of bits, the draw


@functools.cache
def draw(mesh):
    """A compiled draw, as it is sharded on a mesh."""
    places = sharding.shardings([param.dims for param in PARAMS], mesh)
    with jax.set_mesh(mesh):
        make = lambda key: initial.values(PARAMS, CONFIG, key)
        return jax.jit(make, out_shardings=places).lower(jax.random.key(0)).compile()


class InitialTest(parameterized.TestCase):
    def test_a_device_needs_room_for_its_part_of_an_array(self):
        mesh = mesh_lib.make_mesh(MeshConfig(fsdp=4, expert=2))
        sizes = draw(mesh).memory_analysis()
        whole = 4 * math.prod(STACKS[0].shape)
        self.assertLess(sizes.temp_size_in_bytes, COPIES * whole / mesh.size * 1.1)
        self.assertLess(sizes.output_size_in_bytes, 2 * whole / mesh.size * 1.1)

    def test_values_are_normal_and_the_same_on_every_mesh(self):
        key = jax.random.key(3)
        ours = draw(mesh_lib.make_mesh(MeshConfig(fsdp=4, expert=2)))(key)
        other = draw(runs.first_devices(data=1))(key)
        for param, x, y in zip(PARAMS, ours, other, strict=True):
            x = np.asarray(x)
            np.testing.assert_array_equal(x, y)
            if param.fill is None:
                self.assertAlmostEqual(x.std() / 0.02, 1.0, delta=0.02)
                self.assertLess(abs(x.mean()), 0.0005)
        # Each array has draws of its own.
        stacks = np.stack([np.asarray(x).ravel()[:4096] for x in ours[2:4]])
        self.assertLess(np.abs(np.corrcoef(stacks) - np.eye(2)).max(), 0.07)

    def test_arrays_of_two_million_elements_are_drawn_alone(self):
        """8 MiB in float32; smaller ones together, up to as many."""
        fill = layers.scale(8, "D")
        sizes = (2**21 + 1, 2**20, None, 2**20, 1, 2**21, 2**21 - 1, 1, 7)
        params = [fill if n is None else layers.Param((n,), ("M",)) for n in sizes]
        packs = [[1, 3], [4], [5], [6, 7], [8], [0]]
        self.assertEqual(initial._packs(params), packs)


if __name__ == "__main__":
    environment.main()
