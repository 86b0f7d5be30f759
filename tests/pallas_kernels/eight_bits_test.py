"""Rows of 8-bit numbers with a power of two each: exact in bfloat16."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized

from pallas_kernels import (
    cases,
    decode_indexer_topk,
    dispatch,
    eight_bits,
    indexer_bits,
    indexer_mask,
    indexer_select,
    indexer_topk,
    selection,
)
from tests import environment, typecheck

T = 9  # queries; 333 keys


@functools.cache
def make():
    """Codes of queries and keys with their exponents, w with q's factors, bounds."""
    names = ("q_index", "w", "lo", "hi", "k_index")
    *rows, k = cases.make(cases.SMALL["continued"], *names)
    q, w, lo, hi = (x[:, -T:] for x in rows)
    k = k * 2.0 ** (jnp.arange(k.shape[1]) % 7 - 3)[None, :, None].astype(k.dtype)
    (q, q_exponents), (k, k_exponents) = map(eight_bits.rounded, (q, k))
    return q, k, w * eight_bits.power(q_exponents), lo, hi, k_exponents


def by_hand(q, k, w, lo, hi, exponents, topk):
    """Loops in float64; lists as sets."""
    q, k, w = (np.asarray(x, np.float64) for x in (q, k, w))
    k = k * 2.0 ** np.asarray(exponents, np.float64)[..., None]
    found = np.full((*q.shape[:2], topk), -1)
    for b, t in np.ndindex(q.shape[:2]):
        s = np.arange(lo[b, t], hi[b, t])
        scores = w[b, t] @ np.maximum(q[b, t] @ k[b, s].T, 0)
        best = np.sort(s[np.lexsort((s, -scores))][:topk])
        found[b, t, : len(best)] = best
    return found


class RoundedTest(parameterized.TestCase):
    def test_numbers_are_the_nearest_codes_of_the_least_factor(self):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((50, 16)) * 10.0 ** rng.integers(-6, 7, (50, 1))
        codes, exponents = eight_bits.rounded(jnp.asarray(x, jnp.float32))
        self.assertEqual(codes.dtype, jnp.float8_e4m3fn)
        self.assertEqual(exponents.dtype, jnp.int8)
        for row, code, exponent in zip(np.float32(x), codes, exponents, strict=True):
            largest = np.abs(row).max()
            self.assertLessEqual(largest, 448 * 2.0 ** int(exponent))
            self.assertGreater(largest, 224 * 2.0 ** int(exponent))
            scaled = np.float64(row) / 2.0 ** int(exponent)
            want = scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
            np.testing.assert_array_equal(code, want)

    @parameterized.parameters(448.0, 224.0, 7.0, 2.0**-20)
    def test_a_power_of_two_of_the_largest_code_fits_exactly(self, largest):
        x = jnp.asarray([[largest, 0.0]])
        codes, exponents = eight_bits.rounded(x)
        np.testing.assert_array_equal(eight_bits.restored(codes, exponents), x)

    def test_zeros_and_numbers_beyond_the_exponents(self):
        x = jnp.asarray([[0.0, 0.0], [2.0**-120, 0.0], [2.0**127, 1.0]])
        restored = eight_bits.restored(*eight_bits.rounded(x), "float32")
        np.testing.assert_array_equal(restored, [[0, 0], [0, 0], [2.0**127, 0]])

    def test_restored_rows_are_exact_in_bfloat16(self):
        every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
        every = jnp.asarray(every[np.isfinite(every.astype(np.float32))])[None]
        for exponent in (eight_bits.LEAST, -3, 0, 5, 119):
            exponents = jnp.asarray([exponent], jnp.int8)
            half = eight_bits.restored(every, exponents)
            want = np.asarray(every, np.float64) * 2.0**exponent
            np.testing.assert_array_equal(np.asarray(half, np.float64), want)


