"""The Triton indexer in Triton's interpreter: TRITON_INTERPRET=1 pytest FILE."""

import importlib.util
import os
import unittest
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import (
    block_sizes,
    capabilities,
    cases,
    indexer_bits,
    indexer_mask,
    indexer_scores_at,
    indexer_topk,
)
from tests import environment

FLOAT32_NORM = 1e-5  # two orders of summation
BFLOAT16_NORM = 1e-2  # of gradients: 8 bits of mantissa
CAN_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1" and all(
    importlib.util.find_spec(name) for name in ("triton", "torch")
)

T, S = 6, 300
# Groups of 1 key (no first step), 4 and 32 keys.
TOPKS = (200, 40, 2)


def make_scores(kind, seed=0):
    """Scores [T, S] that are hard to select from."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((T, S), dtype=np.float32)
    if kind == "tied":
        return np.full_like(normal, -1.5)
    if kind == "zeros":  # as a ReLU makes them, of both signs
        sign = np.where(rng.random((T, S)) < 0.5, -1.0, 1.0).astype(np.float32)
        return np.where(rng.random((T, S)) < 0.7, 0.0 * sign, normal)
    if kind == "few_values":
        return np.round(normal)
    if kind == "all_sizes":
        return normal * 10.0 ** rng.integers(-37, 37, (T, S)).astype(np.float32)
    if kind == "one_place":  # the best are neighbours, in few groups
        return normal + np.where(np.abs(np.arange(S) - 150) < 30, 100.0, 0.0)
    return normal


def make_bounds():
    """Lo and hi [1, T]: nothing, one key, few keys, several documents, all keys."""
    lo = np.array([[0, 7, 33, 140, 0, 1]], np.int32)
    hi = np.array([[0, 8, 36, 290, S, S - 1]], np.int32)
    return lo, hi


def best(scores, lo, hi, topk):
    """By a stable sort: the larger score first, then the lower index."""
    s = np.arange(lo, hi)
    kept = np.sort(s[np.lexsort((s, -scores[lo:hi]))][:topk])
    return np.pad(kept, (0, topk - len(kept)), constant_values=-1)


@unittest.skipUnless(CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1")
class IndexerTopkGpuTest(parameterized.TestCase):
    @parameterized.product(
        kind=("random", "tied", "zeros", "few_values", "all_sizes", "one_place"),
        topk=TOPKS,
    )
    def test_given_scores_are_selected_as_by_a_stable_sort(self, kind, topk):
        from pallas_kernels.indexer_topk import gpu_select

        scores, (lo, hi) = make_scores(kind).astype(np.float32), make_bounds()
        group = gpu_select.group_size(S, topk)
        padded = np.full((T, 320), np.nan, np.float32)  # what nobody may look at
        padded[:, :S] = scores
        s = np.arange(320)
        seen = (s >= lo[0][:, None]) & (s < hi[0][:, None])
        maxima = np.where(seen, padded, -np.inf).reshape(T, -1, group).max(-1)
        got = gpu_select.chosen(
            *(jnp.asarray(x) for x in (padded, maxima, lo, hi)),
            jnp.zeros(2, jnp.int32),
            S,
            gpu_select.Plan(1, T, topk, interpret=True),
        )
        for t in range(T):
            want = best(scores[t], lo[0, t], hi[0, t], topk)
            np.testing.assert_array_equal(got[t], want, err_msg=f"query {t}")

    @parameterized.named_parameters((case.name, case) for case in cases.SMALL.values())
    def test_lists_and_bits_equal_the_definition(self, case):
        names = ("q_index", "k_index", "w", "lo", "hi")
        q, k, w, lo, hi = cases.make(case, *names)
        # Few queries, as the interpreter is slow.
        pick = [0, case.queries // 2, case.queries - 2, case.queries - 1]
        q, w, lo, hi = (x[:, np.asarray(pick)] for x in (q, w, lo, hi))
        # A mask is made of bits.
        bits_or_mask = indexer_mask if case.name == "short" else indexer_bits
        for run in (indexer_topk, bits_or_mask):
            got, want = (
                run(q, k, w, lo, hi, topk=case.topk, implementation=name)
                for name in ("gpu_interpret", "reference")
            )
            np.testing.assert_array_equal(got, want)

    def test_chunks_and_blocks_of_queries(self):
        from pallas_kernels.indexer_topk import gpu_dense

        self.assertEqual(gpu_dense._chunk_rows(4096, 4096, 8), 2048)
        self.assertEqual(gpu_dense._chunk_rows(5, 5, 8), 8)
        case = cases.SMALL["continued"]
        args = cases.make(case, "q_index", "k_index", "w", "lo", "hi")
        q, k, w, lo, hi = (x[:, :7] if x.shape[1] == 40 else x for x in args)
        with mock.patch.object(gpu_dense, "_chunk_rows", return_value=4):
            got = indexer_topk(q, k, w, lo, hi, topk=50, implementation="gpu_interpret")
        want = indexer_topk(q, k, w, lo, hi, topk=50, implementation="reference")
        np.testing.assert_array_equal(got, want)

    @parameterized.parameters(*capabilities.GPUS)
    def test_chunks_fill_waves_of_multiprocessors(self, capability):
        """Of selections, and of scoring programs where a row is long."""
        from pallas_kernels.indexer_topk import gpu_dense

        row = capabilities.GPUS[capability]
        for keys in (4096, 8192, 16384, 32768, 65536, 131072, 202752):
            with block_sizes.tried(row):
                rows = gpu_dense._chunk_rows(keys, keys, 8)
            waves = -(-rows // row.cores)
            self.assertGreater(rows, 0.8 * waves * row.cores)
            scoring = rows // 8 * max(4 * row.cores // (rows // 8), 1)
            if keys >= 32768:
                self.assertBetween(scoring, 0.9 * 4 * row.cores, 4 * row.cores)

    @parameterized.named_parameters(("bfloat16", "continued"), ("float32", "float32"))
    def test_scores_at_and_their_gradients(self, which):
        case = cases.SMALL[which]
        q, k, w, indices = cases.make(case, "q_index", "k_index", "w", "indices")
        q, w, indices = q[:, -9:], w[:, -9:], indices[:, -9:].at[:, 3:5].set(-1)

        def loss(q, k, w, name):
            scores = indexer_scores_at(q, k, w, indices, implementation=name)
            return jnp.sum(jnp.sin(scores / 10)), scores

        (got, want) = (
            jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, w, name)
            for name in ("gpu_interpret", "reference")
        )
        for g, r in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            self.assertEqual(g.dtype, r.dtype)
            g, r = (np.asarray(x, np.float64) for x in (g, r))
            limit = FLOAT32_NORM if case.dtype == "float32" else BFLOAT16_NORM
            self.assertLess(np.linalg.norm(g - r), limit * np.linalg.norm(r))
        np.testing.assert_allclose(got[1], want[1], 1e-5, 1e-4)

    def test_refuses_unsupported_arguments_by_name(self):
        q = jnp.zeros((1, 4, 12, 128))
        k, w, lo = jnp.zeros((1, 9, 128)), jnp.zeros((1, 4, 12)), jnp.zeros((1, 4), int)
        with self.assertRaisesRegex(NotImplementedError, "power of two"):
            indexer_topk(q, k, w, lo, lo, topk=3, implementation="gpu_interpret")


if __name__ == "__main__":
    environment.main()
