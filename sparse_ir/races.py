"""Race facts of an iteration's loops, attached to blocks by iteration variable.

A block of stage II has the annotation "sparsetir.races", which says for each of its iteration
variables whether two visits that differ in it may run in parallel::

    with T.sblock("spmm1"):
        vj, vk = T.axis.remap("RS", [j, k])
        T.sblock_attr({"sparsetir.races": {"vj": ["reduction", "C"], "vk": ["free"]}})

["free"]            no visit accesses what another one writes
["reduction", "C"]  visits update the same elements of C
["scatter", "C"]    visits may write the same elements of C, as C[order[e]] may

Splitting, fusing and reordering loops keeps blocks and their variables, so the facts apply to the
new loops: a loop is free of races if each iteration variable whose value uses it is
(:func:`sparsetir.schedules.passes.parallel_loops.run_in_parallel`).

TVM's copies of a block have new variables of the same names; primitives such as
`decompose_reduction` and `reorder_block_iter_var` keep some of them, or reorder them. So facts are
keyed by names, which the lowering makes unique within an iteration
(:mod:`sparsetir.sparse_ir.position_loops`), and read by :func:`facts_of`.

A buffer that the function allocates is private to the visits of an iteration if nothing else uses
it and each visit writes elements before it reads them. It is then allocated in the visit's block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from tvm import ir, tirx
from tvm.sym import Analyzer

from sparsetir.sparse_ir.affine import covered
from sparsetir.sparse_ir.annotations import RESTORE
from sparsetir.sparse_ir.nodes import (
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    flat_axes,
    loads_of,
    nodes_of,
    stores_of,
)
from sparsetir.sparse_ir.parallel import (
    constant_length,
    has_own_place,
    parallel_units,
    written_accesses,
)

RACES = "sparsetir.races"


class Fact(NamedTuple):
    """Whether two visits that differ in a variable may run in parallel.

    Blocks hold it as [kind, *buffers].

    kind : "free", "reduction" or "scatter"
    buffers : names of the buffers in which visits may conflict; () if unknown
    """

    kind: str
    buffers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {', '.join(self.buffers)}" if self.buffers else self.kind


FREE = Fact("free")


def races_of(
    it: SparseIteration,
    private: set[Any],
    in_turn: Collection[Any] = (),
    func: SparseFunc | None = None,
) -> list[Fact]:
    """The fact of each loop of the iteration, in order.

    func : the function of the iteration
    private : stage-I variables of the buffers that are private to each visit
    in_turn : coordinates whose visits are sequential, whatever they access
    """
    free = set(parallel_units(it, private, func))
    accesses = {b: each for b, each in written_accesses(it).items() if b not in private}
    out: list[Fact] = []
    for number, (_, at, end) in enumerate(it.entries()):
        coords, kinds = it.vars[at:end], it.kinds[at:end]
        apart = RESTORE in it.annotations and set(kinds) == {"S"}
        if (number in free or apart) and not any(v in in_turn for v in coords):
            out.append(FREE)
            continue
        shared = [
            b.name
            for b, each in accesses.items()
            if not all(has_own_place(it, v, each) for v in coords)
        ]
        what = "scatter" if set(kinds) == {"S"} else "reduction"
        out.append(Fact(what, tuple(sorted(shared or [b.name for b in accesses]))))
    return out


def facts_of(block: Any) -> dict[Any, Fact]:
    """The fact of each iteration variable of a block; "scatter" if nothing is known.

    A reduction variable is never free, whatever a TVM primitive names it; blocks that such a
    primitive creates have no facts, and the kind of each iteration variable decides.
    """
    known = block.annotations.get(RACES)
    names = Counter(str(v.var.name) for v in block.iter_vars)
    out: dict[Any, Fact] = {}
    for v in block.iter_vars:
        spatial, name = v.iter_type == tirx.IterVar.DataPar, str(v.var.name)
        if known is None:
            fact = FREE if spatial else Fact("reduction")
        else:
            said = known.get(name) if names[name] == 1 else None
            kind, *buffers = said or ["scatter"]
            fact = Fact(kind, tuple(buffers))
        out[v.var] = Fact("reduction") if fact == FREE and not spatial else fact
    return out


def private_buffers(func: SparseFunc, it: SparseIteration) -> set[Any]:
    """The function's buffers that are private to each visit of an iteration.

    They are also private to visits of the iterations nested in it.
    """
    allocated = _allocated(func)
    inside = _uses(it.body) if allocated else Counter()
    return {
        allocated[of].var
        for of in allocated.keys() & inside.keys()
        if inside[of] == _uses_in(func)[of] and reads_after_writes(it.body, allocated[of])
    }


@lru_cache(maxsize=1)
def _allocated(func: SparseFunc) -> dict[int, SparseBuffer]:
    """The buffers that a function allocates, by their handles."""
    return {b.var.__chandle__(): b for b in func.buffers if b.handle is None}


@lru_cache(maxsize=1)
def _uses_in(func: SparseFunc) -> Counter[int]:
    return _uses(func.body)


def _uses(tree: Any) -> Counter[int]:
    """The number of loads and stores of each buffer, by its handle, which is cheap to compare."""
    loads, stores = nodes_of(ir.TensorLoad, tree), stores_of(tree)
    accessed = (*(x.source for x in loads), *(x.buffer for x in stores))
    return Counter(buffer.__chandle__() for buffer in accessed)


def reads_after_writes(stmt: Any, buf: SparseBuffer) -> bool:
    """Whether a statement reads a buffer only after all of it was written."""
    return _Flow(buf).reads_after_writes(stmt)


class _Flow:
    """Dataflow of one buffer through a statement."""

    def __init__(self, buf: SparseBuffer) -> None:
        self.buf = buf
        self.whole = False  # whether all of it has been written

    def reads_after_writes(self, stmt: Any) -> bool:
        """Whether the statement reads the buffer only after all of it was written."""
        if isinstance(stmt, tirx.SeqStmt):
            return all(self.reads_after_writes(s) for s in stmt.seq)
        if isinstance(stmt, SparseIteration):
            return self._iteration(stmt)
        if isinstance(stmt, tirx.BufferStore):
            if not self.whole and _loads([stmt.value, *stmt.indices], self.buf.var):
                return False
            self.whole |= self._covers(stmt, [])
            return True
        before = self.whole  # loops and branches may not execute
        if isinstance(stmt, tirx.For):
            heads, parts = [stmt.min, stmt.extent, stmt.step], [stmt.body]
        elif isinstance(stmt, tirx.IfThenElse):
            heads, parts = [stmt.condition], [stmt.then_case, stmt.else_case]
        else:
            return self.whole or not _loads([stmt], self.buf.var)
        if not before and _loads(heads, self.buf.var):
            return False
        for part in parts:
            self.whole = before
            if part is not None and not self.reads_after_writes(part):
                return False
        self.whole = before
        return True

    def _iteration(self, it: SparseIteration) -> bool:
        before = self.whole
        covered = False
        if it.init is not None:
            if not before and _loads([it.init], self.buf.var):
                return False
            covered = self._covers(it.init, it.axis_of())
        self.whole = before or covered
        if not self.reads_after_writes(it.body):
            return False
        self.whole = before or covered or self._covers(it.body, it.axis_of())
        return True

    def _covers(self, stmt: Any, coords: list[tuple[Any, Any, str]]) -> bool:
        """Whether a statement, executed for all of these coordinates, stores the whole buffer."""
        if isinstance(stmt, tirx.SeqStmt):
            return any(self._covers(s, coords) for s in stmt.seq)
        if isinstance(stmt, SparseIteration) and _has_visits(stmt):
            return self._covers(stmt.body, [*coords, *stmt.axis_of()])
        if not isinstance(stmt, tirx.BufferStore) or not stmt.buffer.same_as(self.buf.var):
            return False
        axes = self.buf.axes
        if axes is None or any(axis.kind != "dense_fixed" for axis in axes):
            return False  # its other rows are not stored
        dense = [(v, a) for a, v, kind in coords if (kind, a.kind) == ("S", "dense_fixed")]
        extents, lengths = {v: a.length for v, a in dense}, [a.length for a in axes]
        return covered(stmt.indices, lengths, extents, Analyzer()) is not None


def _loads(parts: Iterable[Any], var: Any) -> list[Any]:
    return [load for part in parts for load in loads_of(part, var)]


def _has_visits(it: SparseIteration) -> bool:
    """Whether an iteration is known to have a visit."""
    return all(a.kind == "dense_fixed" and constant_length(a) for a in flat_axes(it.axes))
