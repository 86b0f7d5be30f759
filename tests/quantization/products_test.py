"""Products with codes: against numpy in float64, and against qwix."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from absl.testing import parameterized

from glm5_jax.quantization import leaf, products
from tests import environment
from tests.pallas_kernels import program

WHOLE = leaf.WHOLE
FLOAT32 = 1e-5  # relative to the largest: sums of some tens of products
LAYOUTS = (
    ("int8", leaf.Layout("int8", (WHOLE, 1))),
    ("fp8", leaf.Layout("fp8", (4, 4))),
    ("int4", leaf.Layout("int4", (4, 1))),
)
IN, OUT, ROWS = 16, 12, 5
quantize = leaf.compiled_quantize
dequantized = jax.jit(leaf.dequantized, static_argnums=1)


def dot(x, weights):
    """Returns their product by a program that is traced now: PART may have changed."""
    return program.call(products.dot, x, weights)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def rounded_rows(x):
    """Returns rows rounded to int8, by a loop."""
    out = np.zeros(x.shape)
    for i, row in enumerate(np.asarray(x)):
        scale = np.abs(row).max() * np.float32(1 / 127)
        out[i] = np.rint(row * (np.float32(1) / scale)).astype(np.float64) * scale
    return out


def same(got, wanted):
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(got, wanted, atol=FLOAT32 * np.abs(wanted).max())


class ProductsTest(parameterized.TestCase):
    @parameterized.named_parameters(*LAYOUTS)
    def test_dot_multiplies_by_the_rounded_weights(self, layout):
        x, weights = draw(2, ROWS, IN), quantize(draw(IN, OUT, seed=1), layout)
        matrix = np.asarray(dequantized(weights, jnp.float32), np.float64)
        same(dot(x, weights), np.asarray(x, np.float64) @ matrix)

    @parameterized.named_parameters(LAYOUTS[0], LAYOUTS[2])
    def test_int8_activations_are_rounded_row_by_row(self, layout):
        layout = dataclasses.replace(layout, activations="int8")
        x, weights = draw(ROWS, IN), quantize(draw(IN, OUT, seed=1), layout)
        matrix = np.asarray(dequantized(weights, jnp.float32), np.float64)
        got = dot(x, weights)
        same(got, rounded_rows(x) @ matrix)
        self.assertGreater(np.abs(got - x @ matrix.astype(np.float32)).max(), 1e-3)

    def test_several_input_dims_and_parts_of_the_outputs(self):
        layout = leaf.Layout("int8", (WHOLE, WHOLE, 1), num_in=2)
        x, weights = draw(ROWS, 4, 3), quantize(draw(4, 3, 10, seed=1), layout)
        matrix = np.asarray(dequantized(weights, jnp.float32), np.float64)
        wanted = np.einsum("mno,nod->md", np.asarray(x, np.float64), matrix)
        same(dot(x, weights), wanted)
        most, products.PART = products.PART, 50  # 3 parts do not divide 10 outputs: 5
        try:
            self.assertEqual(products._num_parts(weights), 5)
            same(dot(x, weights), wanted)
        finally:
            products.PART = most

    @parameterized.parameters(
        (LAYOUTS[0][1], "same"),
        (LAYOUTS[0][1], "int8"),
        (LAYOUTS[2][1], "same"),
        (LAYOUTS[2][1], "int8"),
        (leaf.Layout("fp8", (128, 128)), "same"),  # pallas_kernels has an operation
    )
    def test_groups_use_their_own_matrix(self, layout, activations):
        layout = dataclasses.replace(layout, activations=activations)
        sizes = np.array([3, 0, 9, 2], np.int32)  # and two rows of no group
        x, w = draw(16, IN), draw(4, IN, OUT, seed=1)
        weights = quantize(w, layout)
        matrices = np.asarray(dequantized(weights, jnp.float32), np.float64)
        rows = rounded_rows(x) if activations == "int8" else np.asarray(x, np.float64)
        wanted, start = np.zeros((16, OUT)), 0
        for matrix, size in zip(matrices, sizes, strict=True):
            wanted[start : start + size] = rows[start : start + size] @ matrix
            start += size
        got = jax.jit(products.grouped)(x, weights, jnp.asarray(sizes))
        same(got, wanted)

    def test_integer_products_equal_those_of_qwix(self):
        layout = leaf.Layout("int8", (WHOLE, 1), activations="int8")
        x, weights = draw(ROWS, IN), quantize(draw(IN, OUT, seed=1), layout)
        codes, scales = program.call(products.rounded_rows, x)
        pair = qwix.QArray(codes, scales), qwix.QArray(weights.values, weights.scales)
        theirs = qwix.dot_general(*pair, (((1,), (0,)), ((), ())))
        same(dot(x, weights), theirs)


if __name__ == "__main__":
    environment.main()
