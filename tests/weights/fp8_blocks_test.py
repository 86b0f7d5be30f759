"""Compares FP8 blocks with float64, and round trips byte by byte."""

import pathlib

import ml_dtypes
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.weights import coded_tensor, fp8_blocks, safetensors_file
from tests import environment

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
CODES = np.arange(256, dtype=np.uint8).view(FP8)
IS_NUMBER = ~np.isnan(CODES.astype(np.float64))
# By the definition of e4m3: 4 bits of exponent with bias 7, 3 of mantissa.
BITS = np.arange(256)
EXPONENT, MANTISSA = BITS >> 3 & 15, BITS & 7
VALUES = np.where(
    EXPONENT == 0, MANTISSA / 8 * 2.0**-6, (1 + MANTISSA / 8) * 2.0 ** (EXPONENT - 7)
) * np.where(BITS < 128, 1, -1)
# Partial blocks in both dims; whole blocks; a single partial block of rows.
SHAPES = (("ragged", (300, 200)), ("whole", (256, 128)), ("small", (5, 130)))


def random_codes(rng, shape, block=128):
    """Returns random codes with a 448 in every block."""
    codes = rng.choice(np.flatnonzero(IS_NUMBER), size=shape).astype(np.uint8)
    codes[::block, ::block] = 126
    return codes.view(FP8)


def random_scales(rng, shape):
    """Returns scales with uniform mantissas and the exponents of real weights."""
    return np.ldexp(rng.uniform(1, 2, shape), rng.integers(-20, 2, shape)).astype("f4")


