"""Compiles every op at GLM-5's shapes for chips that are not there.

Needs `pip install -e '.[aot]'`; a chip whose compiler is missing is skipped. The
nightly set (`pytest -m aot`) has every chip, op and length; a few of the fastest run by
default.
"""

import functools
import time
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from pallas_kernels import aot, chips
from pallas_kernels.bench import measure
from tests import environment

SLOW = 1.0  # seconds, longer than XLA takes
LENGTHS = (4096, 32768, 131072, 202752)
SHORT = LENGTHS[:2]
TPUS = ("v5p", "v6e", "tpu7x")
TPU_OPS = (
    ("indexer_bits", "fwd"),
    ("indexer_topk", "fwd"),
    ("dense_attention_bits", "fwd"),
    ("dense_attention_bits", "bwd"),
    ("dense_attention", "bwd"),
    ("indexer_kl_loss", "bwd"),
    ("sparse_mla", "fwd"),
    ("sparse_mla", "bwd"),
    ("sparse_indexer_kl_loss", "bwd"),
    ("grouped_matmul", "bwd"),
    ("decode_indexer_topk", "fwd"),
    ("decode_sparse_mla", "fwd"),
)
GPU_OPS = (
    *TPU_OPS,
    ("dense_attention", "fwd"),
    ("indexer_kl_loss", "fwd"),
    ("sparse_indexer_kl_loss", "fwd"),
    ("grouped_matmul", "fwd"),
    ("grouped_matmul_fp8", "fwd"),
    ("grouped_matmul_int8", "fwd"),
    ("indexer_topk_fp8", "fwd"),
    ("decode_indexer_topk_fp8", "fwd"),
    ("decode_sparse_mla_fp8", "fwd"),
    ("decode_sparse_mla_int8", "fwd"),
    ("indexer_scores_at", "fwd"),
    ("indexer_scores_at", "bwd"),
    ("sparse_mla", "det"),
)
# Most that an op may allocate for each token, whatever the length: one T x S array of
# bytes would add 128 KiB a token at 131,072, one of float32 scores 512. What is there:
# copies of q, k, v or the outputs in other layouts, lists, a bit for each key.
KIB_PER_TOKEN = {
    "indexer_topk": 8,
    "indexer_topk_fp8": 8,
    "indexer_bits": 2,
    "indexer_scores_at": 12,
    "sparse_mla": 300,
    "dense_attention": 264,
    "dense_attention_bits": 260,
    "indexer_kl_loss": 96,
    "sparse_indexer_kl_loss": 96,
    "grouped_matmul": 72,
    "grouped_matmul_fp8": 72,
    "grouped_matmul_int8": 72,
    "decode_indexer_topk": 0,
    "decode_indexer_topk_fp8": 0,
    "decode_sparse_mla": 0,
    "decode_sparse_mla_fp8": 0,
    "decode_sparse_mla_int8": 0,
}
# Chunks of scores (40 MiB on GPU); shards of the reproducible sum. A cache is never
# copied: its rows fill a TPU's tiles, as in the model's cache.
FIXED_MIB = {("sparse_mla", "det"): 2560}
OTHER_FIXED_MIB = 64
# A v6e has 31 GiB, a v5e 16: long contexts are split over the queries and heads of
# several. Of a v5e, what one chip takes is compiled.
V6E_SHARE = {"queries": 16384, "heads": 16}
FASTEST = (
    ("v5p", "indexer_bits", "fwd", 4096),
    ("v5p", "dense_attention_bits", "fwd", 4096),
    ("v5p", "sparse_mla", "fwd", 4096),
    ("v6e", "sparse_mla", "fwd", 4096),
    ("tpu7x", "sparse_mla", "fwd", 4096),
)


@functools.cache
def has_compiler(chip):
    """Tells whether the chip's compiler is installed."""
    try:
        aot.device_mesh(chips.CHIPS[chip])
    except RuntimeError:
        return False
    return True


def case_name(chip, op, mode, length):
    return f"{chip}_{op}_{mode}_{length}", chip, op, mode, length


NIGHTLY = [
    case_name(chip, op, mode, length)
    for names, ops, lengths in (
        (TPUS, TPU_OPS, LENGTHS),
        (("v5e",), TPU_OPS, LENGTHS[:1]),
        (("h200",), GPU_OPS, LENGTHS),
    )
    for chip in names
    for op, mode in ops
    for length in lengths
    if (chip, op, mode, length) not in FASTEST
]


def check(test, chip, op, mode, length):
    """Compiles; temporaries grow with T alone, and no forward kernel spills."""
    if not has_compiler(chip):
        test.skipTest(f"no compiler for {chip}: pip install -e '.[aot]'")
    share = V6E_SHARE if chip == "v6e" and length > max(SHORT) else {}
    job = measure.Job(op, length, mode, **share)
    with environment.optimized():
        report = measure.compiled(job, chips.CHIPS[chip])
    case = job.case
    tokens = case.batch * (case.queries + case.keys) / 2 * case.heads / 64
    fixed = FIXED_MIB.get((op, mode), OTHER_FIXED_MIB)
    limit = fixed + KIB_PER_TOKEN[op] * tokens / 1024
    test.assertLess(report["temp_mib"], limit)
    for kernel in report["gpu_kernels"]:
        test.assertLessEqual(kernel["shared_bytes"], 227 * 1024)
        test.assertFalse(kernel["is_serialized"], kernel)
        if mode == "fwd":
            test.assertEqual(kernel["spill_bytes"], 0, kernel)


class FastestTest(parameterized.TestCase):
    @parameterized.named_parameters(*(case_name(*case) for case in FASTEST))
    def test_compiles(self, chip, op, mode, length):
        check(self, chip, op, mode, length)


class SecondsTest(parameterized.TestCase):
    def test_those_of_lowering_count_in_which_triton_compiles(self):
        if not has_compiler("v5e"):
            self.skipTest("no compiler for v5e: pip install -e '.[aot]'")
        lower = jax.stages.Traced.lower

        def slow(traced):
            time.sleep(SLOW)
            return lower(traced)

        x = jax.ShapeDtypeStruct((8, 128), np.float32)
        with mock.patch.object(jax.stages.Traced, "lower", slow):
            report = aot.compile(lambda x: x + 1, (x,), chips.CHIPS["v5e"])
        self.assertGreater(report.compile_seconds, SLOW)


@pytest.mark.aot
class NightlyTest(parameterized.TestCase):
    @parameterized.named_parameters(*NIGHTLY)
    def test_compiles(self, chip, op, mode, length):
        check(self, chip, op, mode, length)


if __name__ == "__main__":
    environment.main()
