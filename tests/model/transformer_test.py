"""The dtypes of parameters, and arguments that exclude each other."""

import jax
import jax.numpy as jnp
from absl.testing import parameterized

from glm5_jax.model import context as context_lib
from glm5_jax.model import indexer, transformer
from tests import environment
from tests.model import tiny

HALF = tiny.model(dtype="bfloat16", param_dtype="bfloat16")
# Of norms, router and the indexer's head weights, whose rounding would choose others.
EXACT = ("norm", "layernorm", "scale", "bias", "gate", "weights_proj")


class DtypeTest(parameterized.TestCase):
    def test_stored_and_computed(self):
        stored = transformer.abstract_params(HALF)
        computed = jax.eval_shape(lambda p: transformer.cast(p, HALF), stored)
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
