"""Codes and scales: against loops in numpy, against qwix, and without JAX's jit."""

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from absl.testing import parameterized

from glm5_jax.quantization import leaf
from tests import environment

WHOLE = leaf.WHOLE
# (layout, shape): a matrix, a stack of them, blocks that do not divide, packed codes.
CASES = (
    ("int8", leaf.Layout("int8", (WHOLE, 1)), (3, 8, 5)),
    ("int8_by_head", leaf.Layout("int8", (WHOLE, WHOLE, 1), 2), (4, 3, 6)),
    ("fp8", leaf.Layout("fp8", (4, 3)), (2, 9, 7)),
    ("int4", leaf.Layout("int4", (4, 1)), (2, 3, 8, 5)),
)


def draw(shape, seed=0):
    weights = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    weights[..., 0] = 0  # with an output of zeros
    return weights


def loop(weights, layout):
    """Returns the rounded weights and the scales, block by block, in numpy."""
    depth = weights.ndim - len(layout.blocks)
    sizes = [1] * depth + [
        b or n for b, n in zip(layout.blocks, weights.shape[depth:], strict=True)
    ]
    counts = [-(-n // b) for n, b in zip(weights.shape, sizes, strict=True)]
    out, scales = np.zeros_like(weights), np.zeros(counts, np.float32)
    most = np.float32(leaf.LARGEST[layout.kind])
    for index in np.ndindex(*counts):
        cut = tuple(
            slice(i * b, (i + 1) * b) for i, b in zip(index, sizes, strict=True)
        )
        block = weights[cut]
        largest = np.abs(block).max()
        scale = largest * np.float32(1 / most) if largest else np.float32(1)
        codes = block * (np.float32(1) / scale)
        if layout.kind == "fp8":
            codes = codes.astype(jnp.float8_e4m3fn).astype(np.float32)
        else:
            codes = np.rint(codes)
        out[cut], scales[index] = codes * scale, scale
    return out, scales


class LeafTest(parameterized.TestCase):
    @parameterized.named_parameters(*CASES)
    def test_codes_equal_a_loop_bit_for_bit_with_and_without_jit(self, layout, shape):
        weights = draw(shape)
        wanted, scales = loop(weights, layout)
        for function in (leaf.quantize, jax.jit(leaf.quantize, static_argnums=1)):
            got = function(jnp.asarray(weights), layout)
            self.assertEqual(got.shape, shape)
            self.assertEqual(got.values.dtype, leaf.DTYPES[layout.kind])
            np.testing.assert_array_equal(got.scales, scales)
            np.testing.assert_array_equal(leaf.dequantized(got, jnp.float32), wanted)
        error = np.abs(wanted - weights).max()
        self.assertBetween(
            error, 1e-6, {"int8": 0.02, "fp8": 0.2, "int4": 0.3}[layout.kind]
        )

    @parameterized.named_parameters(*CASES)
    def test_shapes_are_known_without_arrays(self, layout, shape):
        made = leaf.quantize(jnp.asarray(draw(shape)), layout)
        told = leaf.abstract(shape, layout)
        for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(told), strict=True):
            self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))

    @parameterized.named_parameters(*CASES)
    def test_rounding_again_changes_nothing(self, layout, shape):
        once = leaf.quantize(jnp.asarray(draw(shape)), layout)
        weights = leaf.dequantized(once, jnp.float32)
        again = leaf.with_scales(weights, once.scales, layout)
        np.testing.assert_array_equal(again, once.values)

    def test_two_int4_codes_make_a_byte_and_keep_their_signs(self):
        layout = leaf.Layout("int4", (4, 1))
        codes = np.array([[-7, 7], [-1, 0], [3, -4], [7, -7]], np.int8)
        bytes_ = leaf.packed(jnp.asarray(codes), layout)
        np.testing.assert_array_equal(
            bytes_,
            [[(-7 & 15) | (-1 & 15) << 4, 7], [3 | 7 << 4, (-4 & 15) | (-7 & 15) << 4]],
        )
        stored = leaf.Quantized(bytes_, jnp.ones((1, 2)), layout)
        np.testing.assert_array_equal(leaf.unpacked(stored).values, codes)

    @parameterized.parameters(0.0, 1e-38, 1e-45)
    def test_weights_that_are_next_to_nothing_stay_finite(self, value):
        layout = leaf.Layout("int8", (WHOLE, 1))
        weights = jnp.full((2, 3), value, jnp.float32)
        got = leaf.dequantized(
            jax.jit(leaf.quantize, static_argnums=1)(weights, layout), jnp.float32
        )
        np.testing.assert_allclose(got, value, rtol=0, atol=2e-38)

    def test_values_equal_those_of_qwix(self):
        made = leaf.quantize(jnp.asarray(draw((8, 6))), leaf.Layout("int8", (4, 1)))
        theirs = qwix.dequantize(qwix.QArray(made.values, made.scales))
        np.testing.assert_array_equal(leaf.dequantized(made, jnp.float32), theirs)


if __name__ == "__main__":
    environment.main()
