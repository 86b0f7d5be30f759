"""Tiles by compute capability: each has a row or a reason, and each row compiles.

Triton compiles without a device and without jax-triton. One kernel is compiled for
three capabilities by default, all of them with `pytest -m aot`, in an environment of
requirements/triton-py311.txt and without TRITON_INTERPRET.
"""

import importlib.util
import os

import pytest
from absl.testing import parameterized

from pallas_kernels import aot, capabilities, cases
from pallas_kernels.bench import measure, operations
from tests import environment

CAN_COMPILE = importlib.util.find_spec("triton") is not None
CAN_COMPILE &= os.environ.get("TRITON_INTERPRET") != "1"
KINDS = {
    80: "NVIDIA A100-SXM4-80GB",
    86: "NVIDIA A10G",
    89: "NVIDIA L4",
    90: "NVIDIA H200",
    100: "NVIDIA B200",
    120: "NVIDIA GeForce RTX 5090",
}
OPS = (
    ("sparse_mla", "bwd"),
    ("sparse_mla", "det"),
    ("masked_mla", "fwd"),
    ("masked_mla_bits", "bwd"),
    ("indexer_topk", "fwd"),
    ("indexer_bits", "fwd"),
    ("indexer_scores_at", "bwd"),
    ("indexer_kl_loss", "bwd"),
    ("sparse_indexer_kl_loss", "bwd"),
    ("grouped_matmul", "bwd"),
    ("grouped_matmul_int8", "bwd"),
    ("grouped_matmul_fp8", "bwd"),
    ("decode_indexer_topk", "fwd"),
    ("decode_sparse_mla", "fwd"),
)
WITHOUT_FLOAT8 = (80, 86)
# Most bytes of registers that a thread stores and loads again (docs/kernels.md): only
# Hopper's gradients spill, as their tiles were kept large.
SPILLS = {(90, "sparse_mla"): 768}


def case_name(capability, op, mode):
    return f"{op}_{mode}_{capability}", capability, op, mode


ALL = [
    case_name(capability, op, mode)
    for capability in KINDS
    for op, mode in OPS
    if not (op == "grouped_matmul_fp8" and capability in WITHOUT_FLOAT8)
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
        self.assertEqual(set(KINDS), set(capabilities.GPUS))
        for capability, kind in KINDS.items():
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


def check(test, capability, op, mode):
    """Compiles; kernels fit the shared memory, and spill no more than is known."""
    if not CAN_COMPILE:
        test.skipTest("needs triton, and no TRITON_INTERPRET")
    length = 131072 if op.startswith("decode") else 32768
    job = measure.Job(op, length, mode)
    table = cases.shapes(job.case)
    args = [table[name] for name in operations.OPERATIONS[op].inputs]
    function = job.function("gpu_interpret", job.case)
    kernels = aot.kernels(function, args, KINDS[capability])
    test.assertNotEmpty(kernels)
    for kernel in kernels:
        test.assertEqual(kernel.capability, capability)
        test.assertGreater(kernel.resident, 0, kernel)
        test.assertFalse(kernel.is_serialized, kernel)
        most = SPILLS.get((capability, op), 0) if mode != "fwd" else 0
        test.assertLessEqual(kernel.spill_bytes, most, kernel)


class FastestTest(parameterized.TestCase):
    @parameterized.parameters(80, 89, 100)
    def test_attention_compiles(self, capability):
        check(self, capability, "sparse_mla", "fwd")


@pytest.mark.aot
class NightlyTest(parameterized.TestCase):
    @parameterized.named_parameters(*ALL)
    def test_compiles(self, capability, op, mode):
        check(self, capability, op, mode)


if __name__ == "__main__":
    environment.main()
