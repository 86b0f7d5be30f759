"""The TPU's loss of the indexer over lists, interpreted, against its definition."""

import dataclasses
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from pallas_kernels import cases, sparse_indexer_kl_loss, sparse_mla
from pallas_kernels.sparse_mla import tpu_rows
from tests import environment
from tests.pallas_kernels import program
from tests.pallas_kernels.sparse_mla_tpu_test import few_rows

# Every copy of a row is a call back into Python: few queries, short lists. Lists are of
# one chunk or several, full, partly full and empty; T is no multiple of a tile.
FEW = {"heads": 4, "topk": 9}
CASES = (
    dataclasses.replace(cases.SMALL["documents"], queries=4, keys=12, **FEW),
    dataclasses.replace(cases.SMALL["float32"], queries=4, keys=10, **FEW),
)
LOSS_RTOL = 1e-5  # float32 sums of the same products in another order
# Relative L2 norms of errors of gradients: products with dI rounded to bfloat16, or
# two orders of summation.
GRADIENT_TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-4}


def run(case, implementation, with_gradient=True):
    """The loss, and its gradient for the indexer's q, k and w."""
    names = ("q_latent", "kv", "indices", "q_index", "k_index", "w", "weight")
    q, kv, indices, *index, weight = cases.make(case, *names)
    index[2] = index[2] / 8  # scores of the size of logits
    weight = weight.at[:, 1].set(0)
    options = {"scale": case.scale, "implementation": "reference"}
    options["value_dim"] = case.latent
    _, lse = program.call(sparse_mla, q, kv, indices, **options)

    def loss(index, main, indices, weight):
        options = {"scale": case.scale, "implementation": implementation}
        return 2 * sparse_indexer_kl_loss(main, index, indices, weight, **options)

    compiled = jax.jit(jax.value_and_grad(loss) if with_gradient else loss)
    return compiled(tuple(index), (q, kv, lse), indices, weight)


def error(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


class SparseKlTpuTest(parameterized.TestCase):
    def assert_close(self, got, want, dtype):
        (loss, gradient), (wanted_loss, wanted) = got, want
        np.testing.assert_allclose(loss, wanted_loss, rtol=LOSS_RTOL)
        for g, w in zip(gradient, wanted, strict=True):
            self.assertEqual((g.dtype, g.shape), (w.dtype, w.shape))
            self.assertLess(error(g, w), GRADIENT_TOLERANCE[dtype])

    @parameterized.named_parameters(
        ("two_parts", CASES[0], 3), ("one_part_float32", CASES[1], 4)
    )
    def test_equals_definition(self, case, queries):
        want = run(case, "reference")
        with few_rows(queries):
            got = run(case, "tpu_interpret")
        self.assert_close(got, want, case.dtype)
        (dq, dk, dw), hidden = got[1], [1]  # query 1 has no weight
        if case.documents > 1:  # the last query of a sequence sees nothing
            hidden.append(-1)
            self.assertEqual(float(np.abs(np.asarray(dk[0, -1], np.float32)).max()), 0)
        for t in hidden:
            np.testing.assert_array_equal(np.asarray(dq[0, t], np.float32), 0)
            np.testing.assert_array_equal(dw[0, t], 0)

    def test_value_alone(self):
        case = CASES[0]
        with few_rows(queries=3):
            got = run(case, "tpu_interpret", with_gradient=False)
        want = run(case, "reference", with_gradient=False)
        np.testing.assert_allclose(got, want, rtol=LOSS_RTOL)

    def test_unrolled_as_for_real_lists(self):
        case = dataclasses.replace(
            cases.SMALL["continued"], queries=1, heads=2, topk=16
        )
        with mock.patch.multiple(tpu_rows, QUERIES=1, UNROLL=8):
            got = run(dataclasses.replace(case, queries=2), "tpu_interpret")
        want = run(dataclasses.replace(case, queries=2), "reference")
        self.assert_close(got, want, case.dtype)


if __name__ == "__main__":
    environment.main()
