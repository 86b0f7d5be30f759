"""Grouped products with weights of 8 bits, against a numpy loop in float64."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized

from pallas_kernels import dispatch, grouped_matmul_quantized
from tests import environment, typecheck

E, K, N = 4, 200, 300  # two and three blocks of scales, the last ones ragged
SIZES = (17, 0, 33, 1)
NUM_ROWS = 60  # nine rows have no group
FLOAT32_RTOL = 1e-5  # orders of summation in float32
BFLOAT16_RTOL = 4e-3  # relative L2: rounds the result, and "blocked" the weights too


def make_inputs(code, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, K)).astype(np.float32)
    w = rng.normal(size=(E, K, N)) * 40
    w = w.astype(ml_dtypes.float8_e4m3fn if code == "float8_e4m3fn" else np.int8)
    scales = rng.uniform(0.01, 0.1, (E, -(-K // 128), -(-N // 128))).astype(np.float32)
    dy = rng.normal(size=(NUM_ROWS, N)).astype(np.float32)
    dtypes = ((x, dtype), (w, w.dtype), (scales, jnp.float32), (dy, dtype))
    return tuple(jnp.asarray(a, d) for a, d in dtypes)


def loop(x, w, scales, dy):
    """y and dx, group by group and block by block."""
    x, w, scales, dy = (np.asarray(a).astype(np.float64) for a in (x, w, scales, dy))
    y, dx = np.zeros((NUM_ROWS, N)), np.zeros((NUM_ROWS, K))
    for e, (start, size) in enumerate(zip(np.cumsum((0, *SIZES)), SIZES, strict=False)):
        rows = slice(start, start + size)
        for i, j in np.ndindex(scales.shape[1:]):
            down, across = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            block = w[e, down, across] * scales[e, i, j]
            y[rows, across] += x[rows, down] @ block
            dx[rows, down] += dy[rows, across] @ block.T
    return y, dx


@functools.partial(jax.jit, static_argnums=4)
def value_and_gradient(x, w, scales, dy, implementation):
    """y and dx."""
    sizes = jnp.asarray(SIZES)
    run = lambda x: grouped_matmul_quantized(
        x, w, scales, sizes, implementation=implementation
    )
    y, pull = jax.vjp(run, x)
    return y, *pull(dy)


class GroupedMatmulQuantizedTest(parameterized.TestCase):
    @parameterized.product(
        code=("float8_e4m3fn", "int8"),
        implementation=("reference", "blocked", "batched"),
    )
    def test_equals_loop(self, code, implementation):
        inputs = make_inputs(code)
        got = value_and_gradient(*inputs, implementation)
        for g, want in zip(got, loop(*inputs), strict=True):
            np.testing.assert_allclose(
                g, want, rtol=FLOAT32_RTOL, atol=FLOAT32_RTOL * np.abs(want).max()
            )

    @parameterized.product(implementation=("reference", "blocked", "batched"))
    def test_bfloat16_is_close(self, implementation):
        inputs = make_inputs("float8_e4m3fn", jnp.bfloat16)
        got = value_and_gradient(*inputs, implementation)
        for g, want in zip(got, loop(*inputs), strict=True):
            self.assertEqual(g.dtype, jnp.bfloat16)
            error = np.linalg.norm(np.asarray(g, np.float64) - want)
            self.assertLess(error, BFLOAT16_RTOL * np.linalg.norm(want))

    def test_groups_are_cut_where_the_rows_end(self):
        x, w, scales, _ = make_inputs("int8")
        out = jnp.zeros((NUM_ROWS, N))
        with mock.patch.object(dispatch, "run", return_value=out) as run:
            grouped_matmul_quantized(x, w, scales, jnp.asarray([17, 0, 33, 99]))
        np.testing.assert_array_equal(run.call_args.args[2][3], [17, 0, 33, 10])

    def test_scales_of_another_shape_are_refused(self):
        x, w, scales, _ = make_inputs("int8")
        with self.assertRaisesRegex(ValueError, r"scales must be \[4, 2, 3\]"):
            grouped_matmul_quantized(x, w, scales[:, :1], jnp.asarray(SIZES))

    @parameterized.parameters(
        ("x", lambda a: a[:, :-1], "D = 199"),
        ("w", lambda a: a.astype(jnp.float32), "w must be float8_e4m3fn or int8"),
        ("scales", lambda a: a.astype(jnp.int32), "scales must be floats"),
        ("group_sizes", lambda a: a[1:], "E = 4"),
    )
    def test_other_arguments_are_refused(self, name, change, message):
        x, w, scales, _ = make_inputs("int8")
        args = {"x": x, "w": w, "scales": scales, "group_sizes": jnp.asarray(SIZES)}
        args[name] = change(args[name])
        with (
            typecheck.off(),
            self.assertRaisesRegex(
                ValueError, f"^grouped_matmul_quantized: .*{message}"
            ),
        ):
            grouped_matmul_quantized(*args.values())


if __name__ == "__main__":
    environment.main()
