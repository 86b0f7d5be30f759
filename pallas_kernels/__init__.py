"""Kernels for DeepSeek Sparse Attention and mixtures of experts, for JAX alone.

One folder an op. `reference` is its definition: plain jnp, no tiles. The other files
are implementations that agree with it, in values and gradients.
"""

from pallas_kernels.dispatch import SAVED
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.indexer_kl import indexer_kl_loss
from pallas_kernels.indexer_topk import indexer_mask, indexer_scores, indexer_topk
from pallas_kernels.masked_mla import masked_mla

__all__ = [
    "SAVED",
    "grouped_matmul",
    "indexer_kl_loss",
    "indexer_mask",
    "indexer_scores",
    "indexer_topk",
    "masked_mla",
]
