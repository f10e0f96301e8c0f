"""Copy what has strided features around an iteration, so that features are contiguous in it.

Before, with as many cache lines per term as there are features::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        C[i, k] = C[i, k] + A[i, j] * X[k, j]

After::

    with T.sp_iter([N, K], "SS", "X_ws_copy") as [n, k]:
        X_ws[n, k] = X[k, n]
    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
        C[i, k] = C[i, k] + A[i, j] * X_ws[j, k]

A result `C[k, i]` is computed as `C_ws[i, k]`, and copied after that. Copies are in tiles, so that
lines stay in the L1 cache until all of their elements have been copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import ir, tirx

from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.names import fresh_name
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    loads_of,
    same_indices,
    stores_of,
)
from sparsetir.sparse_ir.schedule import Schedule, SparseIterationRef
from sparsetir.sparse_ir.schedule.loops import Change, changed, loops_of
from sparsetir.sparse_ir.tir import free_vars
from sparsetir.sparse_ir.traversal import access_rules, map_expr

# Elements of a line, and the rows of an operand's tile, which follow each other in memory. (Zen 5,
# one thread: 0.2 to 0.6 ns an element both ways; without tiles 0.2 to 1.0, and up to 6 where the
# lines of a tile compete for the same places of the cache, as with 1024 rows.)
LINE, CHUNK = 16, 1024


class Copied(NamedTuple):
    """A program with copies around its iteration.

    rows : of each copied buffer, the sizes of the axes other than the features
    visited : the axes around the features
    stride : the sizes whose product is the distance of neighbouring features of a copied result
    """

    func: SparseFunc
    rows: list[list[Any]]
    visited: list[Axis]
    stride: list[Any]


def features_last(func: SparseFunc) -> Copied | None:
    """Copy operands with strided features before an iteration.

    None for a program without such operands, and without a single reduction over a sparse axis,
    without which no element is read twice.
    """
    it, around = _reduction(func)
    if it is None:
        return None
    features = loops_of(it)[-1].var
    sch, rows = Schedule(func), []
    for buffer in func.buffers:
        place = _place(it, buffer, features)
        if place is None:
            continue
        others = [*(buffer.axes or ())]
        moved = others.pop(place)
        names = [axis.name for axis in (*others, moved)]
        try:
            at = sch.get_sparse_iteration(it.name)
            (copy,) = sch.precompute(buffer.name, at, names, scope="global")
        except ScheduleError:  # read at more than one place
            return None
        _in_tiles(sch, copy, others[-1].name, moved.name, CHUNK, it.annotations)
        rows.append([axis.length for axis in others])
    return Copied(sch.func, rows, around, []) if rows else None


def result_last(func: SparseFunc) -> Copied | None:
    """Compute a result with strided features in a workspace, and copy it after the iteration.

    None for other programs than those of :func:`features_last`, and for a result that the iteration
    does not initialise, or not all of.
    """
    it, around = _reduction(func)
    if it is None or it.init is None or loops_of(it)[-1].kinds != "S":
        return None
    loops = {x.var: x.node for x in loops_of(it) if x.kinds == "S"}
    (store, *others), features = stores_of(it.init, it.body), loops_of(it)[-1].var
    written, index = store.buffer, list(store.indices)
    buffer = next(b for b in func.buffers if b.var.same_as(written))
    everywhere = [x.indices for x in (*others, *loads_of(it.body, written))]
    if any(not x.buffer.same_as(written) for x in others):
        return None
    if any(not same_indices(index, x) for x in everywhere) or {*index} != {*loops}:
        return None
    axes = [loops[var] for var in index]
    names = [axis.name for axis in buffer.axes or ()]
    if [axis.name for axis in axes] != names or any(axis.kind != "dense_fixed" for axis in axes):
        return None
    order = sorted(range(len(axes)), key=lambda n: index[n].same_as(features))
    if order[-1] == len(axes) - 1:
        return None
    held, name = [axes[n] for n in order], fresh_name(func, f"{buffer.name}_ws")
    ws = buffer_var([axis.length for axis in held], buffer.dtype, name)

    def place(accessed: Any, indices: Any) -> Any:
        return (ws, [indices[n] for n in order]) if accessed.same_as(written) else None

    body, init = (map_expr(x, access_rules(place)) for x in (it.body, it.init))
    at = [tirx.Var(axis.name.lower(), axis.idtype) for axis in axes]
    value = tirx.BufferLoad(ws, [at[n] for n in order])
    copy = SparseIteration(
        span=it.span, axes=axes, kinds="S" * len(axes), name=fresh_name(func, f"{name}_copy"),
        vars=at, init=None, body=tirx.BufferStore(written, value, at), annotations={},
    )  # fmt: skip
    both = tirx.SeqStmt([changed(it, body=body, init=init), copy])
    workspace = SparseBuffer(var=ws, axes=held, handle=None)
    sch = Schedule(Change("result_last", func, it).put(both, buffers=[workspace]))
    reference = sch.get_sparse_iteration(copy.name)
    _in_tiles(sch, reference, axes[-1].name, held[-1].name, LINE, it.annotations)
    sizes = [axis.length for axis in held[:-1]]
    return Copied(sch.func, [sizes], around, [axis.length for axis in axes[order[-1] + 1 :]])


def _reduction(func: SparseFunc) -> tuple[SparseIteration | None, list[Axis]]:
    """The only reduction, over a sparse axis and features, and the axes around the features."""
    top = func.body.seq if isinstance(func.body, tirx.SeqStmt) else [func.body]
    reductions = [x for x in top if isinstance(x, SparseIteration) and "R" in x.kinds]
    if len(reductions) != 1:
        return None, []
    *around, features = loops_of(reductions[0])
    axes = [x.node for x in around if isinstance(x.node, Axis)]
    dense = isinstance(features.node, Axis) and features.node.kind == "dense_fixed"
    if not dense or len(axes) < len(around) or not any(axis.is_sparse for axis in axes):
        return None, []
    return reductions[0], axes


def _in_tiles(
    sch: Schedule, copy: SparseIterationRef, rows: str, features: str, chunk: int, annotations: Any
) -> None:
    """Copy in tiles of two axes, of which the last one is contiguous where the copy writes.

    rows, features : the axes: lines of the workspace are along the features, others along the rows
    chunk : rows in a tile
    annotations : of the iteration around which it copies, such as the number of threads
    """
    loops = {x.name: x for x in sch.get_sp_iters(copy)}
    *_, last = loops
    rest = [x for name, x in loops.items() if name not in (rows, features)]
    (chunks, row), (tiles, feature) = (
        sch.split(loops[name], [None, most]) for name, most in ((rows, chunk), (features, LINE))
    )
    inner = [row, feature] if last == features else [feature, row]
    sch.sparse_reorder(copy, [*rest, chunks, tiles, *inner])
    for key, value in annotations.items():
        sch.annotate(copy, str(key), value)


def _place(it: SparseIteration, buffer: SparseBuffer, features: Any) -> int | None:
    """The dimension of a dense operand that the features index, or None if it is the last one."""
    loads = loads_of(it.body, buffer.var)
    if not loads or any(axis.kind != "dense_fixed" for axis in buffer.axes or ()):
        return None
    if any(store.buffer.same_as(buffer.var) for store in stores_of(it.body, it.init)):
        return None
    indices = list(loads[0].indices)
    places = [n for n, index in enumerate(indices) if features in free_vars(index)]
    if len(places) != 1 or places[0] == len(indices) - 1:
        return None
    return places[0] if isinstance(indices[places[0]], ir.Var) else None
