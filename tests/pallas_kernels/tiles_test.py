"""Tiles of queries: how many loops are compiled, and the keys that each one reads."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import tiles
from tests import environment

ROWS, TIERS = tiles.ROWS, tiles.TIERS


class TiersTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("one_tile", ROWS, ROWS, [ROWS]),
        ("two_tiles_a_loop_at_least", 4 * ROWS, 4 * ROWS, [2 * ROWS, 4 * ROWS]),
        (
            "no_more_loops_than_tiers",
            10 * ROWS,
            10 * ROWS,
            [3 * ROWS, 6 * ROWS, 9 * ROWS, 10 * ROWS],
        ),
        ("a_part_of_a_tile", 5 * ROWS - 1, 5 * ROWS - 1, [2 * ROWS, 4 * ROWS, -1]),
        ("after_other_keys", 3 * ROWS, 3 * ROWS + 7, [2 * ROWS + 7, 3 * ROWS + 7]),
    )
    def test_a_loop_reads_the_keys_that_its_last_query_sees(self, queries, keys, ends):
        """-1 stands for all keys; no more than TIERS loops are compiled."""
        read = []

        def body(carry, tile, seen, mask):
            del mask
            read.append(seen.shape[0])
            return carry, tile + seen.shape[0]

        inputs = jnp.zeros((queries, 1)), jnp.zeros((keys, 1))
        _, got = jax.jit(lambda q, k: tiles.over_tiles(body, None, q, k, None))(*inputs)
        ends = [keys if end == -1 else end for end in ends]
        self.assertEqual([*dict.fromkeys(read)], ends)
        self.assertLessEqual(len(ends), TIERS)
        place = np.arange(queries) + keys - queries
        np.testing.assert_array_equal(
            got[:, 0], np.take(ends, np.digitize(place, ends))
        )


if __name__ == "__main__":
    environment.main()
