"""Graphs that one machine cannot hold: products and layers over the processes of a group.

On top of `torch.distributed` (gloo on CPUs, NCCL on GPUs), started by `torchrun`. A
:class:`DistGraph` has on each process some nodes and the edges into them; layers of
:mod:`sparsetir.nn` take it as they take an `edge_index`, and features with a row for each own node.

>>> import torch
>>> from sparsetir import distributed
>>> store = torch.distributed.HashStore()  # torchrun's, for several processes
>>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
>>> graph = distributed.DistGraph.from_edges(torch.tensor([[0, 1, 2], [1, 0, 0]]))
>>> distributed.spmm(graph, torch.eye(3))
tensor([[0., 1., 1.],
        [1., 0., 0.],
        [0., 0., 0.]])
"""

from sparsetir import needs_torch  # noqa: F401
from sparsetir.distributed.collectives import DistributedError
from sparsetir.distributed.graph import DistGraph
from sparsetir.distributed.products import attention, sddmm, softmax, spmm, with_halo
from sparsetir.distributed.training import mean

__all__ = [
    "DistGraph",
    "DistributedError",
    "attention",
    "mean",
    "sddmm",
    "softmax",
    "spmm",
    "with_halo",
]
