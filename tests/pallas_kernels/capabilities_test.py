"""Tiles by compute capability: each has a row or a reason, and each row compiles.

Triton compiles without a device and without jax-triton. One kernel is compiled for
three capabilities by default, with its gradients for Hopper, all of them with
`pytest -m aot`, in an environment of requirements/triton-py311.txt and without
TRITON_INTERPRET.
"""

import dataclasses
import importlib.util
import os

import pytest
from absl.testing import parameterized

from pallas_kernels import aot, capabilities, cases
from pallas_kernels.bench import measure
from tests import environment

CAN_COMPILE = importlib.util.find_spec("triton") is not None
CAN_COMPILE &= os.environ.get("TRITON_INTERPRET") != "1"
OPS = (
    ("sparse_mla", "bwd"),
    ("sparse_mla", "det"),
    ("dense_attention", "fwd"),
    ("dense_attention_bits", "bwd"),
    ("indexer_topk", "fwd"),
    ("indexer_topk_fp8", "fwd"),
    ("indexer_bits", "fwd"),
    ("indexer_scores_at", "bwd"),
    ("indexer_kl_loss", "bwd"),
    ("sparse_indexer_kl_loss", "bwd"),
    ("grouped_matmul", "bwd"),
    ("grouped_matmul_int8", "bwd"),
    ("grouped_matmul_fp8", "bwd"),
    ("decode_indexer_topk", "fwd"),
    ("decode_indexer_topk_fp8", "fwd"),
    ("decode_sparse_mla", "fwd"),
    ("decode_sparse_mla_fp8", "fwd"),
    ("decode_sparse_mla_int8", "fwd"),
)
WITHOUT_FLOAT8 = (80, 86)
# Most bytes of registers that a thread stores and loads again.
SPILLS = {(90, "sparse_mla", "det"): 8, (100, "sparse_mla", "det"): 52}
# Of a kernel by hand: addresses of its products, the same in each step.
SPILLS_BY_HAND = {"_backward_kernel": 552}
# Most often that a kernel computes the products of its source, by op (docs/kernels.md):
# in a tile of fewer rows than its warps cover, several compute the same ones.
TIMES = {
    ("sparse_mla", "_forward_kernel"): 1.53,
    ("decode_sparse_mla", "_part_kernel"): 1.53,
    ("decode_sparse_mla_fp8", "_part_kernel"): 1.53,
    ("decode_sparse_mla_int8", "_part_kernel"): 1.53,
    ("dense_attention", "_forward_kernel"): 1.5,
    ("dense_attention_bits", "_forward_kernel"): 1.5,
}
OTHER_TIMES = 1.04
BY_HAND = 1.0  # with Gluon's layouts
# Most that the instructions of an op multiply, over what its definition needs.
ISSUED = {
    ("sparse_mla", "fwd"): 1.54,
    ("sparse_mla", "bwd"): 1.48,  # scores in both gradients
    ("dense_attention", "fwd"): 1.52,
    ("dense_attention_bits", "bwd"): 1.58,  # scores in three kernels
    ("indexer_topk", "fwd"): 1.01,
    ("indexer_topk_fp8", "fwd"): 1.01,
    ("indexer_bits", "fwd"): 1.01,
    ("indexer_scores_at", "bwd"): 1.39,
    ("indexer_kl_loss", "bwd"): 1.30,
    ("sparse_indexer_kl_loss", "bwd"): 1.09,
    ("grouped_matmul", "bwd"): 1.06,  # rows that pad a group's tiles
    ("grouped_matmul_int8", "bwd"): 1.08,
    ("grouped_matmul_fp8", "bwd"): 1.08,
    ("decode_indexer_topk", "fwd"): 1.01,
    ("decode_indexer_topk_fp8", "fwd"): 1.01,
    ("decode_sparse_mla", "fwd"): 1.54,
    ("decode_sparse_mla_fp8", "fwd"): 1.54,
    ("decode_sparse_mla_int8", "fwd"): 1.54,
}
ISSUED_BY_HAND = {(90, "sparse_mla", "fwd"): 1.01, (90, "sparse_mla", "bwd"): 1.01}
# DeepSeek-V3.2's heads: q and k of 128 + 64 dims, so that scores are two products.
TWO_PARTS = dataclasses.replace(
    cases.full(32768), heads=128, head_dim=192, value_dim=128, index_heads=64
)
SPILLS_OF_TWO_PARTS = {
    (90, "sparse_indexer_kl_loss"): 76,
    (100, "sparse_indexer_kl_loss"): 100,
}
ISSUED_OF_TWO_PARTS = {
    "dense_attention": 1.46,
    "dense_attention_bits": 1.46,
    "indexer_kl_loss": 1.34,  # the scores of 64 heads of the indexer, twice
    "sparse_indexer_kl_loss": 1.09,
}