def multiply(codes, scales, block=128):
    """Computes the expected products: exact in float64, rounded once to float32."""
    out = np.empty(codes.shape, np.float32)
    for i, j in np.ndindex(codes.shape):
        scale = np.float64(scales[i // block, j // block])
        out[i, j] = np.float32(VALUES[codes[i, j].view(np.uint8)] * scale)
    return out


class MultiplyTest(parameterized.TestCase):
    def open(self, codes, scales, **kwargs):
        path = pathlib.Path(self.create_tempdir().full_path) / "x.safetensors"
        arrays = {"codes": codes, "scales": scales}
        made = safetensors_file.create(
            path, {name: (x.dtype, x.shape) for name, x in arrays.items()}
        )
        for name, array in arrays.items():
            made[name].write(0, array)
        found = safetensors_file.read_header(path)
        return coded_tensor.CodedTensor(found["codes"], found["scales"], **kwargs)

    @parameterized.named_parameters(*SHAPES)
    def test_equals_float64_rounded_once(self, shape):
        rng = np.random.default_rng(0)
        codes = random_codes(rng, shape)
        scales = random_scales(rng, fp8_blocks.scale_shape(shape, (128, 128)))
        tensor, expected = self.open(codes, scales), multiply(codes, scales)
        whole = tensor[:, :]
        self.assertEqual(whole.dtype, np.float32)
        self.assertEqual(whole.tobytes(), expected.tobytes())  # the sign of 0 as well
        for _ in range(20):
            window = tuple(
                slice(*sorted(rng.integers(0, n + 1, size=2))) for n in shape
            )
            np.testing.assert_array_equal(tensor[window], expected[window])

    def test_other_blocks(self):
        rng = np.random.default_rng(1)
        codes, scales = random_codes(rng, (50, 70)), random_scales(rng, (4, 3))
        tensor = self.open(codes, scales, block=(16, 32))
        expected = np.repeat(np.repeat(scales, 16, 0), 32, 1)[:50, :70].astype("f8")
        expected = (VALUES[codes.view(np.uint8)] * expected).astype(np.float32)
        np.testing.assert_array_equal(tensor[:, :], expected)

    @parameterized.parameters(
        {"quant_method": "gptq"},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": [128.0, 128]},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"},
        {"weight_block_size": [128, 128]},
    )
    def test_refuses_other_quantizations(self, **settings):
        with self.assertRaisesRegex(config_lib.InputError, "weight_block_size"):
            fp8_blocks.block_size(settings)
        with self.assertRaises(config_lib.InputError):
            fp8_blocks.block_size([settings])

    @parameterized.parameters((128, 128), (1, 1))
    def test_takes_blocks_of_any_size(self, *block):
        settings = {"quant_method": "fp8", "weight_block_size": [*block]}
        self.assertEqual(fp8_blocks.block_size(settings), block)


class QuantizeTest(parameterized.TestCase):
    @parameterized.named_parameters(*SHAPES)
    def test_equals_the_nearest_code(self, shape):
        weights = np.random.default_rng(2).normal(size=shape).astype(np.float32)
        codes, scales = fp8_blocks.quantize(weights)
        numbers = VALUES[IS_NUMBER]
        for i, j in np.ndindex(scales.shape):
            here = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            block = weights[here]
            reciprocal = np.float32(1 / 448)  # as quantization-aware training
            self.assertEqual(scales[i, j], np.abs(block).max() * reciprocal)
            exact = block.astype(np.float64)[..., None] / np.float64(scales[i, j])
            least = np.abs(exact - numbers).min(axis=-1)
            error = np.abs(exact[..., 0] - VALUES[codes[here].view(np.uint8)])
            np.testing.assert_allclose(error, least, atol=448 * 2.0**-24)

    @parameterized.named_parameters(*SHAPES)
    def test_products_give_the_same_bytes(self, shape):
        """Includes scales whose quotient is a neighbour, as 7 * scale is a tie."""
        rng = np.random.default_rng(3)
        num_ties = 0
        for _ in range(10):
            codes = random_codes(rng, shape)
            scales = random_scales(rng, fp8_blocks.scale_shape(shape, (128, 128)))
            num_ties += (np.float32(448) * scales / np.float32(448) != scales).sum()
            again = fp8_blocks.quantize(multiply(codes, scales))
            self.assertEqual(again.scales.tobytes(), scales.tobytes())
            self.assertEqual(again.codes.tobytes(), codes.tobytes())
        self.assertGreater(num_ties, 0)

    @parameterized.named_parameters(
        ("denormal_products", 2.0**-126, 448),
        ("denormal_scales", 3 * 2.0**-140, 448),
        ("largest", 2.0**119, 448),
        ("power_of_two", 2.0**-9, 416),
        ("no_448", 1.2345, 352),
    )
    def test_odd_scales_give_the_same_bytes(self, scale, largest):
        rng = np.random.default_rng(4)
        allowed = np.flatnonzero(IS_NUMBER & (np.abs(VALUES) <= largest))
        codes = rng.choice(allowed, size=(128, 128)).astype(np.uint8)
        codes[3, 5] = np.flatnonzero(largest == VALUES)[0]
        scales = np.full((1, 1), scale, np.float32)
        again = fp8_blocks.quantize(multiply(codes.view(FP8), scales))
        self.assertEqual(again.scales, scales)
        np.testing.assert_array_equal(again.codes.view(np.uint8), codes)

    @parameterized.named_parameters(
        ("only_448", [126], 1.7),
        ("powers_of_two", [56, 64, 72], 1.3),
        ("below_half", [1, 2, 3, 70], 0.77),
        ("rounded_away", range(127), 2.0**-149),
    )
    def test_values_survive_where_bytes_are_ambiguous(self, some, scale):
        """Different codes and scales with equal products are equivalent."""
        codes = (
            np.random.default_rng(5).choice(list(some), size=(40, 40)).astype(np.uint8)
        )
        products = multiply(codes.view(FP8), np.full((1, 1), scale, np.float32))
        again = fp8_blocks.quantize(products)
        np.testing.assert_array_equal(multiply(*again), products)

    def test_zeros_keep_their_sign(self):
        weights = np.zeros((130, 3), np.float32)
        weights[1] = -0.0
        codes, scales = fp8_blocks.quantize(weights)
        np.testing.assert_array_equal(scales, [[1], [1]])
        self.assertEqual(multiply(codes, scales).tobytes(), weights.tobytes())

    def test_bfloat16_keeps_codes_and_later_conversions_change_nothing(self):
        """8 bits of a product determine the code, but not which of 2**24 scales."""
        rng = np.random.default_rng(6)
        codes, scales = random_codes(rng, (300, 200)), random_scales(rng, (3, 2))
        rounded = multiply(codes, scales).astype(ml_dtypes.bfloat16)
        once = fp8_blocks.quantize(rounded.astype(np.float32))
        self.assertEqual(once.codes.tobytes(), codes.tobytes())
        np.testing.assert_allclose(once.scales, scales, rtol=2.0**-8)
        rounded = multiply(*once).astype(ml_dtypes.bfloat16)
        twice = fp8_blocks.quantize(rounded.astype(np.float32))
        self.assertEqual(twice.codes.tobytes(), once.codes.tobytes())
        self.assertEqual(twice.scales.tobytes(), once.scales.tobytes())

    def test_powers_of_two_survive_bfloat16(self):
        """Scales of ue8m0 survive, because a code's four bits fit into eight."""
        rng = np.random.default_rng(7)
        codes = random_codes(rng, (300, 200))
        scales = np.exp2(rng.integers(-20, 2, (3, 2))).astype(np.float32)
        rounded = multiply(codes, scales).astype(ml_dtypes.bfloat16)
        again = fp8_blocks.quantize(rounded.astype(np.float32))
        self.assertEqual(again.codes.tobytes(), codes.tobytes())
        self.assertEqual(again.scales.tobytes(), scales.tobytes())


if __name__ == "__main__":
    environment.main()
