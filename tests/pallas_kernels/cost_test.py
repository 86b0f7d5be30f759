"""The kernels' cost estimates, from which FLOPs and MFU of compiled programs follow."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import block_sizes, cases, chips
from pallas_kernels.bench import measure, operations
from pallas_kernels.decode import tpu_dense
from tests import environment
from tests.pallas_kernels import program
from tests.pallas_kernels.dispatch_test import meant_for

B, N, H, O, I, J, C, R = 3, 16, 256, 128, 8, 384, 512, 64
_SIZES = {"heads": N, "head_dim": H, "value_dim": O, "index_heads": I, "index_dim": J}
# Whole blocks of a v5p, and lists without padding: nothing is rounded up.
DENSE = cases.Case("dense", 2048, 2048, batch=B, **_SIZES)
LISTED = cases.Case("listed", 48, 4096, batch=B, topk=1024, latent=C, rope=R, **_SIZES)
DECODE = cases.Case("decode", 3, 2048, batch=2, topk=256, row_padding=64, **_SIZES)
PAIRS, ENTRIES = B * 2048 * 2049 // 2, B * 48 * 1024
INDEX = 2 * I * J  # FLOPs of the indexer for one pair of query and key
LIST_BYTES = 4 * ENTRIES
KV_BYTES = 2 * ENTRIES * (C + R)  # of listed rows
INDEX_KV_BYTES = 2 * ENTRIES * (J + C + R)


def of(case, *names):
    """Bytes of inputs."""
    return operations.size(case, *names)


Q_BYTES, W_BYTES = of(LISTED, "q_latent"), of(LISTED, "w")
LSE_BYTES, OUT_BYTES = of(LISTED, "lse"), 2 * B * 48 * N * C
SPARSE_KL_BYTES = of(LISTED, "indices", "q_latent", "lse", "q_index", "w", "weight")
# What each kernel of an op multiplies, and the bytes that it reads and writes once.
FORWARD = {
    ("dense_attention", "dense_attention"): (
        PAIRS * 2 * N * (H + O),
        of(DENSE, "q", "k", "v"),
    ),
    ("indexer_bits", "indexer_bits"): (
        PAIRS * INDEX,
        of(DENSE, "q_index", "k_index", "w"),
    ),
    ("indexer_topk", "indexer_bits"): (
        PAIRS * INDEX,
        of(DENSE, "q_index", "k_index", "w"),
    ),
    ("indexer_kl_loss", "indexer_kl_norms"): (
        PAIRS * INDEX,
        of(DENSE, "q_index", "k_index", "w"),
    ),
    ("indexer_kl_loss", "indexer_kl_loss"): (
        PAIRS * (2 * N * H + INDEX),
        of(DENSE, "q", "k", "lse", "q_index", "k_index", "w", "bits")
        + 2 * of(DENSE, "weight"),  # and a norm
    ),
    ("sparse_mla", "sparse_mla"): (
        ENTRIES * 2 * N * (C + R + C),
        Q_BYTES + LIST_BYTES + KV_BYTES,
    ),
    ("sparse_indexer_kl_loss", "sparse_indexer_kl_loss"): (
        ENTRIES * (2 * N * (C + R) + INDEX),
        SPARSE_KL_BYTES + INDEX_KV_BYTES,
    ),
    ("decode_sparse_mla", "decode_sparse_mla"): (
        2 * 3 * 256 * 2 * N * (C + R + 64 + C),
        2 * 3 * 256 * 2 * (C + R + 64),
    ),
    ("decode_indexer_topk", "decode_indexer_topk"): (
        2 * 2048 * 4 * INDEX,  # three queries take the place of four
        of(DECODE, "k_index"),
    ),
}
# The gradient's kernels; "indexer_kl_loss" and its list form do the forward pass too.
BACKWARD = {
    # Scores and dP twice: for dq, and for dk and dv.
    ("dense_attention", "dense_attention_backward"): (
        PAIRS * 2 * N * ((2 * H + O) + 2 * (H + O)),
        2 * of(DENSE, "q", "k", "v", "lo", "hi", "lse", "lse")
        + 2 * 2 * B * 2048 * N * O
        + of(DENSE, "q", "k", "v"),
    ),
    ("indexer_kl_loss", "indexer_kl_loss"): (
        PAIRS * (2 * N * H + 3 * INDEX),
        of(DENSE, "q", "k", "lse", "q_index", "k_index", "w", "bits", "k_index")
        + 2 * of(DENSE, "weight")
        + 4 * 2 * B * 2048 * J,  # float32 sums of two cores
    ),
    ("sparse_mla", "sparse_mla_backward"): (
        ENTRIES * 2 * N * (3 * (C + R) + 2 * C),
        Q_BYTES + 2 * LSE_BYTES + OUT_BYTES + LIST_BYTES + 4 * KV_BYTES,
    ),
    ("sparse_indexer_kl_loss", "sparse_indexer_kl_loss"): (
        ENTRIES * (2 * N * (C + R) + 3 * INDEX),
        SPARSE_KL_BYTES
        + INDEX_KV_BYTES
        + of(LISTED, "q_index", "w")
        + 4 * 2 * (B * 4096 + 1) * J,
    ),
}


def estimates(op, mode):
    """FLOPs and bytes of each kernel of an op, summed over its calls.

    Programs for a TPU do not interpret their kernels.
    """
    case = DENSE
    if "sparse" in op or "decode" in op:
        case = DECODE if "decode" in op else LISTED
    specs = cases.shapes(case)
    inputs = [specs[name] for name in operations.OPERATIONS[op].inputs]
    with meant_for(chips.CHIPS["v5p"]):
        run = measure.Job(op, 0, mode, sizes=case).function(None, case)
        traced = jax.jit(run).trace(*inputs).jaxpr
    return kernels(traced.jaxpr)


def kernels(jaxpr):
    """FLOPs and bytes of each kernel in a jaxpr, summed over its calls."""
    found = collections.defaultdict(lambda: np.zeros(2, np.int64))
    for params in program.kernels(jaxpr):
        cost = params["cost_estimate"]
        assert not params["interpret"], params["name"]
        if cost is not None:
            assert not cost.transcendentals, "exponentials do not count"
            found[params["name"]] += (cost.flops, cost.bytes_accessed)
    return found


class CostTest(parameterized.TestCase):
    @parameterized.parameters(sorted({op for op, _ in FORWARD}))
    def test_values(self, op):
        self.check(op, "fwd", FORWARD)

    @parameterized.parameters(sorted({op for op, _ in BACKWARD}))
    def test_gradients(self, op):
        self.check(op, "bwd", BACKWARD)

    def test_a_kernel_that_fetches_rows_by_itself_moves_their_tiles(self):
        with block_sizes.tried(block_sizes.TPUS["v5e"]):
            got = estimates("decode_sparse_mla", "fwd")["decode_sparse_mla"]
        once = FORWARD["decode_sparse_mla", "decode_sparse_mla"]
        self.assertEqual(got.tolist(), [8 * x for x in once])

    def test_keys_of_sequences_that_fill_a_group_up_do_not_count(self):
        """Two sequences of one query each are in a group of eight."""
        float_of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        bound = jax.ShapeDtypeStruct((2, 1), jnp.int32)
        inputs = float_of(2, 1, I, J), float_of(2, 2048, J), float_of(2, 1, I)
        run = functools.partial(
            tpu_dense.decode_indexer_topk, page_table=None, topk=256
        )
        traced = jax.jit(run).trace(*inputs, bound, bound).jaxpr
        flops, _ = kernels(traced.jaxpr)["decode_indexer_topk"]
        self.assertEqual(flops, 2 * 2048 * INDEX)

    def check(self, op, mode, table):
        got = estimates(op, mode)
        for (name, kernel), want in table.items():
            if name == op:
                self.assertEqual(got[kernel].tolist(), list(want), kernel)


if __name__ == "__main__":
    environment.main()
