"""Stage-I nodes: axes, sparse buffers, sparse iterations, sparse functions.

Each node is a frozen tvm-ffi class, so TVM's structural equality and hashing (under renaming),
JSON round trip, printing and traversal work on it. Bodies are ordinary TIR statements; a
:class:`SparseIteration` is a statement among them, and sparse buffers are read and written through
TIR buffers whose shape is the coordinate space. (SparseTIR, section 3.1.)

Axes are identified by name within a function: names are unique there, and survive copies.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm_ffi import Object
from tvm_ffi.dataclasses import field, py_class

from sparsetir.sparse_ir.traversal import ADVANCE, collect, map_expr, replace_variables, visit_nodes

if TYPE_CHECKING:  # TVM has no type annotations; subclasses of its classes get some here

    @py_class("tirx.Stmt", frozen=True)
    class Stmt(Object):  # noqa: D101
        span: Any

        def __getattr__(self, name: str) -> Any: ...

    @py_class("ir.BaseFunc", frozen=True)
    class BaseFunc(Object):  # noqa: D101
        span: Any
        ty: Any
        attrs: Any

        def __getattr__(self, name: str) -> Any: ...

else:
    Stmt, BaseFunc = tirx.Stmt, ir.BaseFunc

STORED_KINDS = ("dense_fixed", "dense_variable", "sparse_fixed", "sparse_variable")
MERGED_KINDS = ("union", "intersect", "difference")
AXIS_KINDS = (*STORED_KINDS, *MERGED_KINDS)


@py_class("sparsetir.Axis", frozen=True, structural_eq="dag")
class Axis(Object):
    """One level of a sparse iteration space.

    Attributes
    ----------
    name : str
        Unique within its function.
    kind : {"dense_fixed", "dense_variable", "sparse_fixed", "sparse_variable"}
        Which arrays it stores. "union", "intersect" and "difference" store nothing: they
        co-iterate other axes.
    length : expression of type `idtype`
        Number of coordinates.
    parent : Axis or None
        The axis that this one depends on; None for "dense_fixed". For a merged axis the common
        parent of its axes, or the merged axis of their parents, or else the parent of the first.
    nnz : expression or None
        Stored elements summed over all parents; None for the fixed kinds.
    nnz_cols : expression or None
        Stored elements per parent of a "sparse_fixed" axis, else None. A negative index marks a
        padded slot, which no iteration visits.
    indptr : tirx.Var or None
        Handle of the (parents + 1,) offsets; None for the fixed kinds.
    indices : tirx.Var or None
        Handle of the (nnz,) coordinates; None for the dense kinds.
    idtype : {"int32", "int64"}
        The type of coordinates, `indptr` and `indices`.
    unique : bool
        Whether the coordinates under one parent differ (False only for COO-like rows).
    of : list of Axis and AttachedAxis, or None
        The axes that a merged axis co-iterates, possibly merged; else None. It has no arrays:
        buffers lie over these axes, and its coordinate indexes them.

    Notes
    -----
    SparseTIR, section 3.1. Merged axes: Senanayake et al., section 4; Kjolstad et al., "The tensor
    algebra compiler" (merge lattices).
    """

    name: str = field(structural_eq="ignore")
    kind: str
    length: Any
    parent: Any = None
    nnz: Any = None
    nnz_cols: Any = None
    indptr: Any = None
    indices: Any = None
    idtype: str = "int32"
    unique: bool = True
    of: Any = None

    @property
    def is_merged(self) -> bool:
        """Whether it visits the coordinates of several axes at once, and stores none."""
        return self.of is not None

    @property
    def merged(self) -> list[Any]:
        """The axes that a merged axis co-iterates, directly or through nested ones, each once."""
        inside = [x for a in self.of or () for x in (a, *(a.merged if isinstance(a, Axis) else ()))]
        return list({x.name: x for x in inside}.values())

    @property
    def members(self) -> list[Axis]:
        """The plain axes that a merged axis co-iterates, nested ones flattened; else none."""
        return [a for a in flat_axes(self.merged) if not a.is_merged]

    def stores(self, by: Callable[[str], Any], any_: Any, all_: Any, no: Any) -> Any:
        """Whether a merged axis has a coordinate, given which of its members store it.

        Parameters
        ----------
        by : callable
            Returns whether the member of a name stores the coordinate.
        any_, all_, no : callable
            The disjunction and conjunction of such values, and the negation of one.

        Returns
        -------
        bool or expression
            Of the type that `by` and the others return.
        """
        if not self.is_merged:
            return by(self.name)
        first, *rest = (a.stores(by, any_, all_, no) for a in flat_axes(self.of))
        if self.kind == "difference":
            return all_(first, *map(no, rest))
        return (any_ if self.kind == "union" else all_)(first, *rest)

    @property
    def is_sparse(self) -> bool:
        """Whether coordinates are read from `indices`."""
        return self.kind.startswith("sparse")

    @property
    def is_variable(self) -> bool:
        """Whether the number of elements under a parent is read from `indptr`."""
        return self.kind.endswith("variable")

    def ancestors(self) -> list[Axis]:
        """The axes from the root down to this one, both included."""
        return [*(self.parent.ancestors() if self.parent is not None else []), self]

    @property
    def root(self) -> Axis:
        """The root of this axis's tree."""
        return self if self.parent is None else self.parent.root


