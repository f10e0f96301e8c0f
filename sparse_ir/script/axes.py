"""Axes in a script: their declarations and arguments."""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from sparsetir.sparse_ir.errors import IllFormedError, describe
from sparsetir.sparse_ir.names import numbered
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    FusedAxis,
    PartAxis,
    flat_axes,
    merged_parent,
)
from sparsetir.sparse_ir.script.context import context, current_span

__all__ = [
    "attach",
    "dense_fixed",
    "dense_variable",
    "difference",
    "fuse",
    "intersect",
    "part",
    "sparse_fixed",
    "sparse_variable",
    "union",
]

INDEX_DTYPES = ("int32", "int64")


class AxisRef:
    """An axis while its function is parsed; it becomes a node once it has a name.

    wish : its name if it is never assigned; by default derived from its number
    """

    def __init__(self, wish: str | None = None, **fields: Any) -> None:
        self.ctx = context("an axis")
        self.name: str | None = None
        self._wish = wish
        self._fields = fields
        self._node: Axis | None = None
        self.span = current_span()
        self.ctx.refs.append(self)

    @property
    def is_merged(self) -> bool:
        """Whether it co-iterates other axes."""
        return "of" in self._fields

    def set_name(self, name: str) -> None:
        """Give the axis the name that it is assigned to."""
        if self.name is not None:
            return
        if name in self.ctx.axis_names():
            raise IllFormedError(f"axis '{name}' is defined twice; names of axes must differ")
        self.name = name

    def node(self) -> Axis:
        """The finished axis."""
        if self._node is None:
            if self.name is None:
                wish = self._wish or f"axis_{self.ctx.refs.index(self)}"
                self.set_name(numbered(wish, self.ctx.axis_names()))
            self._node = Axis(name=str(self.name), **self._fields)
        return self._node


class GroupRef:
    """A fused, attached or part axis; it has no name of its own."""

    def __init__(self, node: FusedAxis | AttachedAxis | PartAxis) -> None:
        self.ctx = context()
        self._node = node

    def node(self) -> FusedAxis | AttachedAxis | PartAxis:
        """The finished node."""
        return self._node


def axis_arg(func: str, arg: str, value: Any) -> Axis:
    """The node of an axis of the function being parsed."""
    if not isinstance(value, AxisRef):
        raise IllFormedError(f"{func}: argument '{arg}': expected an axis, got {describe(value)}")
    if value.ctx is not context():
        raise IllFormedError(
            f"{func}: argument '{arg}': axis '{value.node().name}' belongs to another function"
        )
    return value.node()


def _int_arg(func: str, arg: str, value: Any, idtype: str) -> Any:
    if isinstance(value, bool) or not (isinstance(value, int) or ir.is_prim_expr(value)):
        raise IllFormedError(
            f"{func}: argument '{arg}': expected an integer or integer expression, "
            f"got {describe(value)}"
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
            f"{func}: argument 'idtype': expected 'int32' or 'int64', got {describe(idtype)}"
        )
    return idtype


