"""Panels of rows, whose columns are grouped by which rows of the panel they hold.

(Albakri and Cheshmi, "A Novel Compiler Transformation for Fast Sparse Matrix Multiplication in
GPUs", enumerate-and-sparse-coarsen, sections 3.2 and 3.3.) Before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

After `patterns(i, j, 4)`, where the columns of a panel of four rows that hold the same of them come
one after the other, as an entry each::

    I_panels = T.dense_fixed((m + 3) // 4)
    I_patterns = T.sparse_fixed(I_panels, (15, 15), I_ids)
    I_entries = T.dense_variable(I_patterns, (nnz, nnz), I_entries_ptr)
    I_rows = T.dense_fixed(4)
    with T.sp_iter([I_panels, I_patterns, I_entries, I_rows, K], "SRRSS", "spmm") as [
        p, q, e, r, k
    ]:
        with T.init():
            C[p * 4 + r, k] = 0.0
        if (q + 1) // 2**r % 2 == 1:
            C[p * 4 + r, k] = C[p * 4 + r, k] + A[
                I_order[I_values[p, q] + e * (bits of q + 1) + (bits of q + 1 below r)]
            ] * B[J_at[p, q, e], k]

Pattern q holds the rows whose bits q + 1 has. Where loops over patterns and rows are unrolled, all
that depends on them is constant: each pattern has a loop of its own over its entries, in which a
row of B is loaded once for all of its rows, and with `precompute("C", p, [r, k])` the sums of a
panel stay in registers over all patterns. `pack("A", ..)` brings values into that order.

With `by="count"` a pattern is one of its number of rows (section 3.5), so that code differs by this
number alone: there are size kinds of it instead of 2**size - 1. Which rows they are is a table, and
the init an iteration of its own::

        if r < I_counts[q]:
            C[p * 4 + I_members[q, r], k] = C[p * 4 + I_members[q, r], k] + A[
                I_order[I_values[p, q] + e * I_counts[q] + r]
            ] * B[J_at[p, q, e], k]

Sums of a panel are then in registers for one pattern at a time: `precompute("C", q, [r, k])`.

What says where entries and values are is computed. Values are the arrays that they were: buffers
over rows and columns lie over positions.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.assumptions import with_fact
from sparsetir.sparse_ir.expressions import as_dtype
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
)
from sparsetir.sparse_ir.recipes import constant, part_numbers
from sparsetir.sparse_ir.recipes import patterns as recipes
from sparsetir.sparse_ir.reduction import reduction_of, under
from sparsetir.sparse_ir.schedule.cuts import Cut
from sparsetir.sparse_ir.schedule.elements import Elements, other_loops, rows_and_columns
from sparsetir.sparse_ir.schedule.handles import SpIter
from sparsetir.sparse_ir.schedule.loops import (
    Loop,
    changed,
    handle_of,
    iteration_of,
    loops_of,
    place_of,
    refuse_order,
    replaced,
)
from sparsetir.sparse_ir.schedule.primitives import primitive
from sparsetir.sparse_ir.schedule.workspaces import init_apart

__all__ = ["LARGEST", "patterns"]

WHO = "patterns"
LARGEST = 8  # rows of a panel: 255 patterns


@primitive
def patterns(
    func: SparseFunc, rows: SpIter, columns: SpIter, size: int, *, by: str = "pattern"
) -> tuple[SparseFunc, list[SpIter]]:
    """Go through panels of rows, in each the columns that hold the same of its rows together.

    Parameters
    ----------
    rows : SpIter
        Over a dense axis, spatial.
    columns : SpIter
        Over the sparse_variable axis under it, a reduction, in a body `X[..] = X[..] + term` (or *,
        max, min); no other iteration visits it.
    size : int
        Rows of a panel, 2 to 8; there are 2**size - 1 patterns.
    by : {"pattern", "count"}
        What tells code for patterns apart: "pattern", or "count", the number of its rows.

    Returns
    -------
    list of SpIter
        Panels, patterns, entries, rows of a panel.
    """
    it = iteration_of(WHO, func, rows)
    refuse_order(WHO, func, it)
    loops = loops_of(it)
    chosen = [loops[place_of(WHO, func, it, handle)] for handle in (rows, columns)]
    if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= LARGEST:
        Cut(WHO, func, it, chosen[0]).refuse(
            f"argument 'size': expected 2 to {LARGEST} rows, got {size!r}"
        )
    if by not in ("pattern", "count"):
        Cut(WHO, func, it, chosen[0]).refuse(
            f"argument 'by': expected 'pattern' or 'count', got {by!r}"
        )
    return _Patterns(func, it, chosen[0], chosen[1], size, by).run()


class _Patterns(Elements):
    def __init__(
        self, func: SparseFunc, it: SparseIteration, rows: Loop, columns: Loop, size: int, by: str
    ) -> None:
        cut = Cut(WHO, func, it, rows)
        row, column = rows_and_columns(cut, rows, columns, unique=True)
        reduction = reduction_of(it.body)
        if reduction is None:
            cut.refuse("expected a body of the form X[..] = X[..] + term (or *, max, min)")
        self.rest = other_loops(cut, it, rows, columns)
        super().__init__(WHO, func, it, rows, [row, column], [rows.var, columns.var])
        self.size, self.by = size, by
        # What recipes are told of the order of patterns, which is by pattern unless said.
        self.order: dict[str, Any] = {"rows": size} | ({} if by == "pattern" else {"by": by})

    def run(self) -> tuple[SparseFunc, list[SpIter]]:
        """The rewritten function and the handles."""
        it, idtype, size, name = self.it, self.idtype, self.size, self.row.name
        count, panels = as_dtype((1 << size) - 1, idtype), self._panels()
        n, many = self.named(self.column.length), self.named(panels.length)
        given = {
            "indptr": self.named(self.column.indptr), "indices": self.named(self.column.indices)
        }  # fmt: skip
        held = self.array(
            "held", {"recipe": recipes.pattern_entries.__name__, **given, "n": n, **self.order}
        )
        entries = self.named(held)
        ids = self.array(
            "ids", {"recipe": part_numbers.__name__, "rows": many, "parts": int(count)}
        )
        pattern = self.axis(
            "patterns", kind="sparse_fixed", length=count, parent=panels, nnz_cols=count,
            indices=ids,
        )  # fmt: skip
        ptr = self.array("entries_ptr", {
            "recipe": recipes.entry_ptr.__name__, "entries": entries, "n": n, "panels": many,
            "rows": size,
        })  # fmt: skip
        nnz = self.number("entries_count", {"recipe": "last_of", "offsets": self.named(ptr)})
        entry = self.axis(
            "entries", kind="dense_variable", length=nnz, parent=pattern, nnz=nnz, indptr=ptr
        )
        over = [panels, pattern, entry]
        # Numbers of a column in a pattern, which may pass the type of the others.
        var = buffer_var([a.length for a in over], "int64", self._buffer_name(f"{name}_held"))
        self.buffers.append(SparseBuffer(var=var, axes=over, handle=held))
        values = self.table(
            f"{name}_values", over[:2], recipes.value_ptr.__name__, ptr=self.named(ptr),
            **self.order,
        )  # fmt: skip
        at = self.table(
            f"{self.column.name}_at", over, recipes.entry_columns.__name__, entries=entries, n=n
        )
        order = self.table(
            f"{name}_order", [self.positions], recipes.pattern_order.__name__,
            **given, entries=entries, ptr=self.named(ptr), n=n, **self.order,
        )  # fmt: skip
        self.number("step", {"recipe": constant.__name__, "value": 1})
        row = self.axis("rows", kind="dense_fixed", length=as_dtype(size, idtype))
        names = [f"{self.over[0].name}_{x}" for x in ("panel", "pattern", "entry", "row")]
        p, q, e, r = (tirx.Var(x, idtype) for x in names)
        each, below, mine, member = self._rows_of(row, q, r)
        place = tirx.BufferLoad(values.var, [p, q]) + e * each + below
        position = tirx.BufferLoad(order.var, [place])
        here = [p * as_dtype(size, idtype) + member, tirx.BufferLoad(at.var, [p, q, e])]
        body = under([mine], self.rewritten(it.body, position, here))
        first, init = [], it.init
        if self.by == "count" and init is not None:
            first, init = self._init_apart(), None
        init = None if init is None else self.rewritten(init, position, here)
        kind = "R" if self.by == "pattern" else "S"  # which rows they are of, a table says
        made = [Loop(panels, [p], "S"), Loop(pattern, [q], kind), Loop(entry, [e], "R"),
                Loop(row, [r], "S")]  # fmt: skip
        iteration = changed(it, [*made, *self.rest], body=body, init=init)
        whole = tirx.SeqStmt([*first, iteration]) if first else iteration
        func = replaced(
            WHO, self.moved_function(), it, whole, axes=self.axes, buffers=self.buffers,
            params=self.params, trusted=False,
        )  # fmt: skip
        func = with_fact(func, "inside", buffer=order.name, axis=self.positions.name)
        return func, [handle_of(iteration, loop) for loop in made]

    def _rows_of(self, row: Axis, q: Any, r: Any) -> tuple[Any, Any, Any, Any]:
        """Of visit r of pattern q: rows of the pattern, those before r, whether r is one, the row.

        By pattern r is the row, by count the number of one of the pattern's rows.
        """
        idtype, size = self.idtype, self.size
        if self.by == "count":
            kind = self.axis("kinds", kind="dense_fixed", length=as_dtype((1 << size) - 1, idtype))
            name = self.row.name
            of_pattern = recipes.pattern_counts.__name__, recipes.pattern_rows.__name__
            counts = self.table(f"{name}_counts", [kind], of_pattern[0], rows=size)
            members = self.table(f"{name}_members", [kind, row], of_pattern[1], rows=size)
            each = tirx.BufferLoad(counts.var, [q])
            return each, r, r < each, tirx.BufferLoad(members.var, [q, r])
        mask = q + as_dtype(1, idtype)
        bits = [_bit(mask, b, idtype) for b in range(size)]
        below: Any = as_dtype(0, idtype)
        for b in range(size - 1):
            below = below + tirx.Select(r > as_dtype(b, idtype), bits[b], as_dtype(0, idtype))
        mine = tirx.floormod(tirx.shift_right(mask, r), as_dtype(2, idtype))
        return sum(bits[1:], bits[0]), below, tirx.EQ(mine, as_dtype(1, idtype)), r

    def _init_apart(self) -> list[SparseIteration]:
        """The init of all rows as an iteration of its own: not all patterns are of a row."""
        first, axes = init_apart(self.func, self.it)
        self.axes.extend(axes)
        return [first]

    def _panels(self) -> Axis:
        how = {"m": self.named(self.row.length), "rows": self.size}
        count = self.number("panels_count", {"recipe": recipes.panel_count.__name__, **how})
        return self.axis("panels", kind="dense_fixed", length=count)


def _bit(mask: Any, bit: int, idtype: str) -> Any:
    return tirx.floormod(tirx.floordiv(mask, as_dtype(1 << bit, idtype)), as_dtype(2, idtype))
