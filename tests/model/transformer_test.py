"""The dtypes of parameters, and arguments that exclude each other."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax.model import attention, indexer, layers, transformer
from glm5_jax.model import context as context_lib
from pallas_kernels import chips
from tests import environment
from tests.model import tiny
from tests.pallas_kernels.dispatch_test import meant_for

HALF = tiny.model(dtype="bfloat16", param_dtype="bfloat16")
VARIANTS = tiny.variants(dtype="bfloat16", param_dtype="bfloat16")
# Of norms, router and the indexer's head weights, whose rounding would choose others;
# and of the linear attentions' decays and convolutions.
EXACT = (
    "norm",
    "layernorm",
    "scale",
    "bias",
    "gate",
    "weights_proj",
    "A_log",
    "conv1d",
)


class DtypeTest(parameterized.TestCase):
    @parameterized.parameters(HALF, VARIANTS)
    def test_stored_and_computed(self, config):
        stored = transformer.abstract_params(config)
        computed = jax.eval_shape(lambda p: transformer.cast(p, config), stored)
        pairs = zip(
            *map(jax.tree_util.tree_leaves_with_path, (stored, computed)), strict=True
        )
        for (path, x), (_, y) in pairs:
            name = path[-1].key
            is_kept = name == "e_score_correction_bias"
            self.assertEqual(x.dtype, "float32" if is_kept else "bfloat16", name)
            self.assertEqual(
                y.dtype, "float32" if name.endswith(EXACT) else "bfloat16", name
            )


class LinearTest(parameterized.TestCase):
    @parameterized.parameters((None, [(6, 20), (20, 42)]), ("v5p", None))
    def test_on_a_cpu_two_matrices_are_multiplied(self, chip, shapes):
        """XLA for CPUs is slow at gradients of products with several free dims."""
        x, w = jnp.zeros((2, 3, 4, 5)), jnp.zeros((4, 5, 6, 7))
        with contextlib.ExitStack() as stack:
            if chip:
                stack.enter_context(meant_for(chips.CHIPS[chip]))
            program = jax.make_jaxpr(lambda x, w: layers.linear(x, w, 2))(x, w)
        found = [
            [value.aval.shape for value in equation.invars]
            for equation in program.eqns
            if equation.primitive.name == "dot_general"
        ]
        self.assertEqual(found, [shapes or [x.shape, w.shape]])
        self.assertEqual(program.out_avals[0].shape, (2, 3, 6, 7))


class ColumnsTest(parameterized.TestCase):
    @parameterized.parameters((1, 2, False), (3, 1, False), (2, 2, True), (5, 1, True))
    def test_the_smaller_of_matrix_and_product_is_arranged(self, b, t, is_matrix):
        """A matrix with 4 inputs is arranged for 4 rows or more; results are equal."""
        rng = np.random.default_rng(0)
        x, w = (jnp.float32(rng.normal(size=s)) for s in ((b, t, 4), (4, 6, 5)))
        arranged = []

        def reverse(y):
            arranged.append(y.shape)
            return y[..., ::-1]

        (got,) = layers.linear_of_columns(x, w, reverse)
        want = np.einsum("bti,ijk->btjk", x, w)[..., ::-1]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        self.assertEqual(arranged, [w.shape if is_matrix else got.shape])


class FirstSharedTest(parameterized.TestCase):
    def test_before_the_first_index_no_cached_key_is_selected(self):
        found = attention.first_cached_shared(tiny.model(), 2, 3, capacity=16)
        np.testing.assert_array_equal(found.indices, np.full((2, 3, 6), -1))


class ForwardTest(parameterized.TestCase):
    @parameterized.parameters("segment_ids", "positions")
    def test_a_context_replaces_documents_and_positions(self, name):
        model = tiny.model()
        ids = jnp.ones((1, 4), jnp.int32)
        context = context_lib.make_context(model, ids, ids)
        with self.assertRaisesRegex(ValueError, "leave them out"):
            transformer.forward({}, model, ids, context=context, **{name: ids})


class SelectionTest(parameterized.TestCase):
    @parameterized.parameters(
        ({}, 7, False),
        ({}, 8, False),  # as many as are kept
        ({}, 9, True),
        ({"batch_invariant": True}, 7, True),  # one form for any length
        ({"attention": "dense"}, 9, False),
        ({"attention": "dense_with_indexer_loss"}, 9, False),
    )
    def test_keys_are_selected_where_there_are_more(self, fields, num_keys, wanted):
        config = tiny.model(index_topk=8, **fields)
        self.assertEqual(indexer.selects(config, num_keys), wanted)


if __name__ == "__main__":
    environment.main()
