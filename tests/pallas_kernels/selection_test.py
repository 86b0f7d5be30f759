"""The three forms of a selection, and the bounds of packed documents."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import (
    cases,
    chips,
    indexer_bits,
    indexer_mask,
    indexer_select,
    indexer_topk,
    selection,
)
from tests import environment
from tests.pallas_kernels import program, sparse_mla_gpu_test
from tests.pallas_kernels.dispatch_test import meant_for


class SelectionFormsTest(parameterized.TestCase):
    @parameterized.parameters(5, 4096, 5000)
    def test_bits_are_where_they_say(self, num_keys):
        mask = np.random.default_rng(0).random((2, num_keys, 3)) < 0.3
        bits = np.asarray(program.call(selection.pack, mask))
        self.assertEqual(bits.shape[-1], selection.num_words(num_keys))
        s = np.arange(num_keys)
        words = bits[:, :, s // 4096 * 128 + s % 128]
        found = words >> (s % 4096 // 128).astype(np.uint32) & 1
        np.testing.assert_array_equal(found.astype(bool), mask.swapaxes(1, 2))
        back = program.call(selection.unpack, bits, num_keys=num_keys)
        np.testing.assert_array_equal(back, mask)

    @parameterized.named_parameters((case.name, case) for case in cases.SMALL.values())
    def test_the_forms_agree(self, case):
        names = ("q_index", "k_index", "w", "lo", "hi")
        args = cases.make(case, *names)

        @jax.jit
        def forms(*args):
            ops = (indexer_mask, indexer_topk, indexer_bits)
            mask, lists, bits = (op(*args, topk=case.topk) for op in ops)
            masks = [mask, selection.unpack(bits, case.keys)]
            masks.append(selection.to_mask(lists, case.keys))
            return masks, (lists, selection.to_list(mask, case.topk))

        (mask, *masks), (lists, listed) = forms(*args)
        for other in masks:
            np.testing.assert_array_equal(other, mask)
        np.testing.assert_array_equal(listed, lists)

    def test_the_number_of_keys_decides_about_the_form(self):
        args = cases.make(cases.SMALL["short"], "q_index", "k_index", "w", "lo", "hi")
        with mock.patch.object(selection, "form", return_value="list") as form:
            jax.eval_shape(lambda *x: indexer_select(*x, topk=2), *args)
        form.assert_called_once_with(args[1].shape[1])

    @parameterized.parameters(
        ("h200", 8192),
        ("v5p", 36864),
        ("v6e", 131072),
        ("tpu7x", 131072),
        ("b200", 32768),  # nobody computed it
    )
    def test_lists_pay_from_a_length_of_the_chip_on(self, name, length):
        """Design note 0004 has the lengths."""
        self.assertEqual(selection.form(length), "mask")  # on this CPU
        with meant_for(chips.CHIPS[name]):
            self.assertEqual(selection.form(length - 1), "bits")
            self.assertEqual(selection.form(length), "list")

    @parameterized.parameters("reference", "tiled", "gpu_interpret")
    def test_a_visible_key_counts_even_with_a_score_of_minus_infinity(self, name):
        """It goes last, but before keys that nobody may see."""
        if name == "gpu_interpret" and not sparse_mla_gpu_test.CAN_INTERPRET:
            self.skipTest("needs triton, torch and TRITON_INTERPRET=1")
        keys = np.ones((1, 130, 128), np.float32)
        keys[0, ::3] = -1  # their products are cut to zero
        q = jnp.full((1, 2, 8, 128), 2.0**20)
        w = jnp.full((1, 2, 8), -(2.0**120))
        lo, hi = jnp.asarray([[5, 0]]), jnp.asarray([[17, 2]])
        args = (q, jnp.asarray(keys), w, lo, hi)
        got = program.call(indexer_topk, *args, topk=9, implementation=name)
        want = [[5, 6, 7, 8, 9, 10, 11, 12, 15], [0, 1, *[-1] * 7]]
        np.testing.assert_array_equal(got, [want])
        bits = program.call(indexer_bits, *args, topk=9, implementation=name)
        np.testing.assert_array_equal(
            selection.unpack(bits, 130), selection.to_mask(got, 130)
        )

    @parameterized.parameters("reference", "tiled")
    def test_ties_go_to_the_lower_index_in_every_form(self, name):
        """Scores of whole numbers are exact, and most are equal."""
        rng = np.random.default_rng(0)
        q, k = rng.integers(0, 2, (1, 40, 1, 4)), rng.integers(0, 2, (1, 40, 4))
        arrays = [jnp.asarray(y, jnp.float32) for y in (q, k, np.ones((1, 40, 1)))]
        scores = np.einsum("tj,sj->ts", q[0, :, 0], k[0])
        lo = np.maximum(np.arange(40) - 30, 0)[None]
        hi = np.arange(1, 41)[None]
        args = (*arrays, jnp.asarray(lo), jnp.asarray(hi))
        options = {"topk": 6, "implementation": name}
        lists = program.call(indexer_topk, *args, **options)
        for t in range(40):
            s = np.arange(lo[0, t], hi[0, t])
            best = sorted(s[np.lexsort((s, -scores[t, s]))][:6])
            np.testing.assert_array_equal(lists[0, t], best + [-1] * (6 - len(best)))
        mask = program.call(indexer_mask, *args, **options)
        np.testing.assert_array_equal(mask, selection.to_mask(lists, 40))
        bits = program.call(indexer_bits, *args, **options)
        np.testing.assert_array_equal(selection.unpack(bits, 40), mask)

    def test_segment_bounds(self):
        lo, hi = selection.segment_bounds(jnp.asarray([[1, 1, 2, 2, 2, 0]]))
        np.testing.assert_array_equal(lo, [[0, 0, 2, 2, 2, 5]])
        np.testing.assert_array_equal(hi, [[1, 2, 3, 4, 5, 0]])


if __name__ == "__main__":
    environment.main()
