"""Schemes: which matrices they round, in the model's forward pass and on a mesh."""

import jax
import numpy as np
from absl.testing import parameterized
from jax.sharding import PartitionSpec

from glm5_jax import config as config_lib
from glm5_jax.model import transformer
from glm5_jax.quantization import leaf, schemes, shards
from tests import environment
from tests.model import tiny

TINY = tiny.model()
DIMS = transformer.param_dims(TINY)
WHOLE = leaf.WHOLE
FLOAT32 = 2e-5  # logits up to about 10
KEPT = {"embed_tokens", "lm_head", "eh_proj", "gate", "weights_proj"}


def as_one_program(rounded, params, model, scheme):
    dims = transformer.param_dims(model)
    return jax.jit(lambda params: rounded(params, dims, scheme))(params)


class SchemesTest(parameterized.TestCase):
    @parameterized.parameters(*schemes.NAMES)
    def test_a_scheme_rounds_the_matrices_of_an_fp8_release(self, name):
        made = schemes.abstract(
            transformer.abstract_params(TINY), DIMS, schemes.SCHEMES[name]
        )
        flat = jax.tree_util.tree_leaves_with_path(made, is_leaf=leaf.is_quantized)
        depths = jax.tree.leaves(DIMS, is_leaf=lambda x: isinstance(x, tuple))
        for (path, x), dims in zip(flat, depths, strict=True):
            names = [key.key for key in path]
            is_matrix = x.ndim - schemes.stacks(dims) > 1 and names[-1] not in KEPT
            self.assertEqual(leaf.is_quantized(x), is_matrix, names)
            if is_matrix and "experts" in names and name.startswith("w4"):
                self.assertEqual(x.layout.kind, "int4")

    @parameterized.parameters(
        (("self_attn", "q_a_proj"), (16, 6), "int4", (WHOLE, 1)),
        (("self_attn", "o_proj"), (2, 4, 6), "int4", (WHOLE, WHOLE, 1)),
        (("self_attn", "o_proj"), (1, 8, 6), "int8", (WHOLE, WHOLE, 1)),
        (("mlp", "experts", "down_proj"), (384, 6), "int4", (128, 1)),
        (("mlp", "experts", "down_proj"), (192, 6), "int4", (64, 1)),
        (("mlp", "experts", "down_proj"), (12, 6), "int8", (WHOLE, 1)),
    )
    def test_int4_codes_fill_bytes_and_words(self, names, shape, kind, blocks):
        path = ("layers_0", "block_0", *names)
        found = schemes.layout_of(schemes.SCHEMES["int4"], path, shape)
        self.assertEqual((found.kind, found.blocks), (kind, blocks))

    def test_bytes_of_glm5_are_those_of_its_fp8_release(self):
        """756,162,687,872; the release cuts kv_b_proj into fewer blocks."""
        config = config_lib.ModelConfig(param_dtype="bfloat16")
        shapes, dims = (
            transformer.abstract_params(config),
            transformer.param_dims(config),
        )
        sizes = {}
        for name in ("fp8", "w4a8"):
            made = schemes.abstract(shapes, dims, schemes.SCHEMES[name])
            sizes[name] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made))
        self.assertAlmostEqual(sizes["fp8"] / 756_162_687_872, 1, delta=1e-5)
        self.assertLess(sizes["w4a8"], 0.55 * sizes["fp8"])

    @parameterized.parameters("w4a16", "int4")
    def test_codes_and_rounded_weights_give_the_same_logits(self, name):
        """Attention, indexer and experts; the shared expert is a dense layer."""
        model = tiny.model(
            num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=0
        )
        params, scheme = tiny.params(model), schemes.SCHEMES[name]
        tokens = tiny.batch(model, [(20,), (9, 8)], 24)["tokens"]
        got, wanted = (
            tiny.logits(as_one_program(rounded, params, model, scheme), model, tokens)
            for rounded in (schemes.quantized, schemes.rounded)
        )
        np.testing.assert_allclose(got, wanted, atol=FLOAT32)

    def test_scales_lie_with_their_codes(self):
        layouts = {
            "a": leaf.Layout("int8", (leaf.WHOLE, 1)),
            "b": leaf.Layout("int4", (4, 1)),
        }
        shapes = {k: leaf.abstract((2, 8, 16, 8), x) for k, x in layouts.items()}
        dims = dict.fromkeys(shapes, ("L", "E", "D", "F"))
        found = shards.specs(shapes, dims)
        self.assertEqual(
            found["a"].values,
            PartitionSpec(None, ("expert",), ("fsdp", "context"), ("tensor",)),
        )
        self.assertEqual(
            found["a"].scales, PartitionSpec(None, ("expert",), None, ("tensor",))
        )
        self.assertEqual(found["b"].scales, found["b"].values)

    def test_a_mesh_must_not_cut_blocks(self):
        """Devices that gather a dim may share its blocks, but never a byte."""
        names = "data", "fsdp", "expert", "tensor", "context"
        gathered = jax.sharding.AbstractMesh((1, 8, 1, 1, 1), names)
        kept = jax.sharding.AbstractMesh((1, 1, 1, 8, 1), names)
        for mesh, dims, blocks, message in (
            (kept, ("F", "D"), (4, 1), "8 devices.*every 4 weights have one scale"),
            (gathered, ("D", "F"), (4, 1), "8 devices.*every 2 weights have one byte"),
            (gathered, ("D", "F"), (WHOLE, 1), "8 devices.*2 weights have one byte"),
        ):
            shapes = {"x": leaf.abstract((8, 8), leaf.Layout("int4", blocks))}
            with self.assertRaisesRegex(config_lib.InputError, message):
                shards.shardings(shapes, {"x": dims}, mesh)


if __name__ == "__main__":
    environment.main()
