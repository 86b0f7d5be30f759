"""Checks that rows sent to a matrix's parts give the product with the whole matrix."""

import dataclasses
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
from glm5_jax.quantization import leaf, shards
from tests import environment

SIZES = {"D": 16, "Q": 24, "N": 4, "H": 6, "O": 3, "F": 32, "E": 8, "I": 2, "J": 5}
ROWS = 2  # of a device
RTOL = 1e-6  # float32 sums in another order
MATRICES = {  # dims of a matrix, and how many of them are of its input
    "input_cut": (("D", "I"), 1),
    "input_cut_and_heads": (("Q", "N", "H"), 1),
    "two_input_dims": (("N", "O", "D"), 2),
    "output_cut": (("F", "D"), 1),
    "both_cut": (("D", "E"), 1),  # the router
}

# Layouts of a matrix with two dims, or with more behind or before them.
LAYOUTS = {
    "int8": leaf.Layout("int8", (leaf.WHOLE, 1)),
    "w8a8": leaf.Layout("int8", (leaf.WHOLE, 1), activations="int8"),
    "int4": leaf.Layout("int4", (leaf.WHOLE, 1)),
    "groups": leaf.Layout("int4", (8, 1), activations="int8"),
    "fp8": leaf.Layout("fp8", (8, 8)),  # devices share blocks
}


def layout_of(name, dims, num_in):
    """Returns the layout for a matrix whose first and last dims have the blocks."""
    layout = LAYOUTS[name]
    first, last = layout.blocks
    middle = [first if i < num_in else last for i in range(1, len(dims) - 1)]
    blocks = (first, *(leaf.WHOLE if b > 1 else b for b in middle), last)
    return dataclasses.replace(layout, blocks=blocks, num_in=num_in)


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

    @parameterized.product(
        name=["input_cut", "input_cut_and_heads", "two_input_dims", "output_cut"],
        kind=[*LAYOUTS],
    )
    def test_codes_stay_and_the_numbers_too(self, name, kind):
        """As the gathered codes give them; sums of integers to the bit."""
        dims, num_in = MATRICES[name]
        layout = layout_of(kind, dims, num_in)
        if layout.blocks[0] > 1 and num_in > 1:
            self.skipTest("groups are of matrices with one input dim")
        rng = np.random.default_rng(0)
        w = rng.standard_normal([SIZES[dim] for dim in dims]).astype(np.float32)
        x = rng.standard_normal([4 * ROWS, *w.shape[:num_in]]).astype(np.float32)
        codes = leaf.quantize(jnp.asarray(w), layout)

        def local(codes, x, stays):
            if stays:
                return layers.linear(x, stationary.stored(codes, dims, num_in))
            return layers.linear(x, shards.fetched(codes, dims))

        keeps = [dim if dim in ("N", "F") else None for dim in dims]
        cut = [keep and "tensor" for keep in keeps]
        rows = PartitionSpec(collectives.ROWS, *cut[:num_in])
        # Sums over heads and widths are of the devices' shares; here each is compared.
        shares = "tensor" if dims[0] in ("N", "F") else None
        out = PartitionSpec((*collectives.ROWS, *([shares] if shares else [])))
        if not shares:
            out = PartitionSpec(collectives.ROWS, *cut[num_in:])
        found = []
        with jax.set_mesh(make_mesh()):
            specs = shards.specs(codes, dims), rows
            for stays in (True, False):
                run = functools.partial(local, stays=stays)
                mapped = jax.jit(collectives.on_shards(run, specs, out))
                found.append(mapped(codes, jnp.asarray(x)))
        is_exact = layout.activations == "int8" and layout.blocks[0] == leaf.WHOLE
        rtol = 0 if is_exact else RTOL
        np.testing.assert_allclose(*found, rtol=rtol, atol=10 * rtol)
        if layout.activations == "same" and not shares:
            whole = np.asarray(leaf.dequantized(codes, jnp.float32))
            wanted = np.tensordot(x, whole, axes=num_in)
            np.testing.assert_allclose(found[0], wanted, rtol=RTOL, atol=10 * RTOL)

    def test_a_quantized_matrix_pays_by_its_codes(self):
        """Gathered codes take a byte each; sent rows are codes as well."""
        layout, found = LAYOUTS["w8a8"], {}
        codes = leaf.abstract((16, 24), layout)

        def count(codes, num_rows):
            found[num_rows] = stationary.pays(
                codes, ("D", "Q"), 1, num_rows, "bfloat16"
            )
            return codes.values

        for num_rows in (1, 2, 3, 4):
            with jax.set_mesh(make_mesh()):
                specs = shards.specs(codes, ("D", "Q"))
                run = functools.partial(count, num_rows=num_rows)
                mapped = collectives.on_shards(run, (specs,), specs.values)
                jax.eval_shape(mapped, codes)
        # A row of 16 codes goes; 4 sums of 24 come, and stay, rounded to 2 bytes.
        row = 16 + 4 * 24 * 4 + 24 * 2
        self.assertEqual(found, {n: n * row < 3 * 4 * 24 for n in found})

    def test_pays_for_few_rows_only(self):
        """The bytes of a ring: of all-gather, exchange and scattered sum."""
        found = {}

        def count(w, num_rows):
            found[num_rows] = stationary.pays(w, ("D", "Q"), 1, num_rows, "float32")
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
