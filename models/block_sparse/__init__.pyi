from .attention import BlockSparseAttention as BlockSparseAttention
from .convolution import BlockSparseConv2D as BlockSparseConv2D
from .dense import BlockSparseDense as BlockSparseDense
from .patterns import names as names
from .product import block_sparse_matmul as block_sparse_matmul
