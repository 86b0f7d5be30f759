"""The TPU's attention, interpreted, against its definition, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import (
    block_pairs,
    block_sizes,
    cases,
    dense_attention,
    indexer_mask,
    selection,
)
from tests import environment
from tests.pallas_kernels import program

# No two dims of a block are equal.
_SMALL = {"heads": 2, "head_dim": 384, "value_dim": 640, "index_heads": 8, "topk": 32}
BLOCKS = 128, 512  # queries, keys; half as many keys in float32
CASES = (
    cases.Case("documents", 300, 300, batch=2, documents=3, **_SMALL),
    # A block of queries that sees all of two blocks of keys, and a padded one.
    cases.Case("continued", 140, 700, dtype="float32", **_SMALL),
)
SCALE = 0.1  # no power of two, which would be folded into q
# Relative L2 norms of errors: of gradients, of the output and of the log-sum-exp.
# bfloat16: the kernel rounds weights before, the definition after they are normalised;
# the log-sum-exp is of the same float32 scores. float32: two orders of summation.
TOLERANCES = {"bfloat16": (1e-2, 4e-3, 1e-5), "float32": (1e-5, 1e-5, 1e-5)}


def error(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


class DenseAttentionTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(block_sizes.tried(block_sizes.Tpu(dense_attention=BLOCKS)))

    def run_both(self, case, selected, scale=SCALE):
        q, k, v, lo, hi = cases.make(case, "q", "k", "v", "lo", "hi")

        def loss(q, k, v, lo, hi, selected, name):
            out, lse = dense_attention(
                q, k, v, lo, hi, selected, scale=scale, implementation=name
            )
            value = jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(lse))
            return value, (out, lse)

        run = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
        run = jax.jit(run, static_argnums=6)
        args = q, k, v, lo, hi, selected  # constants of a program would be folded
        return run(*args, "tpu_interpret"), run(*args, "reference")

    def assert_close(self, case, got, want):
        limits = np.array(TOLERANCES[case.dtype])[[0, 0, 0, 1, 2]]
        leaves = map(jax.tree.leaves, (got, want))
        for g, w, limit in zip(*leaves, limits, strict=True):
            self.assertEqual((g.dtype, g.shape), (w.dtype, w.shape))
            self.assertLess(error(g, w), limit)

    def selected(self, case):
        args = cases.make(case, "q_index", "k_index", "w", "lo", "hi")
        options = {"topk": case.topk, "implementation": "reference"}
        return program.call(indexer_mask, *args, **options)

    @parameterized.named_parameters((case.name, case) for case in CASES)
    def test_all_keys(self, case):
        got, want = self.run_both(case, None)
        self.assert_close(case, got, want)
        if case.documents > 1:  # the last query of a sequence sees nothing
            out, lse = got[1]
            np.testing.assert_array_equal(out[0, -1], 0)
            np.testing.assert_array_equal(lse[0, :, -1], 0)

    @parameterized.named_parameters((case.name, case) for case in CASES)
    def test_selected_keys(self, case):
        mask = self.selected(case)
        is_packed = case.dtype != "float32"
        selected = program.call(selection.pack, mask) if is_packed else mask
        self.assert_close(case, *self.run_both(case, selected, scale=0.125))


class BlockPairsTest(parameterized.TestCase):
    @parameterized.parameters(("queries", 1), ("keys", 1), ("queries", 2))
    def test_lists_the_parts_that_meet(self, major, parts):
        """Two sequences of 4 x 6 blocks of 2 queries x 3 keys, against a loop."""
        rng = np.random.default_rng(0)
        hi = np.arange(8)[None] + 1 + 10 - np.array([[0], [1]])
        lo = np.maximum(hi - rng.integers(0, 12, hi.shape), 0)
        lo[0, 2:4] = hi[0, 2:4]  # a block that sees nothing

        @jax.jit
        def make(lo, hi):
            sizes = 18, (2, 3), 10
            pairs = block_pairs.make(lo, hi, *sizes, major=major, parts=parts)
            flags = block_pairs.WHOLE, block_pairs.FIRST, block_pairs.LAST
            entries = pairs.flat, block_pairs.query_block(pairs.flat)
            entries += (block_pairs.key_block(pairs.flat),)
            entries += tuple(block_pairs.has(pairs.flat, flag) for flag in flags)
            shape = 2, parts, pairs.size
            return [x.reshape(shape) for x in entries], pairs.steps

        entries, steps = jax.device_get(make(lo, hi))
        for b in range(2):
            seen = (np.arange(18) >= lo[b, :, None]) & (np.arange(18) < hi[b, :, None])
            tiles = seen.reshape(4, 2, 6, 3)
            meets, whole = tiles.any((1, 3)), tiles.all((1, 3))
            if major == "queries":
                meets[~meets.any(1), 0] = True
            else:
                meets[-1, ~meets.any(0)] = True
            found = []
            for part in range(parts):
                row, *rest = (x[b, part] for x in entries)
                i, j, is_whole, is_first, is_last = (x[row >= 0] for x in rest)
                np.testing.assert_array_equal(is_whole, whole[i, j])
                group = i if major == "queries" else j
                self.assertTrue((np.diff(group) >= 0).all())
                for flag, edge in (
                    (is_first, np.diff(group, prepend=-1) != 0),
                    (is_last, np.diff(group, append=-1) != 0),
                ):
                    np.testing.assert_array_equal(flag, edge)
                self.assertLessEqual(len(i), int(steps))
                found += list(zip(i.tolist(), j.tolist(), strict=True))
            want = list(zip(*(x.tolist() for x in np.nonzero(meets)), strict=True))
            self.assertEqual(sorted(found), want)


if __name__ == "__main__":
    environment.main()
