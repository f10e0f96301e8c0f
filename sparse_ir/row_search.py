"""Rows of positions, computed in the kernel: searched for once, then carried (Senanayake, 6.2).

Before, where the row of each element is read from a table::

    for nz in range(16):
        with T.sblock("spmm1"):
            C[I_at[p * 16 + nz], k] = ...

After, where the loop over `p` is parallel, and that over `nz` runs on one thread::

    I_at_first[0] = ...                               # the last row that begins at p * 16 or before
    I_at_carried[0] = I_at_first[0]
    for nz in range(16):
        with T.sblock("spmm0"):
            while I_at_carried[0] + 1 < m and J_ptr[I_at_carried[0] + 1] <= p * 16 + nz:
                I_at_carried[0] = I_at_carried[0] + 1
            I_at_row[0] = I_at_carried[0]
            with T.sblock("spmm1"):
                C[I_at_row[0], k] = ...

A row is carried through the innermost loops that the position depends on, as long as it is
non-decreasing there and no other loop lies between them. Everything inside uses the carried row.
Loops that stage I has divided among workers do not carry: each visit searches. For axes of more
levels, such as those of a tensor in CSF, the row at a level is searched for in the next one's
offsets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.nodes import SparseFunc, sparse_iterations, substitute
from sparsetir.sparse_ir.rows import found_rows, recipe_of_rows, step_of
from sparsetir.sparse_ir.search import carry, find_last_start, restart, whole
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, free_vars
from sparsetir.sparse_ir.translate import Around, Scope, Translator
from sparsetir.sparse_ir.workers import divided


class Place(NamedTuple):
    """A position or a row.

    now : in the current visit
    first : at the start of the loops that carry it
    """

    now: Any
    first: Any


class RowSearch:
    """The searches for the rows of one function.

    in_turn : stage-I coordinates of the loops that carry rows, whose visits are sequential
    """

    def __init__(self, func: SparseFunc, translate: Translator) -> None:
        self.func, self.translate, self.space = func, translate, translate.space
        self.how = found_rows(func)
        self.in_turn: set[Any] = set()
        self._groups = [names for it in sparse_iterations(func) for names in divided(it)]

    def __call__(self, buffer: Any, position: Any, scope: Scope) -> Any:
        """The value of a buffer of :func:`found_rows` at a position of stage II."""
        around = scope.around
        carried = self._carried(position, around)
        begin = {x.var: as_dtype(0, dtype_of(x.var)) for x in carried}
        place = Place(position, substitute(position, begin))
        return self._found(buffer, place, carried, scope).now

    # -- loops that carry ---------------------------------------------------------------------

    def _carried(self, position: Any, around: list[Around]) -> list[Around]:
        """The loops through which a row at the position is carried, innermost first."""
        used = free_vars(position)
        out: list[Around] = []
        reach: int | None = 0  # how far the position advances in the loops collected
        for loop in reversed(around):
            if loop.var not in used:
                if out:
                    break
                continue
            step = step_of(position, loop.var)
            if self._is_divided(loop) or step is None or reach is None or step < max(1, reach):
                break
            out.append(loop)
            extent = loop.extent
            known = isinstance(extent, tirx.IntImm)
            reach = reach + step * (int(extent) - 1) if known else None
        self.in_turn |= {coord for loop in out for coord in loop.coords}
        return out

    def _is_divided(self, loop: Around) -> bool:
        return any(loop.name in names for names in self._groups)

    # -- steps --------------------------------------------------------------------------------

    def _found(self, buffer: Any, place: Place, carried: list[Around], scope: Scope) -> Place:
        """The value of the buffer at a place."""
        recipe = recipe_of_rows(self.func, buffer)
        assert recipe is not None  # verified
        if recipe.order is not None:
            place = self._found(recipe.order, place, carried, scope)
        array = self.space.buffers[recipe.array.name]
        if not recipe.searches:
            return Place(tirx.BufferLoad(array, [place.now]), tirx.BufferLoad(array, [place.first]))
        key = (buffer.name, [place.now])
        known = scope.known(key)
        if known is not None:
            return known
        first = self._initial(buffer, array, place.first, carried, scope)
        now = self._current(buffer, array, first, place.now, carried, scope) if carried else first
        row = Place(now, first)
        # Available everywhere inside the loops that it depends on.
        inner = [x for x in scope.around if x.var in free_vars(place.now)]
        home = [*carried[:1], *inner[-1:]][:1]
        (home[0].scope if home else scope).rows.append((key, row))
        return row

    def _initial(
        self, buffer: Any, array: Any, position: Any, carried: list[Around], scope: Scope
    ) -> Any:
        """The row at the start of the loops that carry it."""
        result = self.translate.local(f"{buffer.name}_first", buffer.dtype)
        rows = self._rows(buffer, array)
        begin, end = self._bounds(buffer, rows, scope)
        around = scope.around
        loops = [x for x in around if x.var in free_vars(position)]
        if not loops:  # at their start, as there is no scope outside of all loops
            loops = _before(around, carried)
        stmt, locals_ = find_last_start(
            f"find_{result.name}", result, lambda x: tirx.BufferLoad(array, [x]), (begin, end),
            position, [*self.translate.reads_of([position, begin, end]), whole(array)],
        )  # fmt: skip
        owner = [*loops[-1:], *carried[-1:]][:1]
        self._place(stmt, locals_, position, loops, owner[0].scope if owner else scope)
        return tirx.BufferLoad(result, [0])

    def _current(
        self, buffer: Any, array: Any, first: Any, position: Any, carried: list[Around],
        scope: Scope,
    ) -> Any:  # fmt: skip
        """The row in the current visit of the loops that carry it."""
        held, row = (
            self.translate.local(f"{buffer.name}_{what}", buffer.dtype)
            for what in ("carried", "row")
        )
        around = scope.around
        before = _before(around, carried)
        begin = self.translate.made(*restart(f"start_{held.name}", held, first), {first.source})
        begin.uses |= {x.var for x in before}
        carried[-1].scope.searches.append((("", []), begin))
        reads = [*self.translate.reads_of([position]), whole(array)]
        rows = self._rows(buffer, array)
        stmt, locals_ = carry(f"find_{row.name}", row, held, array, rows, position, reads)
        step = self.translate.made(stmt, locals_, {held, *free_vars(position)})
        carried[0].scope.searches.append((("", []), step))
        return tirx.BufferLoad(row, [0])

    def _place(
        self, stmt: Any, locals_: list[Any], position: Any, loops: list[Around], scope: Scope
    ) -> None:
        """Emit a search in `scope`, after the last of some loops and those divided with it."""
        uses = {*free_vars(position), *(x.var for x in loops)}
        for loop in loops:
            peers = [names for names in self._groups if loop.name in names]
            same = [x for x in scope.around if any(x.name in names for names in peers)]
            uses |= {x.var for x in same if x.scope is scope}
        scope.searches.append((("", []), self.translate.made(stmt, locals_, uses)))

    # -- bounds -------------------------------------------------------------------------------

    def _rows(self, buffer: Any, array: Any) -> Any:
        """The number of rows: one less than the offsets."""
        (length,) = array.ty.shape
        return as_dtype(Analyzer().simplify(length - as_dtype(1, dtype_of(length))), buffer.dtype)

    def _bounds(self, buffer: Any, rows: Any, scope: Scope) -> tuple[Any, Any]:
        """The rows among which a row is searched for: all, or those of a block."""
        how = self.how.get(buffer.name, {})
        visit = scope.visits.get(str(how.get("loop", "")))
        if visit is None:
            return as_dtype(0, buffer.dtype), rows
        starts = self.space.buffers[str(how["starts"])]
        at, per_block = visit.coord, int(how["per_block"])
        if per_block > 1:
            at = tirx.floordiv(at, as_dtype(per_block, dtype_of(at)))
        after = at + as_dtype(1, dtype_of(at))
        one = as_dtype(1, buffer.dtype)
        return tirx.BufferLoad(starts, [at]), tirx.BufferLoad(starts, [after]) + one


def _before(around: list[Around], carried: list[Around]) -> list[Around]:
    """The loops around those that carry."""
    return around[: around.index(carried[-1])] if carried else around
