"""Sums that visits on a GPU add to atomically, since several of them may add to one element.

An iteration with the annotation "atomic" stores `X[..] = X[..] + term`, which the interpreter, and
any order of visits, may do as it stands. Before::

    with T.sp_iter([W, L], "SS", "spmm_add") as [w, l]:
        T.sp_iter_attr({"atomic": 1})
        C[i, k] = C[i, k] + C_ws[w, l]

In stage II::

    with T.sblock("spmm_add0"):
        T.call_extern("float32", "atomicAdd", T.address_of(C[vi, vk]), C_ws[vw, vl])
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.nodes import (
    SparseFunc,
    SparseIteration,
    map_expr,
    sparse_iterations,
)
from sparsetir.sparse_ir.reduction import Reduction, reduction_of

__all__ = ["ATOMIC", "ATOMIC_DTYPES", "with_atomic_calls"]

# Annotation of an iteration.
ATOMIC = "atomic"
# Of sums; of 16 bits, each addition would be rounded.
ATOMIC_DTYPES = ("float32", "float64", "int32")


def with_atomic_calls(func: SparseFunc) -> SparseFunc:
    """The function with calls for the stores of atomic iterations.

    Raises LoweringError for an atomic iteration that stores something else than a sum.
    """

    atomic = {it.name: _sum(it) for it in sparse_iterations(func) if ATOMIC in it.annotations}

    def visit(it: Any) -> Any:
        if it.name not in atomic:
            return it
        found = atomic[it.name]
        place = tirx.BufferLoad(found.store.buffer, found.store.indices)
        dtype = str(found.store.value.ty.dtype)
        add = tirx.call_extern(dtype, "atomicAdd", tirx.address_of(place), found.term)
        body: Any = tirx.Evaluate(add)
        for condition in reversed(found.conditions):
            body = tirx.IfThenElse(condition, body, None)
        names = ("span", "axes", "kinds", "name", "vars", "init", "annotations")
        return SparseIteration(body=body, **{n: getattr(it, n) for n in names})

    return func.replace(body=map_expr(func.body, [(SparseIteration, visit)])) if atomic else func


def _sum(it: SparseIteration) -> Reduction:
    """What an atomic iteration adds."""
    found = reduction_of(it.body)
    dtype = "" if found is None else str(found.store.value.ty.dtype)
    plain = it.init is None and dtype in ATOMIC_DTYPES
    if found is None or found.operator != "sum" or not plain:
        raise LoweringError(
            f"sp_iter '{it.name}': annotation '{ATOMIC}': expected a sum of "
            f"{' or '.join(ATOMIC_DTYPES)}, X[..] = X[..] + term, got another statement"
        )
    return found