@py_class("sparsetir.FusedAxis", frozen=True, structural_eq="tree")
class FusedAxis(Object):
    """Several axes iterated as one loop over their joint positions (`T.fuse`).

    Attributes
    ----------
    axes : list of Axis
        In their order.
    """

    axes: list[Axis]

    @property
    def name(self) -> str:
        """The names of the fused axes, joined."""
        return "_".join(a.name for a in self.axes)


@py_class("sparsetir.AttachedAxis", frozen=True, structural_eq="tree")
class AttachedAxis(Object):
    """An axis whose parent position is the coordinate of another axis (`T.attach`).

    Attributes
    ----------
    axis : Axis
        The axis.
    to : Axis
        The axis whose coordinate selects the parent position.
    """

    axis: Axis
    to: Axis

    @property
    def name(self) -> str:
        """The name of the attached axis."""
        return self.axis.name


@py_class("sparsetir.PartAxis", frozen=True, structural_eq="tree")
class PartAxis(Object):
    """An axis visited in parts: the storage positions given by another axis (`T.part`).

    Attributes
    ----------
    axis : Axis, FusedAxis or AttachedAxis
        Coordinates remain its own, so accesses of buffers over it and axes under it do not change.
    by : Axis
        A "dense_variable" axis whose positions are those of `axis`: the part of each parent of `by`
        is `indptr[p] .. indptr[p + 1] - 1`. `by` itself is not iterated.

    Notes
    -----
    The position on a root axis is its coordinate; on another axis it is the index in its storage, 0
    .. nnz - 1, so that parts cut rows into pieces; on fused axes it is that of the last. Rows 0 to
    m in blocks, and the stored elements of each row in `parts` parts::

        O = T.dense_fixed(blocks)
        IB = T.dense_variable(O, (m, m), block_ptr)             # T.part(I, IB) under O
        Q = T.sparse_fixed(I, (parts, parts), part_of)          # 0 .. parts - 1 in each row
        JQ = T.dense_variable(Q, (n, nnz), part_ptr)            # T.part(J, JQ) under I and Q

    Q may also be dense_variable(I, (parts, m * parts), ...), which only needs an indptr; as a
    sparse_fixed axis its loop has equal extents for all rows, and stage II may interchange the two.

    The parts partition the positions: `indptr` is non-decreasing from 0 to their number, which the
    check of structures ensures. So different parts have disjoint visits. That a part of J lies in
    the row above it is trusted, as are all claims of an axis about its parent.
    """

    axis: Any
    by: Axis

    @property
    def name(self) -> str:
        """The name of the axis that is visited."""
        return self.axis.name


