"""Gradients of operators that are a program and a record, as operators themselves."""

from __future__ import annotations

from typing import Any

from tvm import ir

from sparsetir.schedules.operators.operands import OPERATORS, OfProgram, Operator, register
from sparsetir.schedules.operators.problems import memoized
from sparsetir.sparse_ir.gradient import gradient, transposed_axes
from sparsetir.sparse_ir.nodes import SparseBuffer, SparseFunc


def gradient_of(name: str, wrt: str) -> Operator:
    """The operator that gives the gradient of another one for an operand, or for its values "a".

    It takes those operands of the other one that it reads, and the gradient of the result behind
    the place of that, under the name that :func:`sparsetir.sparse_ir.gradient.gradient` gives it.
    Its gradients are operators, too.

    Raises ValueError where the program has no gradient that can be derived.
    """
    known_gradient = OPERATORS.get(f"{name}_grad_{wrt}")
    return register(_made(name, wrt)) if known_gradient is None else known_gradient


def _made(name: str, wrt: str) -> Operator:
    of = OPERATORS[name]
    plain, upstream = _derived(of, OfProgram(name), wrt)
    names = [str(p.name) for p in plain.params]
    dims = {**of.dims, "a": "e", upstream: of.dims["out"]}
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
    that the gradient of the other result is given by."""
    assert of.program is not None
    base = of.program(of.compiled_for(problem.dtype, idtype=problem.idtype))
    derived = gradient(base, wrt)
    before = {str(p.name) for p in base.params}
    upstream, result = [p for p in derived.params if str(p.name) not in before]
    out = ir.Var("out", result.ty)
    buffers = [
        SparseBuffer(b.var, b.axes, out) if b.handle is not None and b.handle.same_as(result) else b
        for b in derived.buffers
    ]
    params = [out if p.same_as(result) else p for p in derived.params]
    return derived.replace(params=params, buffers=buffers), str(upstream.name)
