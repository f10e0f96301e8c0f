"""Sparse operators on torch tensors, with gradients.

>>> import torch
>>> from sparsetir import ops
>>> edge_index = torch.tensor([[0, 1, 2], [1, 0, 0]])
>>> ops.spmm((edge_index, 3), torch.eye(3))
tensor([[0., 1., 1.],
        [1., 0., 0.],
        [0., 0., 0.]])

They work under torch.compile, torch.export and autocast, and with torch.func except forward-mode
derivatives (jvp, jacfwd, hessian), which raise NotImplementedError. `vmap` runs them in a loop; a
first dimension for heads is faster.
"""

from typing import TYPE_CHECKING, Any

from sparsetir import needs_torch  # noqa: F401
from sparsetir.extras import extend
from sparsetir.ops.messages import (
    attention,
    edge_softmax,
    gsddmm,
    gspmm,
    segment_reduce,
    sparse_softmax,
)
from sparsetir.ops.operands import Operand, Prepared, resolve
from sparsetir.ops.prepared import PreparedRelations, prepare
from sparsetir.ops.products import sddmm, spmm, spmv
from sparsetir.ops.rgms import rgms
from sparsetir.ops.sparse_results import (
    add,
    inner,
    kron,
    maximum,
    minimum,
    mul,
    spgemm,
    sub,
    vecdot,
)
from sparsetir.ops.structure import Structure, cache_info, clear_cache, limit_cache, structure_of

if TYPE_CHECKING:
    from sparsetir.ops.masked_attention import sparse_attention

__all__ = [
    "Operand",
    "Prepared",
    "PreparedRelations",
    "Structure",
    "add",
    "attention",
    "cache_info",
    "clear_cache",
    "edge_softmax",
    "gsddmm",
    "gspmm",
    "limit_cache",
    "inner",
    "kron",
    "maximum",
    "minimum",
    "mul",
    "prepare",
    "resolve",
    "rgms",
    "sddmm",
    "segment_reduce",
    "sparse_attention",
    "sparse_softmax",
    "spgemm",
    "spmm",
    "spmv",
    "structure_of",
    "sub",
    "vecdot",
]

_refuse = extend(__name__, masked_attention="sparse_attention")


def __getattr__(name: str) -> Any:
    """Operators defined by a record and a program alone, made on first access."""
    from sparsetir.schedules.operators.registry import OPERATORS

    if name in OPERATORS:
        from sparsetir.ops.programs import function_of

        function = globals()[name] = function_of(name)
        return function
    return _refuse(name)