class SelectedTest(parameterized.TestCase):
    @parameterized.parameters(None, "reference")
    def test_codes_are_selected_by_as_in_loops(self, implementation):
        q, k, w, lo, hi, exponents = make()
        how = {"topk": 50, "k_exponents": exponents, "implementation": implementation}
        lists = indexer_topk(q, k, w, lo, hi, **how)
        want = by_hand(q, k, w, lo, hi, exponents, 50)
        np.testing.assert_array_equal(lists, want)
        bits = indexer_bits(q, k, w, lo, hi, **how)
        mask = selection.to_mask(lists, k.shape[1])
        np.testing.assert_array_equal(selection.unpack(bits, k.shape[1]), mask)

    def test_masks_and_the_form_of_the_platform(self):
        q, k, w, lo, hi, exponents = make()
        how = {"topk": 50, "k_exponents": exponents}
        mask = indexer_mask(q, k, w, lo, hi, **how)
        lists = indexer_topk(q, k, w, lo, hi, **how)
        np.testing.assert_array_equal(mask, selection.to_mask(lists, k.shape[1]))
        np.testing.assert_array_equal(mask, indexer_select(q, k, w, lo, hi, **how))

    @parameterized.parameters(jnp.bfloat16, jnp.float32)
    def test_queries_that_are_no_codes(self, dtype):
        q, k, w, lo, hi, exponents = make()
        q = q.astype(dtype)
        want = indexer_topk(
            q, eight_bits.restored(k, exponents, q.dtype), w, lo, hi, topk=50
        )
        got = indexer_topk(q, k, w, lo, hi, topk=50, k_exponents=exponents)
        np.testing.assert_array_equal(got, want)

    def test_pages_of_codes(self):
        q, k, w, lo, hi, exponents = make()
        q, w, lo, hi = (x[:, -2:] for x in (q, w, lo, hi))
        k = jnp.pad(k, [(0, 0), (0, 3), (0, 0)])  # 336 keys
        exponents = jnp.pad(exponents, [(0, 0), (0, 3)])
        table = jnp.asarray([[2, 0, 1]])
        place = np.argsort(table[0])
        place = np.append(place, 0)  # a fourth page, of nobody
        args = (q, k.reshape(3, 112, -1)[place], w, lo, hi, table)
        pages = exponents.reshape(3, 112)[place]
        plain = mock.patch.object(eight_bits, "restored", wraps=eight_bits.restored)
        with plain as restored:
            got = decode_indexer_topk(*args, topk=50, k_exponents=pages)
        restored.assert_called_once()  # and for the keys of the sequence alone
        self.assertEqual(restored.call_args.args[0].shape, (1, 336, 128))
        np.testing.assert_array_equal(got, by_hand(q, k, w, lo, hi, exponents, 50))

    def test_vmap(self):
        q, k, w, lo, hi, exponents = make()
        run = lambda k, e: indexer_topk(q, k, w, lo, hi, topk=50, k_exponents=e)
        moved = exponents + jnp.int8(2)  # all scores four times as large
        got = jax.vmap(run)(jnp.stack([k, k]), jnp.stack([exponents, moved]))
        np.testing.assert_array_equal(got[0], run(k, exponents))
        np.testing.assert_array_equal(got[1], got[0])


class ArgumentsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"k": jnp.bfloat16}, "k must be float8_e4m3fn .* got bfloat16"),
        ({"q": jnp.float16}, "q must be float8_e4m3fn, bfloat16 or float32 .* float16"),
        ({"k_exponents": None}, r"needs k_exponents \[1, 333\], got none"),
        ({"k_exponents": (1, 332)}, r"\[1, 333\], got \[1, 332\]"),
        ({"k_exponents": jnp.int32}, "int8, got int32"),
    )
    def test_what_does_not_fit_is_named(self, change, message):
        q, k, w, lo, hi, exponents = make()
        given = {"q": q, "k": k, "k_exponents": exponents}
        ((name, new),) = change.items()
        if isinstance(new, tuple):
            given[name] = given[name][:, : new[1]]
        else:
            given[name] = new if new is None else given[name].astype(new)
        for op in (indexer_topk, decode_indexer_topk):
            exponents = given["k_exponents"]
            words = f"{op.__name__}: .*{message}"
            with typecheck.off(), self.assertRaisesRegex(ValueError, words):
                op(given["q"], given["k"], w, lo, hi, topk=5, k_exponents=exponents)

    def test_queries_of_codes_need_keys_of_codes(self):
        q, k, w, lo, hi, _ = make()
        with self.assertRaisesRegex(ValueError, "if q is"):
            indexer_topk(q, k.astype(jnp.bfloat16), w, lo, hi, topk=5)

    def test_who_would_run(self):
        op = dispatch.Op("decode", "decode_indexer_topk", ("reference", "gpu"), "dense")
        q, k, w, lo, hi, _ = make()
        args = (q, k, w, lo, hi, None, 50)
        self.assertTrue(dispatch.would_run(op, "gpu", "gpu_interpret", args))
        self.assertFalse(dispatch.would_run(op, "gpu", "tpu_interpret", args))
        self.assertFalse(dispatch.would_run(op, "gpu", None, args))  # on a CPU


if __name__ == "__main__":
    environment.main()
