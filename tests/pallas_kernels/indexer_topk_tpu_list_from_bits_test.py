"""Lists of bits on TPU, interpreted, against a sort."""

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import selection
from pallas_kernels.indexer_topk import tpu_list_from_bits
from tests import environment


class ListFromBitsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        # One vector of the list, and several; runs of 4096 keys, the last one cut.
        ("sparse", 300, 64, 0.15),
        ("dense", 9000, 400, 0.2),
    )
    def test_lists_are_those_of_a_sort(self, num_keys, topk, density):
        rng = np.random.default_rng(0)
        mask = rng.random((2, num_keys, 10)) < density
        mask[0, :, 3] = False  # an empty row
        mask[0, 200:, 4] = False
        mask[0, : num_keys // 2, 5] = False
        mask[1, :70, 6] = True  # without gaps
        mask[1, :, 7] = np.arange(num_keys) == num_keys - 1
        mask &= np.cumsum(mask, axis=1) <= topk
        mask = jnp.asarray(mask)
        got = tpu_list_from_bits.list_from_bits(
            selection.pack(mask), topk, interpret=True
        )
        np.testing.assert_array_equal(got, selection.to_list(mask, topk))


if __name__ == "__main__":
    environment.main()
