"""Buffers and iterations in a script; axes are in :mod:`sparsetir.sparse_ir.script.axes`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.tirx.script import builder as tir_builder

from sparsetir.sparse_ir.errors import IllFormedError, describe
from sparsetir.sparse_ir.nodes import Axis, SparseBuffer, SparseIteration, buffer_var, flat_axes
from sparsetir.sparse_ir.script.axes import AxisRef, GroupRef, axis_arg, handle_arg
from sparsetir.sparse_ir.script.context import capture, context, current_span, stack

__all__ = [
    "alloc_sparse_buffer",
    "ceildiv",
    "func_attr",
    "init",
    "match_buffer",
    "match_sparse_buffer",
    "sp_iter",
    "sp_iter_attr",
]


def _buffer_var(func: str, shape: Any, dtype: Any, scope: str) -> Any:
    try:
        known = isinstance(dtype, str) and hasattr(tir_builder, str(tvm_ffi.dtype(dtype)))
    except (ValueError, TypeError, RuntimeError):
        known = False
    if not known:
        raise IllFormedError(f"{func}: argument 'dtype': unknown dtype {describe(dtype)}")
    return buffer_var(shape, dtype, "buffer", scope)


def _axes_arg(func: str, axes: Any) -> list[Axis]:
    if isinstance(axes, AxisRef):
        axes = (axes,)
    if not isinstance(axes, tuple | list):
        raise IllFormedError(f"{func}: argument 'axes': expected axes, got {describe(axes)}")
    return [axis_arg(func, "axes", a) for a in axes]


def match_sparse_buffer(
    handle: Any, axes: Any, dtype: str = "float32", scope: str = "global"
) -> Any:
    """Bind a parameter to a sparse buffer over `axes`; return the buffer that the body indexes."""
    func = "match_sparse_buffer"
    nodes = _axes_arg(func, axes)
    handle_arg(func, "handle", handle)
    var = _buffer_var(func, [a.length for a in nodes], dtype, scope)
    context(func).buffers.append(SparseBuffer(var=var, axes=nodes, handle=handle))
    return var


def alloc_sparse_buffer(axes: Any, dtype: str = "float32", scope: str = "global") -> Any:
    """Allocate a sparse buffer over `axes` inside the function."""
    func = "alloc_sparse_buffer"
    nodes = _axes_arg(func, axes)
    var = _buffer_var(func, [a.length for a in nodes], dtype, scope)
    context(func).buffers.append(SparseBuffer(var=var, axes=nodes, handle=None))
    return var


def match_buffer(
    handle: Any, shape: Any, dtype: str = "float32", scope: str = "global", **options: Any
) -> Any:
    """Bind a parameter to a dense buffer without axes, indexed as in TIR.

    options : TIR's further options, only in the PrimFuncs of a mixed module
    """
    if not stack():  # in a PrimFunc of a mixed module
        return tir_builder.match_buffer(handle, shape, dtype, scope=scope, **options)
    func = "match_buffer"
    if options:
        raise IllFormedError(f"{func}: expected no options but dtype and scope, got {[*options]}")
    handle_arg(func, "handle", handle)
    shape = shape if isinstance(shape, tuple | list) else (shape,)
    var = _buffer_var(func, shape, dtype, scope)
    context(func).buffers.append(SparseBuffer(var=var, axes=None, handle=handle))
    return var


def ceildiv(a: Any, b: Any) -> Any:
    """The quotient rounded up; unlike TVM's also right for negative divisors."""
    signed = str(getattr(getattr(b, "ty", None), "dtype", "int")).startswith("int")
    positive = isinstance(b, int | tirx.IntImm) and int(b) > 0
    return 0 - tirx.floordiv(0 - a, b) if signed and not positive else tirx.ceildiv(a, b)


def func_attr(attrs: dict[str, Any]) -> None:
    """Set attributes of the function, as TIR's `T.func_attr` does."""
    if not stack():  # in a PrimFunc of a mixed module
        tir_builder.func_attr(attrs)
        return
    context("func_attr").attrs.update(attrs)


class _SpIter(contextlib.AbstractContextManager):
    def __init__(self, axes: list[Any], kinds: str, name: str, span: Any) -> None:
        self.axes, self.kinds, self.name, self.span = axes, kinds, name, span
        self.init: Any = None
        self.annotations: dict[str, Any] = {}
        self.vars: list[Any] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> list[Any]:
        self.vars = [tirx.Var(a.name.lower(), a.idtype) for a in flat_axes(self.axes)]
        context().iterations.append(self)
        self._body = self._stack.enter_context(capture())
        return self.vars

    def __exit__(self, *exc: Any) -> None:
        suppressed = self._stack.__exit__(*exc)
        context().iterations.pop()
        if exc[0] is None and not suppressed:
            tir_builder.add_to_parent(
                SparseIteration(
                    span=self.span,
                    axes=self.axes,
                    kinds=self.kinds,
                    name=self.name,
                    vars=self.vars,
                    init=self.init,
                    body=self._body[0],
                    annotations=self.annotations,
                )
            )


def sp_iter(axes: Sequence[Any], kinds: str, name: str) -> _SpIter:
    """`with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:` (section 3.1).

    axes : axes in visiting order, parents before children; entries may be `T.fuse` and `T.attach`
    kinds : "S" or "R" for each coordinate
    name : the iteration's name, for schedules
    """
    nodes: list[Any] = []
    for a in axes if isinstance(axes, tuple | list) else [axes]:
        if isinstance(a, GroupRef):
            nodes.append(a.node())
        else:
            nodes.append(axis_arg("sp_iter", "axes", a))
    count = len(flat_axes(nodes))
    if not isinstance(kinds, str) or len(kinds) != count or set(kinds) - set("SR"):
        raise IllFormedError(
            f"sp_iter '{name}': argument 'kinds': expected {count} letters S or R, one for each of "
            f"{[a.name for a in flat_axes(nodes)]}, got {describe(kinds)}"
        )
    if not isinstance(name, str) or not name:
        raise IllFormedError(
            f"sp_iter: argument 'name': expected a non-empty string, got {describe(name)}"
        )
    return _SpIter(nodes, kinds, name, current_span())


def _current_iteration(what: str) -> _SpIter:
    iterations = context(what).iterations
    if not iterations:
        raise IllFormedError(f"{what} is outside a sparse iteration")
    return iterations[-1]


def init() -> Any:
    """`with T.init():` the initial value at every coordinate of the spatial axes."""
    return _init() if stack() else tir_builder.init()


@contextlib.contextmanager
def _init() -> Iterator[None]:
    owner = _current_iteration("T.init()")
    if owner.init is not None:
        raise IllFormedError(f"sp_iter '{owner.name}' has two T.init() scopes")
    with capture() as body:
        yield
    owner.init = body[0]


def sp_iter_attr(attrs: dict[str, Any]) -> None:
    """Annotations of the enclosing sparse iteration."""
    _current_iteration("T.sp_iter_attr").annotations.update(attrs)
