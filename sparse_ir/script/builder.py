"""What a script calls: axes, buffers and iterations, collected while the parser runs the body."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from tvm import ir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as tir_builder

from sparsetir.sparse_ir.errors import IllFormedError
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    FusedAxis,
    SparseBuffer,
    SparseIteration,
    buffer_var,
    flat_axes,
)

__all__ = [
    "alloc_sparse_buffer",
    "attach",
    "dense_fixed",
    "dense_variable",
    "func_attr",
    "fuse",
    "init",
    "match_buffer",
    "match_sparse_buffer",
    "sp_iter",
    "sp_iter_attr",
    "sparse_fixed",
    "sparse_variable",
]

INDEX_DTYPES = ("int32", "int64")
_state = threading.local()


class FunctionContext:
    """What one function has declared so far."""

    def __init__(self) -> None:
        self.refs: list[AxisRef] = []
        self.buffers: list[SparseBuffer] = []
        self.attrs: dict[str, Any] = {}
        self.iterations: list[_SpIter] = []

    def axis_names(self) -> set[str]:
        return {r.name for r in self.refs if r.name is not None}


def _stack() -> list[FunctionContext]:
    if not hasattr(_state, "stack"):
        _state.stack = []
    return _state.stack


def context(what: str = "this construct") -> FunctionContext:
    """The function being parsed."""
    if not _stack():
        raise IllFormedError(f"{what} can only be used inside a @T.prim_func of sparse_tir")
    return _stack()[-1]


@contextlib.contextmanager
def function_context() -> Iterator[FunctionContext]:
    """Collect the declarations of one function."""
    _stack().append(FunctionContext())
    try:
        yield _stack()[-1]
    finally:
        _stack().pop()


@contextlib.contextmanager
def capture() -> Iterator[list[tirx.Stmt]]:
    """Collect the statements that the scope emits, instead of adding them to the parent."""
    out: list[tirx.Stmt] = []
    with IRBuilder() as builder:
        with tir_builder.While(tirx.const(True, "bool")):
            yield out
    out.append(builder.get().body)


def current_span() -> Any:
    """Source position of the statement being parsed (None outside the parser)."""
    probe = tirx.Var("probe", "int32")
    return IRBuilder.current()._set_current_source_span(probe).span


class AxisRef:
    """An axis while its function is parsed: it becomes a node once it has a name."""

    def __init__(self, **fields: Any) -> None:
        self.ctx = context("an axis")
        self.name: str | None = None
        self._fields = fields
        self._node: Axis | None = None
        self.span = current_span()
        self.ctx.refs.append(self)

    def set_name(self, name: str) -> None:
        """Give the axis the name it is assigned to."""
        if self.name is not None:
            return
        if name in self.ctx.axis_names():
            raise IllFormedError(f"axis '{name}' is defined twice; names of axes must differ")
        self.name = name

    def node(self) -> Axis:
        """The finished axis; named after its place if it was never assigned."""
        if self._node is None:
            if self.name is None:
                self.set_name(f"axis_{self.ctx.refs.index(self)}")
            self._node = Axis(name=str(self.name), **self._fields)
        return self._node


class GroupRef:
    """A fused or attached axis; it has no name of its own."""

    def __init__(self, node: FusedAxis | AttachedAxis) -> None:
        self.ctx = context()
        self._node = node

    def node(self) -> FusedAxis | AttachedAxis:
        """The finished node."""
        return self._node


def _axis_arg(func: str, arg: str, value: Any) -> Axis:
    if not isinstance(value, AxisRef):
        raise IllFormedError(f"{func}: argument '{arg}': expected an axis, got {_describe(value)}")
    if value.ctx is not context():
        raise IllFormedError(
            f"{func}: argument '{arg}': axis '{value.node().name}' belongs to another function"
        )
    return value.node()


def _describe(value: Any) -> str:
    return f"{value!r}" if isinstance(value, str | int | float) else type(value).__name__


def _int_arg(func: str, arg: str, value: Any, idtype: str) -> Any:
    if isinstance(value, bool) or not (isinstance(value, int) or ir.is_prim_expr(value)):
        raise IllFormedError(
            f"{func}: argument '{arg}': expected an integer or integer expression, "
            f"got {_describe(value)}"
        )
    if isinstance(value, int):
        if value < 0:
            raise IllFormedError(f"{func}: argument '{arg}': expected a size >= 0, got {value}")
        return tirx.IntImm(idtype, value)
    if str(value.ty.dtype) not in INDEX_DTYPES:
        raise IllFormedError(
            f"{func}: argument '{arg}': expected an int32 or int64 expression, got {value.ty.dtype}"
        )
    return value


def _idtype_arg(func: str, idtype: Any) -> str:
    if idtype not in INDEX_DTYPES:
        raise IllFormedError(
            f"{func}: argument 'idtype': expected 'int32' or 'int64', got {_describe(idtype)}"
        )
    return idtype


def _pair_arg(func: str, arg: str, value: Any, meaning: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        got = f"{len(value)} items" if isinstance(value, tuple | list) else _describe(value)
        raise IllFormedError(f"{func}: argument '{arg}': expected a pair {meaning}, got {got}")
    return value[0], value[1]


def _handle_arg(func: str, arg: str, value: Any) -> Any:
    if not isinstance(value, ir.Var) or not isinstance(value.ty, ir.PointerType):
        raise IllFormedError(
            f"{func}: argument '{arg}': expected a T.handle parameter, got {_describe(value)}"
        )
    return value


def dense_fixed(length: Any, idtype: str = "int32") -> AxisRef:
    """Axis of the coordinates 0 .. length - 1, all stored, without a parent (section 3.1)."""
    _idtype_arg("dense_fixed", idtype)
    return AxisRef(
        kind="dense_fixed", length=_int_arg("dense_fixed", "length", length, idtype), idtype=idtype
    )


def dense_variable(parent: Any, shape: Any, indptr: Any, idtype: str = "int32") -> AxisRef:
    """Ragged axis: under parent p the coordinates 0 .. indptr[p + 1] - indptr[p] - 1.

    shape : (length, nnz), the largest row and the sum of all rows
    indptr : handle of (parents + 1,) `idtype`
    """
    func = "dense_variable"
    length, nnz = _pair_arg(func, "shape", shape, "(length, nnz)")
    _idtype_arg(func, idtype)
    return AxisRef(
        kind=func,
        parent=_axis_arg(func, "parent", parent),
        length=_int_arg(func, "length", length, idtype),
        nnz=_int_arg(func, "nnz", nnz, idtype),
        indptr=_handle_arg(func, "indptr", indptr),
        idtype=idtype,
    )


def sparse_fixed(
    parent: Any, shape: Any, indices: Any, idtype: str = "int32", unique: bool = True
) -> AxisRef:
    """Axis with the same number of stored coordinates under each parent (ELL).

    shape : (length, nnz_cols)
    indices : handle of (parents * nnz_cols,) `idtype`; a negative index marks a padded slot
    unique : False when one parent may store a coordinate twice
    """
    func = "sparse_fixed"
    length, nnz_cols = _pair_arg(func, "shape", shape, "(length, nnz_cols)")
    _idtype_arg(func, idtype)
    return AxisRef(
        kind=func,
        parent=_axis_arg(func, "parent", parent),
        length=_int_arg(func, "length", length, idtype),
        nnz_cols=_int_arg(func, "nnz_cols", nnz_cols, idtype),
        indices=_handle_arg(func, "indices", indices),
        idtype=idtype,
        unique=unique,
    )


def sparse_variable(
    parent: Any, shape: Any, indptr_indices: Any, idtype: str = "int32", unique: bool = True
) -> AxisRef:
    """Compressed axis: parent p stores indices[indptr[p] : indptr[p + 1]] (CSR, CSF).

    shape : (length, nnz)
    indptr_indices : handles of (parents + 1,) and (nnz,) `idtype`
    unique : False when one parent may store a coordinate twice (the rows of COO)
    """
    func = "sparse_variable"
    length, nnz = _pair_arg(func, "shape", shape, "(length, nnz)")
    indptr, indices = _pair_arg(func, "indptr_indices", indptr_indices, "(indptr, indices)")
    _idtype_arg(func, idtype)
    return AxisRef(
        kind=func,
        parent=_axis_arg(func, "parent", parent),
        length=_int_arg(func, "length", length, idtype),
        nnz=_int_arg(func, "nnz", nnz, idtype),
        indptr=_handle_arg(func, "indptr", indptr),
        indices=_handle_arg(func, "indices", indices),
        idtype=idtype,
        unique=unique,
    )


def fuse(*axes: Any) -> GroupRef:
    """Iterate several axes as one loop over their joint positions (section 3.2.2)."""
    if len(axes) == 1 and isinstance(axes[0], tuple | list):
        axes = tuple(axes[0])
    if len(axes) < 2:
        raise IllFormedError(f"fuse: expected at least two axes, got {len(axes)}")
    return GroupRef(FusedAxis(axes=[_axis_arg("fuse", "axes", a) for a in axes]))


def attach(axis: Any, to: Any) -> GroupRef:
    """Iterate `axis` under the parent whose position is the coordinate of axis `to`.

    In a hypergraph, `attach(EV, VE)` visits the vertices of each hyperedge that VE has reached.
    """
    return GroupRef(
        AttachedAxis(axis=_axis_arg("attach", "axis", axis), to=_axis_arg("attach", "to", to))
    )


def _buffer_var(func: str, shape: Any, dtype: Any, scope: str) -> Any:
    import tvm_ffi

    try:
        known = isinstance(dtype, str) and tvm_ffi.dtype(dtype) is not None
    except (ValueError, TypeError, RuntimeError):
        known = False
    if not known:
        raise IllFormedError(f"{func}: argument 'dtype': unknown dtype {_describe(dtype)}")
    return buffer_var(shape, dtype, "buffer", scope)


def _axes_arg(func: str, axes: Any) -> list[Axis]:
    if isinstance(axes, AxisRef):
        axes = (axes,)
    if not isinstance(axes, tuple | list):
        raise IllFormedError(f"{func}: argument 'axes': expected axes, got {_describe(axes)}")
    return [_axis_arg(func, "axes", a) for a in axes]


def match_sparse_buffer(
    handle: Any, axes: Any, dtype: str = "float32", scope: str = "global"
) -> Any:
    """Bind a parameter to a sparse buffer over `axes`; returns what the body indexes."""
    func = "match_sparse_buffer"
    nodes = _axes_arg(func, axes)
    _handle_arg(func, "handle", handle)
    var = _buffer_var(func, [a.length for a in nodes], dtype, scope)
    context(func).buffers.append(SparseBuffer(var=var, axes=nodes, handle=handle))
    return var


def alloc_sparse_buffer(axes: Any, dtype: str = "float32", scope: str = "global") -> Any:
    """A sparse buffer over `axes` that lives inside the function."""
    func = "alloc_sparse_buffer"
    nodes = _axes_arg(func, axes)
    var = _buffer_var(func, [a.length for a in nodes], dtype, scope)
    context(func).buffers.append(SparseBuffer(var=var, axes=nodes, handle=None))
    return var


def match_buffer(
    handle: Any, shape: Any, dtype: str = "float32", scope: str = "global", **options: Any
) -> Any:
    """Bind a parameter to an ordinary dense buffer (no axes, indexed as TIR does).

    options : TIR's further ones, in the PrimFuncs of a mixed module only
    """
    if not _stack():  # in a PrimFunc of a mixed module
        return tir_builder.match_buffer(handle, shape, dtype, scope=scope, **options)
    func = "match_buffer"
    if options:
        raise IllFormedError(f"{func}: expected no options but dtype and scope, got {[*options]}")
    _handle_arg(func, "handle", handle)
    shape = shape if isinstance(shape, tuple | list) else (shape,)
    var = _buffer_var(func, shape, dtype, scope)
    context(func).buffers.append(SparseBuffer(var=var, axes=None, handle=handle))
    return var


def func_attr(attrs: dict[str, Any]) -> None:
    """Attributes of the function, as `T.func_attr` of TIR."""
    if not _stack():  # in a PrimFunc of a mixed module
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

    axes : axes in visiting order, parents before children; may hold `T.fuse` and `T.attach`
    kinds : "S" or "R" for each coordinate
    name : what schedules call the iteration
    """
    nodes: list[Any] = []
    for a in axes if isinstance(axes, tuple | list) else [axes]:
        if isinstance(a, GroupRef):
            nodes.append(a.node())
        else:
            nodes.append(_axis_arg("sp_iter", "axes", a))
    count = len(flat_axes(nodes))
    if not isinstance(kinds, str) or len(kinds) != count or set(kinds) - set("SR"):
        raise IllFormedError(
            f"sp_iter '{name}': argument 'kinds': expected {count} letters S or R, one for each of "
            f"{[a.name for a in flat_axes(nodes)]}, got {_describe(kinds)}"
        )
    if not isinstance(name, str) or not name:
        raise IllFormedError(
            f"sp_iter: argument 'name': expected a non-empty string, got {_describe(name)}"
        )
    return _SpIter(nodes, kinds, name, current_span())


def _current_iteration(what: str) -> _SpIter:
    iterations = context(what).iterations
    if not iterations:
        raise IllFormedError(f"{what} is outside a sparse iteration")
    return iterations[-1]


def init() -> Any:
    """`with T.init():` what every coordinate of the spatial axes starts from."""
    return _init() if _stack() else tir_builder.init()


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
