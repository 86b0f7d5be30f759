"""Torch's own path for each op runs, rehearsed on a CPU in small."""

import dataclasses
import importlib.util
import pathlib
import sys
import warnings

from absl.testing import parameterized

from pallas_kernels import cases
from tests import environment

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "benchmarks"))
HAS_TORCH = importlib.util.find_spec("torch") is not None
OPS = (
    "dense_attention",
    "dense_attention_bits",
    "grouped_matmul",
    "indexer_topk",
    "sparse_mla",
)


class TorchTest(parameterized.TestCase):
    @parameterized.product(op=OPS, mode=("fwd", "bwd"))
    def test_an_op_runs(self, op, mode):
        if not HAS_TORCH:
            self.skipTest("needs torch")
        import h200_torch

        case = dataclasses.replace(
            cases.SMALL["short"], queries=40, keys=40, topk=8, heads=2
        )
        if mode == "bwd" and op in ("indexer_topk", "dense_attention_bits"):
            self.skipTest("no gradient, or none on a CPU")
        with warnings.catch_warnings(action="ignore"):  # FlexAttention, uncompiled
            found = h200_torch.timed(op, 40, mode, case)
        self.assertGreater(found["torch_ms"], 0)


if __name__ == "__main__":
    environment.main()
