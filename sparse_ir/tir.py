"""Helpers that construct, change and read expressions, loops and blocks of TIR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any

import tvm
from tvm import ir, s_tir, tirx

from sparsetir.sparse_ir.nodes import nodes_of, variables_of
from sparsetir.sparse_ir.traversal import map_expr

BINARY = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)


def dtype_of(expr: Any) -> str:
    """The dtype of an expression."""
    return str(expr.ty.dtype)


def as_dtype(expr: Any, dtype: str) -> Any:
    """`expr` as `dtype`; integer constants are converted, others are cast if necessary."""
    if isinstance(expr, int):
        return tirx.IntImm(dtype, expr)
    if dtype_of(expr) == dtype:
        return expr
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm(dtype, expr.value)
    if isinstance(expr, tirx.Ramp) and "x" not in dtype:  # of an intrinsic's vectors
        base, stride = as_dtype(expr.base, dtype), as_dtype(expr.stride, dtype)
        return tirx.Ramp(base, stride, expr.lanes)
    return tirx.Cast(dtype, expr)


def cast(expr: Any, dtype: str) -> Any:
    """A value cast to `dtype`, unless it has that type."""
    return expr if dtype_of(expr) == dtype else tirx.Cast(dtype, expr)


def uncast(expr: Any) -> Any:
    """The operand of a cast, or the expression itself."""
    return expr.value if isinstance(expr, tirx.Cast) else expr


def size_text(size: Any) -> str:
    """A size for messages, such as `nnz * 3`: without casts and types of numbers."""

    def named(text: object) -> Any:
        return ir.Var(str(text), ir.PrimType("int32"))

    leaves = [(tirx.Cast, uncast), (tirx.IntImm, lambda n: named(n.value))]
    leaves += [(ir.Var, lambda v: named(v.name) if isinstance(v.ty, ir.PrimType) else v)]
    # Reconstructed, with operands of one type.
    return str(map_expr(size, [*leaves, *((kind, lambda n: type(n)(n.a, n.b)) for kind in BINARY)]))


def slots_of(axes: Sequence[Any], dtype: str) -> Any:
    """The number of slots of sparse_fixed axes, each under the one before; the first may be dense.

    Structure checks refuse more than the type of indices can count.
    """
    sizes = [as_dtype(a.nnz_cols if a.is_sparse else a.length, dtype) for a in axes]
    return reduce(lambda a, b: b if is_one(a) else a * b, sizes)


def constant(expr: Any) -> int | None:
    """The value of a constant expression; None if it is not constant."""
    return int(expr) if isinstance(expr, tirx.IntImm) else None


def is_one(expr: Any) -> bool:
    """Whether an expression is the constant 1."""
    return isinstance(expr, tirx.IntImm) and int(expr) == 1


def free_vars(expr: Any) -> set[Any]:
    """All variables, including buffers, that occur in an expression."""
    return set(variables_of(expr))


def type_of_product(sizes: Sequence[Any], dtypes: Sequence[str]) -> str:
    """The integer type of loops over a product of sizes with these types."""
    known = [int(n) for n in sizes if isinstance(n, tirx.IntImm)]
    unknown = len(sizes) - len(known)
    fits = prod(known) < (2 if unknown else 2**31) and unknown < 2
    return "int32" if fits and "int64" not in dtypes else "int64"


def conjunction(guards: list[Any]) -> Any:
    """The conjunction of guards; one with loads is only evaluated if those before it hold."""
    out = guards[-1]
    for guard in reversed(guards[:-1]):
        if nodes_of(ir.TensorLoad, out):
            out = tirx.if_then_else(guard, out, tirx.const(False, "bool"))
        else:
            out = tirx.all(guard, out)
    return out


def zero(dtype: str) -> Any:
    """The zero of a dtype."""
    return tirx.const(0, dtype)


def loop_over(
    var: Any,
    extent: Any,
    body: Any,
    kind: Any = tirx.ForKind.SERIAL,
    thread: Any = None,
    annotations: Any = None,
) -> tirx.For:
    """A loop that starts at 0. extent : an expression of the variable's type, or an int"""
    start, extent = as_dtype(0, dtype_of(var)), as_dtype(extent, dtype_of(var))
    return tirx.For(var, start, extent, kind, body, thread, annotations)


def as_one(statements: list[Any]) -> Any:
    """Statements as one; TVM has no sequence of length one."""
    return tirx.SeqStmt(statements) if len(statements) > 1 else statements[0]


def statements_of(stmt: Any) -> list[Any]:
    """The statements of a sequence, or the only one."""
    parts = stmt.seq if isinstance(stmt, tirx.SeqStmt) else ()
    return [s for part in parts for s in statements_of(part)] if len(parts) else [stmt]


def map_parts(stmt: Any, change: Callable[[Any], Any]) -> Any:
    """A statement with the statements directly inside of it changed, other than a block's."""
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([change(s) for s in stmt.seq])
    if isinstance(stmt, tirx.For):
        return loop_with(stmt, body=change(stmt.body))
    if isinstance(stmt, tirx.While):
        return tirx.While(stmt.condition, change(stmt.body), stmt.span)
    if isinstance(stmt, tirx.IfThenElse):
        then, other = change(stmt.then_case), stmt.else_case
        other = None if other is None else change(other)
        return tirx.IfThenElse(stmt.condition, then, other, stmt.span)
    if isinstance(stmt, tirx.AttrStmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, change(stmt.body), stmt.span)
    return stmt


def barrier() -> Any:
    """A barrier of all threads of a block."""
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", "shared"))


def loop_with(loop: Any, **changes: Any) -> tirx.For:
    """A loop with some fields changed."""
    fields = ("loop_var", "min", "extent", "kind", "body", "thread_binding", "annotations",
              "step", "span")  # fmt: skip
    return tirx.For(*(changes.get(f, getattr(loop, f)) for f in fields))


def with_body(func: tirx.PrimFunc, body: Any) -> tirx.PrimFunc:
    """A function with another body; itself if it is unchanged, as TVM analyses a new one."""
    return func if body.same_as(func.body) else func.with_body(body)


def pass_on(name: str, kind: Any, change: Callable[[Any], Any]) -> Any:
    """A pass of a module that changes its functions of a class."""

    @tvm.transform.module_pass(opt_level=0, name=name)
    def run(mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        of = {gv: change(f) if isinstance(f, kind) else f for gv, f in mod.functions.items()}
        return tvm.IRModule(of, attrs=mod.attrs)

    return run


def block_with(block: Any, **changes: Any) -> Any:
    """A block with some fields changed."""
    fields = ("iter_vars", "reads", "writes", "name_hint", "body", "init", "alloc_buffers",
              "match_buffers", "annotations", "span")  # fmt: skip
    return s_tir.SBlock(*(changes.get(f, getattr(block, f)) for f in fields))


def nest_of(stmt: Any) -> tuple[list[Any], Any]:
    """Perfectly nested loops, starting at a statement, and the body of the last one."""
    loops: list[Any] = []
    while isinstance(stmt, tirx.For):
        loops.append(stmt)
        stmt = stmt.body
    return loops, stmt


def values_of(realize: Any) -> dict[Any, Any]:
    """The values of a block's variables."""
    return {v.var: x for v, x in zip(realize.block.iter_vars, realize.iter_values, strict=True)}
