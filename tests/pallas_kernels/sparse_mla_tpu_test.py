"""Sparse attention's TPU kernels, interpreted, against the definition."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import cases
from pallas_kernels.sparse_mla import tpu_rows
from tests import environment
from tests.pallas_kernels import sparse_mla_test

# Every copy of a row is a call back into Python: few queries, short lists. Lists are of
# one chunk or several, full, partly full and empty; T is no multiple of a tile.
FEW = {"heads": 4, "topk": 9}
CASES = (
    dataclasses.replace(cases.SMALL[1], queries=4, keys=12, **FEW),
    dataclasses.replace(cases.SMALL[3], queries=4, keys=10, **FEW),
)


class SparseMlaTpuTest(parameterized.TestCase):
    @parameterized.named_parameters((case.name, case) for case in CASES)
    def test_kernels_equal_definition_with_gradients(self, case):
        with mock.patch.multiple(tpu_rows, CHUNK=4, QUERIES=3):
            got = sparse_mla_test.run(case, "tpu_interpret")
        want = sparse_mla_test.run(case, "reference")
        sparse_mla_test.assert_close(got, want, case.dtype)
        if case.documents > 1:  # the last query of row 0 has no keys
            np.testing.assert_array_equal(got["out"][0, -1], 0)
            np.testing.assert_array_equal(got["lse"][0, :, -1], 0)
            np.testing.assert_array_equal(got["dq"][0, -1], 0)

    @pytest.mark.slow
    def test_unrolled_as_for_real_lists(self):
        case = dataclasses.replace(cases.SMALL[2], queries=1, heads=2, topk=16)
        with mock.patch.multiple(tpu_rows, QUERIES=1, UNROLL=8):
            got = sparse_mla_test.run(case, "tpu_interpret")
        want = sparse_mla_test.run(case, "reference")
        sparse_mla_test.assert_close(got, want, case.dtype)


if __name__ == "__main__":
    environment.main()
