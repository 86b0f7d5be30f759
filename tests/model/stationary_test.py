"""Checks that rows sent to a matrix's parts give the product with the whole matrix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.sharding import PartitionSpec

from glm5_jax import collectives, depth, sharding
from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.model import block as block_lib
from glm5_jax.model import layers, stationary, transformer
from glm5_jax.quantization import leaf, shards
from tests import environment
from tests.model import tiny

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


def pays(mesh, shape, dims, num_in):
    """Returns for some numbers of rows whether to send them to the matrix."""
    found = {}

    def count(w):
        for num_rows in (1, 2, 3, 4):
            found[num_rows] = stationary.pays(w, dims, num_in, num_rows, "float32")
        return w

    with jax.set_mesh(mesh):
        run = collectives.on_shards(count, (sharding.spec(dims),), sharding.spec(dims))
        jax.eval_shape(run, jax.ShapeDtypeStruct(shape, jnp.float32))
    return found


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
        codes = jax.jit(leaf.quantize, static_argnums=1)(w, layout)

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
            restore = jax.jit(leaf.dequantized, static_argnums=1)
            whole = np.asarray(restore(codes, jnp.float32))
            wanted = np.tensordot(x, whole, axes=num_in)
            np.testing.assert_allclose(found[0], wanted, rtol=RTOL, atol=10 * RTOL)

    def test_on_one_device_nothing_is_sent(self):
        whole = jnp.arange(float(SIZES["D"] * SIZES["Q"])).reshape(SIZES["D"], -1)
        table = {"w": layers.Param(whole.shape, ("D", "Q"), num_in=1)}
        fetched = layers.fetched({"w": whole}, table, "float32", num_rows=1)
        self.assertIsInstance(fetched["w"], jax.Array)
        np.testing.assert_array_equal(fetched["w"], whole)


class PaysTest(parameterized.TestCase):
    def test_a_quantized_matrix_pays_by_its_codes(self):
        """Gathered codes take a byte each; sent rows are codes as well."""
        layout, found = LAYOUTS["w8a8"], {}
        codes = leaf.abstract((96, 24), layout)

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
        # A row of 96 codes goes; 4 sums of 24 come, and stay, rounded to 2 bytes.
        row = 96 + 4 * 24 * 4 + 24 * 2
        self.assertEqual(found, {n: n * row < 3 * 24 * 24 for n in found})
        self.assertEqual(set(found.values()), {True, False})

    @parameterized.named_parameters(
        # The numbers sent for a row: gathered over the devices that cut the output,
        # exchanged, summed over those that cut the input, returned.
        ("input_cut", ("D", "Q"), 1, 0 + 32 + 4 * 32 + 32, 3 * 8 * 32),
        ("output_cut", ("F", "D"), 1, 3 * 20 + 4 * 20 + 32 + 32, 3 * 20 * 8),
        ("both_cut", ("D", "E"), 1, 32 + 2 * 32 + 2 * 8 + 8, 3 * 16 * 4),
        ("heads", ("Q", "N", "H"), 1, 0 + 32 + 4 * 12 + 12, 3 * 8 * 12),
        ("two_input_dims", ("N", "O", "D"), 2, 3 * 6 + 4 * 6 + 32 + 32, 3 * 6 * 8),
        ("cut_within_the_input", ("I", "D", "J"), 2, None, None),
        ("no_matrix", ("D", "Q"), 0, None, None),
    )
    def test_pays_for_few_rows_only(self, dims, num_in, row, gathered):
        """Where rows take fewer bytes than the parts of the other three devices."""
        sizes = SIZES | {"D": 32, "Q": 32, "F": 40}
        shape = [sizes[dim] for dim in dims]
        found = pays(make_mesh(), shape, dims, num_in)
        self.assertEqual(found, {n: bool(row) and n * row < gathered for n in found})

    def test_pays_with_two_parts(self):
        mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=4, fsdp=2))
        found = pays(mesh, (32, 32), ("D", "Q"), 1)
        row = 32 + 2 * 32 + 32
        self.assertEqual(found, {n: n * row < 16 * 32 for n in found})


class DecodingTest(parameterized.TestCase):
    @parameterized.parameters((1, None), (None, None), (1, True))
    def test_a_row_goes_to_the_matrices_of_a_layer(self, num_rows, invariant):
        """Not to those of heads and experts; nor where sums may not be reordered."""
        config = tiny.model(batch_invariant=invariant, kv_lora_rank=16)
        block, found = block_lib.make(config, depth.layer_kinds(config)[-1]), {}
        dims = transformer.map_table(lambda p: p.dims, block.table())
        shapes = transformer.map_table(
            lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), block.table()
        )

        def fetch(params):
            own = block.fetched(params, num_rows)
            is_whole = lambda node: isinstance(node, stationary.Stationary)
            for path, w in jax.tree_util.tree_leaves_with_path(own, is_leaf=is_whole):
                if is_whole(w):
                    found["/".join(key.key for key in path[-2:])] = w.num_in
            return ()

        with jax.set_mesh(mesh_lib.make_mesh(config_lib.MeshConfig(fsdp=8))):
            specs = (sharding.specs(dims),)
            jax.eval_shape(collectives.on_shards(fetch, specs, ()), shapes)
        names = (
            *("self_attn/q_a_proj", "self_attn/q_b_proj", "self_attn/kv_a_proj"),
            *("indexer/wq_b", "indexer/wk", "indexer/weights_proj", "mlp/gate"),
            *(f"shared_experts/{name}_proj" for name in ("gate", "up", "down")),
        )
        wanted = dict.fromkeys(names, 1) | {"self_attn/o_proj": 2}
        self.assertEqual(found, wanted if num_rows and not invariant else {})


if __name__ == "__main__":
    environment.main()
