"""Triton's attention to rows of bytes in its interpreter: TRITON_INTERPRET=1."""

import dataclasses
import importlib.util
import os
import unittest
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import (
    block_sizes,
    capabilities,
    cases,
    decode_sparse_mla,
    dispatch,
)
from tests import environment
from tests.pallas_kernels import latent_rows_test

CAN_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1" and all(
    importlib.util.find_spec(name) for name in ("triton", "torch")
)
KINDS = (*latent_rows_test.KINDS,)
SMALL = dataclasses.replace(latent_rows_test.CASE, latent=32)  # a tile of 32 codes
TILES = dataclasses.replace(latent_rows_test.CASE, latent=512, rope=64, topk=40)


@unittest.skipUnless(CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1")
class LatentRowsGpuTest(parameterized.TestCase):
    @parameterized.product(
        codes=KINDS, dtype=("bfloat16", "float32"), page=(None, 8), case=(SMALL, TILES)
    )
    def test_outputs_are_those_of_the_loop(self, codes, dtype, page, case):
        case = dataclasses.replace(case, dtype=dtype)
        padding = 8 if page is None else 0
        latent_rows_test.check(case, codes, "gpu_interpret", page, padding)

    @parameterized.product(codes=KINDS, splits=(1, 2, 4))
    def test_rows_of_bytes_are_the_rows_that_they_stand_for(self, codes, splits):
        """Equal, bit for bit: the products and their order are the same."""
        from pallas_kernels.decode import gpu_listed

        rows, numbers = map(jnp.asarray, latent_rows_test.make(codes, TILES))
        (q,) = cases.make(TILES, "q_latent")
        options = latent_rows_test.make_lists(TILES), None, TILES.scale, TILES.latent
        tile = capabilities.Tile((64, 16), 8, 2)
        sizes = capabilities.Gpu(decode_sparse_mla=tile, decode_sparse_mla_codes=tile)
        with block_sizes.tried(sizes):
            form = TILES.row_form(codes)
            got = gpu_listed.attend(q, rows, *options, splits, True, form)
            want = gpu_listed.attend(q, numbers, *options, splits, True)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)

    @parameterized.parameters(80, 100)
    def test_tiles_of_other_capabilities(self, capability):
        """Several blocks of heads, the last one not full; 8.9 has the tile of 8.0."""
        case = dataclasses.replace(TILES, latent=256, queries=3, heads=72)
        with block_sizes.tried(capabilities.GPUS[capability]):
            latent_rows_test.check(case, "int8", "gpu_interpret", 8)

    @parameterized.parameters(
        (80, "int8", 32, 0, True),
        (80, "float8_e4m3fn", 32, 0, False),
        (86, "float8_e4m3fn", 32, 0, False),
        (89, "float8_e4m3fn", 32, 0, True),
        (90, "float8_e4m3fn", 32, 4, True),
        (90, "int8", 136, 0, False),  # no power of two
        (90, "int8", 32, 2, False),  # scales between words
    )
    def test_codes_are_read_where_instructions_convert_them(
        self, capability, codes, latent, padding, takes
    ):
        case = dataclasses.replace(SMALL, latent=latent)
        rows = jnp.asarray(latent_rows_test.make(codes, case, padding)[0])
        (q,) = cases.make(case, "q_latent")
        form, lists = case.row_form(codes), latent_rows_test.make_lists(case)
        with (
            mock.patch.object(dispatch, "platform", return_value="gpu"),
            mock.patch.object(dispatch, "capability", return_value=capability),
            mock.patch.object(dispatch, "_missing", return_value=None),
        ):
            args = (q, rows, lists, None, 1.0, case.latent, form)
            op = dispatch.Op("decode", "decode_sparse_mla", ("gpu",), "listed")
            got = dispatch.would_run(op, "gpu", None, args)
        self.assertEqual(got, takes)

    def test_a_named_kernel_refuses_by_name(self):
        rows = jnp.asarray(latent_rows_test.make("int8")[0])
        (q,) = cases.make(latent_rows_test.CASE, "q_latent")
        with self.assertRaisesRegex(NotImplementedError, "powers of two"):
            decode_sparse_mla(
                q,
                rows,
                latent_rows_test.make_lists(),
                scale=1.0,
                value_dim=136,
                kv_codes="int8",
                implementation="gpu_interpret",
            )


if __name__ == "__main__":
    environment.main()
