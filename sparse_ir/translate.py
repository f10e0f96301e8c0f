"""Coordinate translation: from coordinates to positions in every access (steps 3 and 4).

An access is rewritten dimension by dimension (SparseTIR, equations 1 to 5): the position is the
iteration's own on the axis that is iterated, the coordinate itself on a dense axis, and the result
of a search on a sparse one. Accesses that are not provably stored are guarded: a read gives zero, a
write is discarded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, sym, tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.affine import affine
from sparsetir.sparse_ir.exact import (
    SIZES,
    Integer,
    exact,
    is_choice,
    is_signed,
    most_of,
    type_bounds,
)
from sparsetir.sparse_ir.known import known
from sparsetir.sparse_ir.names import numbered
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    declared,
    distinct,
    nodes_of,
    same_indices,
    substitute,
    walk,
)
from sparsetir.sparse_ir.position_space import PositionSpace
from sparsetir.sparse_ir.promises import promises_of
from sparsetir.sparse_ir.recipes.ranges import places_in_tiles
from sparsetir.sparse_ir.rows import found_rows
from sparsetir.sparse_ir.search import find, scalar_buffer
from sparsetir.sparse_ir.speculation import any_number, lazy_rules, speculative, total_divisions
from sparsetir.sparse_ir.tir import as_dtype, conjunction, dtype_of, free_vars, is_one, zero
from sparsetir.sparse_ir.traversal import map_expr


@dataclass
class Visit:
    """An iteration's current element on an axis: position under the parent, and coordinate.

    present : for an axis in a merged one, conditions under which it stores the coordinate
    part : for an axis visited in parts, the part's offset, and the index in the part
    """

    axis: Axis
    pos: Any
    coord: Any
    parents: list[Any]
    present: list[Any] = field(default_factory=list)
    part: tuple[Any, Any] | None = None


@dataclass
class Search:
    """A search block, the local buffers that it writes (the result first), and its dependences."""

    stmt: tirx.Stmt
    locals: list[Any]
    uses: set[Any]

    @property
    def result(self) -> Any:
        """The buffer that holds the result."""
        return self.locals[0]


@dataclass(eq=False)
class Around:
    """A loop around a statement.

    var, coords : its stage-II variable, and its stage-I coordinates
    scope : the scope of its iteration
    """

    name: str
    var: Any
    coords: list[Any]
    extent: Any
    scope: Scope


@dataclass(eq=False)
class Scope:
    """Facts known inside an iteration: visited axes, coordinate variables, available searches.

    around : all loops, outer ones first
    rows : rows found here, by key
    """

    visits: dict[str, Visit] = field(default_factory=dict)
    coords: dict[Any, Any] = field(default_factory=dict)
    axis_of_var: dict[Any, Axis] = field(default_factory=dict)
    searches: list[tuple[tuple[str, list[Any]], Search]] = field(default_factory=list)
    # Searches that depend on a variable bound in the body, in front of the current statement.
    local: list[Search] | None = None
    bound_in_body: set[Any] = field(default_factory=set)
    around: list[Around] = field(default_factory=list)
    rows: list[tuple[tuple[str, list[Any]], Any]] = field(default_factory=list)

    def known(self, key: tuple[str, list[Any]]) -> Any:
        """The search with a key, made here or in an enclosing scope; None if there is none."""
        name, asked = key
        scopes = [self, *(x.scope for x in self.around)]
        for scope in scopes:
            for (other, indices), row in scope.rows:
                if name == other and same_indices(asked, indices):
                    return row
        return None

    def nested(self) -> Scope:
        """A scope inside this one, with its own list of searches."""
        known = dict(self.visits), dict(self.coords), dict(self.axis_of_var)
        return Scope(*known, bound_in_body=set(self.bound_in_body), around=list(self.around))


class Translator:
    """Rewrites the accesses of one function; `written` are the stage-I buffers that it writes."""

    def __init__(self, space: PositionSpace, written: set[Any]) -> None:
        self.space = space
        self.written = written
        self._declared = declared(space.func)
        params = self._declared.params
        self.locals: list[Any] = []
        # Lower bounds of parameters: sizes, and promises.
        sizes = (n for a in space.func.axes for n in (a.length, a.nnz) if isinstance(n, ir.Var))
        self._least = dict.fromkeys(sizes, 0)
        self._least |= {
            params[p["param"]]: p["value"]
            for p in promises_of(space.func)
            if p["kind"] in ("min", "exact")
        }
        # Parameters promised to be multiples of a number, as that number times a variable.
        self._multiples = {
            params[p["param"]]: tirx.Var(p["param"], dtype) * as_dtype(p["value"], dtype)
            for p in promises_of(space.func)
            if p["kind"] == "multiple"
            for dtype in [dtype_of(params[p["param"]])]
        }
        # Exclusive upper bounds of nonnegative values, by stage-II variable.
        names = {b.var: b.name for b in space.func.buffers}
        self._known = known(space.func)
        domains = self._known.domains.items()
        self._domains = {space.buffers[names[v]]: n for v, n in domains if v not in written}
        arrays, recipes = self._known.arrays, self._known.computed
        self._made = {space.buffers[arrays[n].name] if n in arrays else params[n] for n in recipes}
        plain = {space.buffers[b.name] for b in space.func.buffers if b.axes is None}
        self._over_axes = {*space.all_buffers()} - plain
        self._names: set[str] = {b.name for b in space.func.buffers}
        self._found = found_rows(space.func)
        self._bound: dict[Any, Integer] = {}  # the exact values of variables bound in the body
        self.rows: Callable[[SparseBuffer, Any, Scope], Any]  # set by the lowering: finds rows

    def local(self, name: str, dtype: str) -> Any:
        """A buffer for a search result, with a unique name."""
        name = numbered(name, self._names)
        self._names.add(name)
        return scalar_buffer(name, dtype)

    def made(self, stmt: tirx.Stmt, locals_: list[Any], uses: set[Any]) -> Search:
        """Register a search block."""
        self.locals.extend(locals_)
        return Search(stmt, locals_, uses)

    def expr(self, expr: Any, scope: Scope) -> Any:
        """An expression of the body in position space."""
        return self._coordinates(self._loads(expr, scope), scope)

    def store(self, stmt: Any, scope: Scope) -> tirx.Stmt:
        """A store of the body in position space."""
        buf = self._declared.buffer_of(stmt.buffer)
        value = self._loads(stmt.value, scope)
        if is_signed(value):
            # The stored value wraps. Code generators assume that arithmetic does not overflow, so a
            # guard of `C[t[0]]` could otherwise see another number than the access.
            whole = self._exact(value, scope).expr
            if not whole.same_as(value) and stmt.buffer in self._indices():
                value = as_dtype(whole, dtype_of(value))
        value = self._coordinates(value, scope)
        if buf is None:
            index = [self.expr(i, scope) for i in stmt.indices]
            return tirx.BufferStore(stmt.buffer, value, index, span=stmt.span)
        index, guards = self._access(buf, [self._loads(i, scope) for i in stmt.indices], scope)
        index = [self._coordinates(i, scope) for i in index]
        buffer = self.space.buffers[buf.name]
        if not guards:
            return tirx.BufferStore(buffer, value, index, span=stmt.span)
        stored = self._coordinates(conjunction(guards), scope)

        def read(call: Any) -> Any:
            """Take the value read if `stored`, which is already known to hold."""
            taken = is_choice(call) and tvm_ffi.structural_equal(call.args[0], stored)
            return call.args[1] if taken else call

        out = tirx.BufferStore(buffer, map_expr(value, [(ir.Call, read)]), index, span=stmt.span)
        return tirx.IfThenElse(stored, out, None, stmt.span)

    def _loads(self, expr: Any, scope: Scope) -> Any:
        """Translate the loads, but leave coordinate variables unchanged."""

        def load(node: Any) -> Any:
            buf = self._declared.buffer_of(node.source)
            if buf is None:
                return node
            row = self._place(buf, node, scope)
            if row is None:
                row = self._row(buf, node, scope)
            if row is not None:
                return row
            index, guards = self._access(buf, list(node.indices), scope)
            value = tirx.BufferLoad(self.space.buffers[buf.name], index)
            if not guards:
                return value
            return tirx.if_then_else(conjunction(guards), value, zero(buf.dtype))

        def ahead(divisor: Any) -> tuple[int, int]:
            return self._exact(divisor, scope)[1:]

        def asked(divisor: Any) -> tuple[int, int]:
            return (1, SIZES) if self._is_size(divisor) else ahead(divisor)

        lazy = lazy_rules(self._unguarded, ahead)
        return map_expr(expr, [(ir.TensorLoad, load), *total_divisions(asked), *lazy])

    def _sizes(self, divisor: Any) -> tuple[int, int]:
        """Bounds of a divisor in position space, where an axis may be empty."""
        return (0, SIZES) if self._is_size(divisor) else any_number(divisor)

    def _is_size(self, expr: Any) -> bool:
        """Whether an expression is a size or a computed parameter."""
        return isinstance(expr, ir.Var) and (expr in self._least or expr in self._made)

    def _unguarded(self, load: Any) -> bool:
        """Whether a load is of a plain array, at an index without known bounds."""
        if load.source in self._over_axes:
            return False
        return not all(
            isinstance(i, tirx.IntImm) and isinstance(n, tirx.IntImm) and 0 <= int(i) < int(n)
            for i, n in zip(load.indices, load.source.ty.shape, strict=True)
        )

    def _place(self, buf: SparseBuffer, load: Any, scope: Scope) -> Any:
        """The index of a row in its part, for a load of such indices in a visited part."""
        how = {} if buf.handle is None else self._known.computed.get(str(buf.handle.name), {})
        if how.get("recipe") != places_in_tiles.__name__:
            return None
        part, length = None, self._domains.get(self.space.buffers[buf.name])
        for axis, index in zip(buf.axes or (), load.indices, strict=True):
            visit = scope.visits.get(axis.name)
            if visit is None or not visit.coord.same_as(scope.coords.get(index)):
                return None
            part = visit.part
        if part is None or length is None or how["starts"] != f"${part[0].name}":
            return None
        place = part[1]
        scope.axis_of_var[place] = Axis(buf.name, "dense_fixed", length, idtype=dtype_of(place))
        self._made.add(place)
        return place

    def _row(self, buf: SparseBuffer, load: Any, scope: Scope) -> Any:
        """The row that a search finds in place of a load; None for other loads."""
        if buf.name not in self._found:
            return None
        row = self.rows(buf, self._coordinates(load.indices[0], scope), scope)
        length = self._domains.get(self.space.buffers[buf.name])
        if length is not None:
            self._domains[row.source] = length
            self._made.add(row.source)
        return row

    def _coordinates(self, expr: Any, scope: Scope) -> Any:
        if not scope.coords or isinstance(expr, int):
            return expr
        return substitute(expr, scope.coords)

    def _access(
        self, buf: SparseBuffer, index: list[Any], scope: Scope
    ) -> tuple[list[Any], list[Any]]:
        """Positions of an access, and the conditions under which they are stored."""
        index = [_folded(i) for i in index]
        if buf.axes is None:
            return index, []
        positions: list[Any] = []
        by_axis: dict[str, Any] = {}
        guards: list[Any] = []
        for axis, coord in zip(buf.axes, index, strict=True):
            parents = [by_axis[a.name] for a in axis.ancestors()[:-1]]
            inside = (buf.name, axis.name) in self._known.inside
            pos, guard = self._position(axis, coord, parents, guards, scope, inside)
            by_axis[axis.name] = pos
            positions.append(pos)
            guards.extend(guard)
        return positions, guards

    def _position(
        self,
        axis: Axis,
        coord: Any,
        parents: list[Any],
        guards: list[Any],
        scope: Scope,
        inside: bool,
    ) -> tuple[Any, list[Any]]:
        """The position of a coordinate, and guards unless it is known to be `inside`."""
        visited = scope.axis_of_var.get(coord) if isinstance(coord, ir.Var) else None
        for one in () if visited is None else (visited, *visited.members):
            if self._same_storage(one, axis):
                visit = scope.visits[one.name]
                if same_indices(visit.parents, [self._coordinates(p, scope) for p in parents]):
                    return visit.pos, visit.present
        if axis.kind == "dense_fixed":
            if inside:
                return coord, []
            proven = self._in_range(coord, axis.length, visited, scope)
            if all(proven) and self._is_computed(coord, scope):
                return coord, []
            exact = self._exact(coord, scope, fits=all(proven))
            if not exact.expr.same_as(coord):
                proven = (exact.low >= 0, False)  # it was proven for the inexact index
            return exact.expr, _range_guards(exact.expr, axis.length, proven)
        exact = self._exact(coord, scope)
        if axis.kind == "dense_variable":
            extent = self.space.extent(axis, parents)
            target = self._coordinates(exact.expr, scope)
            lower = [] if visited is not None else [target >= 0]
            return exact.expr, [] if inside else [*lower, target < extent]
        # The search needs a type that holds it, else it could become another coordinate.
        fits = inside or exact.within(*type_bounds(axis.idtype))
        target = as_dtype(exact.expr, axis.idtype if fits else "int64")
        result = self._search(axis, self._coordinates(target, scope), parents, guards, scope)
        pos = tirx.BufferLoad(result, [0])
        return pos, [] if inside else [pos >= 0]

    @staticmethod
    def _same_storage(a: Axis, b: Axis) -> bool:
        """Whether two axes are the same, or read the same arrays."""
        if a.name == b.name:
            return True
        if a.kind != b.kind or a.kind == "dense_fixed":
            return False
        pairs = [(a.indptr, b.indptr), (a.indices, b.indices)]
        return all((x is None) == (y is None) and (x is None or x.same_as(y)) for x, y in pairs)

    def bind(self, stmt: Any, scope: Scope) -> list[tirx.Stmt]:
        """A binding of the body in position space, preceded by one of its exact value."""
        value = self._loads(stmt.value, scope)
        out = [tirx.Bind(stmt.var, self._coordinates(value, scope), stmt.span)]
        if not is_signed(stmt.var):
            return out
        exact = self._exact(value, scope)
        if exact.expr.same_as(value):
            self._bound[stmt.var] = exact._replace(expr=stmt.var)
            return out
        if stmt.var not in self._indices():
            return out
        var = tirx.Var(f"{stmt.var.name}_exact", dtype_of(exact.expr))
        self._bound[stmt.var] = exact._replace(expr=var)
        return [tirx.Bind(var, self._coordinates(exact.expr, scope), stmt.span), *out]

    def _indices(self) -> set[Any]:
        """Variables and buffers from which indices are computed, directly or indirectly."""
        variables: set[Any] = set()
        bound: list[tuple[Any, Any]] = []

        def visit(node: Any) -> None:
            if not isinstance(node, tirx.Bind):
                variables.update(v for i in node.indices for v in free_vars(i))
            if not isinstance(node, ir.TensorLoad):
                bound.append((node.var if isinstance(node, tirx.Bind) else node.buffer, node.value))

        walk(self.space.func.body, visit, tirx.BufferStore, ir.TensorLoad, tirx.Bind)
        for target, value in reversed(bound):
            if target in variables:
                variables |= free_vars(value)
        return variables

    def loop(self, stmt: Any, scope: Scope) -> list[Any]:
        """First value, extent and step of a loop; also records the bounds of its variable.

        The step is None for 1.
        """
        ends = [self._loads(e, scope) for e in (stmt.min, stmt.extent)]
        first, count = (self._exact(e, scope) for e in ends)
        low, high = first.low + min(count.low + 1, 0), first.high + max(count.high - 1, 0)
        self._bound[stmt.loop_var] = Integer(stmt.loop_var, low, high)
        if stmt.step is None or is_one(stmt.step):
            return [*(self._coordinates(e, scope) for e in ends), None]
        return [self._coordinates(e, scope) for e in (*ends, self._loads(stmt.step, scope))]

    def _exact(self, expr: Any, scope: Scope, fits: bool = False) -> Integer:
        """An index computed without overflow.

        fits : whether it is known to be a coordinate of an axis
        """

        def bounds(leaf: Any) -> tuple[int, int]:
            if isinstance(leaf, ir.TensorLoad):
                length = self._domains.get(leaf.source)
            else:
                length = scope.axis_of_var[leaf].length if leaf in scope.axis_of_var else None
            return self._ends(leaf) if length is None else (0, most_of(length, self._ends) - 1)

        return exact(expr, bounds, fits, self._bound)

    def _ends(self, leaf: Any) -> tuple[int, int]:
        """Bounds of a parameter or an unknown value."""
        low, high = type_bounds(dtype_of(leaf))
        if leaf not in self._least:
            return low, high
        step = self._known.steps.get(str(leaf.name), 1)
        return max(low, self._least[leaf]), min(high, SIZES) // step

    def _is_computed(self, coord: Any, scope: Scope) -> bool:
        """Whether an index is computed from results of recipes."""
        used = free_vars(coord)
        axes = {scope.axis_of_var[v].name for v in used if v in scope.axis_of_var}
        return bool(axes & self._known.made_axes or used & self._made)

    def _in_range(
        self, coord: Any, length: Any, visited: Axis | None, scope: Scope
    ) -> tuple[bool, bool]:
        """Whether 0 <= coord and coord < length are provable from the lengths of the axes.

        The proof is over unbounded integers, which :meth:`_exact` makes of coordinates.
        """
        if visited is not None and tvm_ffi.structural_equal(visited.length, length):
            if not self.space.has_padding(visited):
                return True, True
        if isinstance(coord, ir.TensorLoad) and tvm_ffi.structural_equal(
            self._domains.get(coord.source), length
        ):
            return True, True
        analyzer, used = Analyzer(), free_vars(coord)
        ranges: dict[Any, Any] = {}

        def loaded(node: Any) -> Any:
            """A variable for a loaded value with a known range."""
            most = self._domains.get(node.source)
            if most is None:
                return node
            var = tirx.Var("loaded", dtype_of(node))
            first, end = as_dtype(0, dtype_of(node)), as_dtype(most, dtype_of(node))
            analyzer.bind(var, ir.Range(first, end))
            ranges[var] = sym.IntervalSet(first, end - as_dtype(1, dtype_of(node)))
            return var

        asked = map_expr(coord, [(ir.TensorLoad, loaded)])
        not_empty: set[Any] = set()  # sizes of axes that are visited here, so not 0
        for var, axis in scope.axis_of_var.items():
            if var in used:
                if not self.space.has_padding(axis):
                    not_empty.add(_counted(axis.length))
                most = substitute(axis.length, self._multiples)
                first, end = as_dtype(0, axis.idtype), as_dtype(most, axis.idtype)
                analyzer.bind(var, ir.Range(first, end))
                ranges[var] = sym.IntervalSet(first, end - as_dtype(1, axis.idtype))
        for var in self._least.keys() & used:
            dtype = dtype_of(var)
            most = tirx.max_value(dtype)
            least = max(self._least[var], int(var in not_empty))
            analyzer.bind(var, ir.Range(as_dtype(least, dtype), most))
        if tvm.DataType(dtype_of(coord)).bits < tvm.DataType(dtype_of(length)).bits:
            asked = as_dtype(asked, dtype_of(length))  # a length need not fit the narrower type
        whole = substitute(as_dtype(length, dtype_of(asked)), self._multiples)
        asked = substitute(asked, self._multiples)
        lower, upper = analyzer.can_prove(asked >= 0), analyzer.can_prove(asked < whole)
        if not upper and ranges:
            # The last coordinate, for symbolic bounds: p * 8 + l < n * 8 for p < n, l < 8.
            last = analyzer.int_set(asked, ranges).max_value
            ends = (free_vars(r.max_value) for r in ranges.values())
            known = set().union(free_vars(whole), *ends)
            upper = free_vars(last) <= known and analyzer.can_prove(last < whole)
        return lower, upper

    def _search(
        self, axis: Axis, target: Any, parents: list[Any], guards: list[Any], scope: Scope
    ) -> Any:
        parents = [self._coordinates(p, scope) for p in parents]
        guards = [self._coordinates(g, scope) for g in guards]
        key = [target, *parents, *guards]
        for (name, other), search in scope.searches:
            if name == axis.name and same_indices(other, key):
                return search.result
        result = self.local(f"{axis.name}_pos", axis.idtype)
        # The search may be placed before the loops and conditions around its use.
        target, *rest = (speculative(e, self._unguarded, self._sizes) for e in key)
        parents, guards = rest[: len(parents)], rest[len(parents) :]
        extent = self.space.extent(axis, parents)
        if guards:
            extent = tirx.if_then_else(conjunction(guards), extent, as_dtype(0, dtype_of(extent)))
        found = find(
            f"find_{result.name}", result, self.space.indices(axis), parents, extent, target,
            self.reads_of([extent, target, *parents]), axis.is_variable and axis.unique,
        )  # fmt: skip
        uses = set().union(*(free_vars(e) for e in [target, extent, *parents, *guards]))
        search = self.made(*found, uses)
        if scope.local is not None and (uses & (scope.bound_in_body | self.written_now())):
            scope.local.append(search)
            scope.bound_in_body.add(result)
        else:
            scope.searches.append(((axis.name, key), search))
        return result

    def written_now(self) -> set[Any]:
        """Stage-II variables of the buffers that the function writes."""
        return {self.space.buffers[v.name] for v in self.written if self._declared.buffer_of(v)}

    def reads_of(self, exprs: list[Any]) -> list[Any]:
        """The regions (single elements) that expressions load."""
        return distinct(
            tirx.BufferRegion(
                load.source,
                [ir.Range.from_min_extent(i, as_dtype(1, dtype_of(i))) for i in load.indices],
            )
            for load in nodes_of(ir.TensorLoad, *exprs)
        )


def _folded(index: Any) -> Any:
    """An index, folded if it is the same number for all variables: TVM divides by `j - j`."""
    if not isinstance(index, tirx.Add | tirx.Sub | tirx.Mul) or not is_signed(index):
        return index
    terms, (low, high) = affine(index).terms, type_bounds(dtype_of(index))
    number = terms.get((), 0)
    known = not terms.keys() - {()} and low <= number <= high
    return as_dtype(number, dtype_of(index)) if known else index


def _range_guards(coord: Any, length: Any, proven: tuple[bool, bool]) -> list[Any]:
    """The parts of 0 <= coord and coord < length that are not proven."""
    if tvm.DataType(dtype_of(coord)).bits < tvm.DataType(dtype_of(length)).bits:
        coord = as_dtype(coord, dtype_of(length))  # a length need not fit the narrower type
    length = as_dtype(length, dtype_of(coord))
    return [g for g, known in zip((coord >= 0, coord < length), proven, strict=True) if not known]


def _counted(length: Any) -> Any:
    """The size that is at least 1 if an axis of this length has a coordinate; None if unknown.

    It is the length itself, or the `size` in a number of tiles, `(size + 31) // 32`.
    """
    if isinstance(length, tirx.FloorDiv) and isinstance(length.a, tirx.Add):
        more, tile = length.a.b, length.b
        numbers = isinstance(more, tirx.IntImm) and isinstance(tile, tirx.IntImm)
        length = length.a.a if numbers and int(more) < int(tile) else None
    return length if isinstance(length, ir.Var) else None
