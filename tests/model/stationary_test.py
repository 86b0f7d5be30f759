"""Checks that rows sent to a matrix's parts give the product with the whole matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import PartitionSpec

from glm5_jax import collectives, sharding
from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.model import layers, stationary
from tests import environment

SIZES = {"D": 16, "Q": 24, "N": 4, "H": 6, "O": 3, "F": 20, "E": 8, "I": 2, "J": 5}
ROWS = 2  # of a device
RTOL = 1e-6  # float32 sums in another order
MATRICES = {  # dims of a matrix, and how many of them are of its input
    "input_cut": (("D", "I"), 1),
    "input_cut_and_heads": (("Q", "N", "H"), 1),
    "two_input_dims": (("N", "O", "D"), 2),
    "output_cut": (("F", "D"), 1),
    "both_cut": (("D", "E"), 1),  # the router
}


def make_mesh():
    return mesh_lib.make_mesh(config_lib.MeshConfig(data=1, fsdp=2, expert=2, tensor=2))


class StationaryTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (name, *matrix) for name, matrix in MATRICES.items()
    )
    def test_equals_the_whole_product(self, dims, num_in):
        rng = np.random.default_rng(0)
        w = rng.standard_normal([SIZES[dim] for dim in dims])
        x = rng.standard_normal([4 * ROWS, *w.shape[:num_in]])
        wanted = np.tensordot(x, w, axes=num_in)
        is_summed = dims[0] in ("N", "F")  # over the devices that share heads or widths

        def local(x, w):
            w = stationary.Stationary(w, dims, num_in)
            y = layers.linear(x, w, num_in, jax.lax.Precision.HIGHEST)
            return collectives.total(y, collectives.SHARES) if is_summed else y

        keeps = [dim if dim in ("N", "F") else None for dim in dims]
        cut = [keep and "tensor" for keep in keeps]
        rows = PartitionSpec(collectives.ROWS, *cut[:num_in])
        out = PartitionSpec(collectives.ROWS, *cut[num_in:])
        with jax.set_mesh(make_mesh()):
            run = collectives.on_shards(local, (rows, sharding.spec(dims)), out)
            found = jax.jit(run)(jnp.asarray(x, jnp.float32), jnp.asarray(w, "float32"))
        np.testing.assert_allclose(found, wanted, rtol=RTOL, atol=RTOL * 10)

    def test_pays_for_few_rows_only(self):
        """The bytes of a ring: of all-gather, exchange and scattered sum."""
        found = {}

        def count(w, num_rows):
            found[num_rows] = stationary.pays(w, ("D", "Q"), 1, num_rows)
            return w

        for num_rows in (1, 2, 3, 4):
            with jax.set_mesh(make_mesh()):
                spec = sharding.spec(("D", "Q"))
                run = functools.partial(count, num_rows=num_rows)
                shape = jax.ShapeDtypeStruct((16, 24), jnp.float32)
                jax.eval_shape(collectives.on_shards(run, (spec,), spec), shape)
        # 4 parts of 4 x 24: 3 * 96 numbers are gathered; a row costs 16 + 4 * 24.
        self.assertEqual(found, {n: n * (16 + 96) < 288 for n in found})

    def test_on_one_device_nothing_is_sent(self):
        whole = jnp.arange(float(SIZES["D"] * SIZES["Q"])).reshape(SIZES["D"], -1)
        table = {"w": layers.Param(whole.shape, ("D", "Q"), num_in=1)}
        fetched = layers.fetched({"w": whole}, table, "float32", num_rows=1)
        self.assertIsInstance(fetched["w"], jax.Array)
        np.testing.assert_array_equal(fetched["w"], whole)


if __name__ == "__main__":
    environment.main()
