"""The TPU's selection, interpreted, against its definition."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import (
    cases,
    indexer_bits,
    indexer_mask,
    indexer_topk,
    selection,
)
from pallas_kernels.indexer_topk import tpu_dense
from tests import environment
from tests.pallas_kernels import program

HEADS, DIM = 8, 128
QUERIES, KEYS, TOPK = 20, 4300, 100  # blocks of keys, a run of words and a bit more


@functools.partial(jax.jit, static_argnums=5)
def select(q, k, w, lo, hi, topk):
    bits = indexer_bits(q, k, w, lo, hi, topk=topk, implementation="tpu_interpret")
    return selection.unpack(bits, k.shape[1])


@functools.partial(jax.jit, static_argnums=5)
def definition(q, k, w, lo, hi, topk):
    return indexer_mask(q, k, w, lo, hi, topk=topk, implementation="reference")


def whole_numbers(size):
    """Small whole numbers: scores are exact in any order of summation, many tie."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.integers(-size, size + 1, shape), jnp.bfloat16)

    w = draw(1, QUERIES, HEADS).astype(jnp.float32)
    return draw(1, QUERIES, HEADS, DIM), draw(1, KEYS, DIM), w


class IndexerTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (case.name, case)
        for case in cases.SMALL.values()
        if case.name in ("documents", "float32")
    )
    def test_equals_definition(self, case):
        args = cases.make(case, "q_index", "k_index", "w", "lo", "hi")
        got, want = select(*args, case.topk), definition(*args, case.topk)
        np.testing.assert_array_equal(got, want)

    def test_lists_name_the_same_keys_part_by_part(self):
        case = cases.SMALL["documents"]
        args = cases.make(case, "q_index", "k_index", "w", "lo", "hi")
        wrapped = mock.Mock(wraps=tpu_dense._part_rows)
        sizes = {"PART_BYTES": 64 * 4 * 128, "_part_rows": wrapped}  # of 64 queries
        with mock.patch.multiple(tpu_dense, **sizes):
            got = jax.jit(
                functools.partial(
                    indexer_topk, topk=case.topk, implementation="tpu_interpret"
                )
            )(*args)
        wrapped.assert_called_with(case.queries, 64)
        options = {"topk": case.topk, "implementation": "reference"}
        want = program.call(indexer_topk, *args, **options)
        np.testing.assert_array_equal(got, want)

    @parameterized.parameters(
        (4096, 4096, 4096),
        (131072, 4056, 2048),
        (3168, 2621, 1584),  # of 202,752 tokens on 64 devices
        (20, 2621, 32),
        (997, 100, 112),  # padded: a prime
    )
    def test_parts_are_equal_and_whole_blocks(self, num_queries, most, rows):
        self.assertEqual(tpu_dense._part_rows(num_queries, most), rows)

    @parameterized.named_parameters(("zero", 0), ("few_values", 1), ("values", 9))
    def test_ties_go_to_the_lower_index(self, size):
        q, k, w = whole_numbers(size)
        if size == 1:
            k = k.at[:, :, 4:].set(0)
        w = w.at[:, 7].set(-1)  # -0.0 among the scores
        # One document, two packed ones, a few keys of one, none, borders of blocks. If
        # all tie, keys before 1504 + 100 count, which the last halving decides.
        hi = np.arange(KEYS - QUERIES, KEYS) + 1
        lo = np.where(hi % 3 == 0, 1504, 0)
        lo[5:8], hi[7], lo[9], hi[12], hi[15] = 4200, 4260, 4096, 4096, 0
        lo, hi = (jnp.asarray(x[None], jnp.int32) for x in (lo, hi))
        got = select(q, k, w, lo, hi, TOPK)
        want = definition(q, k, w, lo, hi, TOPK)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got[0, 4200:, 7], np.arange(100) < 60)
        self.assertEqual(got[0, :, 15].sum(), 0)


if __name__ == "__main__":
    environment.main()
