"""The parts that Triton kernels share, in the interpreter: TRITON_INTERPRET=1."""

import unittest

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from tests import environment
from tests.pallas_kernels import sparse_mla_gpu_test

if sparse_mla_gpu_test.CAN_INTERPRET:
    import triton
    import triton.language as tl

    from pallas_kernels import triton_call

    @triton.jit
    def distances(starts, out, SIZE: tl.constexpr, STEP: tl.constexpr):
        """The row that an offset of so many rows of STEP numbers leads to."""
        for i in range(SIZE):
            offset = triton_call.far(tl.load(starts + i), STEP)
            tl.store(out + i, (offset // STEP).to(tl.int32))


@unittest.skipUnless(
    sparse_mla_gpu_test.CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1"
)
class TritonCallTest(absltest.TestCase):
    def test_rows_of_a_million_tokens_are_found(self):
        """Words of dense_attention and rows of grouped_matmul's dw lie so far apart."""
        starts = jnp.asarray([0, 349_526, 2**20], jnp.int32)
        [found] = triton_call.call(
            distances,
            starts,
            out_shape=[jax.ShapeDtypeStruct(starts.shape, starts.dtype)],
            grid=(1,),
            interpret=True,
            SIZE=len(starts),
            STEP=6144,
        )
        np.testing.assert_array_equal(found, starts)


if __name__ == "__main__":
    environment.main()
