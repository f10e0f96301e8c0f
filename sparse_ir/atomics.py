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

from tvm import ir, tirx

from sparsetir.sparse_ir.errors import LoweringError
from sparsetir.sparse_ir.nodes import (
    SparseFunc,
    SparseIteration,
    iteration_with,
    map_expr,
    sparse_iterations,
)
from sparsetir.sparse_ir.reduction import Reduction, reduction_of, taken_apart, under

__all__ = ["ATOMIC", "ATOMIC_DTYPES", "as_call", "atomic_update", "with_atomic_calls"]

# Annotation of an iteration.
ATOMIC = "atomic"
# Of sums; of 16 bits, each addition would be rounded.
ATOMIC_DTYPES = ("float32", "float64", "int32")
ADD = "atomicAdd"


def with_atomic_calls(func: SparseFunc) -> SparseFunc:
    """The function with atomic updates for the stores of atomic iterations.

    Raises LoweringError for an atomic iteration that stores something else than a sum.
    """

    atomic = {it.name: _sum(it) for it in sparse_iterations(func) if ATOMIC in it.annotations}

    def visit(it: Any) -> Any:
        if it.name not in atomic:
            return it
        found = atomic[it.name]
        body = under(found.conditions, atomic_update(found.store, found.term))
        return iteration_with(it, body=body)

    return func.replace(body=map_expr(func.body, [(SparseIteration, visit)])) if atomic else func


def atomic_update(store: Any, term: Any) -> Any:
    """A store as :func:`as_call` knows it, which adds a term."""
    dtype = str(store.value.ty.dtype)
    return tirx.BufferStore(store.buffer, tirx.call_extern(dtype, ADD, term), store.indices)


def as_call(stmt: Any) -> Any:
    """The call for an atomic update, which may be under the conditions that its element exists."""
    conditions, store = taken_apart(stmt)
    value: Any = getattr(store, "value", None)
    if not isinstance(store, tirx.BufferStore) or not _is_add(value):
        return stmt
    place = tirx.BufferLoad(store.buffer, store.indices)
    dtype = str(place.ty.dtype)
    add = tirx.call_extern(dtype, ADD, tirx.address_of(place), value.args[1])
    return under(conditions, tirx.Evaluate(add))


def _is_add(value: Any) -> bool:
    name: Any = value.args[0] if isinstance(value, ir.Call) and len(value.args) == 2 else None
    return isinstance(name, ir.StringImm) and str(name.value) == ADD


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
