"""Keys in float32 beside queries in bfloat16: rounded, with gradients that are not."""

import functools
import unittest

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import pallas_kernels as pk
from tests import environment
from tests.pallas_kernels import sparse_mla_gpu_test

B, T, N, C, R, K = 1, 8, 8, 128, 128, 2


def arrays():
    """Returns queries in bfloat16, and keys in float32 that it cannot hold."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q = normal(B, T, N, C + R).astype(jnp.bfloat16)
    return q, normal(B, T, C + R), (normal(B, T, N, C + R), normal(B, T, N, C))


def listed(q, keys, **how):
    """Attends to the first K keys."""
    lists = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (B, T, K))
    return pk.sparse_mla(q, keys, lists, scale=0.1, value_dim=C, **how)


def dense(q, keys, **how):
    lo, hi = pk.segment_bounds(jnp.ones((B, T), jnp.int32))
    return pk.dense_attention(q, *keys, lo, hi, scale=0.1, **how)


class Comparison(parameterized.TestCase):
    def check(self, op, implementation, **how):
        """Compares with rounded keys, whose gradient is rounded, too."""
        q, latent, heads = arrays()
        keys = heads if op is dense else latent
        how |= {"implementation": implementation}

        @jax.jit
        @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
        def run(q, keys):
            out, lse = op(q, keys, **how)
            total = jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(lse))
            return total, (out, lse)

        halves = jax.tree.map(lambda x: x.astype(q.dtype), keys)
        ((_, got), (dq, exact)), ((_, want), (dq_half, rounded)) = (
            run(q, x) for x in (keys, halves)
        )
        np.testing.assert_array_equal(dq, dq_half)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        for one, half in zip(*map(jax.tree.leaves, (exact, rounded)), strict=True):
            self.assertEqual((one.dtype, half.dtype), (jnp.float32, q.dtype))
            self.assertFalse(np.array_equal(one, one.astype(q.dtype)))
            np.testing.assert_array_equal(one.astype(q.dtype), half)


class Float32GradientsTest(Comparison):
    @parameterized.product(op=(listed, dense), implementation=(None, "tpu_interpret"))
    def test_keys_have_them(self, op, implementation):
        self.check(op, implementation)


@unittest.skipUnless(
    sparse_mla_gpu_test.CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1"
)
class Float32GradientsGpuTest(Comparison):
    @parameterized.parameters(
        (listed, {}), (listed, {"deterministic": True}), (dense, {})
    )
    def test_keys_have_them(self, op, how):
        self.check(op, "gpu_interpret", **how)


if __name__ == "__main__":
    environment.main()
