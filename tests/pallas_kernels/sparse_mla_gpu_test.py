"""The Triton kernels of sparse_mla in the interpreter: TRITON_INTERPRET=1."""

import contextlib
import dataclasses
import functools
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

    @parameterized.product(
        num_heads=(1, 17, 128), dtype=("float32", "bfloat16"), in_order=(False, True)
    )
    def test_edges_equal_loops_in_float64(self, num_heads, dtype, in_order):
        """Lists that do not fill a tile or are empty; one head, and blocks of them."""
        rng = np.random.default_rng(0)
        draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
        q, kv = draw(1, 3, num_heads, 48), draw(1, 50, 48)
        indices = np.full((1, 3, 40), -1, np.int32)
        indices[0, 0, :37] = np.sort(rng.choice(50, 37, replace=False))
        indices[0, 2, :1] = 49
        indices = jnp.asarray(indices)
        d_out, d_lse = draw(1, 3, num_heads, 32), rng.normal(size=(1, num_heads, 3))
        options = {"scale": 0.3, "value_dim": 32, "deterministic": in_order}
        run = functools.partial(sparse_mla, implementation="gpu_interpret", **options)
        (out, lse), pull = jax.vjp(lambda q, kv: run(q, kv, indices), q, kv)
        got = (out, lse, *pull((d_out, jnp.asarray(d_lse, jnp.float32))))
        exact = (np.asarray(x, np.float64) for x in (q, kv, d_out, d_lse))
        want = loops(*exact, np.asarray(indices), 0.3, 32)
        limit = 1e-5 if dtype == "float32" else 1e-2
        for g, w in zip(got, want, strict=True):
            error = np.linalg.norm(np.asarray(g, np.float64) - w)
            self.assertLess(error, limit * np.linalg.norm(w))

    def test_names_the_arguments_that_it_cannot_take(self):
        q, kv, indices = cases.make(FEW, "q_latent", "kv", "indices")
        with self.assertRaisesRegex(NotImplementedError, "powers of two"):
            attend(q, kv, indices, value_dim=100)
        with self.assertRaisesRegex(NotImplementedError, "kv the same or float32"):
            attend(q, kv.astype(jnp.bfloat16), indices, value_dim=FEW.latent)


def loops(q, kv, d_out, d_lse, indices, scale, value_dim):
    """Returns out, lse, dq and dkv, a query and a head at a time."""
    out, lse = np.zeros_like(d_out), np.zeros_like(d_lse)
    dq, dkv = np.zeros_like(q), np.zeros_like(kv)
    for b, t, n in np.ndindex(q.shape[:3]):
        listed = [i for i in indices[b, t] if i >= 0]
        if not listed:
            continue
        rows = kv[b, listed]
        scores = scale * rows @ q[b, t, n]
        lse[b, n, t] = np.log(np.exp(scores).sum())
        probs = np.exp(scores - lse[b, n, t])
        values = rows[:, :value_dim]
        out[b, t, n] = probs @ values
        d_probs = values @ d_out[b, t, n]
        d_scores = probs * (d_probs - probs @ d_probs + d_lse[b, n, t])
        dq[b, t, n] = scale * d_scores @ rows
        for i, p, d in zip(listed, probs, d_scores, strict=True):
            dkv[b, i] += scale * d * q[b, t, n]
            dkv[b, i, :value_dim] += p * d_out[b, t, n]
    return out, lse, dq, dkv


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