def _pair_arg(func: str, arg: str, value: Any, meaning: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        got = f"{len(value)} items" if isinstance(value, tuple | list) else describe(value)
        raise IllFormedError(f"{func}: argument '{arg}': expected a pair {meaning}, got {got}")
    return value[0], value[1]


def handle_arg(func: str, arg: str, value: Any) -> Any:
    """A parameter of pointer type."""
    if not isinstance(value, ir.Var) or not isinstance(value.ty, ir.PointerType):
        raise IllFormedError(
            f"{func}: argument '{arg}': expected a T.handle parameter, got {describe(value)}"
        )
    return value


def dense_fixed(length: Any, idtype: str = "int32") -> AxisRef:
    """Axis of the coordinates 0 .. length - 1, all stored; it has no parent (section 3.1)."""
    _idtype_arg("dense_fixed", idtype)
    return AxisRef(
        kind="dense_fixed", length=_int_arg("dense_fixed", "length", length, idtype), idtype=idtype
    )


def dense_variable(parent: Any, shape: Any, indptr: Any, idtype: str = "int32") -> AxisRef:
    """Ragged axis: parent p has the coordinates 0 .. indptr[p + 1] - indptr[p] - 1.

    shape : (length, nnz), the length of the longest row and the sum over all rows
    indptr : handle of (parents + 1,) `idtype`
    """
    return _stored("dense_variable", parent, shape, "nnz", idtype, indptr=indptr)


def sparse_fixed(
    parent: Any, shape: Any, indices: Any, idtype: str = "int32", unique: bool = True
) -> AxisRef:
    """Axis with the same number of stored coordinates under each parent (ELL).

    shape : (length, nnz_cols)
    indices : handle of (parents * nnz_cols,) `idtype`; a negative index marks a padded slot
    unique : False if one parent may store a coordinate twice
    """
    return _stored("sparse_fixed", parent, shape, "nnz_cols", idtype, unique, indices=indices)


def sparse_variable(
    parent: Any, shape: Any, indptr_indices: Any, idtype: str = "int32", unique: bool = True
) -> AxisRef:
    """Compressed axis: parent p stores indices[indptr[p] : indptr[p + 1]] (CSR, CSF).

    shape : (length, nnz); nnz is None for a result that the program assembles, see
        :mod:`sparsetir.sparse_ir.open_axes`
    indptr_indices : handles of (parents + 1,) and (nnz,) `idtype`
    unique : False if one parent may store a coordinate twice (the rows of COO)
    """
    func = "sparse_variable"
    pair = _pair_arg(func, "indptr_indices", indptr_indices, "(indptr, indices)")
    arrays = dict(zip(("indptr", "indices"), pair, strict=True))
    return _stored(func, parent, shape, "nnz", idtype, unique, **arrays)


def _stored(
    kind: str, parent: Any, shape: Any, count: str, idtype: Any, unique: bool = True, **arrays: Any
) -> AxisRef:
    """An axis under a parent; `count` is the field of the second number of its shape."""
    length, stored = _pair_arg(kind, "shape", shape, f"(length, {count})")
    _idtype_arg(kind, idtype)
    fields: dict[str, Any] = {"parent": axis_arg(kind, "parent", parent)}
    fields["length"] = _int_arg(kind, "length", length, idtype)
    if stored is not None or kind != "sparse_variable":
        fields[count] = _int_arg(kind, count, stored, idtype)
    fields |= {name: handle_arg(kind, name, array) for name, array in arrays.items()}
    return AxisRef(kind=kind, idtype=idtype, unique=unique, **fields)


def fuse(*axes: Any) -> GroupRef:
    """Iterate several axes as one loop over their joint positions (section 3.2.2)."""
    if len(axes) == 1 and isinstance(axes[0], tuple | list):
        axes = tuple(axes[0])
    if len(axes) < 2:
        raise IllFormedError(f"fuse: expected at least two axes, got {len(axes)}")
    return GroupRef(FusedAxis(axes=[axis_arg("fuse", "axes", a) for a in axes]))


def attach(axis: Any, to: Any) -> GroupRef:
    """Iterate `axis` under the parent whose position is the coordinate of axis `to`.

    In a hypergraph, `attach(EV, VE)` visits the vertices of each hyperedge that VE has reached.
    """
    return GroupRef(
        AttachedAxis(axis=axis_arg("attach", "axis", axis), to=axis_arg("attach", "to", to))
    )


def union(*axes: Any) -> AxisRef:
    """Co-iterate axes: each coordinate that at least one of them stores, once, in order.

    axes : two or more, of one length and idtype, each with increasing coordinates under a parent or
        itself merged; parents are visited outside, unless attached: `T.attach(J2, K)`

    A buffer over any of the axes is read at the coordinate, and gives zero if its own axis does not
    store it. The sum of two matrices::

        with T.sp_iter([I, T.union(J1, J2)], "SS", "add") as [i, j]:
            C[i, j] = A[i, j] + B[i, j]

    If the parents differ, as in DCSR, the rows are merged first::

        R = T.union(I1, I2)
        with T.sp_iter([R, T.union(J1, J2)], "SS", "add") as [i, j]:
    """
    return _merged("union", "or", axes)


def intersect(*axes: Any) -> AxisRef:
    """Co-iterate axes: each coordinate that all of them store, in order.

    axes : see :func:`union`

    A product of two sparse operands stores what both store::

        with T.sp_iter([I, T.intersect(J1, J2)], "SR", "dot") as [i, j]:
            with T.init():
                C[i] = 0.0
            C[i] = C[i] + A[i, j] * B[i, j]
    """
    return _merged("intersect", "and", axes)


def difference(*axes: Any) -> AxisRef:
    """Co-iterate axes: each coordinate that only the first one stores, in order.

    axes : see :func:`union`

    Merged axes may be nested. The coordinates of exactly one of two axes, and those not in J::

        T.union(T.difference(J1, J2), T.difference(J2, J1))
        T.difference(N, J)  # N dense
    """
    return _merged("difference", "not", axes)


def _merged(func: str, joined: str, axes: tuple[Any, ...]) -> AxisRef:
    if len(axes) == 1 and isinstance(axes[0], tuple | list):
        axes = tuple(axes[0])
    nodes = [_member_arg(func, a) for a in axes]
    if len(nodes) < 2:
        raise IllFormedError(
            f"{func}: argument 'axes': expected at least two axes, got {len(axes)}"
        )
    known = [r.node() for r in context(func).refs if isinstance(r, AxisRef) and r.is_merged]
    return AxisRef(
        wish=f"_{joined}_".join(a.name for a in nodes),
        kind=func,
        parent=merged_parent(nodes, known),
        length=flat_axes(nodes)[0].length,
        idtype=flat_axes(nodes)[0].idtype,
        of=nodes,
    )


def _member_arg(func: str, value: Any) -> Axis | AttachedAxis:
    if isinstance(value, GroupRef):
        node = value.node()
        if isinstance(node, AttachedAxis):
            return node
    return axis_arg(func, "axes", value)


def part(axis: Any, by: Any) -> GroupRef:
    """Iterate `axis` in parts: at the storage positions of `by`, under a parent of `by`.

    axis : an axis, `T.fuse(...)` or `T.attach(...)`, which keeps its coordinates
    by : a dense_variable axis whose parent is iterated outside; see :class:`PartAxis`

    Rows in blocks with the offsets `block_ptr`::

        O = T.dense_fixed(blocks)
        IB = T.dense_variable(O, (m, m), block_ptr)
        with T.sp_iter([O, T.part(I, IB), J, K], "SSRS", "spmm") as [o, i, j, k]:
    """
    group = isinstance(axis, GroupRef) and not isinstance(axis.node(), PartAxis)
    node = axis.node() if group else axis_arg("part", "axis", axis)
    return GroupRef(PartAxis(axis=node, by=axis_arg("part", "by", by)))
