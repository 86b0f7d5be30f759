"""Arrays inside a shard_map that vary along the axes of others."""

import functools

import jax
import jax.numpy as jnp
from absl.testing import absltest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import varying
from tests import environment


class VaryingTest(absltest.TestCase):
    def run_local(self, function, *args):
        """Runs it on a 2 x 4 mesh: the first argument varies along a, the next b."""
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        specs = (PartitionSpec("a"), PartitionSpec("b"), PartitionSpec())[: len(args)]

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=specs[0])
        def local(*args):
            function(*args)
            return args[0]

        jax.eval_shape(local, *args)

    def test_all_arrays_vary_along_all_axes(self):
        def check(x, y, z):
            self.assertEqual(varying._axes(z), frozenset())
            tree = varying.alike({"x": x, "rest": (y, z, 3)})
            self.assertEqual(tree["rest"][2], 3)
            for array in (tree["x"], *tree["rest"][:2]):
                self.assertEqual(varying._axes(array), {"a", "b"})
            self.assertIs(varying.alike((x, 2))[0], x)

        self.run_local(check, jnp.ones(2), jnp.ones(4), jnp.ones(3))

    def test_zeros_vary_like_the_arguments(self):
        def check(x, y, z):
            for like, axes in (((x, z, None), {"a"}), ([x, y], {"a", "b"}), (z, set())):
                zeros = varying.zeros((5, 3), jnp.int32, like)
                self.assertEqual(varying._axes(zeros), axes)
                self.assertEqual((zeros.shape, zeros.dtype), ((5, 3), jnp.int32))

        self.run_local(check, jnp.ones(2), jnp.ones(4), jnp.ones(3))

    def test_nothing_varies_without_a_shard_map(self):
        x, y = jnp.ones(2), jnp.ones(3)
        self.assertIs(varying.alike((x, y))[1], y)


if __name__ == "__main__":
    environment.main()
