"""Layers on sparse kernels: for graphs, for points, and for pruned linear maps.

:class:`SparseLinear` replaces a pruned `torch.nn.Linear`; :func:`sparse_linears` swaps those of a
model, :func:`prune` selects the weights to keep. :class:`SparseConv3d` and
:class:`SparseConvTranspose3d` are convolutions of :class:`SparsePoints`.

The others mirror PyTorch Geometric: they take the arguments of PyG's layers of the same names,
return the same results, and have the same parameters, so that state dictionaries work both ways;
PyG itself is not needed. In all of them `edge_index` is a (2, E) int32 or int64 tensor of sources
and targets, a `torch.sparse` matrix of targets x sources (PyG's `adj_t`), or anything else that
:func:`sparsetir.ops.spmm` accepts; and, except for relations, a graph over several processes,
:class:`sparsetir.distributed.DistGraph`.

Features may be sparse matrices. Dense ones that are nearly all zero, such as bags of words, are
multiplied as sparse ones on a CPU by layers with `sparse_features=True` (GCN, SAGE, GAT).

Differences from PyG: with flow="target_to_source" features are one tensor, not a pair, and a
GATConv with `edge_dim` uses the values of a sparse matrix as features of its edges.

To run PyG's own layers on these kernels, see :func:`sparsetir.nn.pyg.accelerate`.
"""

from typing import TYPE_CHECKING

from sparsetir import needs_torch  # noqa: F401
from sparsetir.extras import extend
from sparsetir.nn.gat import GATConv
from sparsetir.nn.gcn import GCNConv
from sparsetir.nn.pyg import accelerate
from sparsetir.nn.rgcn import RGCNConv
from sparsetir.nn.sage import SAGEConv
from sparsetir.nn.sparse_linear import SparseLinear, prune, sparse_linears

if TYPE_CHECKING:
    from sparsetir.nn.points import KernelMap, OnFeatures, SparsePoints, kernel_map
    from sparsetir.nn.sparse_conv import SparseConv3d, SparseConvTranspose3d

__all__ = [
    "GATConv", "GCNConv", "KernelMap", "OnFeatures", "RGCNConv", "SAGEConv", "SparseConv3d",
    "SparseConvTranspose3d", "SparseLinear", "SparsePoints", "accelerate", "kernel_map", "prune",
    "sparse_linears",
]  # fmt: skip

__getattr__ = extend(
    __name__,
    points="KernelMap OnFeatures SparsePoints kernel_map",
    sparse_conv="SparseConv3d SparseConvTranspose3d",
)