@py_class("sparsetir.SparseBuffer", frozen=True, structural_eq="tree")
class SparseBuffer(Object):
    """Values over a list of axes.

    Attributes
    ----------
    var : tirx.Buffer
        The TIR buffer variable that bodies index by coordinates.
    axes : list of Axis or None
        Parents before children; None for a plain dense TIR buffer.
    handle : tirx.Var or None
        The parameter it is bound to; None for a buffer allocated in the function.
    """

    var: Any = field(structural_eq="def")
    axes: list[Axis] | None
    handle: Any = None

    @property
    def name(self) -> str:
        """The buffer's name."""
        return self.var.name

    @property
    def dtype(self) -> str:
        """The type of its values."""
        return str(self.var.ty.dtype)


@py_class("sparsetir.SparseIteration", frozen=True, structural_eq="tree")
class SparseIteration(Stmt):
    """`with T.sp_iter(axes, kinds, name) as vars: ...`

    Attributes
    ----------
    axes : list of Axis, FusedAxis, AttachedAxis or PartAxis
        In the order they are visited.
    kinds : list of {"S", "R"}
        "S" or "R", spatial or reduction, for each coordinate.
    name : str
        Unique within its function.
    vars : list of tirx.Var
        One coordinate variable per axis, also for each of the fused ones.
    init : statement or None
        Run for every coordinate of the spatial axes.
    body : statement
        Run for every coordinate.
    annotations : mapping
        Set by :meth:`Schedule.annotate`.
    """

    axes: list[Any]
    kinds: str
    name: str
    vars: list[Any] = field(structural_eq="def")
    init: Any
    body: Any
    annotations: dict[str, Any]

    def axis_of(self) -> list[tuple[Axis, Any, str]]:
        """(axis, coordinate variable, kind) for each coordinate."""
        return list(zip(flat_axes(self.axes), self.vars, self.kinds, strict=True))

    def entries(self) -> list[tuple[Any, int, int]]:
        """(entry of `axes`, first, end) of the coordinates of each loop."""
        out, end = list[tuple[Any, int, int]](), 0
        for node in self.axes:
            at, end = end, end + (1 if isinstance(node, Axis) else len(flat_axes([node])))
            out.append((node, at, end))
        return out


@py_class("sparsetir.SparseFunc", frozen=True, structural_eq="tree")
class SparseFunc(BaseFunc):
    """A stage-I function: parameters, axes, buffers and a body with sparse iterations.

    Attributes
    ----------
    attrs : tvm.ir.DictAttrs
        Attributes, including the global symbol.
    params : list of tirx.Var
        Parameters: handles of arrays, and scalars.
    axes : list of Axis
        Parents before children.
    buffers : list of SparseBuffer
        Those of parameters, and those that it allocates.
    body : statement
        Iterations, and the statements around them.
    """

    params: list[Any] = field(structural_eq="def")
    axes: list[Axis]
    buffers: list[SparseBuffer]
    body: Any

    @property
    def name(self) -> str:
        """The function's global symbol."""
        return str(self.attrs["global_symbol"]) if "global_symbol" in self.attrs else "main"

    def axis(self, name: str) -> Axis:
        """The axis of this name.

        Parameters
        ----------
        name : str
            Name of the axis.

        Returns
        -------
        Axis

        Raises
        ------
        KeyError
            If there is none; the message lists the names.
        """
        return _named(declared(self).axes, name, "axis")

    def buffer(self, name: str) -> SparseBuffer:
        """The buffer of this name.

        Parameters
        ----------
        name : str
            Name of the buffer.

        Returns
        -------
        SparseBuffer

        Raises
        ------
        KeyError
            If there is none; the message lists the names.
        """
        return _named(declared(self).buffers, name, "buffer")

    def replace(self, **changes: Any) -> SparseFunc:
        """A copy with some fields replaced.

        Parameters
        ----------
        **changes
            The new fields, by name.

        Returns
        -------
        SparseFunc
        """
        names = ("span", "ty", "attrs", "params", "axes", "buffers", "body")
        return SparseFunc(**{n: changes.get(n, getattr(self, n)) for n in names})

    def script(self, **_: Any) -> str:
        """The function as text that :func:`sparsetir.from_source` parses back."""
        from sparsetir.sparse_ir.printer import script

        return script(self)

    def show(self, **_: Any) -> None:
        """Print :meth:`script`."""
        print(self.script())

    def __str__(self) -> str:
        return self.script()


