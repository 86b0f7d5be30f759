"""Grouped products with codes: the definition against a loop, the kernel against it."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import block_sizes, chips, grouped_codes, takes_grouped_codes
from pallas_kernels.grouped_codes import tpu
from tests import environment, typecheck
from tests.pallas_kernels import program
from tests.pallas_kernels.dispatch_test import meant_for

NUM_MATRICES, DEPTH, WIDTH, ROWS = 5, 512, 128, 70
SIZES, FIRST = (3, 0, 40), 2  # rows of each group; the matrix of the first one
RTOL = 1e-5  # sums of float32 in another order
BFLOAT16 = 2.0**-8  # one rounding
KINDS = ("fp8", "int8", "int4")


def make_inputs(kind, blocks, is_integer, num_scales=NUM_MATRICES):
    rng = np.random.default_rng(0)
    shape = NUM_MATRICES, DEPTH, WIDTH
    if kind == "fp8":  # of all sizes, subnormal ones too
        numbers = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))
        codes = jnp.asarray(np.clip(numbers, -448, 448), jnp.float8_e4m3fn)
        plain = np.asarray(codes, np.float64)
    else:
        most = 7 if kind == "int4" else 127
        plain = rng.integers(-most, most + 1, shape)
        codes = jnp.asarray(plain, jnp.int8)
        if kind == "int4":
            low, high = plain[:, ::2] & 15, plain[:, 1::2] & 15
            codes = jnp.asarray(low | high << 4, jnp.uint8)
    if is_integer:
        x = jnp.asarray(rng.integers(-127, 128, (ROWS, DEPTH)), jnp.int8)
    else:
        x = jnp.asarray(rng.standard_normal((ROWS, DEPTH)), jnp.bfloat16)
    scales = jnp.asarray(rng.random((num_scales, blocks, WIDTH)), jnp.float32)
    return x, codes, scales, jnp.asarray(SIZES), plain


def loop(x, plain, scales):
    """Row by row, in float64."""
    y = np.zeros((ROWS, WIDTH))
    x, scales = np.asarray(x, np.float64), np.asarray(scales, np.float64)
    each = np.repeat(scales, DEPTH // scales.shape[1], axis=1)
    offset = FIRST if len(scales) == NUM_MATRICES else 0
    for row, e in enumerate(np.repeat(np.arange(len(SIZES)), SIZES)):
        y[row] = x[row] @ (plain[FIRST + e] * each[offset + e])
    return y


class GroupedCodesTest(parameterized.TestCase):
    @parameterized.product(
        kind=KINDS, is_integer=(False, True), implementation=("reference", "tpu")
    )
    def test_equals_a_loop(self, kind, is_integer, implementation):
        if kind == "fp8" and is_integer:
            self.skipTest("int8 rows meet integer codes")
        *args, plain = make_inputs(kind, 4, is_integer)
        self.check(args, plain, implementation)

    @parameterized.parameters("reference", "tpu")
    def test_a_column_with_one_scale_and_scales_of_the_groups(self, implementation):
        *args, plain = make_inputs("int8", 1, True, len(SIZES))
        self.check(args, plain, implementation)

    @parameterized.parameters("int8", "int4")
    def test_a_long_block_is_multiplied_part_by_part(self, kind):
        with mock.patch.multiple(tpu, _MOST=256, _COLUMNS=128):
            *args, plain = make_inputs(kind, 1, False)
            self.check(args, plain, "tpu")

    def test_mapped_entries_are_what_each_gives_alone(self):
        x, *others = make_inputs("int8", 4, False)[:4]
        how = {"implementation": "tpu_interpret"}
        run = jax.jit(lambda x: grouped_codes(x, *others, FIRST, **how))
        both = jnp.stack([x, 2 * x])
        want = [run(x) for x in both]
        np.testing.assert_array_equal(jax.vmap(run)(both), jnp.stack(want))

    def check(self, args, plain, implementation):
        name = "tpu_interpret" if implementation == "tpu" else implementation
        got = grouped_codes(*args, FIRST, implementation=name)
        wanted = loop(args[0], plain, args[2])
        rounding = RTOL if got.dtype == jnp.float32 else BFLOAT16
        atol = RTOL * np.abs(wanted).max()
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(got, wanted, rtol=rounding, atol=atol)

    @parameterized.named_parameters(
        ("codes", {"codes": (5, 100, 128)}, "codes must be"),
        ("blocks", {"scales": (5, 3, 128)}, "blocks must divide"),
        ("scales", {"scales": (4, 4, 128)}, "scales must be of all 5 matrices"),
    )
    def test_wrong_shapes_are_told(self, shapes, message):
        x, codes, scales, sizes, _ = make_inputs("int8", 4, False)
        if "codes" in shapes:
            codes = jnp.zeros(shapes["codes"], jnp.int8)
        if "scales" in shapes:
            scales = jnp.zeros(shapes["scales"], jnp.float32)
        with self.assertRaisesRegex(ValueError, f"^grouped_codes: {message}"):
            grouped_codes(x, codes, scales, sizes, FIRST)

    def test_a_scale_of_half_a_byte_is_refused(self):
        x, codes, _, sizes, _ = make_inputs("int4", 4, False)
        scales = jnp.ones((NUM_MATRICES, DEPTH, WIDTH))
        with self.assertRaisesRegex(ValueError, "into whole bytes, got 512"):
            grouped_codes(x, codes, scales, sizes, FIRST)

    @parameterized.named_parameters(
        ("codes", {"codes": "int32"}, "codes must be float8_e4m3fn or int8, got int32"),
        ("rows", {"x": "int32"}, "x must be floats"),
        ("sizes", {"sizes": "float32"}, "group_sizes must be signed integers"),
        ("float8", {"x": "int8", "codes": "float8_e4m3fn"}, "int8 rows meet integer"),
    )
    def test_wrong_types_are_told(self, types, message):
        *args, _ = make_inputs("int8", 4, False)
        named = dict(zip(("x", "codes", "scales", "sizes"), args, strict=True))
        named |= {name: named[name].astype(dtype) for name, dtype in types.items()}
        told = self.assertRaisesRegex(ValueError, f"^grouped_codes: {message}")
        with typecheck.off(), told:
            grouped_codes(*named.values(), FIRST)

    @parameterized.parameters(
        ((5, 128), (3,), (), "scales must be .some, blocks, F., got"),
        ((5, 0, 128), (3,), (), "blocks must be at least 1, got 0"),
        ((5, 4, 128), (6,), (), "group_sizes must be of 1 .. 5 groups.*got 6"),
        ((5, 4, 128), (0,), (), "group_sizes must be of 1 .. 5 groups.*got 0"),
        ((5, 4, 128), (3,), (1,), "first must be"),
    )
    def test_wrong_ranks_and_numbers_are_told(self, scales, sizes, first, message):
        x, codes, *_ = make_inputs("int8", 4, False)
        sizes, first = (jnp.ones(shape, jnp.int32) for shape in (sizes, first))
        told = self.assertRaisesRegex(ValueError, f"^grouped_codes: {message}")
        with typecheck.off(), told:
            grouped_codes(x, codes, jnp.ones(scales), sizes, first)

    @parameterized.parameters(
        ("reference", -1, 0), ("reference", 4, 2), ("tpu_interpret", 4, 2)
    )
    def test_all_groups_have_a_matrix_of_the_stack(self, name, beyond, last):
        *args, _ = make_inputs("int8", 4, True)
        got, want = (
            grouped_codes(*args, first, implementation=name) for first in (beyond, last)
        )
        np.testing.assert_array_equal(got, want)

    def test_groups_are_cut_where_the_rows_end(self):
        x, codes, scales, _, _ = make_inputs("int8", 4, True)
        got, want = (
            grouped_codes(
                x, codes, scales, jnp.asarray(sizes), FIRST, implementation="reference"
            )
            for sizes in ((3, 0, 400), (3, 0, ROWS - 3))
        )
        np.testing.assert_array_equal(got, want)

    def test_the_first_group_has_the_first_matrix_by_default(self):
        *args, _ = make_inputs("int8", 4, True)
        got, want = (
            grouped_codes(*args, *first, implementation="reference")
            for first in ((), (0,))
        )
        np.testing.assert_array_equal(got, want)

    def test_the_kernel_is_for_a_tpu_with_room(self):
        *args, _ = make_inputs("int8", 4, True)
        self.assertFalse(takes_grouped_codes(*args, FIRST))
        with meant_for(chips.CHIPS["v5p"]):
            self.assertTrue(takes_grouped_codes(*args, FIRST))
            long = jnp.zeros((2**16, DEPTH), jnp.int8)
            self.assertFalse(takes_grouped_codes(long, *args[1:], FIRST))


class LimitsTest(parameterized.TestCase):
    @parameterized.parameters(
        (100, 512, 2, "int8", 512),
        (64, 1024, 4, "int8", 256),
        (33, 640, 1, "uint8", 128),
    )
    def test_rows_beyond_vmem_are_refused(self, num_rows, depth, blocks, codes, part):
        """Two of rows, results, codes and scales; a tile's sums and its matrix."""
        stored = depth // (2 if codes == "uint8" else 1)
        args = ((num_rows, depth), "bfloat16"), ((1, stored, 1536), codes)
        args += ((1, blocks, 1536), "float32"), ((1,), "int32"), ((), "int32")
        padded, columns, part = -(-num_rows // 32) * 32, 768, min(depth // blocks, 512)
        if depth // blocks == 640:
            part = 128  # the largest that divides the block
        needed = 2 * padded * (2 * depth + 2 * columns)
        needed += 2 * columns * (stored + 4 * blocks)
        needed += 4 * columns * (4 * 32 + 4 * part)
        for limit, is_taken in ((needed, True), (needed - 1, False)):
            with block_sizes.tried(block_sizes.Tpu(vmem_bytes=limit)):
                found = program.traced(tpu.unsupported_grouped_codes, *args)
            self.assertEqual(found is None, is_taken)
        self.assertIn(f"take {needed} bytes", found)

    @parameterized.parameters(
        ("bfloat16", "int8", (512, 128), 4, None),
        ("bfloat16", "float8_e4m3fn", (512, 128), 4, None),
        ("int8", "int8", (512, 128), 4, None),
        ("float32", "int8", (512, 128), 4, "x must be bfloat16 or int8"),
        ("int8", "float8_e4m3fn", (512, 128), 4, "meet integer codes"),
        ("bfloat16", "int8", (512, 192), 4, "multiples of 128, got 192 and 128"),
        ("bfloat16", "int8", (512, 128), 8, "multiples of 128, got 128 and 64"),
    )
    def test_what_the_kernel_takes(self, x, codes, shape, blocks, message):
        args = ((8, 512), x), ((1, *shape), codes), ((1, blocks, 128), "float32")
        args += ((1,), "int32"), ((), "int32")
        found = program.traced(tpu.unsupported_grouped_codes, *args)
        self.assertIn(message or "None", str(found))

    @parameterized.parameters(
        (128, 128), (1024, 1024), (1152, 384), (1536, 768), (2048, 1024), (100, 100)
    )
    def test_columns_of_a_matrix_in_vmem_divide_it(self, width, columns):
        """The most up to 1024, in whole tiles."""
        self.assertEqual(tpu._columns(width), columns)

    @parameterized.parameters((64, 64), (512, 512), (640, 128), (1024, 512), (600, 600))
    def test_inputs_that_are_multiplied_at_a_time_divide_a_block(self, block, part):
        self.assertEqual(tpu._part(block), part)

    def test_cost_is_that_of_the_groups_matrices(self):
        """All padded rows against one matrix each; bytes of 2 of 5 matrices."""
        args = [((64, 512), "bfloat16"), ((5, 512, 384), "int8")]
        args += [((5, 4, 384), "float32"), ((2,), "int32"), ((), "int32")]
        specs = (jax.ShapeDtypeStruct(*arg) for arg in args)
        (call,) = program.kernels(jax.make_jaxpr(tpu.grouped_codes)(*specs).jaxpr)
        found = call["cost_estimate"]
        self.assertFalse(call["interpret"])
        self.assertEqual(found.flops, 2 * 64 * 512 * 384)
        moved = 2 * 64 * (512 + 384) + 2 * 384 * (512 + 4 * 4)
        self.assertEqual(found.bytes_accessed, moved)


if __name__ == "__main__":
    environment.main()
