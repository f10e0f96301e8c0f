"""Go through what each row stores in steps of a few elements side by side.

Before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * B[j, k]

After `steps(j, 32)`, where each row has as many steps as it takes, and `T.Select` leaves out
what is beyond the row in its last::

    J_steps = T.dense_variable(I, (J_steps_count, J_steps_count), J_steps_ptr)
    J_lanes = T.dense_fixed(32)
    with T.sp_iter([I, J_steps, J_lanes, K], "SRRS", "spmm") as [i, j_step, j_lane, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = ... + T.Select(J_ptr[i] + j_step * 32 + j_lane <= J_last[i], ..., 0.0)

where an element is at T.min(J_ptr[i] + j_step * 32 + j_lane, J_last[i]), so that loads need no
guards.

`split` by positions makes tiles of the same elements, of which the last is shorter. Here all have a
constant length, which lanes need: with `precompute(.., lanes=[lane])` each has a sum of its own,
and on a GPU they are threads that load neighbouring elements. Values are the arrays that they were:
buffers over rows and columns lie over positions.
"""

from __future__ import annotations

from tvm import tirx

from sparsetir.sparse_ir.expressions import as_dtype
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseFunc,
    SparseIteration,
)
from sparsetir.sparse_ir.recipes.positions import last_of, row_lasts, tile_ptr
from sparsetir.sparse_ir.reduction import reduction_of, under, where
from sparsetir.sparse_ir.schedule.cuts import Cut
from sparsetir.sparse_ir.schedule.elements import Elements, check_alone
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

__all__ = ["steps"]

WHO = "steps"


@primitive
def steps(func: SparseFunc, columns: SpIter, lanes: int) -> tuple[SparseFunc, list[SpIter]]:
    """Go through what each row stores in steps of so many elements side by side.

    Parameters
    ----------
    columns : SpIter
        Over the sparse_variable axis under a dense one, a reduction that may end without some terms
        (a sum, a product, a maximum or a minimum); no other iteration visits it.
    lanes : int
        Elements of a step.

    Returns
    -------
    list of SpIter
        Steps, lanes.
    """
    it = iteration_of(WHO, func, columns)
    refuse_order(WHO, func, it)
    place = place_of(WHO, func, it, columns)
    loop = loops_of(it)[place]
    if isinstance(lanes, bool) or not isinstance(lanes, int) or not 0 < lanes < 2**15:
        Cut(WHO, func, it, loop).refuse(
            f"argument 'lanes': expected a positive integer, got {lanes!r}"
        )
    return _Steps(func, it, place, lanes).run()


class _Steps(Elements):
    def __init__(self, func: SparseFunc, it: SparseIteration, place: int, lanes: int) -> None:
        loops = loops_of(it)
        loop, cut = loops[place], Cut(WHO, func, it, loops[place])
        column = loop.node
        row = column.parent if isinstance(column, Axis) else None
        own = [x for x in loops if row is not None and x.axes == (row.name,) and x.kinds == "S"]
        fits = isinstance(column, Axis) and column.kind == "sparse_variable" and loop.kinds == "R"
        if not fits or not own or not isinstance(row, Axis) or row.kind != "dense_fixed":
            cut.refuse(
                "expected a reduction over a sparse_variable axis under a dense one that is "
                f"visited as well, got '{loop.name}'"
            )
        reduction = reduction_of(it.body)
        if reduction is None:
            cut.refuse(
                "expected a body of the form X[..] = X[..] + term (or *, max, min), which can be "
                "without a term"
            )
        check_alone(cut, it)
        self.place, self.lanes, self.reduction = place, lanes, reduction
        super().__init__(WHO, func, it, loop, [row, column], [own[0].var, loop.var])

    def run(self) -> tuple[SparseFunc, list[SpIter]]:
        """The rewritten function and the handles."""
        it, column, idtype = self.it, self.column, self.idtype
        how = {"indptr": self.named(column.indptr), "size": self.lanes, "within": 0}
        ptr = self.array("steps_ptr", {"recipe": tile_ptr.__name__, **how})
        count = self.number("steps_count", {"recipe": last_of.__name__, "offsets": self.named(ptr)})
        step = self.axis(
            "steps", kind="dense_variable", length=count, parent=self.row, nnz=count, indptr=ptr
        )
        lane = self.axis("lanes", kind="dense_fixed", length=as_dtype(self.lanes, idtype))
        one = as_dtype(1, idtype)
        bounds = self.axis("bounds", kind="dense_fixed", length=self.row.length + one)
        offsets = self.bound(f"{column.name}_ptr", [bounds], column.indptr)
        at = self.bound(f"{column.name}_at", [self.positions], column.indices)
        lasts = self.table(
            f"{column.name}_last", [self.row], row_lasts.__name__, indptr=how["indptr"]
        )
        row, name = self.over[0], self.over[1].name
        s, v = (tirx.Var(f"{name}_{what}", idtype) for what in ("step", "lane"))
        begin, last = (tirx.BufferLoad(b.var, [row]) for b in (offsets, lasts))
        beyond = begin + s * as_dtype(self.lanes, idtype) + v
        position = tirx.min(beyond, last)
        coordinates = [row, tirx.BufferLoad(at.var, [position])]
        body = under(self.reduction.conditions, where(self.reduction, beyond <= last))
        made = [Loop(step, [s], "R"), Loop(lane, [v], "R")]
        loops = loops_of(it)
        iteration = changed(
            it,
            [*loops[: self.place], *made, *loops[self.place + 1 :]],
            body=self.rewritten(body, position, coordinates),
        )
        func = replaced(
            WHO, self.moved_function(), it, iteration, axes=self.axes, buffers=self.buffers,
            params=self.params, trusted=False,
        )  # fmt: skip
        return func, [handle_of(iteration, loop) for loop in made]
