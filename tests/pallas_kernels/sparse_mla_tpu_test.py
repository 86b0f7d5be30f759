"""Sparse attention's TPU kernels, interpreted, against the definition."""

import contextlib
import dataclasses
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import block_sizes, cases
from pallas_kernels.sparse_mla import tpu_rows
from tests import environment
from tests.pallas_kernels import sparse_mla_test

# Every copy of a row is a call back into Python: few queries, short lists. Lists are of
# one chunk or several, full, partly full and empty; T is no multiple of a tile.
FEW = {"heads": 4, "topk": 9}
CASES = (
    dataclasses.replace(cases.SMALL["documents"], queries=4, keys=12, **FEW),
    dataclasses.replace(cases.SMALL["float32"], queries=4, keys=10, **FEW),
)


@contextlib.contextmanager
def few_rows(queries, cores=2):
    """Several chunks of rows, and tiles of queries, of which each core has its own."""
    sizes = block_sizes.Tpu(cores=cores, sparse_rows=4)
    with block_sizes.tried(sizes), mock.patch.object(tpu_rows, "QUERIES", queries):
        yield


class RowsTest(parameterized.TestCase):
    def test_cores_divide_whole_tiles_of_queries_or_one_takes_all(self):
        for cores, num_queries, want in (
            (2, 4, 1),
            (2, 8, 2),
            (2, 12, 1),
            (2, 16, 2),
            (1, 8, 1),
        ):
            with few_rows(queries=4, cores=cores):
                self.assertEqual(tpu_rows.num_parts(num_queries), want)

    @parameterized.parameters((5, 9, 8, 12), (4, 8, 4, 8), (1, 3, 4, 3), (8, 4, 8, 4))
    def test_lists_are_padded_to_tiles_and_chunks(self, queries, topk, rows, columns):
        """Chunks of four rows, or of as many as a shorter list has."""
        lists = np.arange(2 * queries * topk).reshape(2, queries, topk)
        with few_rows(queries=4):
            self.assertEqual(tpu_rows.chunk_size(topk), min(topk, 4))
            got = tpu_rows.pad_list(jnp.asarray(lists))
        want = np.full((2, rows, columns), -1)
        want[:, :queries, :topk] = lists
        np.testing.assert_array_equal(got, want)


class SparseMlaTpuTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("documents_in_two_parts", CASES[0], 2), ("float32", CASES[1], 1)
    )
    def test_kernels_equal_definition_with_gradients(self, case, cores):
        with few_rows(queries=3, cores=cores):
            got = sparse_mla_test.run(case, "tpu_interpret")
        want = sparse_mla_test.definition(case)
        sparse_mla_test.assert_close(got, want, case.dtype)
        if case.documents > 1:  # the last query of row 0 has no keys
            np.testing.assert_array_equal(got["out"][0, -1], 0)
            np.testing.assert_array_equal(got["lse"][0, :, -1], 0)
            np.testing.assert_array_equal(got["dq"][0, -1], 0)

    @pytest.mark.slow
    def test_unrolled_as_for_real_lists(self):
        case = dataclasses.replace(
            cases.SMALL["continued"], queries=1, heads=2, topk=16
        )
        with mock.patch.multiple(tpu_rows, QUERIES=1, UNROLL=8):
            got = sparse_mla_test.run(case, "tpu_interpret")
        want = sparse_mla_test.definition(case)
        sparse_mla_test.assert_close(got, want, case.dtype)


if __name__ == "__main__":
    environment.main()
