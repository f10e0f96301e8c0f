"""Programs for gradients of products, maxima and minima: reductions of functions of their terms.

The gradient of `y[i] = max(j, A[i, j] * x[j])` is that of a sum with constant weights w, 1 / the
number of terms that are equal to y, as in torch's `amax`::

    r[i] = r[i] + T.Select(A[i, j] * x[j] == y[i], A[i, j] * x[j] * w[i], 0)

The gradient of a product is the product times that of the sum of its terms' logarithms; terms that
are zero are summed separately.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.gradient import needed
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    buffer_var,
    iteration_with,
    sparse_iterations,
    stores_of,
)
from sparsetir.sparse_ir.reduction import add_guards, identity, reduction_of
from sparsetir.sparse_ir.tir import as_one, dtype_of


def _if_equal(t: Any, value: Any, yes: Any, no: Any) -> Any:
    """A choice by whether a term has a value; integers are constants of the term's type."""
    parts = (tirx.const(x, dtype_of(t)) if isinstance(x, int) else x for x in (value, yes, no))
    value, yes, no = parts
    return tirx.Select(tirx.EQ(t, value), yes, no)


# What replaces a term t, by name; y is the result's element, and w its weight.
TERMS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "number": lambda t, y, w: _if_equal(t, y, 1, 0),
    "attaining": lambda t, y, w: _if_equal(t, y, t * w, 0),
    "number of zeros": lambda t, y, w: _if_equal(t, 0, 1, 0),
    "without zeros": lambda t, y, w: _if_equal(t, 0, 1, t),
    "logarithms": lambda t, y, w: _if_equal(t, 0, 0, tirx.log(tirx.abs(t))),
    "zeros": lambda t, y, w: _if_equal(t, 0, t, 0),
    "squares of zeros": lambda t, y, w: _if_equal(t, 0, t * t, 0),
}


def reduction_to(func: SparseFunc, result: str) -> str | None:
    """The operator by which a program reduces to its result, other than a sum, in a type that its
    gradients have; None for other programs.

    result : the parameter of the result
    """
    y = _buffer(func, result)
    operators = set[str]()
    for it in sparse_iterations(func):
        reduction, stores = reduction_of(it.body), stores_of(it.body, it.init)
        if any(not s.buffer.same_as(y.var) for s in stores):
            return None
        if reduction is not None:
            operators.add(reduction.operator)
        elif not isinstance(it.body, tirx.BufferStore):
            return None
    if y.dtype not in ("float32", "float64") or len(operators) != 1 or operators == {"sum"}:
        return None
    return operators.pop()


def surrogate(func: SparseFunc, result: str, kind: str) -> tuple[SparseFunc, str, str]:
    """A program of :func:`reduction_to` with each term replaced by one of TERMS; it sums these, or
    multiplies those without zeros.

    result : the parameter of the result, which becomes an input where terms depend on it

    Also returns the parameters of the weights and the new result.
    """
    y = _buffer(func, result)
    w, r = (_like(func, y, f"{y.name}_{what}") for what in ("WEIGHTS", "NEW"))
    operator = "product" if kind == "without zeros" else "sum"
    none, body = identity(operator, y.dtype), list[Any]()
    for it in sparse_iterations(func):
        reduction = reduction_of(it.body)
        init = None if it.init is None else tirx.BufferStore(r.var, none, it.init.indices)
        if reduction is None:
            store = tirx.BufferStore(r.var, none, it.body.indices)
        else:
            at = reduction.store.indices
            best, weight, held = (tirx.BufferLoad(b.var, at) for b in (y, w, r))
            term = TERMS[kind](reduction.term, best, weight)
            value = held * term if operator == "product" else held + term
            store = add_guards(reduction.conditions, tirx.BufferStore(r.var, value, at))
        body.append(iteration_with(it, init=init, body=store))
    params = list(func.params)
    place = [str(p.name) for p in params].index(result) + 1
    params[place:place] = [w.handle, r.handle]
    made = needed(func, params, [*func.buffers, w, r], as_one(body))
    return made, str(w.handle.name), str(r.handle.name)


def _buffer(func: SparseFunc, param: str) -> SparseBuffer:
    return next(b for b in func.buffers if b.handle is not None and b.handle.name == param)


def _like(func: SparseFunc, buffer: SparseBuffer, wish: str) -> SparseBuffer:
    """A further buffer over the axes of another one."""
    name = fresh_name(func, wish)
    var = buffer_var(list(buffer.var.ty.shape), buffer.dtype, name)
    return SparseBuffer(var, buffer.axes, ir.Var(fresh_name(func, wish.lower()), buffer.handle.ty))
