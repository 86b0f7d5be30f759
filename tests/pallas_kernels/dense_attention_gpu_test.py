"""Triton's attention in its interpreter, against the definition."""

import importlib.util
import os
import unittest

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import dense_attention, selection
from tests import environment

CAN_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1" and all(
    importlib.util.find_spec(name) for name in ("triton", "torch")
)
SCALE = 0.2
# Relative L2 of outputs and of gradients: orders of summation in float32; roundings of
# results, probabilities and dS in bfloat16.
TOLERANCES = {jnp.float32: (1e-5, 1e-4), jnp.bfloat16: (4e-3, 1e-2)}
# Queries, keys, heads, head dims, documents.
CASES = (
    ("documents", 150, 150, 1, 32, 16, 3),
    ("continued", 40, 203, 2, 16, 32, 1),
    ("blocks_without_mask", 70, 200, 1, 16, 16, 1),
    ("dims_in_two_parts", 40, 100, 1, 192, 128, 2),
)


def make_inputs(num_queries, num_keys, heads, dim, value_dim, documents, dtype):
    """q, k, v and their bounds; the last query of row 0 sees nothing."""
    rng = np.random.default_rng(0)
    shapes = (num_queries, dim), (num_keys, dim), (num_keys, value_dim)
    qkv = [jnp.asarray(rng.normal(size=(2, t, heads, h)), dtype) for t, h in shapes]
    s = np.arange(num_keys)
    size = -(-num_keys // documents)
    lo, hi = np.stack([s // size * size, 0 * s]), np.stack([s + 1, s + 1])
    hi[0, -1] = 0
    return *qkv, *(jnp.asarray(x[:, -num_queries:], jnp.int32) for x in (lo, hi))


def make_selection(lo, hi, num_keys, form):
    """A third of the visible keys, as mask or bits; one query has none of its own."""
    if form == "none":
        return None
    rng = np.random.default_rng(1)
    seen = np.asarray(selection.visible(lo, hi, num_keys))
    rows = seen & (rng.random(seen.shape) < 1 / 3)
    rows[1, 5] = False
    mask = jnp.asarray(rows.swapaxes(1, 2))
    return mask if form == "mask" else selection.pack(mask)


def value_and_gradients(inputs, selected, implementation):
    q, k, v, lo, hi = inputs

    def loss(q, k, v):
        out, lse = dense_attention(
            q, k, v, lo, hi, selected, scale=SCALE, implementation=implementation
        )
        value = jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(lse))
        return value, (out, lse)

    grads, (out, lse) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    return out, lse, grads


@unittest.skipUnless(CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1")
class DenseAttentionGpuTest(parameterized.TestCase):
    def assert_close(self, got, want, rtol):
        error = np.linalg.norm(np.asarray(got, np.float32) - want)
        self.assertLess(error, rtol * np.linalg.norm(want))

    @parameterized.product(case=CASES, form=("none", "mask", "bits"))
    def test_equals_definition_with_gradients(self, case, form):
        self.check(case, form, jnp.float32)

    @parameterized.product(case=(CASES[0], CASES[-1]), form=("none", "bits"))
    def test_bfloat16_is_close(self, case, form):
        self.check(case, form, jnp.bfloat16)

    def check(self, case, form, dtype):
        inputs = make_inputs(*case[1:], dtype)
        selected = make_selection(*inputs[3:], case[2], form)
        out, lse, grads = value_and_gradients(inputs, selected, "gpu_interpret")
        exact = [x.astype(jnp.float32) for x in inputs[:3]]
        want, want_lse, want_grads = value_and_gradients(
            (*exact, *inputs[3:]), selected, "reference"
        )
        rtol, grad_rtol = TOLERANCES[dtype]
        self.assertEqual((out.dtype, lse.dtype), (dtype, jnp.float32))
        self.assert_close(out, want, rtol)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
        for got, wanted in zip(grads, want_grads, strict=True):
            self.assertEqual(got.dtype, dtype)
            self.assert_close(got, wanted, grad_rtol)
        np.testing.assert_array_equal(out[0, -1], 0)
        np.testing.assert_array_equal(lse[0, :, -1], 0)
        np.testing.assert_array_equal(grads[0][0, -1], 0)

    def test_bounds_in_any_order(self):
        """Tiles of queries of one block of keys need not be neighbours."""
        q, k, v, *_ = make_inputs(90, 160, 1, 16, 16, 1, jnp.float32)
        starts = np.asarray([120, 0, 110, 70, 17], np.int32).repeat(18)[None]
        lo = jnp.asarray(np.concatenate([starts, starts[:, ::-1]]))
        inputs = (q, k, v, lo, jnp.minimum(lo + 45, 160))
        got = value_and_gradients(inputs, None, "gpu_interpret")
        want = value_and_gradients(inputs, None, "reference")
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            self.assert_close(g, w, TOLERANCES[jnp.float32][1])

    @parameterized.parameters((24, 16), (224, 128), (320, 128), (192, 96))
    def test_unsupported_head_dims_are_named(self, *dims):
        inputs = make_inputs(8, 8, 1, *dims, 1, jnp.float32)
        message = rf"head dims .* the sum of two.* \({dims[0]}, {dims[1]}\)"
        with self.assertRaisesRegex(NotImplementedError, message):
            dense_attention(*inputs, scale=SCALE, implementation="gpu_interpret")


if __name__ == "__main__":
    environment.main()
