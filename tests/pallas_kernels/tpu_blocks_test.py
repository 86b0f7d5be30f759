"""Blocks, masks and index maps of the TPU's kernels, one by one, against loops.

No two sizes are equal, and key blocks lie beyond the first run of 4096 keys.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import block_pairs, selection
from pallas_kernels.dense_attention import tiled
from pallas_kernels.dense_attention import tpu_blocks as blocks
from pallas_kernels.indexer_kl import tpu_dense as kl
from pallas_kernels.indexer_topk import tpu_dense as topk
from pallas_kernels.sparse_mla import tpu_rows
from tests import environment

ROWS = 256, 1024  # of a query block and of a key block
PADDING = -(1 << 31)
# Query and key block of each entry of three lists.
PAIRS = np.int32([[(0, 0), (1, 3), (1, 4)], [(2, 9), (0, 1), (5, 7)], [(3, 2)] * 3])
FLAT = (PAIRS[..., 0] << block_pairs.NUMBER_BITS | PAIRS[..., 1]).ravel()


class PairTest(parameterized.TestCase):
    def test_padding_is_negative_and_has_no_flag(self):
        """The first blocks of queries and of keys are a pair, without a flag too."""
        first = jnp.asarray([0, 1, block_pairs.FIRST, PADDING, PADDING | 1])
        np.testing.assert_array_equal(block_pairs.is_pair(first), [1, 1, 1, 0, 0])
        padded = jnp.asarray([block_pairs.FIRST, PADDING | block_pairs.FIRST])
        found = block_pairs.has(padded, block_pairs.FIRST)
        np.testing.assert_array_equal(found, [True, False])


class SpecsTest(parameterized.TestCase):
    def check(self, spec, shape, grid, at, flat=FLAT):
        indices = (jnp.int32(n) for n in (*grid, flat))
        found = tuple(map(int, spec.index_map(*indices)))
        self.assertEqual((spec.block_shape, found), (shape, at))

    @parameterized.parameters((0, 2), (1, 0), (1, 2), (2, 1))
    def test_attention(self, b, p):
        specs, n = blocks.Specs(3, ROWS), 11
        i, j = PAIRS[b, p]
        grid, run = (b, n, p), j // 4  # of 4096 keys
        self.check(specs.queries(64), (1, 1, 256, 64), grid, (b, n, i, 0))
        self.check(specs.keys(64), (1, 1, 1024, 64), grid, (b, n, j, 0))
        self.check(specs.statistics(2), (1, 1, 2, 256), grid, (b, n, 0, i))
        self.check(specs.mask(True), (1, 256, 128), grid, (b, i, run))
        self.check(specs.mask(False), (1, 2, 256), grid, (b, 0, i))

    @parameterized.parameters((0, 2), (1, 0), (1, 2), (2, 1))
    def test_loss_of_the_indexer(self, part, p):
        """The first sequence has two parts, the second one the third."""
        specs, g = kl._Specs(3, ROWS, parts=2, groups=4), 2
        i, j = PAIRS[part, p]
        b, grid = part // 2, (part, p, g)
        bounds = jnp.zeros((1, 2, 5), jnp.int32)
        bits = jnp.zeros((1, 5, 256), jnp.uint32)
        q, k, w = specs.index((jnp.zeros((1, 24, 5, 384)), None, None))
        self.check(q, (1, 24, 256, 384), grid, (b, 0, i, 0))
        self.check(k, (1, 1024, 384), grid, (b, j, 0))
        self.check(w, (1, 24, 256), grid, (b, 0, i))
        q, k, lse = specs.main(64)
        self.check(q, (1, 8, 256, 64), grid, (b, g, i, 0))
        self.check(k, (1, 8, 1024, 64), grid, (b, g, j, 0))
        self.check(lse, (1, 8, 256), grid, (b, g, i))
        self.check(specs.mask(bits), (1, 256, 128), grid, (b, i, j // 4))
        self.check(specs.mask(bounds), (1, 2, 256), grid, (b, 0, i))
        self.check(specs.numbers(1), (1, 1, 256), grid, (b, 0, i))

    def test_padding_fetches_the_last_heads_again(self):
        q, *_ = kl._Specs(3, ROWS, parts=2, groups=4).main(64)
        self.check(q, (1, 8, 256, 64), (2, 0, 1), (1, 3, 3, 0), FLAT | PADDING)


class KeepTest(parameterized.TestCase):
    @parameterized.product(is_bits=(False, True), key_axis=(0, 1))
    def test_marks_the_keys_of_a_block(self, is_bits, key_axis):
        """Keys 5120 .. 5375 of 6000, for 128 queries."""
        rng = np.random.default_rng(0)
        num_keys, keys, j = 6000, 256, 20
        lo = rng.integers(5000, 5300, (1, 128))
        hi = lo + rng.integers(0, 200, (1, 128))
        seen = selection.visible(jnp.asarray(lo), jnp.asarray(hi), num_keys)
        if is_bits:
            seen &= rng.random(seen.shape) < 0.5
            mask = selection.pack(seen.swapaxes(1, 2))[..., 128:]  # the second run
        else:
            mask = jnp.stack([jnp.asarray(lo), jnp.asarray(hi)], axis=1)
        got = blocks.keep(mask, jnp.int32(7 << 14 | j), keys, key_axis)
        want = np.asarray(seen)[0, :, j * keys : (j + 1) * keys]
        np.testing.assert_array_equal(got, want if key_axis == 1 else want.T)


class ProductsTest(parameterized.TestCase):
    @parameterized.parameters(("float32", "HIGHEST"), ("bfloat16", None))
    def test_float32_operands_are_not_rounded(self, dtype, precision):
        """A TPU would multiply them as bfloat16, and this one in several passes."""
        a, b = jnp.zeros((16, 128), dtype), jnp.zeros((256, 128), dtype)
        w_lanes = jnp.zeros((1, 16, 128))
        for multiply in (
            lambda a, b: blocks.contract(a, b, (1, 1)),
            lambda a, b: tpu_rows.dot(a, b, 1, 1),
            lambda a, b: topk._scores(a, b, w_lanes),
        ):
            equations = jax.make_jaxpr(multiply)(a, b).eqns
            (dot,) = (e for e in equations if e.primitive.name == "dot_general")
            want = precision and (jax.lax.Precision[precision],) * 2
            self.assertEqual(dot.params["precision"], want)
            self.assertEqual(dot.params["preferred_element_type"], jnp.float32)

    def test_a_factor_goes_into_queries_where_that_is_exact(self):
        for dtype, scale, want in (
            ("bfloat16", 0.25, (0.75, 1.0)),
            ("bfloat16", 0.3, (3.0, 0.3)),
            ("float32", 0.3, (np.float32(3) * np.float32(0.3), 1.0)),
        ):
            q, rest = tiled.scaled(jnp.full((1, 2, 3, 4), 3, dtype), scale)
            self.assertEqual(q.dtype, dtype)
            self.assertEqual((float(q[0, 0, 0, 0]), rest), want)


class TileRowsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("bfloat16", 5, 5, (128, 128)),
        ("bfloat16", 128, 128, (128, 128)),
        ("bfloat16", 129, 129, (256, 256)),
        ("bfloat16", 300, 600, (384, 1024)),
        ("bfloat16", 5000, 2048, (512, 2048)),
        ("bfloat16", 5000, 2049, (512, 2048)),
        ("float32", 5000, 5000, (256, 1024)),
    )
    def test_blocks_are_no_larger_than_needed(self, dtype, queries, keys, want):
        q = jnp.zeros((1, queries, 3, 2), dtype)
        self.assertEqual(blocks.tile_rows(q, keys, 1, (512, 2048)), want)

    def test_float32_has_a_lane_tile_at_least(self):
        q = jnp.zeros((2, 3, 500, 2), jnp.float32)
        self.assertEqual(blocks.tile_rows(q, 500, 2, (128, 128)), (128, 128))


class MasksTest(parameterized.TestCase):
    def test_bounds_and_bits_of_whole_blocks(self):
        lo, hi = jnp.array([[-3, 4]]), jnp.array([[2, 9]])
        bounds, bits = blocks.masks(lo, hi, None, 7, 3)
        np.testing.assert_array_equal(bounds, [[[0, 4, 0], [2, 7, 0]]])
        self.assertIsNone(bits)
        mask = jnp.asarray(np.random.default_rng(0).random((1, 7, 2)) < 0.5)
        packed = selection.pack(mask)
        for selected in (mask, packed):
            _, bits = blocks.masks(lo, hi, selected, 7, 3)
            np.testing.assert_array_equal(bits[:, :2], packed)
            np.testing.assert_array_equal(bits[:, 2:], jnp.zeros((1, 1, 128)))

    @parameterized.parameters((5, 1, (2, 5, 4)), (3, 2, (2, 5, 6)), (4, 2, (2, 5, 4)))
    def test_padding_is_zeros_at_the_end(self, multiple, axis, shape):
        x = jnp.ones((2, 5, 4))
        got = blocks.pad(x, multiple, axis)
        want = np.zeros(shape)
        want[:, :5, :4] = 1
        np.testing.assert_array_equal(got, want)


class KeyBlocksTest(parameterized.TestCase):
    def test_the_range_of_a_query_block_and_whether_it_must_choose(self):
        lo, hi = np.zeros((2, 2, 16, 16), int)[:, 0]
        lo[0, 0], hi[0, 0] = 70, 90  # keys 70 .. 133 of two queries
        lo[0, 1], hi[0, 1] = 100, 134
        lo[1], hi[1] = 9, 5  # see nothing
        hi[2, 3] = 64
        lo[3], hi[3] = 64, 99
        bounds = jnp.asarray(np.stack([lo[:4], hi[:4]], -1)).reshape(2, 32, 2)
        got = topk._key_blocks(bounds, 34, 64).reshape(4, 3)
        want = [[1, 3, 0], [0, 0, 0], [0, 1, 1], [1, 2, 1]]
        np.testing.assert_array_equal(got, want)


class SizeTest(parameterized.TestCase):
    @parameterized.parameters(((4, 6), (2, 3), 10), ((3, 2), (5, 4), -3))
    def test_counts_the_pairs_under_the_diagonal(self, num_blocks, rows, offset):
        t = np.arange(num_blocks[0] * rows[0])[:, None]
        s = np.arange(num_blocks[1] * rows[1])[None]
        tiles = (s <= t + offset).reshape(num_blocks[0], rows[0], num_blocks[1], -1)
        most = np.maximum(tiles.any((1, 3)).sum(1), 1)  # one to write the outputs
        self.assertEqual(block_pairs.size(num_blocks, rows, offset), most.sum())


class ListsTest(parameterized.TestCase):
    @parameterized.parameters(("queries", 1), ("queries", 2), ("keys", 1))
    def test_pairs_of_blocks_in_which_a_query_sees_a_key(self, major, parts):
        """Of packed documents, the second row mostly padding; five keys come before."""
        rows, offset, num_keys = (4, 5), 5, 25
        t = np.arange(20)
        lo, hi = np.zeros((2, 2, 20), int)
        lo[0] = np.where(t < 9, 0, 15)  # from the end of a block of keys on
        hi[0] = t + 1 + offset
        hi[1, :3] = 5  # up to the end of a block
        make = functools.partial(
            block_pairs.make, num_keys=num_keys, rows=rows, offset=offset
        )
        options = {"parts": parts} if parts > 1 else {}
        make = functools.partial(make, major=major, **options)

        @jax.jit
        def run(lo, hi):
            pairs = make(lo, hi)
            size = block_pairs.size((5, 5), rows, offset)
            flat = pairs.flat.reshape(2 * parts, size)
            flags = (block_pairs.FIRST, block_pairs.LAST, block_pairs.WHOLE)
            has = [block_pairs.has(flat, flag) for flag in flags]
            numbers = block_pairs.query_block(flat), block_pairs.key_block(flat)
            return flat, jnp.stack(numbers, -1), jnp.stack(has, -1), pairs.steps

        flat, numbers, flags, steps = jax.device_get(run(lo, hi))
        counts = []
        for n, found in enumerate(flat):
            want = wanted_pairs(lo[n // parts], hi[n // parts], rows, major)
            want = [pair for pair in want if pair[0] % parts == n % parts]
            counts.append(len(want))
            is_pair = np.arange(len(found)) < len(want)
            np.testing.assert_array_equal(found >= 0, is_pair)
            last = want[-1:] * int(np.sum(~is_pair))
            np.testing.assert_array_equal(numbers[n], [x[:2] for x in want + last])
            at = [pair[major == "keys"] for pair in want]
            is_first, is_last = (
                np.diff(at, prepend=-1) != 0,
                np.diff(at, append=-1) != 0,
            )
            is_whole = [pair[2] for pair in want]
            set_ = np.stack([is_first, is_last, is_whole], -1)
            np.testing.assert_array_equal(flags[n, is_pair], set_)
            self.assertFalse(flags[n, ~is_pair].any())
        self.assertEqual(steps, max(counts))


def wanted_pairs(lo, hi, rows, major):
    """Query block, key block, and whether all queries see all keys; sorted."""
    s = np.arange(25)[None]
    seen = ((s >= lo[:, None]) & (s < hi[:, None])).reshape(5, rows[0], 5, rows[1])
    meets = seen.any((1, 3))
    if major == "queries":
        meets[~meets.any(1), 0] = True  # to write the outputs
    else:
        meets[-1, ~meets.any(0)] = True
    found = [(i, j, seen[i, :, j].all()) for i, j in zip(*meets.nonzero(), strict=True)]
    return sorted(
        found, key=lambda pair: pair[:2] if major == "queries" else pair[1::-1]
    )


if __name__ == "__main__":
    environment.main()
