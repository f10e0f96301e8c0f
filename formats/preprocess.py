"""Extract the parts of a decomposed function that only need to run once."""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseFunc,
    SparseIteration,
    make_func,
    stores_of,
    variables_of,
    walk,
)
from sparsetir.sparse_ir.tir import as_one

# Annotation of the iterations that copy constant values into a format.
COPY = "sparsetir.copy"
# Attribute of functions that decode values, which no copy encodes.
DECODED = "sparsetir.decoded"


def extract_preprocess(func: SparseFunc) -> tuple[SparseFunc, SparseFunc]:
    """Extract the copies of constant values from a decomposed function.

    Parameters
    ----------
    func : SparseFunc
        The result of :func:`decompose_format`.

    Returns
    -------
    preprocess : SparseFunc
        Fills the new formats, and runs once; empty where rules encode all values.
    rest : SparseFunc
        Computes, without copies. Both keep all parameters that they use, in the order of `func`.
    """
    parts = statements(func)
    copies = [p for p in parts if is_copy(p)]
    if not copies and DECODED not in func.attrs:
        raise ValueError(
            f"extract_preprocess: '{func.name}' has no copies of constant values; decompose_format "
            "makes them"
        )
    rest = [p for p in parts if not is_copy(p)]
    local = {b.var: b.name for b in func.buffers if b.handle is None}

    for store in stores_of(*copies):
        if store.buffer in local:
            raise ValueError(
                f"extract_preprocess: '{local[store.buffer]}' is allocated in '{func.name}', so "
                "that what one function fills is lost to the other; give it a parameter"
            )
    return (
        without_unused(func, copies, f"{func.name}_preprocess"),
        without_unused(func, rest, func.name),
    )


def statements(func: SparseFunc) -> list[Any]:
    """The statements of a function's body."""
    return list(func.body.seq) if isinstance(func.body, tirx.SeqStmt) else [func.body]


def is_copy(stmt: Any) -> bool:
    """Whether a statement copies constant values into a format."""
    return isinstance(stmt, SparseIteration) and COPY in stmt.annotations


def without_unused(func: SparseFunc, body: list[Any], name: str) -> SparseFunc:
    """A function of some statements, with the parameters, axes and buffers that they use."""
    stmt = as_one(body) if body else tirx.Evaluate(0)
    variables: dict[int, Any] = {}
    axes: dict[str, Axis] = {}

    def visit(node: Any) -> None:
        if isinstance(node, ir.Var):
            variables[node.__chandle__()] = node
        elif isinstance(node, Axis):
            axes[node.name] = node

    walk(stmt, visit, ir.Var, Axis)
    buffers = [b for b in func.buffers if b.var.__chandle__() in variables]
    for buf in buffers:
        for part in [*(buf.axes or ()), *buf.var.ty.shape]:
            walk(part, visit, ir.Var, Axis)
    kept_axes = [a for a in func.axes if a.name in axes]
    for axis in kept_axes:
        walk(axis, visit, ir.Var, Axis)
    used = {*variables.values(), *(b.handle for b in buffers if b.handle is not None)}
    # Unused parameters remain: a format's lengths, if they follow from others.
    anywhere = set(variables_of(func.body, list(func.axes), list(func.buffers)))
    params = [p for p in func.params if p in used or p not in anywhere]
    attrs = {k: v for k, v in func.attrs.items() if k != "global_symbol"}
    return make_func(name, params, kept_axes, buffers, stmt, attrs, func.span)