class Names(NamedTuple):
    """A function's declarations by name, and the handles of its parameters and buffers."""

    params: dict[str, Any]
    axes: dict[str, Axis]
    buffers: dict[str, SparseBuffer]
    handles: set[int]

    def has_param(self, var: Any) -> bool:
        """Whether a variable is a parameter."""
        param = self.params.get(str(var.name))
        return param is not None and param.same_as(var)

    def declares(self, var: Any) -> bool:
        """Whether a variable is a parameter or a buffer's."""
        return var.__chandle__() in self.handles

    def buffer_of(self, var: Any) -> SparseBuffer | None:
        """The buffer of this variable; None for one defined by a statement."""
        buffer = self.buffers.get(str(var.name))
        return buffer if buffer is not None and buffer.var.same_as(var) else None


_LOCK = threading.Lock()
_DECLARED: dict[Any, Names] = {}  # of the functions queried last


def declared(func: SparseFunc) -> Names:
    """A function's declarations, read once: iterating over TVM's lists is slow."""
    names = _DECLARED.get(func)
    if names is not None:
        return names
    return _keep(func, _by_name(func.params, func.axes, func.buffers))


def declare_more(
    func: SparseFunc, before: SparseFunc, params: Any, axes: Any, buffers: Any
) -> None:
    """Record the declarations of a function that extends those of another one."""
    more = _by_name(params, axes, buffers)
    pairs: Any = zip(declared(before), more, strict=True)
    _keep(func, Names(*(old | new for old, new in pairs)))


def _by_name(params: Any, axes: Any, buffers: Any) -> Names:
    tables: list[Any] = [{str(x.name): x for x in each} for each in (params, axes, buffers)]
    variables = *tables[0].values(), *(b.var for b in tables[2].values())
    tables.append({v.__chandle__() for v in variables})
    return Names(*tables)


def _keep(func: SparseFunc, names: Names) -> Names:
    with _LOCK:
        while len(_DECLARED) >= 4:
            del _DECLARED[next(iter(_DECLARED))]
        _DECLARED[func] = names
    return names


def make_func(
    name: str | None,
    params: list[Any],
    axes: list[Axis],
    buffers: list[SparseBuffer],
    body: Any,
    attrs: dict[str, Any] | None = None,
    span: Any = None,
) -> SparseFunc:
    """Build a :class:`SparseFunc`; `name` None makes it private (no global symbol)."""
    all_attrs = {**({"global_symbol": name} if name else {}), **(attrs or {})}
    return SparseFunc(
        span=span,
        ty=ir.Type.missing(),
        attrs=tvm.ir.make_node("ir.DictAttrs", **all_attrs),
        params=params,
        axes=axes,
        buffers=buffers,
        body=body,
    )


def buffer_var(shape: Any, dtype: str, name: str, scope: str = "global", align: int = -1) -> Any:
    """A TIR buffer variable without a tile layout, as schedulable TIR requires."""
    return tirx.decl_buffer(shape, dtype, name=name, scope=scope, data_alignment=align, layout=None)


def flat_axes(axes: Any) -> list[Axis]:
    """The plain axes of an iteration's list, with fused, attached and part axes flattened."""
    out: list[Axis] = []
    for node in axes:
        a = visited_node(node)
        if isinstance(a, Axis):  # the common case first: a failing isinstance of TVM is slow
            out.append(a)
        elif isinstance(a, FusedAxis):
            out.extend(a.axes)
        else:
            out.append(a.axis)
    return out


def merged_parent(axes: Sequence[Any], known: Sequence[Axis]) -> Axis | None:
    """The parent of an axis that merges these: their parent, or the merged axis of their parents.

    axes : those that are attached elsewhere are ignored
    known : merged axes declared so far

    Otherwise the parent of the first, if all are visited outside; None if all are roots.
    """
    inside = [x for a in axes for x in ((a.merged if isinstance(a, Axis) else []) or [a])]
    above = [a.parent for a in inside if isinstance(a, Axis) and not a.is_merged and a.parent]
    parents = {a.name for a in above}
    together = (m for m in known if {a.name for a in m.members} >= parents)
    return next(together, above[0]) if len(parents) > 1 else next(iter(above), None)


