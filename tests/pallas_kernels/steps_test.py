"""Steps of the GPU kernels' loops, against loops over queries, tiles and groups."""

import dataclasses

import numpy as np
from absl.testing import parameterized

from pallas_kernels import cases
from pallas_kernels.bench import operations, steps
from tests import environment

CASE = dataclasses.replace(cases.SMALL["documents"], topk=19, heads=70)


def meeting(case, rows, keys):
    """Tiles of queries and keys with a visible pair, one by one."""
    lo, hi = cases.bounds(case)
    seen = np.zeros((case.batch, -(-case.queries // rows), -(-case.keys // keys)), bool)
    for b, t in np.ndindex(lo.shape):
        for s in range(lo[b, t], hi[b, t]):
            seen[b, t // rows, s // keys] = True
    return int(seen.sum())


class StepsTest(parameterized.TestCase):
    @parameterized.parameters((8, 64), (128, 32), (7, 5))
    def test_tiles(self, rows, keys):
        want = meeting(CASE, rows, keys)
        scores = {"QUERIES": rows, "KEYS": keys, "N": 3}
        got = steps.count("indexer_topk.gpu_select", "_scores_kernel", scores, CASE)
        self.assertEqual(got, want)
        for name in ("loss", "gradient", "dk"):
            module = "indexer_kl.gpu_dense_tiles"
            got = steps.count(module, f"{name}_kernel", scores, CASE)
            self.assertEqual(got, want)
        got = steps.count("indexer_kl.gpu_dense_tiles", "target_kernel", scores, CASE)
        self.assertEqual(got, 3 * want)
        sizes = {"BM": rows, "BN": keys, "N": 5}
        for name in ("dq", "dk", "dv"):
            got = steps.count(
                "dense_attention.gpu_backward", f"_{name}_kernel", sizes, CASE
            )
            self.assertEqual(got, 5 * want)

    def test_lists(self):
        """Four keys at a time, of 70 heads 64."""
        lo, hi = cases.bounds(CASE)
        entries = np.clip(hi - lo, 0, CASE.topk)
        want = sum(len(range(0, n, 4)) for n in entries.ravel())
        sizes = {"KEYS": 4, "HEADS": 64, "N": 70, "K": 19}
        count = lambda module, name, sizes: steps.count(module, name, sizes, CASE)
        for name in ("dq", "dkv"):
            got = count("sparse_mla.gpu_backward", f"_{name}_kernel", sizes)
            self.assertEqual(got, 2 * want)
        one = {"KEYS": 4, "HEADS": 16}  # no blocks of heads
        self.assertEqual(count("indexer_kl.gpu_listed", "_loss_kernel", one), want)
        got = count("indexer_topk.gpu_listed", "_forward_kernel", sizes)
        self.assertEqual(got, 2 * 150 * 5)
        by_ranges = sizes | {"RANGE": 64}
        self.assertIsNone(count("sparse_mla.gpu_backward", "_dkv_kernel", by_ranges))
        self.assertEqual(count("indexer_topk.gpu_select", "_select_kernel", sizes), 0)

    def test_groups(self):
        sizes = np.asarray(operations.make(CASE, ("group_sizes",), "random", None)[0])
        tiles = sum(len(range(0, n, 16)) for n in sizes)
        rows = {"BM": 16, "O": 100, "BO": 64, "C": 128, "BC": 32}
        got = steps.count("grouped_matmul.gpu", "_rows_times_matrix_kernel", rows, CASE)
        self.assertEqual(got, tiles * 2 * 4)
        matrices = {"BM": 16, "K": 100, "BK": 64, "N": 128, "BN": 32}
        name = "_rows_times_rows_kernel"
        got = steps.count("grouped_matmul.gpu", name, matrices, CASE)
        self.assertEqual(got, tiles * 2 * 4)


if __name__ == "__main__":
    environment.main()
