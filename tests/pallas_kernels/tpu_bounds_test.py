"""No kernel reads beyond an array: the TPU's interpreter raises, the other one clamps.

The other tests of these kernels use the other one, which is faster.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import block_sizes, cases, dense_attention, indexer_kl_loss
from pallas_kernels.dense_attention import tpu
from pallas_kernels.indexer_kl import tpu_dense
from tests import environment
from tests.pallas_kernels import program

# Fewer tokens than a block may have, which therefore shrinks; no two dims are equal.
SIZES = {"heads": 8, "head_dim": 256, "value_dim": 384, "dtype": "float32"}
CASE = dataclasses.replace(cases.SMALL["short"], **SIZES)
RTOL = 1e-4  # of float32, in another order


class BoundsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        sizes = block_sizes.Tpu(dense_attention=(1024, 1024), indexer_kl=(1024, 1024))
        self.enter_context(block_sizes.tried(sizes))

    def assert_close(self, kernel, definition, *args):
        with pltpu.force_tpu_interpret_mode():
            got = jax.jit(jax.grad(kernel))(*args)
        want = jax.jit(jax.grad(definition))(*args)
        for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(g, w, rtol=RTOL, atol=RTOL * abs(w).max())

    def test_dense_attention(self):
        q, k, v, lo, hi = cases.make(CASE, "q", "k", "v", "lo", "hi")

        def loss(attend):
            def run(qkv, lo, hi):
                out, lse = attend(*qkv, lo, hi)
                return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

            return run

        options = {"scale": 0.1, "implementation": "reference"}
        self.assert_close(
            loss(lambda *args: tpu.dense_attention(*args, None, 0.1)),
            loss(functools.partial(dense_attention, **options)),
            (q, k, v),
            lo,
            hi,
        )

    def test_indexer_kl_loss(self):
        names = ("q", "k", "lo", "hi", "q_index", "k_index", "w", "weight")
        q, k, lo, hi, *index, weight = cases.make(CASE, *names)
        options = {"scale": 0.1, "implementation": "reference"}
        _, lse = program.call(dense_attention, q, k, k, lo, hi, **options)

        def kernel(index, main, lo, hi, weight):
            rest = (lo, hi, None, weight)
            return tpu_dense.indexer_kl_loss(main, index, *rest, 0.1)

        def definition(index, main, lo, hi, weight):
            return indexer_kl_loss(main, index, lo, hi, None, weight, **options)

        args = tuple(index), (q, k, lse), lo, hi, weight
        self.assert_close(kernel, definition, *args)


if __name__ == "__main__":
    environment.main()
