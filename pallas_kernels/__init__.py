"""Kernels for DeepSeek Sparse Attention and mixtures of experts; needs only JAX.

Each op has a folder. Its definition is `reference`: plain jnp without tiles. The other
files are implementations that agree with it in values and gradients.
"""

from pallas_kernels.decode import decode_indexer_topk, decode_sparse_mla
from pallas_kernels.dense_attention import dense_attention
from pallas_kernels.dispatch import SAVED
from pallas_kernels.grouped_codes import grouped_codes, takes_grouped_codes
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_quantized
from pallas_kernels.indexer_kl import indexer_kl_loss, sparse_indexer_kl_loss
from pallas_kernels.indexer_topk import (
    indexer_bits,
    indexer_mask,
    indexer_scores,
    indexer_scores_at,
    indexer_select,
    indexer_topk,
)
from pallas_kernels.selection import segment_bounds
from pallas_kernels.sparse_mla import sparse_mla

__version__ = "0.1.0"

__all__ = [
    "SAVED",
    "decode_indexer_topk",
    "decode_sparse_mla",
    "dense_attention",
    "grouped_codes",
    "grouped_matmul",
    "grouped_matmul_quantized",
    "indexer_bits",
    "indexer_kl_loss",
    "indexer_mask",
    "indexer_scores",
    "indexer_scores_at",
    "indexer_select",
    "indexer_topk",
    "segment_bounds",
    "sparse_indexer_kl_loss",
    "sparse_mla",
    "takes_grouped_codes",
]
