"""Kernels on the chip that they are for, against the definition.

JAX_PLATFORMS=cuda,cpu JAX_DISABLE_MOST_OPTIMIZATIONS=0 python -m pytest -m gpu
JAX_PLATFORMS=tpu,cpu JAX_DISABLE_MOST_OPTIMIZATIONS=0 python -m pytest -m tpu
"""

import dataclasses

import pytest
from absl.testing import parameterized

from pallas_kernels import cases, dispatch
from pallas_kernels.bench import measure, operations
from tests import environment

NOT_ON_TPU = ("indexer_scores_at", "grouped_matmul", "masked_layer")
JOBS = [
    (f"{op}_{mode}_{case.name}", op, mode, case)
    for op in operations.OPERATIONS
    for mode in measure.MODES
    for case in cases.SMALL.values()
    if measure.runnable(op, mode)
]
# Rows of GLM-5's width, for which Hopper has kernels of its own.
WIDE = [
    (f"{mode}_{case.name}_{heads}", mode, case, heads)
    for mode in ("fwd", "bwd")
    for case in cases.SMALL.values()
    for heads in (64, 128)
    if case.dtype == "bfloat16"
]


class OnDeviceTest(parameterized.TestCase):
    @parameterized.named_parameters(*JOBS)
    @pytest.mark.gpu
    def test_gpu_equals_definition(self, op, mode, case):
        self.check(op, mode, case, "gpu")

    @parameterized.named_parameters(*WIDE)
    @pytest.mark.gpu
    def test_attention_of_wide_rows_equals_definition(self, mode, case, heads):
        wide = dataclasses.replace(case, heads=heads, latent=512)
        self.check("sparse_mla", mode, wide, "gpu")

    @parameterized.named_parameters(
        job for job in JOBS if not job[1].startswith(NOT_ON_TPU)
    )
    @pytest.mark.tpu
    def test_tpu_equals_definition(self, op, mode, case):
        self.check(op, mode, case, "tpu")

    def check(self, op, mode, case, platform):
        if dispatch.platform() != platform:
            self.skipTest(f"needs a {platform}: JAX_PLATFORMS names it")
        if op.startswith("decode"):
            case = dataclasses.replace(case, queries=3, keys=208, documents=1)
        found = measure.values(measure.Job(op, 0, mode, platform, sizes=case))
        self.assertFalse(found["is_wrong"], found["error"])


if __name__ == "__main__":
    environment.main()
