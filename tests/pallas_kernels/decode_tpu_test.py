"""Decoding's TPU kernels, interpreted, against the definition."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax import lax

from pallas_kernels import block_sizes, decode
from pallas_kernels.decode import tpu_dense, tpu_listed
from tests import environment
from tests.pallas_kernels import program, sparse_mla_test

# Name, sequences, queries of each, tokens of a page, pages of a sequence or 0, dtype.
CACHES = (
    ("pages", 3, 2, 16, 6, "bfloat16"),
    ("one_piece", 2, 3, 208, 0, "float32"),
)


def make_cache(rng, sequences, size, pages, width, dtype):
    """Rows of a cache, and its page table: pages in no order, some not in use."""
    count = sequences * pages + 3 if pages else sequences
    cache = jnp.asarray(np.round(rng.standard_normal((count, size, width))), dtype)
    if not pages:
        return cache, None
    table = rng.permutation(count)[: sequences * pages].reshape(sequences, pages)
    return cache, jnp.asarray(table, jnp.int32)


class RowsTest(parameterized.TestCase):
    def test_an_index_beyond_the_keys_names_no_row(self):
        indices = jnp.array([[[0, 5, 6, 7, -1]]])
        np.testing.assert_array_equal(
            tpu_listed._rows(indices, 6, None), [[[0, 5, -1, -1, -1]]]
        )
        table = jnp.array([[3, 1]])
        np.testing.assert_array_equal(
            tpu_listed._rows(indices, 3, table), [[[9, 5, -1, -1, -1]]]
        )


class LimitsTest(parameterized.TestCase):
    @parameterized.parameters(
        (32, 16, 4096, None),
        (33, 16, 4096, "540672 bytes does not fit beside 524288"),
        (128, 2048, 512, None),  # two copies of 1024 keys a page
        (129, 2048, 512, "528384 bytes"),
        (1, 2048, 513, "at most 1048576 keys a sequence, got 1050624"),
        (1, 24, 1, "multiples of 16 tokens, got 24"),
    )
    def test_page_tables_and_scores_that_fit(self, batch, size, pages, message):
        args = [((batch, 1, 8, 128), "bfloat16"), ((9, size, 128), "bfloat16")]
        args += [((batch, 1, 8), "float32"), *[((batch, 1), "int32")] * 2]
        args.append(((batch, pages), "int32"))
        unsupported = functools.partial(
            tpu_dense.unsupported_decode_indexer_topk, topk=1
        )
        found = program.traced(unsupported, *args)
        self.assertIn(message or "None", str(found))

    def test_vmem_has_room_for_all_scores(self):
        """8 x 4 bytes a key, and 24 MiB for what else is computed with."""
        inputs = [((1, 1, 8, 128), "bfloat16"), ((1, 8192, 128), "bfloat16")]
        inputs += [((1, 1, 8), "float32"), ((1, 1), "int32"), ((1, 1), "int32")]
        inputs = [jax.ShapeDtypeStruct(*x) for x in inputs]
        run = functools.partial(
            tpu_dense.decode_indexer_topk, page_table=None, topk=256
        )
        (call, _) = program.kernels(jax.make_jaxpr(run)(*inputs).jaxpr)
        self.assertEqual(
            call["compiler_params"].vmem_limit_bytes, 8192 * 8 * 4 + 24 * 2**20
        )


class DecodeTpuTest(parameterized.TestCase):
    @parameterized.named_parameters(*CACHES)
    def test_attention(self, sequences, queries, size, pages, dtype):
        self.check(sequences, queries, size, pages, dtype, decode_groups=8)

    @parameterized.named_parameters(*CACHES)
    def test_attention_to_gathered_rows(self, sequences, queries, size, pages, dtype):
        self.check(sequences, queries, size, pages, dtype, decode_gathers=1)

    @parameterized.parameters({"decode_groups": 8}, {"decode_gathers": 1})
    def test_lists_are_split_among_cores(self, **sizes):
        """One of five queries has no keys, one so few that a part has none."""
        self.check(5, 1, 16, 4, "bfloat16", cores=2, **sizes)

    def check(self, sequences, queries, size, pages, dtype, **sizes):
        rng = np.random.default_rng(0)
        kv, table = make_cache(rng, sequences, size, pages, 192, dtype)
        q = jnp.asarray(rng.standard_normal((sequences, queries, 4, 192)), dtype)
        lists = np.full((sequences, queries, 20), -1, np.int32)
        for b, t in np.ndindex(lists.shape[:2]):
            length = (19, 17, 0, 3)[(b + t) % 4]
            rows = 1 + rng.choice(size * max(pages, 1) - 1, length, replace=False)
            lists[b, t, :length] = np.sort(rows)
        lists[0, 0, 0] = 0  # the very first row of a cache in one piece
        args = (q, kv, jnp.asarray(lists), table)
        options = {"scale": 0.05, "value_dim": 128}
        attend = functools.partial(program.call, decode.decode_sparse_mla, **options)
        want = attend(*args, implementation="reference")
        lists[0, 0, 19] = size * max(pages, 1) + 3  # names no key, and counts as none
        args = (q, kv, jnp.asarray(lists), table)
        with block_sizes.tried(block_sizes.Tpu(**sizes)):
            got = attend(*args, implementation="tpu_interpret")
        names = ("out", "lse")
        sparse_mla_test.assert_close(
            dict(zip(names, got, strict=True)),
            dict(zip(names, want, strict=True)),
            dtype,
        )

    @parameterized.named_parameters(*CACHES)
    def test_selection_with_ties(self, sequences, queries, size, pages, dtype):
        """Inputs are small integers: scores are exact, and many are equal."""
        rng = np.random.default_rng(0)
        k, table = make_cache(rng, sequences, size, pages, 16, dtype)
        length = size * max(pages, 1)
        q = jnp.asarray(
            np.round(rng.standard_normal((sequences, queries, 4, 16))), dtype
        )
        w = jnp.asarray(rng.integers(-2, 4, q.shape[:3]), jnp.float32)
        lo = rng.integers(0, length // 2, q.shape[:2])
        hi = rng.integers(length // 2, length + 1, q.shape[:2])
        lo[0, 0], hi[0, 0], hi[1, 1] = 0, 10, 0  # fewer than top-k keys, and none
        # One query sees all keys, and gives the first of them a high score.
        lo[0, 1], hi[0, 1] = 0, length
        w = w.at[0, 1].set(1)
        page = 0 if table is None else table[0, 0]
        k = k.at[page, 0].set(3 * q[0, 1, 0])
        bounds = [jnp.asarray(x, jnp.int32) for x in (lo, hi)]
        args = (q, k, w, *bounds, table)
        choose = functools.partial(program.call, decode.decode_indexer_topk, topk=24)
        with mock.patch.multiple(tpu_dense, CHUNK=128, COUNTED=512):
            got = choose(*args, implementation="tpu_interpret")
        want = choose(*args, implementation="reference")
        np.testing.assert_array_equal(got, want)

    @parameterized.parameters(
        (3, 2, 32, 4, "bfloat16"),
        (2, 3, 224, 0, "float32"),
        (2, 1, 32, 3, "float8_e4m3fn"),
        (2, 1, 32, 3, "float8_e4m3fn", False),
        (2, 1, 16, 6, "bfloat16"),  # too short for a tile of bytes: keys are restored
    )
    def test_selection_by_codes(
        self, sequences, queries, size, pages, dtype, by_bytes=True
    ):
        rng = np.random.default_rng(0)
        k, table = make_cache(rng, sequences, size, pages, 16, "float8_e4m3fn")
        exponents = jnp.asarray(rng.integers(-4, 5, k.shape[:2]), jnp.int8)
        length = size * max(pages, 1)
        q = jnp.asarray(rng.integers(-3, 4, (sequences, queries, 4, 16)), dtype)
        w = jnp.asarray(rng.integers(-2, 4, q.shape[:3]), jnp.float32)
        lo = jnp.asarray(rng.integers(0, length // 2, q.shape[:2]), jnp.int32)
        hi = jnp.asarray(rng.integers(length // 2, length + 1, q.shape[:2]), jnp.int32)
        args = (q, k, w, lo.at[0, 0].set(0), hi.at[0, 0].set(10), table)
        choose = functools.partial(
            program.call, decode.decode_indexer_topk, topk=24, k_exponents=exponents
        )
        made = mock.patch.object(
            decode, "_with_restored_keys", wraps=decode._with_restored_keys
        )
        sizes = mock.patch.multiple(tpu_dense, CHUNK=128, COUNTED=512)
        given = lax.bitcast_convert_type(k, jnp.uint8) if by_bytes else k
        with sizes, made as restored:
            got = choose(q, given, *args[2:], implementation="tpu_interpret")
        self.assertEqual(restored.called, size < 32)
        want = choose(*args, implementation="reference")
        np.testing.assert_array_equal(got, want)


if __name__ == "__main__":
    environment.main()