def visited_axes(axes: Any) -> list[Axis]:
    """The axes whose positions an iteration visits: plain axes, and those in merged ones."""
    return [a for axis in flat_axes(axes) for a in (axis, *flat_axes(axis.merged))]


def attached_axes(axes: Any) -> list[AttachedAxis]:
    """The attached axes in an iteration's list: entries, and what merged axes co-iterate."""
    nodes = [visited_node(a) for a in axes]
    inside = [x for a in nodes if isinstance(a, Axis) for x in a.merged]
    return [a for a in [*nodes, *inside] if isinstance(a, AttachedAxis)]


def visited_node(node: Any) -> Any:
    """The axis that an entry of an iteration's list visits; for a part, the axis that is cut."""
    return node.axis if not isinstance(node, Axis) and isinstance(node, PartAxis) else node


def walk(node: Any, callback: Callable[[Any], None], *kinds: Any) -> None:
    """Call `callback` on every node of a TIR or stage-I tree, parents first.

    kinds : classes of nodes to call it on; all by default, which is slower
    """

    def visit(value: Any) -> Any:
        callback(value)
        return ADVANCE

    visit_nodes(node, [(kind, visit) for kind in kinds or (Object,)])


def nodes_of(kind: Any, *trees: Any, nested: bool = True) -> list[Any]:
    """The nodes of a class in TIR or stage-I trees, parents first; None counts as an empty tree.

    kind : a class, or a tuple of classes
    nested : whether to descend into matching nodes

    Faster than :func:`walk`, since other nodes cause no call.
    """
    return collect(kind if isinstance(kind, tuple) else (kind,), trees, nested)


def variables_of(*trees: Any) -> list[Any]:
    """The distinct variables, including buffers, in TIR or stage-I trees, in order.

    Sets and dicts compare variables by TVM's operators, which is ten times slower.
    """
    return list({var.__chandle__(): var for var in nodes_of(ir.Var, *trees)}.values())


def substitute(node: Any, mapping: dict[Any, Any]) -> Any:
    """Replace variables in a TIR or stage-I tree."""
    if not mapping:
        return node
    by_handle = {var.__chandle__(): new for var, new in mapping.items()}  # see variables_of
    return replace_variables(node, by_handle)


def fresh_definitions(*trees: Any) -> dict[Any, Any]:
    """New variables for those that statements define, so that a copy may be in the same function.

    None counts as an empty tree.
    """
    fresh: dict[Any, Any] = {}
    for node in nodes_of((tirx.AllocBuffer, tirx.Bind, tirx.Let, tirx.For), *trees):
        if isinstance(node, tirx.AllocBuffer):
            ty, name = node.buffer.ty, node.buffer.name
            alike = str(ty.dtype), name, ty.storage_scope, ty.data_alignment
            fresh[node.buffer] = buffer_var(ty.shape, *alike)
        else:
            var = node.loop_var if isinstance(node, tirx.For) else node.var
            fresh[var] = tirx.Var(var.name, var.ty.dtype)
    return fresh


def stores_of(*statements: Any) -> list[Any]:
    """The stores in some statements; None counts as an empty one."""
    return nodes_of(tirx.BufferStore, *statements)


def loads_of(tree: Any, buffer: Any) -> list[Any]:
    """The loads of a buffer in a statement or expression."""
    return [load for load in nodes_of(ir.TensorLoad, tree) if load.source.same_as(buffer)]


def accesses_of(tree: Any, buffer: Any) -> list[Any]:
    """The loads and stores of a buffer in a statement; None counts as an empty one."""
    stores = [s for s in stores_of(tree) if s.buffer.same_as(buffer)]
    return [*loads_of(tree, buffer), *stores]


