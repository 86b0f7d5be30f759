"""Values with the tiles of every compute capability: TRITON_INTERPRET=1."""

import dataclasses
import unittest

import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import (
    block_sizes,
    capabilities,
    cases,
    decode_sparse_mla,
    grouped_matmul,
    indexer_topk,
)
from tests import environment
from tests.pallas_kernels import (
    dense_attention_gpu_test,
    indexer_kl_gpu_test,
    sparse_mla_gpu_test,
    sparse_mla_test,
)

# 8.6 and 12.0 have the tiles of 8.9.
OTHERS = (("a100", 80), ("l4", 89), ("b200", 100))
HEADS = dataclasses.replace(sparse_mla_gpu_test.HEADS, queries=2)  # several blocks


@unittest.skipUnless(
    sparse_mla_gpu_test.CAN_INTERPRET, "needs triton, torch and TRITON_INTERPRET=1"
)
class CapabilitiesGpuTest(parameterized.TestCase):
    def tried(self, capability):
        return block_sizes.tried(capabilities.GPUS[capability])

    def test_alike_rows_are_tested_once(self):
        for capability in (86, 120):
            cores = capabilities.GPUS[capability].cores
            alike = dataclasses.replace(capabilities.GPUS[89], cores=cores)
            self.assertEqual(capabilities.GPUS[capability], alike)

    @parameterized.named_parameters(*OTHERS)
    def test_sparse_mla(self, capability):
        want = sparse_mla_test.definition(HEADS)
        for deterministic in (False, True):
            with self.tried(capability):
                got = sparse_mla_test.run(HEADS, "gpu_interpret", deterministic)
            sparse_mla_test.assert_close(got, want, "bfloat16")

    @parameterized.named_parameters(*OTHERS)
    def test_dense_attention(self, capability):
        test = dense_attention_gpu_test.DenseAttentionGpuTest()
        with self.tried(capability):
            test.check(dense_attention_gpu_test.CASES[0], "bits", jnp.bfloat16)

    @parameterized.named_parameters(*OTHERS)
    def test_indexer_kl(self, capability):
        case = indexer_kl_gpu_test.CASES[2]
        with self.tried(capability):
            listed = indexer_kl_gpu_test.run(case, "gpu_interpret")
            dense = indexer_kl_gpu_test.run_dense(case, "gpu_interpret", True)
        want = indexer_kl_gpu_test.run(case, "reference")
        indexer_kl_gpu_test.assert_close(case, listed, want)
        want = indexer_kl_gpu_test.run_dense(case, "reference", True)
        indexer_kl_gpu_test.assert_close(case, dense, want)

    @parameterized.named_parameters(*OTHERS)
    def test_indexer(self, capability):
        case = cases.SMALL["continued"]
        q, k, w, lo, hi = cases.make(case, "q_index", "k_index", "w", "lo", "hi")
        args = (q[:, :3], k, w[:, :3], lo[:, :3], hi[:, :3])
        with self.tried(capability):
            got = indexer_topk(*args, topk=50, implementation="gpu_interpret")
        want = indexer_topk(*args, topk=50, implementation="reference")
        np.testing.assert_array_equal(got, want)

    @parameterized.named_parameters(*OTHERS)
    def test_decode(self, capability):
        q, kv, indices = cases.make(HEADS, "q_latent", "kv", "indices")
        options = {"scale": HEADS.scale, "value_dim": HEADS.latent}
        with self.tried(capability):
            got = decode_sparse_mla(
                q, kv, indices, **options, implementation="gpu_interpret"
            )
        want = decode_sparse_mla(q, kv, indices, **options, implementation="reference")
        for g, w in zip(got, want, strict=True):
            g, w = (np.asarray(x, np.float32) for x in (g, w))
            self.assertLess(np.linalg.norm(g - w), 1e-2 * np.linalg.norm(w))

    @parameterized.named_parameters(*OTHERS)
    def test_grouped_matmul(self, capability):
        rng = np.random.default_rng(0)
        x, w = rng.normal(size=(300, 64)), rng.normal(size=(3, 64, 40))
        x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
        sizes = jnp.asarray((129, 150, 0))
        with self.tried(capability):
            got = grouped_matmul(x, w, sizes, implementation="gpu_interpret")
        want = grouped_matmul(x, w, sizes, implementation="reference")
        g, w = (np.asarray(y, np.float32) for y in (got, want))
        self.assertLess(np.linalg.norm(g - w), 4e-3 * np.linalg.norm(w))


if __name__ == "__main__":
    environment.main()