def case_name(capability, op, mode):
    return f"{op}_{mode}_{capability}", capability, op, mode


ALL = [
    case_name(capability, op, mode)
    for capability in capabilities.KINDS
    for op, mode in OPS
    if not (op.endswith("_fp8") and capability in WITHOUT_FLOAT8)
]
TWO_PARTS_ALL = [
    case_name(capability, op, "bwd")
    for capability in capabilities.KINDS
    for op in ISSUED_OF_TWO_PARTS
]


class RowsTest(parameterized.TestCase):
    @parameterized.parameters(*capabilities.NAMES.values())
    def test_every_gpu_has_a_row_or_a_reason(self, capability):
        row, reason = capabilities.row(capability), capabilities.refusal(capability)
        self.assertNotEqual(row is None, reason is None)
        if reason is not None:
            known = "the kernels are for 8.0, 8.6, 8.9, 9.0, 10.0, 12.0"
            self.assertEndsWith(reason, known)

    @parameterized.parameters((87, 86), (103, 100), (121, 120), (90, 90))
    def test_a_newer_gpu_of_a_generation_takes_an_older_ones_row(self, newer, older):
        self.assertIs(capabilities.row(newer), capabilities.GPUS[older])

    @parameterized.parameters(70, 75, 110, 130, None)
    def test_no_row_of_another_generation_is_taken(self, capability):
        self.assertIsNone(capabilities.row(capability))

    def test_rows_are_those_that_are_compiled(self):
        self.assertEqual(set(capabilities.KINDS), set(capabilities.GPUS))
        for capability, kind in capabilities.KINDS.items():
            self.assertEqual(capabilities.named(kind), capability)

    @parameterized.parameters(
        # Registers: 65,536 / (255 * 32 -> 8,192 a warp); memory: 228 / (98 + 1).
        (90, 255, 98, 4, 2),
        (90, 255, 98, 8, 1),
        (90, 64, 8, 4, 8),
        (90, 32, 8, 16, 4),  # 2,048 threads
        (89, 32, 8, 16, 3),  # 1,536 threads
        (90, 64, 228, 4, 0),
    )
    def test_programs_of_a_multiprocessor(self, capability, registers, kib, warps, n):
        kernel = aot.GpuKernel(
            name="",
            registers=registers,
            spill_bytes=0,
            shared_bytes=kib << 10,
            is_serialized=False,
            warps=warps,
            capability=capability,
        )
        self.assertEqual(kernel.resident, n)


def check(test, capability, op, mode, sizes=None):
    """Compiles; kernels fit the shared memory, and multiply and spill little more."""
    if not CAN_COMPILE:
        test.skipTest("needs triton, and no TRITON_INTERPRET")
    length = 131072 if op.startswith("decode") else 32768
    job = measure.Job(op, length, mode, sizes=sizes)
    report = measure.compiled_by_triton(job, capability)
    test.assertNotEmpty(report["gpu_kernels"])
    for kernel in report["gpu_kernels"]:
        test.assertEqual(kernel["capability"], capability)
        test.assertGreater(kernel["resident"], 0, kernel)
        test.assertFalse(kernel["is_serialized"], kernel)
        is_by_hand = kernel["module"].endswith("hopper")
        most = SPILLS.get((capability, op, mode), 0)
        if sizes is not None:
            most = SPILLS_OF_TWO_PARTS.get((capability, op), 0)
        most = SPILLS_BY_HAND.get(kernel["name"], 0) if is_by_hand else most
        test.assertLessEqual(kernel["spill_bytes"], most, kernel)
        times = TIMES if sizes is None else {}
        most = times.get((op, kernel["name"]), OTHER_TIMES)
        most = BY_HAND if is_by_hand else most
        test.assertLess(kernel["times"] or 0.0, most + 0.005, kernel)
    if "issued" in report:
        if sizes is None:
            most = ISSUED_BY_HAND.get((capability, op, mode), ISSUED[op, mode])
        else:
            most = ISSUED_OF_TWO_PARTS[op]
        test.assertBetween(report["issued"], 0.99, most)


class FastestTest(parameterized.TestCase):
    @parameterized.parameters((80, "fwd"), (89, "fwd"), (90, "bwd"), (100, "fwd"))
    def test_attention_compiles(self, capability, mode):
        check(self, capability, "sparse_mla", mode)


@pytest.mark.aot
class NightlyTest(parameterized.TestCase):
    @parameterized.named_parameters(*ALL)
    def test_compiles(self, capability, op, mode):
        check(self, capability, op, mode)

    @parameterized.named_parameters(*TWO_PARTS_ALL)
    def test_heads_in_two_parts_compile(self, capability, op, mode):
        check(self, capability, op, mode, TWO_PARTS)


if __name__ == "__main__":
    environment.main()
