"""Decoding from pages: the last rows of whole sequences, whatever the pages' order."""

import functools

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import (
    cases,
    decode_indexer_topk,
    decode_sparse_mla,
    indexer_topk,
    sparse_mla,
)
from tests import environment
from tests.pallas_kernels import program

CASE = cases.Case(
    "decode",
    queries=3,
    keys=96,
    batch=2,
    topk=16,
    heads=16,
    latent=32,
    rope=16,
    index_heads=4,
    index_dim=16,
    dtype="float32",
)
PAGE = 8


def paged(x, seed=0):
    """Rows [B, S, x] as shuffled pages with some that nobody owns, and their table."""
    batch, num_keys, width = x.shape
    count = batch * num_keys // PAGE
    order = np.random.default_rng(seed).permutation(count + 3)[:count]
    pages = np.full((count + 3, PAGE, width), np.nan, np.float32)
    pages[order] = np.asarray(x).reshape(count, PAGE, width)
    return jnp.asarray(pages), jnp.asarray(order.reshape(batch, -1), jnp.int32)


class DecodeTest(parameterized.TestCase):
    def test_selection_is_that_of_the_last_queries(self):
        q, k, w, lo, hi = cases.make(CASE, "q_index", "k_index", "w", "lo", "hi")
        call = functools.partial(program.call, topk=CASE.topk)
        want = call(indexer_topk, q, k, w, lo, hi)
        got = call(decode_indexer_topk, q, k, w, lo, hi)
        np.testing.assert_array_equal(got, want)
        pages, table = paged(k)
        got = call(decode_indexer_topk, q, pages, w, lo, hi, table)
        np.testing.assert_array_equal(got, want)

    def test_attention_is_that_of_the_last_queries(self):
        q, kv, indices = cases.make(CASE, "q_latent", "kv", "indices")
        indices = indices.at[0, 1, 5:].set(-1).at[1, 2].set(-1)  # few keys, and none
        options = {"scale": CASE.scale, "value_dim": CASE.latent}
        call = functools.partial(program.call, **options)
        want = call(sparse_mla, q, kv, indices)
        pages, table = paged(kv)
        # The same with an entry behind the list that names no key.
        beyond = indices.at[0, 1, 5].set(CASE.keys + 7)
        for cache in ((kv, indices), (pages, beyond, table)):
            got = call(decode_sparse_mla, q, *cache)
            for g, w in zip(got, want, strict=True):
                np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    environment.main()
