"""Sparse attention's TPU kernels, interpreted, against the definition."""

import contextlib
import dataclasses
from unittest import mock

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