def same_indices(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two lists of indices are structurally equal."""
    return len(a) == len(b) and all(
        x is y or tvm_ffi.structural_equal(x, y) for x, y in zip(a, b, strict=True)
    )


def is_among(expr: Any, others: Iterable[Any]) -> bool:
    """Whether an expression equals one of several."""
    return any(tvm_ffi.structural_equal(expr, other) for other in others)


def distinct(exprs: Iterable[Any]) -> list[Any]:
    """Expressions without repetitions."""
    return [key.key for key in dict.fromkeys(map(tvm_ffi.StructuralKey, exprs))]


@functools.lru_cache(maxsize=4)
def sparse_iterations(func: SparseFunc) -> tuple[SparseIteration, ...]:
    """The sparse iterations of a function, outer ones before the ones nested in them."""
    return tuple(nodes_of(SparseIteration, func.body))


@functools.lru_cache(maxsize=1024)
def names_inside(it: SparseIteration) -> frozenset[str]:
    """The names of the iterations nested in an iteration."""
    return frozenset(str(n.name) for n in nodes_of(SparseIteration, it.init, it.body))


def iterations_around(func: SparseFunc, it: SparseIteration) -> list[SparseIteration]:
    """The iterations around an iteration, outer ones first."""
    return [other for other in sparse_iterations(func) if it.name in names_inside(other)]


def trip_counts(axes: Sequence[Axis]) -> list[Any]:
    """Factors of the trip count of loops over axes; of those under each other, of the lowest."""
    above = {x.name for axis in axes if axis.is_variable for x in axis.ancestors()[:-1]}
    sizes = [(axis.nnz, axis.nnz_cols, axis.length) for axis in axes if axis.name not in above]
    return [next(size for size in of_axis if size is not None) for of_axis in sizes]


def entry_name(node: Any) -> str:
    """The name of an entry in an iteration's list of axes: those of its axes joined by `_`."""
    return "_".join(axis.name for axis in flat_axes([node]))


def _named(items: dict[str, Any], name: str, what: str) -> Any:
    if name not in items:
        raise KeyError(f"no {what} '{name}'; there are {[*items]}")
    return items[name]


def axis_with(axis: Axis, **fields: Any) -> Axis:
    """An axis with some fields changed."""
    names = ("name", "kind", "length", "parent", "nnz", "nnz_cols", "indptr", "indices", "idtype",
             "unique", "of")  # fmt: skip
    return Axis(**{n: fields.get(n, getattr(axis, n)) for n in names})


def entry_text(entry: Any, text: Callable[[Axis], str] = lambda axis: axis.name) -> str:
    """An entry of an iteration's list as in a script, given the text of an axis."""
    if isinstance(entry, FusedAxis):
        return f"T.fuse({', '.join(map(text, entry.axes))})"
    if isinstance(entry, PartAxis):
        return f"T.part({entry_text(entry.axis, text)}, {text(entry.by)})"
    if isinstance(entry, AttachedAxis):
        return f"T.attach({text(entry.axis)}, {text(entry.to)})"
    return text(entry)


def iteration_with(it: SparseIteration, **fields: Any) -> Any:
    """An iteration with some fields changed."""
    names = ("span", "axes", "kinds", "name", "vars", "init", "body", "annotations")
    return SparseIteration(**{n: fields.get(n, getattr(it, n)) for n in names})


def entry_with(entry: Any, axes: dict[str, Axis]) -> Any:
    """An entry of an iteration's list, or of a merged axis, with other axes, by name."""
    if isinstance(entry, Axis):
        return axes[entry.name]
    if isinstance(entry, FusedAxis):
        return FusedAxis(axes=[axes[a.name] for a in entry.axes])
    if isinstance(entry, PartAxis):
        return PartAxis(axis=entry_with(entry.axis, axes), by=axes[entry.by.name])
    return AttachedAxis(axis=axes[entry.axis.name], to=axes[entry.to.name])


def without_iteration(body: Any, name: str) -> Any:
    """A body, a sequence of statements, without the iteration of that name."""

    def visit(node: Any) -> Any:
        kept = [s for s in node.seq if not (isinstance(s, SparseIteration) and s.name == name)]
        if len(kept) == 1:
            return kept[0]
        return node if len(kept) == len(node.seq) else tirx.SeqStmt(kept)

    return map_expr(body, [(tirx.SeqStmt, visit)])
