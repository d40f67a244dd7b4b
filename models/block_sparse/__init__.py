"""Layers that compute only some blocks of a kernel, or of the scores of attention.

To import it lets Keras load models that have them.
"""

from towers.models.block_sparse.attention import BlockSparseAttention
from towers.models.block_sparse.convolution import BlockSparseConv2D
from towers.models.block_sparse.dense import BlockSparseDense
from towers.models.block_sparse.product import block_sparse_matmul

__all__ = [
    "BlockSparseAttention",
    "BlockSparseConv2D",
    "BlockSparseDense",
    "block_sparse_matmul",
]
