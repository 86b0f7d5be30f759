"""Triton's products of 8 bits in its interpreter: TRITON_INTERPRET=1 pytest FILE."""

import importlib.util
import os
import unittest
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import (
    decode_indexer_topk,
    dispatch,
    indexer_bits,
    indexer_topk,
)
from tests import environment
from tests.pallas_kernels import eight_bits_test

CAN_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1" and all(
    importlib.util.find_spec(name) for name in ("triton", "torch")
)


@unittest.skipUnless(CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1")
class EightBitsGpuTest(parameterized.TestCase):
    @parameterized.parameters(jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32)
    def test_lists_and_bits_are_those_of_loops(self, dtype):
        q, k, w, lo, hi, exponents = eight_bits_test.make()
        q, w, lo, hi = (x[:, -4:] for x in (q, w, lo, hi))
        how = {"topk": 50, "k_exponents": exponents, "implementation": "gpu_interpret"}
        got = indexer_topk(q.astype(dtype), k, w, lo, hi, **how)
        want = eight_bits_test.by_hand(q, k, w, lo, hi, exponents, 50)
        np.testing.assert_array_equal(got, want)
        if dtype == jnp.float8_e4m3fn:
            how["implementation"] = "reference"
            want = indexer_bits(q, k, w, lo, hi, **how)
            how["implementation"] = "gpu_interpret"
            np.testing.assert_array_equal(indexer_bits(q, k, w, lo, hi, **how), want)

    @parameterized.parameters(jnp.float8_e4m3fn, jnp.bfloat16)
    def test_pages_of_codes(self, dtype):
        q, k, w, lo, hi, exponents = eight_bits_test.make()
        q, w, lo, hi = (x[:, -2:] for x in (q, w, lo, hi))
        want = eight_bits_test.by_hand(q, k, w, lo, hi, exponents, 40)
        k = jnp.pad(k, [(0, 0), (0, 3), (0, 0)]).reshape(3, 112, -1)
        pages = jnp.pad(exponents, [(0, 0), (0, 3)]).reshape(3, 112)
        place = np.asarray([1, 2, 0])
        got = decode_indexer_topk(
            q.astype(dtype),
            k[place],
            w,
            lo,
            hi,
            jnp.asarray(np.argsort(place))[None],
            topk=40,
            k_exponents=pages[place],
            implementation="gpu_interpret",
        )
        np.testing.assert_array_equal(got, want)

    @parameterized.parameters(
        (80, 128, False),
        (86, 128, False),
        (89, 128, True),
        (90, 32, True),
        (90, 16, False),  # too narrow for a product of 8 bits
    )
    def test_codes_are_multiplied_where_instructions_do(self, capability, dim, takes):
        q, k, w, lo, hi, exponents = eight_bits_test.make()
        q, k = q[..., :dim], k[..., :dim]
        with (
            mock.patch.object(dispatch, "platform", return_value="gpu"),
            mock.patch.object(dispatch, "capability", return_value=capability),
            mock.patch.object(dispatch, "_missing", return_value=None),
        ):
            args = (q, k, w, lo, hi, None, 50, exponents)
            op = dispatch.Op("decode", "decode_indexer_topk", ("gpu",), "dense")
            got = dispatch.would_run(op, "gpu", None, args)
        self.assertEqual(got, takes)


if __name__ == "__main__":
    environment.main()
