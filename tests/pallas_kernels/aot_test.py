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


class AotTest(parameterized.TestCase):
    def check(self, chip, op, mode, length):
        """Compiles; holds temporaries below T x S, and spills of a forward at none."""
        if not has_compiler(chip):
            self.skipTest(f"no compiler for {chip}: pip install -e '.[aot]'")
        job = measure.Job(op, length, mode)
        report = measure.compiled(job, chips.CHIPS[chip])
        case = operations.at(op, length)
        scores = 4 * case.queries * case.keys  # bytes of one T x S array in float32
        # Arrays of size T are no part of it: the outputs' gradient, lists, logs.
        tokens = 8 * case.batch * case.queries * case.heads * 576 * 2 + 2**28
        self.assertLess(report["temp_mib"] * 2**20, max(tokens, 0) + 0 * scores)
        for kernel in report["gpu_kernels"]:
            self.assertLess(kernel["shared_bytes"], 227 * 1024 + 1)
            if mode == "fwd":
                self.assertEqual(kernel["spill_bytes"], 0, kernel)

    @parameterized.named_parameters(*(case_name(*case) for case in FASTEST))
    def test_compiles(self, chip, op, mode, length):
        self.check(chip, op, mode, length)

    @pytest.mark.aot
    @parameterized.named_parameters(*NIGHTLY)
    def test_compiles_nightly(self, chip, op, mode, length):
        self.check(chip, op, mode, length)


if __name__ == "__main__":
    environment.main()
