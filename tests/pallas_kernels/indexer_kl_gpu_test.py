"""The Triton kernels of indexer_kl in the interpreter: TRITON_INTERPRET=1."""

import dataclasses
import functools
import importlib.util
import os
import unittest

import jax
import numpy as np
from absl.testing import parameterized

from pallas_kernels import cases, sparse_indexer_kl_loss, sparse_mla
from tests import environment

CAN_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1" and all(
    map(importlib.util.find_spec, ("triton", "torch"))
)
LOSS_RTOL = 1e-4  # logarithms in float32, their sums in another order
FLOAT32_NORM = 1e-4  # of gradients, relative
BFLOAT16_NORM = 1e-2  # products' operands and dq, dk have 8 bits of mantissa

# The small cases with fewer queries: a program of the interpreter takes milliseconds.
CASES = tuple(
    dataclasses.replace(case, queries=queries, keys=keys)
    for case, (queries, keys) in zip(
        cases.SMALL, ((5, 5), (30, 30), (7, 133), (9, 90)), strict=True
    )
)


def run(case, implementation):
    """The loss, and its gradients for q, k and w."""
    names = ("q_latent", "kv", "q_index", "k_index", "w", "indices", "weight")
    q, kv, *index, indices, weight = cases.make(case, *names)
    weight = weight.at[:, -2].set(0)
    _, lse = sparse_mla(
        *(q, kv, indices),
        scale=case.scale,
        value_dim=case.latent,
        implementation="reference",
    )
    loss = functools.partial(
        sparse_indexer_kl_loss,
        (q, kv, lse),
        indices=indices,
        weight=weight,
        scale=case.scale,
        implementation=implementation,
    )
    value, grads = jax.value_and_grad(lambda index: 3 * loss(index))(tuple(index))
    return value, dict(zip(("dq", "dk", "dw"), grads, strict=True)), loss(tuple(index))


@unittest.skipUnless(CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1")
class SparseIndexerKlGpuTest(parameterized.TestCase):
    @parameterized.named_parameters((case.name, case) for case in CASES)
    def test_equals_definition_with_gradients(self, case):
        value, grads, alone = run(case, "gpu_interpret")
        want_value, want_grads, _ = run(case, "reference")
        np.testing.assert_allclose(value, want_value, LOSS_RTOL)
        np.testing.assert_allclose(value, 3 * alone, 1e-6)
        limit = FLOAT32_NORM if case.dtype == "float32" else BFLOAT16_NORM
        for name, want in want_grads.items():
            self.assertEqual(grads[name].dtype, want.dtype)
            got, want = (np.asarray(x, np.float64) for x in (grads[name], want))
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            self.assertLess(error, limit, name)

    def test_queries_without_keys_or_weight_have_no_gradient(self):
        _, grads, _ = run(CASES[1], "gpu_interpret")
        for name in ("dq", "dw"):
            np.testing.assert_array_equal(grads[name][0, -2:], 0)
            np.testing.assert_array_equal(grads[name][1, -2], 0)

    def test_says_what_it_cannot_take(self):
        with self.assertRaisesRegex(NotImplementedError, "up to 64 heads, got 80"):
            run(dataclasses.replace(CASES[0], heads=80), "gpu_interpret")
        with self.assertRaisesRegex(NotImplementedError, "power of two"):
            run(dataclasses.replace(CASES[0], index_dim=48), "gpu_interpret")


if __name__ == "__main__":
    environment.main()
