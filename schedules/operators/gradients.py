"""Gradients of operators with a program and a record, as operators themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import ir

from sparsetir.schedules.operators.operands import OPERATORS, OfProgram, Operator, register
from sparsetir.schedules.operators.problems import memoized
from sparsetir.sparse_ir.gradient import gradient, transposed_axes
from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    flat_axes,
    iteration_with,
)
from sparsetir.sparse_ir.traversal import map_expr


def gradient_of(name: str, wrt: str) -> Operator:
    """The operator that computes the gradient of another one for an operand, or for its values "a".

    It takes those operands of the other one that it reads, and the gradient of the result after the
    place of the result, named as by :func:`sparsetir.sparse_ir.gradient.gradient`.
    Its gradients are operators, too.

    Raises ValueError if the program's gradient cannot be derived.
    """
    known_gradient = OPERATORS.get(f"{name}_grad_{wrt}")
    return register(_made(name, wrt)) if known_gradient is None else known_gradient


def _made(name: str, wrt: str) -> Operator:
    of = OPERATORS[name]
    plain, upstream = _derived(of, OfProgram(name), wrt)
    names = [str(p.name) for p in plain.params]
    dims = {**of.dims, "a": "nnz", upstream: of.dims["out"]}
    read = {n: dims[n] for n in names if n in dims and n not in ("a", "out")}

    @memoized
    def program(problem: OfProgram) -> SparseFunc:
        return _derived(of, problem, wrt)[0]

    return Operator(
        f"{name}_grad_{wrt}", OfProgram, f"the gradient of {name} for {wrt}",
        {**read, "out": dims[wrt]}, "a" in names, None, reductions=("sum",), program=program,
        transposed=of.transposed != bool(transposed_axes(plain)),
    )  # fmt: skip


def _derived(of: Operator, problem: Any, wrt: str) -> tuple[SparseFunc, str]:
    """The gradient's program, whose result has the parameter "out"; and the name of the parameter
    for the gradient of the other result."""
    assert of.program is not None
    base = of.program(of.compiled_for(problem.dtype, idtype=problem.idtype))
    func, before = gradient(base, wrt), {str(p.name) for p in base.params}
    upstream, result = [name for p in func.params if (name := str(p.name)) not in before]
    return with_names(func, {result: "out"}), upstream


def level_by_level(of: SparseFunc, wrt: str, dtype: str, **names: str) -> SparseFunc:
    """The gradient of an operator's program for schedules that visit levels of patterns separately.

    dtype : the type of the result, whose sums may be wider than the operand
    names : new names of parameters
    """
    func = gradient(of, wrt, dtype=dtype)
    apart = (SparseIteration, lambda it: iteration_with(it, axes=flat_axes(it.axes)))
    return with_names(func.replace(body=map_expr(func.body, [apart])), names)


def with_names(func: SparseFunc, names: Mapping[str, str]) -> SparseFunc:
    """A program with some array parameters renamed."""
    new = {p: ir.Var(names[str(p.name)], p.ty) for p in func.params if str(p.name) in names}
    buffers = [SparseBuffer(b.var, b.axes, new.get(b.handle, b.handle)) for b in func.buffers]
    return func.replace(params=[new.get(p, p) for p in func.params], buffers=buffers)
