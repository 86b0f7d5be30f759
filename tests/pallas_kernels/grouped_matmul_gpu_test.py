"""Triton's grouped products in its interpreter, against the definition."""

import functools
import importlib.util
import os
import unittest

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import grouped_matmul, grouped_matmul_quantized
from tests import environment

CAN_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1" and all(
    importlib.util.find_spec(name) for name in ("triton", "torch")
)
FLOAT32_RTOL = 1e-5  # relative L2: orders of summation in float32
BFLOAT16_RTOL = 4e-3  # relative L2: rounds the result
# Rows, K, N and the rows of each group: tails, none, less than all rows; sizes that no
# tile divides and sizes that tiles of 128 rows divide.
CASES = (
    ("tails", 90, 40, 24, (1, 33, 0, 50, 6)),
    ("rows_without_group", 70, 17, 20, (0, 30, 0, 1, 0)),
    ("no_group_has_rows", 20, 16, 16, (0, 0)),
    ("tall_tiles", 300, 64, 300, (129, 150, 0)),
)


def make_inputs(num_rows, depth, width, num_groups, dtype):
    rng = np.random.default_rng(0)
    shapes = (num_rows, depth), (num_groups, depth, width), (num_rows, width)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def as_float(*arrays):
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def value_and_gradients(run, dy, *args):
    y, pull = jax.vjp(run, *args)
    return y, *pull(dy)


@unittest.skipUnless(CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1")
class GroupedMatmulGpuTest(parameterized.TestCase):
    def assert_close(self, got, want, dtype):
        rtol = FLOAT32_RTOL if dtype == jnp.float32 else BFLOAT16_RTOL
        for g, w in zip(got, want, strict=True):
            self.assertEqual(g.dtype, dtype)
            error = np.linalg.norm(np.asarray(g, np.float32) - w)
            self.assertLessEqual(error, rtol * np.linalg.norm(w))

    @parameterized.product(case=CASES, dtype=(jnp.float32, jnp.bfloat16))
    def test_equals_definition_with_gradients(self, case, dtype):
        _, num_rows, depth, width, sizes = case
        x, w, dy = make_inputs(num_rows, depth, width, len(sizes), dtype)
        got, want = (
            value_and_gradients(
                lambda x, w, name=name: grouped_matmul(
                    x, w, jnp.asarray(sizes), implementation=name
                ),
                *arrays,
            )
            for name, arrays in (
                ("gpu_interpret", (dy, x, w)),
                ("reference", as_float(dy, x, w)),
            )
        )
        self.assert_close(got, want, dtype)

    @parameterized.product(
        code=(jnp.float8_e4m3fn, jnp.int8), dtype=(jnp.float32, jnp.bfloat16)
    )
    def test_quantized_equals_definition_with_gradient(self, code, dtype):
        x, w, dy = make_inputs(70, 200, 140, 3, dtype)
        w = (w * 40).astype(code)
        scales = np.random.default_rng(1).uniform(0.01, 0.1, (3, 2, 2))
        run = functools.partial(
            grouped_matmul_quantized,
            w=w,
            scales=jnp.asarray(scales, jnp.float32),
            group_sizes=jnp.asarray((37, 0, 30)),
        )
        got, want = (
            value_and_gradients(
                functools.partial(lambda x, name: run(x, implementation=name), name=n),
                *arrays,
            )
            for n, arrays in (
                ("gpu_interpret", (dy, x)),
                ("reference", as_float(dy, x)),
            )
        )
        self.assert_close(got, want, dtype)


if __name__ == "__main__":
    environment.main()
