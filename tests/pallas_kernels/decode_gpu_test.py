"""Triton's kernels of decoding in its interpreter: TRITON_INTERPRET=1 pytest FILE."""

import contextlib
import dataclasses
import importlib.util
import os
import unittest
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import (
    block_sizes,
    capabilities,
    cases,
    decode_indexer_topk,
    decode_sparse_mla,
)
from tests import environment
from tests.pallas_kernels import indexer_topk_gpu_test

BFLOAT16_NORM = 4e-3  # 8 bits of mantissa
FLOAT32_NORM = 1e-5  # two orders of summation
CAN_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1" and all(
    importlib.util.find_spec(name) for name in ("triton", "torch")
)
CASE = dataclasses.replace(
    cases.SMALL["continued"], batch=2, queries=3, keys=320, topk=150
)


def paged(rows, page, seed=0):
    """Pages in a random order among unused ones of NaN, and their table."""
    rng = np.random.default_rng(seed)
    batch, length, width = rows.shape
    count = batch * length // page
    table = rng.permutation(count + 5)[:count].reshape(batch, -1)
    pages = np.full((count + 5, page, width), np.nan, np.float32)
    pages[table] = np.asarray(rows, np.float32).reshape(batch, -1, page, width)
    return jnp.asarray(pages, rows.dtype), jnp.asarray(table, jnp.int32)


@contextlib.contextmanager
def small_parts():
    """Makes three parts of a row of 300 keys."""
    from pallas_kernels.decode import gpu_parts
    from pallas_kernels.indexer_topk import gpu_select

    with (
        mock.patch.object(gpu_select, "BLOCK", 64),
        mock.patch.object(gpu_parts, "PARTS", 4),
        mock.patch.object(gpu_parts, "NEAR", 1),
    ):
        yield


def assert_close(got, want, dtype):
    for name, g, w in zip(("out", "lse"), got, want, strict=True):
        assert g.dtype == w.dtype
        assert g.shape == w.shape
        g, w = (np.asarray(x, np.float64) for x in (g, w))
        is_rounded = dtype == "bfloat16" and name == "out"
        limit = BFLOAT16_NORM if is_rounded else FLOAT32_NORM
        error = np.linalg.norm(g - w)
        assert error <= limit * np.linalg.norm(w), f"{name}: {error}"


