"""The Triton kernels of sparse_mla in the interpreter: TRITON_INTERPRET=1."""

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import unittest
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import block_sizes, cases, sparse_mla
from tests import environment
from tests.pallas_kernels import sparse_mla_test

CAN_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1" and all(
    map(importlib.util.find_spec, ("triton", "torch"))
)
# The small cases with fewer queries: a program of the interpreter takes milliseconds.
SHORT, DOCUMENTS, CONTINUED, FLOAT32 = (
    dataclasses.replace(case, queries=queries, keys=keys)
    for case, (queries, keys) in zip(
        cases.SMALL.values(), ((5, 5), (30, 30), (7, 133), (9, 90)), strict=True
    )
)
# More heads than a program takes, and not a multiple of it.
HEADS = dataclasses.replace(CONTINUED, name="heads", queries=3, heads=80)
FEW = dataclasses.replace(FLOAT32, topk=32)


@unittest.skipUnless(CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1")
class SparseMlaGpuTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (case.name, case) for case in (SHORT, DOCUMENTS, CONTINUED, FLOAT32, HEADS)
    )
    def test_equals_definition_with_gradients(self, case):
        got = sparse_mla_test.run(case, "gpu_interpret")
        want = sparse_mla_test.definition(case)
        sparse_mla_test.assert_close(got, want, case.dtype)
        if case.documents > 1:  # a row without keys
            for name in ("out", "dq"):
                np.testing.assert_array_equal(got[name][0, -1], 0)
            np.testing.assert_array_equal(got["lse"][0, :, -1], 0)

    @parameterized.named_parameters(
        (f"{case.name}_{ranges}", case, ranges)
        for case, ranges in ((DOCUMENTS, 1), (FEW, 3), (HEADS, 2))
    )
    def test_deterministic_equals_definition(self, case, ranges):
        with few_programs(case, ranges):
            got = sparse_mla_test.run(case, "gpu_interpret", deterministic=True)
        want = sparse_mla_test.definition(case)
        sparse_mla_test.assert_close(got, want, case.dtype)

    def test_deterministic_in_any_order_of_programs(self):
        from triton.runtime import interpreter

        builder = interpreter.interpreter_builder
        in_order = builder.set_grid_idx
        orders = (np.arange, lambda n: np.arange(n)[::-1], shuffled)
        results = {True: [], False: []}
        for mode, order in itertools.product(results, orders):

            def place(x, y, z, order=order):
                in_order(int(order(builder.grid_dim[0])[x]), y, z)

            with (
                few_programs(FEW, 3),
                mock.patch.object(builder, "set_grid_idx", place),
            ):
                results[mode].append(sparse_mla_test.run(FEW, "gpu_interpret", mode))
        for other in results[True][1:]:
            jax.tree.map(np.testing.assert_array_equal, results[True][0], other)
        # Atomics do feel the order, so that this test can fail.
        first, second, _ = results[False]
        self.assertTrue(np.any(first["dkv"] != second["dkv"]))

    def test_names_the_arguments_that_it_cannot_take(self):
        q, kv, indices = cases.make(FEW, "q_latent", "kv", "indices")
        with self.assertRaisesRegex(NotImplementedError, "powers of two"):
            attend(q, kv, indices, value_dim=100)
        with self.assertRaisesRegex(NotImplementedError, "must both be"):
            attend(q, kv.astype(jnp.bfloat16), indices, value_dim=FEW.latent)


def few_programs(case, ranges):
    """Makes each program of the deterministic mode take several queries."""
    from pallas_kernels.sparse_mla import gpu_backward

    width = case.latent + case.rope
    array_bytes = -(-case.keys // ranges) * 4 * width * 4
    stack = contextlib.ExitStack()
    stack.enter_context(
        block_sizes.tried(dataclasses.replace(block_sizes.gpu(), cores=4))
    )
    stack.enter_context(mock.patch.object(gpu_backward, "ARRAY_BYTES", array_bytes))
    return stack


def shuffled(n):
    return np.random.default_rng(0).permutation(n)


def attend(q, kv, indices, value_dim):
    return sparse_mla(
        q,
        kv,
        indices,
        scale=1.0,
        value_dim=value_dim,
        implementation="gpu_interpret",
    )


if __name__ == "__main__":
    environment.main()
