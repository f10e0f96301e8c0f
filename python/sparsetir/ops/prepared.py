"""A sparse matrix that was made ready for operators once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsetir.ops.cache import lasting, memory_key
from sparsetir.ops.operands import Operand, Prepared, resolve
from sparsetir.ops.structure import Structure, pinned, structure_of

__all__ = ["prepare"]


def prepare(A: Any, size: Any = None, values: Tensor | None = None) -> Prepared:
    """The matrix, ready for all operators and layers: what they find out of a pattern is kept here.

    The pattern is copied: whoever writes to A later changes nothing here, so that a call needs no
    look at whether anyone did. Values are not copied: each call reads what they are. What is kept
    lives as long as the handle and counts for no limit of the caches.

    Parameters
    ----------
    A : sparse (m, n) matrix
        Of any kind that :func:`resolve` takes.
    size : int or (int, int), optional
        Of edges: (sources, targets) or one number for both; by default for the largest node.
    values : (nnz,) or (heads, nnz) Tensor, optional
        Of the elements in A's order, instead of its own.

    Returns
    -------
    Prepared

    Raises
    ------
    TypeError, ValueError
        As :func:`resolve`.

    Examples
    --------
    >>> g = ops.prepare(edge_index, num_nodes)
    >>> for features in batches:
    ...     ops.spmm(g, features)
    """
    if isinstance(A, Prepared):
        return A if values is None else A.with_values(values)
    if size is not None:
        if not (isinstance(A, Tensor) or hasattr(A, "__dlpack__")):
            raise TypeError(
                f"prepare: argument 'size': expected None beside {type(A).__name__}, which has one"
            )
        A = (A, size)
    operand = resolve(A, values, None, "prepare")
    return _of(operand)


@lasting
def _of(operand: Operand) -> Prepared:
    rowptr, col, m, n, values = operand
    found = structure_of(rowptr, col, n, "prepare")
    order = None if found.order is None else _copied(found.order)
    parts = _copied(found.rowptr), _copied(found.col)
    structure = Structure(*parts, (m, n), order, found.blocks)
    if col.dim() == 2:
        rowptr, col = parts[0], _copied(col)
        key = m, n, *memory_key(col)
    else:
        rowptr, col = parts
        key = n, *memory_key(col), *memory_key(rowptr)
    made = Prepared(Operand(rowptr, col, m, n, values), structure)
    pinned[key] = made
    return made


def _copied(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)
