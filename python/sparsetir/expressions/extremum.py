"""Programs for the gradients of maxima and minima: of the terms that attain them.

The gradient of `y[i] = max(j, A[i, j] * x[j])` is that of a sum with constant weights w, 1 / the
number of terms that are equal to y, as in torch's `amax`::

    r[i] = r[i] + T.Select(A[i, j] * x[j] == y[i], A[i, j] * x[j] * w[i], 0)
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    buffer_var,
    iteration_with,
    make_func,
    sparse_iterations,
    stores_of,
)
from sparsetir.sparse_ir.reduction import add_guards, reduction_of
from sparsetir.sparse_ir.tir import as_one, zero


def attaining(func: SparseFunc, result: str, counts: bool) -> tuple[SparseFunc, str, str] | None:
    """The weighted sum of the terms that attain a program's maxima or minima; None for others.

    result : the parameter of the result, which becomes an input
    counts : whether to add the weights alone

    Also returns the parameters of the weights and the sum.
    """
    its = sparse_iterations(func)
    y = next(b for b in func.buffers if b.handle is not None and b.handle.name == result)
    reductions = [reduction_of(it.body) for it in its]
    extrema = [r for r in reductions if r is not None and r.operator in ("max", "min")]
    sets = [s for it in its for s in stores_of(it.body, it.init)]
    wide = y.dtype in ("float32", "float64")
    if not extrema or not wide or any(not s.buffer.same_as(y.var) for s in sets):
        return None
    plain = [isinstance(it.body, tirx.BufferStore) for it in its]
    if not all(
        r in extrema if r is not None else x for r, x in zip(reductions, plain, strict=True)
    ):
        return None
    w, r = (_like(func, y, name) for name in (f"{y.name}_WEIGHTS", f"{y.name}_SUM"))
    none = zero(y.dtype)
    body: list[Any] = []
    for it, reduction in zip(its, reductions, strict=True):
        init = None if it.init is None else tirx.BufferStore(r.var, none, it.init.indices)
        if reduction is None:
            store = tirx.BufferStore(r.var, none, it.body.indices)
        else:
            at, term = reduction.store.indices, reduction.term
            best, weight, held = (tirx.BufferLoad(b.var, at) for b in (y, w, r))
            taken = weight if counts else term * weight
            added = held + tirx.Select(tirx.EQ(term, best), taken, none)
            store = add_guards(reduction.conditions, tirx.BufferStore(r.var, added, at))
        body.append(iteration_with(it, init=init, body=store))
    params = list(func.params)
    place = [str(p.name) for p in params].index(result) + 1
    params[place:place] = [w.handle, r.handle]
    made = make_func(
        None, params, func.axes, [*func.buffers, w, r], as_one(body), dict(func.attrs), func.span
    )
    return made, str(w.handle.name), str(r.handle.name)


def _like(func: SparseFunc, buffer: SparseBuffer, wish: str) -> SparseBuffer:
    """A further buffer over the axes of another one."""
    name = fresh_name(func, wish)
    var = buffer_var(list(buffer.var.ty.shape), buffer.dtype, name)
    return SparseBuffer(var, buffer.axes, ir.Var(fresh_name(func, wish.lower()), buffer.handle.ty))
