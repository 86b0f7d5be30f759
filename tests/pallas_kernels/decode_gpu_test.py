"""Triton's kernels of decoding in its interpreter: TRITON_INTERPRET=1 pytest FILE."""

import dataclasses
import importlib.util
import os
import unittest

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
