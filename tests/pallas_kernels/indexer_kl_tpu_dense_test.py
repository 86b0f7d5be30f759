"""The TPU's loss of the indexer, interpreted, against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import (
    block_sizes,
    cases,
    dense_attention,
    indexer_kl_loss,
    indexer_mask,
    selection,
)
from tests import environment
from tests.pallas_kernels import program

# No two dims of a block are equal.
_SMALL = {"heads": 16, "head_dim": 256, "index_heads": 8, "index_dim": 384, "topk": 32}
BLOCKS = 128, 512  # queries, keys; half as many keys in float32
CASES = (
    cases.Case("documents", 150, 150, batch=2, documents=2, **_SMALL),
    cases.Case("continued", 70, 300, dtype="float32", **_SMALL),
)
LOSS_RTOL = 1e-5  # float32 sums of the same products in another order
# Relative L2 norms of errors of gradients: products with dI rounded to bfloat16, or
# two orders of summation.
GRADIENT_TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-4}


def error(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


class IndexerKlTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        sizes = block_sizes.Tpu(cores=2, indexer_kl=BLOCKS)
        self.enter_context(block_sizes.tried(sizes))

    @parameterized.named_parameters(
        ("documents", CASES[0], False),
        ("bits", CASES[0], True),
        ("mask_float32", CASES[1], True),
    )
    def test_equals_definition(self, case, is_selected):
        names = ("q", "k", "v", "q_index", "k_index", "w", "lo", "hi", "weight")
        q, k, v, *index, lo, hi, weight = cases.make(case, *names)
        index[2] = index[2] / 8  # scores of the size of logits
        selected = None
        if is_selected:
            selected = program.call(indexer_mask, *index, lo, hi, topk=32)
        _, lse = program.call(
            dense_attention, q, k, v, lo, hi, selected, scale=case.scale
        )
        if is_selected and case.dtype == "bfloat16":
            selected = program.call(selection.pack, selected)

        # Constants of a program would be folded, which takes XLA ten times as long.
        args = tuple(index), (q, k, lse), lo, hi, selected, weight

        def loss(index, main, *rows, implementation):
            options = {"scale": case.scale, "implementation": implementation}
            return 2 * indexer_kl_loss(main, index, *rows, **options)

        run = jax.jit(jax.value_and_grad(loss), static_argnames="implementation")
        got, gradient = run(*args, implementation="tpu_interpret")
        want, wanted = run(*args, implementation="reference")
        np.testing.assert_allclose(got, want, rtol=LOSS_RTOL)
        if not is_selected:  # the value alone comes without a gradient
            alone = jax.jit(loss, static_argnames="implementation")
            value = alone(*args, implementation="tpu_interpret")
            np.testing.assert_allclose(value, got, rtol=LOSS_RTOL)
        for g, w in zip(gradient, wanted, strict=True):
            self.assertEqual((g.dtype, g.shape), (w.dtype, w.shape))
            self.assertLess(error(g, w), GRADIENT_TOLERANCE[case.dtype])
        if case.documents > 1:  # the last query of a sequence sees nothing
            jax.tree.map(
                lambda g: np.testing.assert_array_equal(g[0, -1], 0),
                (gradient[0], gradient[2]),
            )
            self.assertTrue(jnp.isfinite(got))


if __name__ == "__main__":
    environment.main()
