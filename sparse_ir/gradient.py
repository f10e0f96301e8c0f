"""The gradient of a program for one of its operands, as another program.

Before, the product of a sparse and a dense matrix::

    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

`gradient(spmm, "A")` is a sampled product over the same pattern::

    with T.sp_iter([T.fuse(I, J), K], "SSR", "spmm_grad_a") as [i, j, k]:
        with T.init():
            GRAD_A[i, j] = 0.0
        GRAD_A[i, j] = GRAD_A[i, j] + GRAD_C[i, k] * B[j, k]

`gradient(spmm, "B")` is again a product, over the transposed pattern, whose arrays take the same
parameters `indptr` and `indices` (:mod:`sparsetir.sparse_ir.level_order`)::

    J = T.dense_fixed(n)
    I = T.sparse_variable(J, (m, nnz), (indptr, indices))
    with T.sp_iter([J, I, K], "SRS", "spmm_grad_b") as [j, i, k]:
        with T.init():
            GRAD_B[j, k] = 0.0
        GRAD_B[j, k] = GRAD_B[j, k] + A[j, i] * GRAD_C[i, k]

Of a sequence of iterations, such as a softmax, the gradient visits the last one first. A buffer
that iterations write and others read has a gradient, too, in a buffer of the derived program. Its
values are recomputed by the iterations that write it, or kept: read from a parameter.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tvm_ffi
from tvm import ir, tirx

from sparsetir.sparse_ir.adjoint import is_float
from sparsetir.sparse_ir.annotations import is_scheduled
from sparsetir.sparse_ir.computed import COMPUTED, computed_parameters, reads
from sparsetir.sparse_ir.contributions import (
    Contribution,
    contributions_of,
    live,
    sum_type,
    with_stored_values,
)
from sparsetir.sparse_ir.level_order import visited_in_order, wanted_orders, with_levels
from sparsetir.sparse_ir.names import fresh_name, numbered
from sparsetir.sparse_ir.nodes import (
    Axis,
    FusedAxis,
    PartAxis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    attached_axes,
    buffer_var,
    iteration_with,
    make_func,
    nodes_of,
    sparse_iterations,
    stores_of,
    substitute,
    variables_of,
    visited_axes,
)
from sparsetir.sparse_ir.open_axes import closed
from sparsetir.sparse_ir.promises import ASSUMED, PROMISES, assumed, promises_of
from sparsetir.sparse_ir.reduction import add_guards
from sparsetir.sparse_ir.rows import ROWS
from sparsetir.sparse_ir.sequences import sequence_of
from sparsetir.sparse_ir.tir import as_one, cast, dtype_of, uncast, zero
from sparsetir.sparse_ir.updates import refused, updates_of
from sparsetir.sparse_ir.verify import verify

# The attribute that lists the patterns whose levels are reordered.
TRANSPOSED = "transposed_axes"


def gradient(
    func: SparseFunc, wrt: str, *, transpose: bool = True, dtype: str | None = None,
    keep: Collection[str] = (),
) -> SparseFunc:  # fmt: skip
    """The program that computes the gradient of a program for one of its operands.

    Parameters
    ----------
    func : SparseFunc
        Of stage I, as its author wrote it: iterations in sequence, each of which accumulates,
        `OUT[..] = OUT[..] + term`, reduces by `T.max` or `T.min`, or sets `OUT[..] = value` without
        a reduction. Each reads parameters and what earlier ones write; several may write one buffer
        if the later ones add to it, and none reads it in between. Iterations nested in one that is
        free of races count as a sequence; one may set all of a buffer from its own elements.
        Terms are expressions of loads with `+ - * /`, casts, `T.Select`, `T.if_then_else`, `T.max`,
        `T.min`, `T.exp`, `T.log` and variants, `T.sqrt`, `T.rsqrt`, `T.tanh`, `T.sigmoid`, `T.sin`,
        `T.cos`, `T.tan`, `T.erf`, `T.abs`, and `T.pow`.
    wrt : str
        The operand, of a float type: the name of its buffer or parameter.
    transpose : bool, optional
        Where an operand is indexed by columns alone, as B is in `A[i, j] * B[j, k]`: visit the
        transposed pattern, so that each row of the gradient is accumulated in one place. Otherwise
        visit the pattern as it is, and scatter to rows of the gradient.
    dtype : str, optional
        The type of the gradient: that of the operand (the default) or of the accumulators.
    keep : collection of str, optional
        Names of buffers, or their parameters, that the program writes and the gradient reads. They
        become inputs, with the values that the program leaves in them. Others are recomputed, and
        so are maxima of terms that are more than a load.

    Returns
    -------
    SparseFunc
        Named `<func>_grad_<operand>`, with those parameters of `func`, in order, that it needs
        (see its `params`). (A result that the program assembles has a given pattern there, with its
        nnz.) Each result `out`, a parameter that is written and that no iteration reads, is
        replaced by an input `grad_out`; the output, `grad_` and the operand's parameter, follows
        the last of these and is written in full. Their buffers have the prefix `GRAD_`. Names that
        are taken get a number appended. Accumulators have the types of those in `func`, at least
        float32.

    Raises
    ------
    TypeError
        For an argument that is not a SparseFunc.
    ValueError
        For an unknown operand, one that the result does not depend on, or an unsupported `dtype`,
        `keep` or form of program; the message says what is supported.

    Notes
    -----
    :func:`transposed_axes` returns the patterns that the program visits transposed; if there are
    any, computed parameters become parameters that callers pass. Padded slots are not written. At a
    kink, such as `T.max(x, 0.0)` at 0, the gradient goes to the constant, else to the first
    operand. That of a maximum over a reduction is shared equally by the terms that attain it, or
    goes to the constant of its init if that does.
    """
    if not isinstance(func, SparseFunc):
        raise TypeError(
            f"gradient: argument 'func': expected a stage-I function, got {type(func).__name__}"
        )
    func = closed(func)
    operand = _operand(func, wrt)
    if ROWS in func.attrs or is_scheduled(func.replace(attrs=ir.make_node("ir.DictAttrs"))):
        raise refused(func, "it has been scheduled; take the gradient of the program as written")
    func = sequence_of(func)
    operand = _operand(func, wrt)
    updates, active = updates_of(func, operand)
    derived_from = [u for u in updates if u.target in active]
    sums = sorted({sum_type(u.value) for u in derived_from})
    legal = [operand.dtype, *(s for s in sums if s != operand.dtype and len(sums) == 1)]
    if dtype is not None and dtype not in legal:
        expected = " or ".join(map(repr, legal))
        raise ValueError(f"gradient: argument 'dtype': expected {expected}, got {dtype!r}")
    inner = {u.target for u in updates if any(other.reads(u.target) for other in updates)}
    extrema = [u for u in derived_from if u.operator in ("max", "min")]
    read = inner | {u.target for u in extrema}
    # Terms are compared with their maximum, so that both have to be rounded alike.
    computed = {u.target for u in extrema if not isinstance(uncast(u.value), ir.TensorLoad)}
    kept = _kept(func, keep, read - computed)
    out = _graded(func, operand, read, dtype)
    graded = {operand.var: out}
    for var in dict.fromkeys(u.target for u in derived_from):
        buffer = func.buffer(str(var.name))
        if var in inner:
            grad = _graded(func, buffer, read, sums[-1])
            graded[var] = SparseBuffer(grad.var, grad.axes, None)
        elif buffer.handle is not None:
            graded[var] = _graded(func, buffer, read)
    parts = [
        Contribution(
            u.it.name, u.it, u.it.kinds, [], [], None, func.buffer(str(u.target.name))
        )
        for u in updates if u.target not in kept
    ]  # fmt: skip
    parts = live([*parts, *contributions_of(func, derived_from, graded)], out)
    stored = kept | {p.to.var for p in parts if p.term is None}
    parts = live([with_stored_values(p, updates, stored) for p in parts], out)
    if not parts:
        raise refused(func, f"its result does not depend on the values of '{operand.name}'")
    derived = _program(func, parts, graded, out, kept)
    if transpose:
        derived = _transposed(func, derived, parts)
    derived = _cleared(derived, {p.to.name for p in parts if p.term is not None})
    # Rows of several iterations are visited as they are: only one alone gains by a fused loop.
    fused = all(p.to.var.same_as(out.var) for p in parts)
    body = as_one([visited_in_order(it, fused) for it in sparse_iterations(derived)])
    derived = derived.replace(body=body)
    if "global_symbol" in func.attrs:
        derived = derived.with_attr("global_symbol", f"{func.name}_grad_{operand.handle.name}")
    verify(derived)
    return derived


def transposed_axes(func: SparseFunc) -> list[list[str]]:
    """The patterns whose levels a gradient visits in another order.

    Parameters
    ----------
    func : SparseFunc
        The result of :func:`gradient`.

    Returns
    -------
    list of list of str
        The axis names of each such pattern in their new order: [["J", "I"]] for a matrix by
        columns. Its `indptr` and `indices`, or those of all levels of a tensor, describe the
        elements sorted accordingly, and the values of buffers over these axes have this order.
    """
    return [[str(name) for name in levels] for levels in func.attrs.get(TRANSPOSED, [])]


def _operand(func: SparseFunc, wrt: str) -> SparseBuffer:
    """The operand of this name, if a gradient exists for it."""
    written = {s.buffer for s in stores_of(func.body)}
    legal = [
        b for b in func.buffers
        if b.handle is not None and b.var not in written and is_float(b.var)
    ]  # fmt: skip
    for buffer in legal:
        if wrt in (buffer.name, buffer.handle.name):
            return buffer
    names = [name for b in legal for name in (b.handle.name, b.name)]
    raise ValueError(f"gradient: argument 'wrt': expected one of {names}, got {wrt!r}")


def _kept(func: SparseFunc, keep: Collection[str], read: set[Any]) -> set[Any]:
    """The variables of the buffers that become inputs, of those whose values may be read."""
    legal = [b for b in func.buffers if b.var in read and b.handle is not None]
    named = {name: b.var for b in legal for name in (b.handle.name, b.name)}
    for name in [keep] if isinstance(keep, str) else keep:
        if name not in named or isinstance(keep, str):
            expected = f"expected a collection of names among {[*named]}"
            if not named:
                expected = f"expected (), as nothing that '{func.name}' writes can be kept"
            raise ValueError(f"gradient: argument 'keep': {expected}, got {keep!r}")
    return {named[name] for name in keep}


def _graded(
    func: SparseFunc, buffer: SparseBuffer, read: set[Any], dtype: str | None = None
) -> SparseBuffer:
    """The gradient of a buffer, with a parameter of its own.

    read : written buffers that the gradient reads
    """
    written = {s.buffer for s in stores_of(func.body)}  # others are not parameters of the gradient
    gone = [b for b in func.buffers if b.var in written - read and b.handle is not None]
    free = {name for b in gone for name in (b.name, b.handle.name)}

    def named(wish: str) -> str:
        return wish if wish in free else fresh_name(func, wish)

    shape, wish = list(buffer.var.ty.shape), named(f"GRAD_{buffer.name}")
    var = buffer_var(shape, dtype or buffer.dtype, wish)
    if buffer.handle is None:
        return SparseBuffer(var, buffer.axes, None)
    return SparseBuffer(
        var, buffer.axes, ir.Var(named(f"grad_{buffer.handle.name}"), buffer.handle.ty)
    )


def _program(
    func: SparseFunc, parts: list[Contribution], graded: dict[Any, SparseBuffer],
    out: SparseBuffer, kept: set[Any],
) -> SparseFunc:  # fmt: skip
    """The gradient over the pattern as it is, with the declarations of `func` that it needs."""
    iterations: list[Any] = []
    begun: set[Any] = set()
    for part in parts:
        if part.term is None:
            iterations.append(part.it)
            continue
        name = numbered(fresh_name(func, part.name), [it.name for it in iterations])
        iterations.append(_iteration(part, name, first=part.to.var not in begun))
        begun.add(part.to.var)
    written = {s.buffer for s in stores_of(func.body)}
    of_param = {b.handle: b for b in func.buffers if b.handle is not None}
    params: list[Any] = []
    for param in func.params:
        buffer = of_param.get(param)
        var = None if buffer is None else buffer.var
        params += [] if var in written - kept else [param]
        if var in graded and graded[var].handle is not None and var in written:
            params.append(graded[var].handle)
            last = len(params)
    params.insert(last, out.handle)
    buffers: list[SparseBuffer] = []
    for buffer in func.buffers:
        held = buffer.handle if buffer.var not in written - kept else None
        buffers.append(SparseBuffer(buffer.var, buffer.axes, held))
        buffers += [graded[buffer.var]] if buffer.var in written & {*graded} else []
    known = {b.var for b in buffers}
    more = {p.to.var: p.to for p in parts if p.to.var not in known}
    return needed(func, params, [*buffers, *more.values()], as_one(iterations))


def _iteration(part: Contribution, name: str, first: bool) -> SparseIteration:
    """An iteration that adds a contribution, or sets it where it is the first one of the buffer and
    no other visit writes the element."""
    it, out, fresh = part.it, part.to, {v: tirx.Var(v.name, dtype_of(v)) for v in part.it.vars}
    term, indices = substitute(part.term, fresh), [substitute(i, fresh) for i in part.indices]
    nodes = [a for n in it.axes for a in (n.axes if isinstance(n, FusedAxis) else [n])]
    at = {axis.name: v for axis, v, _ in it.axis_of()}
    places = [at.get(a.name) for a in out.axes or ()]
    sets = len(places) == len(at) and all(isinstance(n, Axis) for n in nodes)
    sets = sets and all(i.same_as(v) for i, v in zip(part.indices, places, strict=True))
    init, value = None, term
    if not (first and sets and not part.conditions):
        held = tirx.BufferLoad(out.var, indices)
        value = cast(held, dtype_of(term)) + term
        init = tirx.BufferStore(out.var, zero(out.dtype), indices)
    store = tirx.BufferStore(out.var, cast(value, out.dtype), indices)
    body = add_guards([substitute(c, fresh) for c in part.conditions], store)
    vars_ = [fresh[v] for v in it.vars]
    return SparseIteration(None, nodes, part.kinds, name, vars_, init, body, {})


def needed(
    func: SparseFunc, params: list[Any], buffers: list[SparseBuffer], body: Any
) -> SparseFunc:
    """A function with those of the parameters, buffers and axes that a body needs."""
    used = set(variables_of(body))
    buffers = [b for b in buffers if b.var in used]
    nodes = [n for it in nodes_of(SparseIteration, body) for n in it.axes]
    tops = [*visited_axes(nodes), *(a for b in buffers for a in b.axes or ())]
    tops += [n.by for n in nodes if isinstance(n, PartAxis)]
    tops += [n.to for n in attached_axes(nodes)]
    there = {a.name for top in tops for a in top.ancestors()}
    axes = [a for a in func.axes if a.name in there]
    used |= set(variables_of(*axes, *(size for b in buffers for size in b.var.ty.shape)))
    used |= {b.handle for b in buffers if b.handle is not None}
    computed = computed_parameters(func)
    names = {str(v.name) for v in used}
    for param in reversed([n for n in computed if n in names]):
        names |= {*reads(computed[param])}
    params = [p for p in params if p in used or str(p.name) in names]
    known = {"axis": there, "buffer": {b.name for b in buffers}}
    kept = {
        COMPUTED: {n: how for n, how in computed.items() if n in names},
        PROMISES: [p for p in promises_of(func) if p["param"] in names],
        ASSUMED: [f for f in assumed(func) if all(f[k] in known[k] for k in f if k in known)],
    }
    symbol = func.name if "global_symbol" in func.attrs else None
    attrs = {k: v for k, v in kept.items() if v}
    return make_func(symbol, params, axes, buffers, body, attrs, func.span)


def _transposed(func: SparseFunc, derived: SparseFunc, parts: list[Contribution]) -> SparseFunc:
    """A gradient over patterns in the level orders that its parts need."""
    orders: dict[str, tuple[str, ...]] = {}
    for part in parts:
        for root, order in wanted_orders(part.it, part.kinds).items():
            if orders.setdefault(root, order) != order:
                raise refused(
                    func,
                    f"the gradient needs a pattern in the orders {[*orders[root]]} and "
                    f"{[*order]}; expected transpose=False, which takes it as it is",
                )
    names = [a.name for a in derived.axes]
    moved = [order for order in orders.values() if order != tuple(sorted(order, key=names.index))]
    if not moved:
        return derived
    attrs = {k: v for k, v in derived.attrs.items() if k != COMPUTED}  # these are of the old order
    attrs[TRANSPOSED] = [[*order] for order in moved]
    derived = with_levels(derived, moved)
    return derived.replace(attrs=ir.make_node("ir.DictAttrs", **attrs))


def _cleared(derived: SparseFunc, names: set[str]) -> SparseFunc:
    """A gradient whose buffers of these names are set to zero before anything is added to them."""
    body, axes, begun = list[Any](), list(derived.axes), set[str]()
    for it in sparse_iterations(derived):
        out = derived.buffer(str(stores_of(it.body)[-1].buffer.name))
        first = out.name not in begun
        begun |= {out.name} & names
        if it.init is None or out.name not in names or (first and _covers(it, out)):
            body.append(it)
            continue
        if first:
            over = [] if out.axes is None else list(out.axes)
            for size in [] if over else out.var.ty.shape:
                wish = fresh_name(derived, f"{out.name}_AXIS", [a.name for a in over])
                over.append(Axis(wish, "dense_fixed", size, idtype=dtype_of(size)))
            axes += [a for a in over if out.axes is None]
            at = [tirx.Var(str(a.name).lower(), a.idtype) for a in over]
            clear = tirx.BufferStore(out.var, zero(out.dtype), at)
            name = fresh_name(derived, f"{it.name}_zero")
            kinds = "S" * len(over)
            body.append(SparseIteration(None, over, kinds, name, at, None, clear, {}))
        body.append(iteration_with(it, init=None))
    return derived.replace(axes=axes, body=as_one(body))


def _covers(it: SparseIteration, out: SparseBuffer) -> bool:
    """Whether the init of an iteration writes a whole buffer."""
    lengths = {var: axis.length for axis, var, _ in it.axis_of()}
    indices = list(it.init.indices)
    return len(set(indices)) == len(indices) and all(
        i in lengths and tvm_ffi.structural_equal(lengths[i], size)
        for i, size in zip(indices, out.var.ty.shape, strict=True)
    )
