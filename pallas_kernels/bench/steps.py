"""Counts the steps that the loops of an op's Triton kernels take at given sizes.

A step is what `aot_products` counts: one pass through a loop that holds products.
"""

from typing import Any

import numpy as np

from pallas_kernels import cases
from pallas_kernels.bench import operations
from pallas_kernels.cases import Case


def count(module: str, name: str, sizes: dict[str, Any], case: Case) -> float | None:
    """Returns the steps of all programs of all launches of a kernel.

    Args:
      module: that defines the kernel, within pallas_kernels.
      name: the kernel's.
      sizes: the kernel's constants.
      case: sizes of the op.

    Returns:
      Their number; 0 for a kernel without products; None where it depends on more than
      the sizes.
    """
    rule = _RULES.get((module, name.strip("_")))
    return 0.0 if rule is None else rule(sizes, case)


def _of_lists(sizes: dict[str, Any], case: Case) -> float | None:
    """Steps through the lists, for each block of heads."""
    if sizes.get("RANGE"):  # lists are cut at the ends of ranges of keys
        return None
    lo, hi = cases.bounds(case)
    steps = -(-np.clip(hi - lo, 0, case.topk) // sizes["KEYS"])
    blocks = -(-sizes["N"] // sizes["HEADS"]) if "N" in sizes else 1
    return float(steps.sum(dtype=np.float64)) * blocks


def _of_whole_lists(sizes: dict[str, Any], case: Case) -> float:
    """Steps through the lists, padding included."""
    return float(case.batch * case.queries * -(-sizes["K"] // sizes["KEYS"]))


def _tiles(case: Case, rows: int, keys: int) -> float:
    """Tiles of `rows` queries and `keys` keys that hold a visible pair."""
    lo, hi = cases.bounds(case)
    sees = lo < hi
    padding = ((0, 0), (0, -lo.shape[1] % rows))
    first = np.pad(np.where(sees, lo, case.keys), padding, constant_values=case.keys)
    end = np.pad(np.where(sees, hi, 0), padding)
    first = first.reshape(case.batch, -1, rows).min(-1) // keys
    end = -(-end.reshape(case.batch, -1, rows).max(-1) // keys)
    return float(np.maximum(end - first, 0).sum(dtype=np.float64))


def _of_scores(sizes: dict[str, Any], case: Case) -> float:
    return _tiles(case, sizes["QUERIES"], sizes["KEYS"])


def _of_heads(sizes: dict[str, Any], case: Case) -> float:
    """A head at a time."""
    return float(sizes["N"] * _tiles(case, sizes["QUERIES"], sizes["KEYS"]))


def _of_attention(sizes: dict[str, Any], case: Case) -> float:
    return sizes["N"] * _tiles(case, sizes["BM"], sizes["BN"])


def _group_sizes(case: Case) -> np.ndarray:
    return np.asarray(operations.make(case, ("group_sizes",), "random", None)[0])


def _of_rows(sizes: dict[str, Any], case: Case) -> float:
    tiles = -(-_group_sizes(case) // sizes["BM"])
    columns, depth = -(-sizes["O"] // sizes["BO"]), -(-sizes["C"] // sizes["BC"])
    return float(tiles.sum() * columns * depth)


def _of_matrices(sizes: dict[str, Any], case: Case) -> float:
    steps = -(-_group_sizes(case) // sizes["BM"])
    tiles = -(-sizes["K"] // sizes["BK"]) * -(-sizes["N"] // sizes["BN"])
    return float(steps.sum() * tiles)


_RULES = {
    ("sparse_mla.gpu", "forward_kernel"): _of_lists,
    ("sparse_mla.gpu_hopper", "forward_kernel"): _of_lists,
    ("sparse_mla.gpu_hopper", "backward_kernel"): _of_lists,
    ("sparse_mla.gpu_backward", "dq_kernel"): _of_lists,
    ("sparse_mla.gpu_backward", "dkv_kernel"): _of_lists,
    ("indexer_kl.gpu_listed", "target_kernel"): _of_lists,
    ("indexer_kl.gpu_listed", "loss_kernel"): _of_lists,
    ("indexer_kl.gpu_listed", "gradient_kernel"): _of_lists,
    ("decode.gpu_listed", "part_kernel"): _of_lists,
    ("indexer_topk.gpu_listed", "forward_kernel"): _of_whole_lists,
    ("indexer_topk.gpu_listed", "backward_kernel"): _of_whole_lists,
    ("indexer_topk.gpu_select", "scores_kernel"): _of_scores,
    ("indexer_kl.gpu_dense_tiles", "target_kernel"): _of_heads,
    ("indexer_kl.gpu_dense_tiles", "loss_kernel"): _of_scores,
    ("indexer_kl.gpu_dense_tiles", "gradient_kernel"): _of_scores,
    ("indexer_kl.gpu_dense_tiles", "dk_kernel"): _of_scores,
    ("dense_attention.gpu", "forward_kernel"): _of_attention,
    ("dense_attention.gpu_backward", "dq_kernel"): _of_attention,
    ("dense_attention.gpu_backward", "dk_kernel"): _of_attention,
    ("dense_attention.gpu_backward", "dv_kernel"): _of_attention,
    ("grouped_matmul.gpu", "rows_times_matrix_kernel"): _of_rows,
    ("grouped_matmul.gpu", "rows_times_rows_kernel"): _of_matrices,
}
