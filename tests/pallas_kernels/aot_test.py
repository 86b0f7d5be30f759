"""Compiles every op at GLM-5's shapes for chips that are not there.

Needs `pip install -e '.[aot]'`; a chip whose compiler is missing is skipped. The
nightly set (`pytest -m aot`) has every chip, op and length; a few of the fastest run by
default.
"""

import functools

import pytest
from absl.testing import parameterized

from pallas_kernels import aot, chips
from pallas_kernels.bench import measure, operations
from tests import environment

LENGTHS = (4096, 32768, 131072, 202752)
SHORT, LONG = LENGTHS[:2], LENGTHS[1:]
TPUS = ("v5p", "v6e", "tpu7x")
# The lengths at which a chip would run an op: dense products for short contexts,
# gathered rows for long ones.
TPU_OPS = {
    ("indexer_bits", "fwd"): LENGTHS,
    ("indexer_topk", "fwd"): LENGTHS,
    ("masked_mla_bits", "fwd"): LENGTHS[:3],
    ("masked_mla_bits", "bwd"): LENGTHS[:3],
    ("masked_mla", "bwd"): SHORT,
    ("indexer_kl_loss", "bwd"): SHORT,
    ("sparse_mla", "fwd"): LENGTHS,
    ("sparse_mla", "bwd"): LENGTHS,
    ("sparse_indexer_kl_loss", "bwd"): LENGTHS,
    ("grouped_matmul", "bwd"): (4096,),
    ("decode_indexer_topk", "fwd"): LENGTHS,
    ("decode_sparse_mla", "fwd"): LENGTHS,
}
GPU_OPS = TPU_OPS | {
    ("indexer_scores_at", "bwd"): LENGTHS,
    ("sparse_mla", "det"): LENGTHS,
}
# One T x S array of bytes would be 41 GB at the longest. What is there: padded or
# packed copies of q and kv, float32 gradients of kv, chunks of scores.
FIXED_BYTES = 3 * 2**30
BYTES_PER_TOKEN = 64 * 640 * 2 * 3
FASTEST = (
    ("v5p", "indexer_bits", "fwd", 4096),
    ("v5p", "masked_mla_bits", "fwd", 4096),
    ("v5p", "sparse_mla", "fwd", 4096),
)


@functools.cache
def has_compiler(chip):
    """Whether the chip's compiler is installed."""
    try:
        aot.device_mesh(chips.CHIPS[chip])
    except RuntimeError:
        return False
    return True


def case_name(chip, op, mode, length):
    return f"{chip}_{op}_{mode}_{length}", chip, op, mode, length


NIGHTLY = [
    case_name(chip, op, mode, length)
    for names, ops in ((TPUS, TPU_OPS), (("h200",), GPU_OPS))
    for chip in names
    for (op, mode), lengths in ops.items()
    for length in lengths
    if (chip, op, mode, length) not in FASTEST
]


def check(test, chip, op, mode, length):
    """Compiles; temporaries grow with T alone, and no forward kernel spills."""
    if not has_compiler(chip):
        test.skipTest(f"no compiler for {chip}: pip install -e '.[aot]'")
    report = measure.compiled(measure.Job(op, length, mode), chips.CHIPS[chip])
    case = operations.at(op, length)
    tokens = case.batch * case.queries
    limit = FIXED_BYTES + BYTES_PER_TOKEN * tokens
    test.assertLess(report["temp_mib"] * 2**20, limit)
    for kernel in report["gpu_kernels"]:
        test.assertLessEqual(kernel["shared_bytes"], 227 * 1024)
        test.assertFalse(kernel["is_serialized"], kernel)
        if mode == "fwd":
            test.assertEqual(kernel["spill_bytes"], 0, kernel)


class FastestTest(parameterized.TestCase):
    @parameterized.named_parameters(*(case_name(*case) for case in FASTEST))
    def test_compiles(self, chip, op, mode, length):
        check(self, chip, op, mode, length)


@pytest.mark.aot
class NightlyTest(parameterized.TestCase):
    @parameterized.named_parameters(*NIGHTLY)
    def test_compiles(self, chip, op, mode, length):
        check(self, chip, op, mode, length)


if __name__ == "__main__":
    environment.main()