@unittest.skipUnless(CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1")
class DecodeGpuTest(parameterized.TestCase):
    @parameterized.parameters((None, 1), (None, 3), (80, 1), (64, 2))
    def test_lists_equal_the_definition(self, page, num_queries):
        q, k, w = cases.make(CASE, "q_index", "k_index", "w")
        q, w = q[:, :num_queries], w[:, :num_queries]
        # Several documents and lengths; the last query of row 1 sees nothing, and what
        # lies past a sequence's end is never read.
        hi = np.array([[310, 311, 312], [40, 41, 0]], np.int32)[:, 3 - num_queries :]
        lo = np.array([[20, 20, 20], [0, 0, 0]], np.int32)[:, 3 - num_queries :]
        args = (q, k, w, jnp.asarray(lo), jnp.asarray(hi))
        want = decode_indexer_topk(*args, topk=CASE.topk, implementation="reference")
        table = None
        if page:
            k, table = paged(k, page)
            table = table.at[1, -1].set(10**6)
        got = decode_indexer_topk(
            q, k, *args[2:], table, topk=CASE.topk, implementation="gpu_interpret"
        )
        np.testing.assert_array_equal(got, want)

    @parameterized.parameters(
        ("random", 40), ("tied", 40), ("zeros", 2), ("few_values", 2), ("one_place", 40)
    )
    def test_parts_select_from_given_scores_as_a_stable_sort(self, kind, topk):
        """Few keys are kept of random scores, all of tied ones: both widths."""
        from pallas_kernels.decode import gpu_parts

        rows, keys = indexer_topk_gpu_test.T, indexer_topk_gpu_test.S
        scores = indexer_topk_gpu_test.make_scores(kind).astype(np.float32)
        lo, hi = indexer_topk_gpu_test.make_bounds()
        group = gpu_parts.group_size(keys, topk)
        padded = np.full((rows, 320), np.nan, np.float32)  # what nobody may look at
        padded[:, :keys] = scores
        s = np.arange(320)
        seen = (s >= lo[0][:, None]) & (s < hi[0][:, None])
        maxima = np.where(seen, padded, -np.inf).reshape(rows, -1, group).max(-1)
        with small_parts():
            self.assertTrue(gpu_parts.is_worthwhile(rows, keys, topk))
            got = gpu_parts.chosen(
                *(jnp.asarray(x) for x in (padded, maxima, lo, hi)), keys, topk, True
            )
        for t in range(rows):
            want = indexer_topk_gpu_test.best(scores[t], lo[0, t], hi[0, t], topk)
            np.testing.assert_array_equal(got[t], want, err_msg=f"query {t}")

    def test_lists_by_parts_of_pages_equal_the_definition(self):
        from pallas_kernels.decode import gpu_parts

        q, k, w = cases.make(CASE, "q_index", "k_index", "w")
        hi = jnp.asarray([[310, 311, 312], [40, 41, 0]], jnp.int32)
        args = (q, k, w, jnp.asarray([[20, 20, 20], [0, 0, 0]], jnp.int32), hi)
        want = decode_indexer_topk(*args, topk=40, implementation="reference")
        k, table = paged(k, 80)
        with (
            small_parts(),
            mock.patch.object(gpu_parts, "chosen", wraps=gpu_parts.chosen) as chosen,
        ):
            got = decode_indexer_topk(
                q, k, *args[2:], table, topk=40, implementation="gpu_interpret"
            )
        chosen.assert_called_once()
        np.testing.assert_array_equal(got, want)

    def test_parts_are_for_few_long_rows(self):
        from pallas_kernels.decode import gpu_parts

        for rows, keys, topk, want in (
            (1, 131072, 2048, True),
            (33, 131072, 2048, True),
            (34, 131072, 2048, False),  # a program for each row keeps enough busy
            (1, 32768, 2048, True),
            (1, 4096, 2048, False),  # no groups
            (1, 1 << 20, 2048, False),  # a part does not fit the registers
            (1, 131072, 4096, False),  # nor do so many kept keys
        ):
            got = gpu_parts.is_worthwhile(rows, keys, topk)
            self.assertEqual(got, want, (rows, keys, topk))

    @parameterized.parameters(
        ("bfloat16", None), ("bfloat16", 16), ("float32", 64), ("float32", 1)
    )
    def test_outputs_equal_the_definition(self, dtype, page):
        case = dataclasses.replace(CASE, dtype=dtype)
        q, kv, indices = cases.make(case, "q_latent", "kv", "indices")
        indices = indices.at[0, 1, 70:].set(-1).at[1, 2].set(-1)
        options = {"scale": case.scale, "value_dim": case.latent}
        want = decode_sparse_mla(q, kv, indices, **options, implementation="reference")
        kv, table = paged(kv, page) if page else (kv, None)
        got = decode_sparse_mla(
            q, kv, indices, table, **options, implementation="gpu_interpret"
        )
        assert_close(got, want, dtype)
        np.testing.assert_array_equal(got[0][1, 2], 0)
        np.testing.assert_array_equal(got[1][1, :, 2], 0)

    @parameterized.parameters(1, 2, 4, 8)
    def test_splits_do_not_change_the_result(self, splits):
        from pallas_kernels.decode import gpu_listed

        q, kv, indices = cases.make(CASE, "q_latent", "kv", "indices")
        q, indices = q[:1, :2], indices[:1, :2].at[0, 1, 3:].set(-1)
        args = (q, kv[:1], indices, None, CASE.scale, CASE.latent)
        tile = capabilities.Tile((64, 16), 8, 2)
        with block_sizes.tried(capabilities.Gpu(decode_sparse_mla=tile)):
            got = gpu_listed.attend(*args, splits, True)
        want = decode_sparse_mla(
            *args[:4], scale=args[4], value_dim=args[5], implementation="reference"
        )
        assert_close(got, want, "bfloat16")

    def test_splits_fill_the_machine(self):
        from pallas_kernels.decode import gpu_listed

        for batch, want in ((1, 32), (8, 16), (64, 2), (200, 1)):
            q = jnp.zeros((batch, 1, 64, 1))
            self.assertEqual(gpu_listed.num_splits(q, 2048), want)

    def test_refuses_unsupported_arguments_by_name(self):
        q, kv = jnp.zeros((1, 1, 4, 100)), jnp.zeros((1, 9, 100))
        with self.assertRaisesRegex(NotImplementedError, "powers of two"):
            decode_sparse_mla(
                q,
                kv,
                jnp.zeros((1, 1, 3), jnp.int32),
                **{"scale": 1.0, "value_dim": 64},
                implementation="gpu_interpret",
            )


if __name__ == "__main__":
    environment.main()
