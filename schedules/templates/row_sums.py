"""Decomposed SpMM on CPUs with a tile of features in registers: a rewrite of stage I."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tvm import s_tir, tirx

from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    sparse_iterations,
    substitute,
)
from sparsetir.sparse_ir.position_space import as_dtype
from sparsetir.sparse_ir.verify import verify

__all__ = ["row_sums", "split", "vectorize_sums", "visits_once"]

# The iteration that sets the result to zero.
INIT = "spmm_init"


def row_sums(func: SparseFunc, rules: list[FormatRewriteRule], features: RowBlocks) -> SparseFunc:
    """Sum up a tile of features in registers for each row, or rows of a block.

    Before, for each rule, such as of BSR::

        with T.sp_iter([IO, JO, II, JI, K], "SRSRS", "spmm_<rule>") as [io, jo, ii, ji, k]:
            if MASK[io, jo, ii, ji] != 0:
                C[io * 4 + ii, k] = C[io * 4 + ii, k] + A[io, jo, ii, ji] * B[jo * 4 + ji, k]

    After, where `at` is the place of lane `l` of vector `v` of tile `p`::

        with T.sp_iter([IO, P], "SS", "spmm_<rule>") as [io, p]:
            with T.sp_iter([JO, JI, II, V, L], "RRSSS", "add_<rule>") as [jo, ji, ii, v, l]:
                with T.init():
                    SUM[ii, v, l] = 0.0
                if MASK[io, jo, ii, ji] != 0:
                    SUM[ii, v, l] = SUM[ii, v, l] + A[io, jo, ii, ji] * B[jo * 4 + ji, at]
            with T.sp_iter([II, V, L], "SSS", "write_<rule>") as [ii, v, l]:
                C[io * 4 + ii, at] = SUM[ii, v, l]

    Rows that are not visited exactly once are set to zero first, and sums added to them.
    Raises ScheduleError for a rule whose columns come before their rows, such as of CSC.
    """
    idtype = func.axis("K").idtype
    tiles = next((p for p in func.params if p.name == "tiles"), None)
    count = tiles if tiles is not None else -(-(features.feat or 0) // features.tile)
    shared = [
        Axis(name=name, kind="dense_fixed", length=as_dtype(length, idtype), idtype=idtype)
        for name, length in (("P", count), ("V", features.vectors), ("L", features.lanes))
    ]
    found = [split(rule) for rule in rules]
    parts = []
    for rule, axes in zip(rules, found, strict=True):
        if axes is None:
            raise ScheduleError(
                "decomposed.program: argument 'config': expected a format whose rows come before "
                f"their columns, for tiles, got rule '{rule.name}'"
            )
        parts.append(_Part(func, rule, axes, features, shared))
    once = visits_once(rules)
    if not once and _overlap(features):
        raise ScheduleError(
            "decomposed.program: argument 'config': expected tiles that do not overlap, where rows "
            f"are stored in pieces, got tile = {features.tile} and lanes = {features.lanes} for "
            f"{features.feat} features"
        )
    body = [it for it in func.body.seq if it.name == INIT and not once]
    body += [part.rewritten(once) for part in parts]
    rewritten = func.replace(
        axes=[*func.axes, *shared],
        buffers=[*func.buffers, *(part.sums for part in parts)],
        body=tirx.SeqStmt(body) if len(body) > 1 else body[0],
    )
    verify(rewritten)
    return rewritten


class Split(NamedTuple):
    """Axes of a rule: outside of sums, those that are summed over, and those of a block's rows."""

    outer: list[str]
    columns: list[str]
    rows: list[str]


def split(rule: FormatRewriteRule) -> Split | None:
    """The axes of a matrix's rule; None where columns come before rows, such as of CSC.

    The rules of a format agree on that, and on the rows of a block.
    """
    spatial = rule.axis_map[rule.axes_before_rewrite[0]]
    axes = [rule.axis(name) for name in rule.axes_after_rewrite]
    parents = {a.parent.name for a in axes if a.parent is not None}
    found = Split([], [], [])
    for axis in axes:
        if axis.name not in spatial:
            found.columns.append(axis.name)
        elif axis.parent is not None and axis.parent.name not in spatial:
            return None
        elif (
            axis.parent is None
            and axis.name not in parents
            and isinstance(axis.length, tirx.IntImm)
        ):
            found.rows.append(axis.name)
        else:
            found.outer.append(axis.name)
    return found


def visits_once(rules: list[FormatRewriteRule]) -> bool:
    """Whether each row is visited exactly once; else it may be stored in pieces, or not at all."""
    axes = split(rules[0])
    if len(rules) > 1 or axes is None:
        return False
    return all(rules[0].axis(name).kind == "dense_fixed" for name in axes.outer)


def _overlap(features: RowBlocks) -> bool:
    """Whether some features are computed twice."""
    return bool((features.feat or 0) % features.tile or features.tile % features.lanes)


def vectorize_sums(func: tirx.PrimFunc, rules: list[FormatRewriteRule]) -> tirx.PrimFunc:
    """Make the lanes of tiles in registers vectors, and the other loops of a tile straight code.

    func : stage II of what :func:`row_sums` gives; left as it is
    """
    sch = s_tir.Schedule(s_tir.renew_defs(func))
    for rule in rules:
        write = sch.get_sblock(f"write_{rule.name}0")
        for number, region in enumerate(sch.get(write).reads):
            # What a lane reads it alone writes, which TVM does not see.
            if str(region.source.name) == "C":
                sch.unsafe_hide_buffer_access(write, "read", [number])
    sch = s_tir.Schedule(sch.mod)  # which looks at dependences anew
    for rule in rules:
        add, write = (sch.get_sblock(f"{step}_{rule.name}0") for step in ("add", "write"))
        loops = len(sch.get_loops(write))
        for block in (add, write):
            _in_vectors(sch, block, loops)
        start = sch.decompose_reduction(add, sch.get_loops(add)[0])
        _in_vectors(sch, start, loops)
    return sch.mod["main"]


def _in_vectors(sch: Any, block: Any, loops: int) -> None:
    *straight, lanes = sch.get_loops(block)[-loops:]
    for loop in straight:
        sch.unroll(loop)
    sch.vectorize(lanes)


class _Part:
    """The iteration of one rule.

    outer, columns, rows : as in Split
    sums : of a tile, for each row of a block
    """

    def __init__(
        self, func: SparseFunc, rule: FormatRewriteRule, axes: Split, features: RowBlocks,
        shared: list[Axis],
    ) -> None:  # fmt: skip
        self.rule, self.features = rule, features
        self.before = next(it for it in sparse_iterations(func) if it.name == f"spmm_{rule.name}")
        self.vars = dict(zip((a.name for a in self.before.axes), self.before.vars, strict=True))
        self.tiles, *self.tile = shared
        self.outer, self.columns, self.rows = (
            [func.axis(rule.renamed(name)) for name in names] for names in axes
        )
        held = [*self.rows, *self.tile]
        dtype = func.buffer("C").dtype
        var = buffer_var([a.length for a in held], dtype, f"SUM_{rule.name}", "local")
        self.sums = SparseBuffer(var=var, axes=held, handle=None)

    def rewritten(self, once: bool) -> SparseIteration:
        """The iteration with its sums in registers, which are added to the result unless `once`."""
        axes = [*self.outer, self.tiles]
        return self._iterate(axes, "S" * len(axes), "spmm", lambda *c: self._steps(once, *c))

    def _steps(self, once: bool, *outside: Any) -> tirx.Stmt:
        outer = dict(zip((a.name for a in self.outer), outside, strict=False))
        inner = [*self.rows, *self.tile]
        conditions, store = _taken_apart(self.before.body)
        sums, dtype = self.sums.var, self.sums.dtype

        def at(expr: Any, names: dict[str, Any], v: Any, l: Any) -> Any:
            coordinates = {**outer, **names, "K": self.features.place(outside[-1], v, l)}
            return substitute(expr, {self.vars[n]: c for n, c in coordinates.items()})

        def names_of(axes: list[Axis], coordinates: Any) -> dict[str, Any]:
            return dict(zip((a.name for a in axes), coordinates, strict=False))

        def start(*c: Any) -> tirx.Stmt:
            place = list(c[len(self.columns) :])
            return tirx.BufferStore(sums, tirx.const(0, dtype), place)

        def add(*c: Any) -> tirx.Stmt:
            place = list(c[len(self.columns) :])
            names = names_of([*self.columns, *self.rows], c)
            total = tirx.BufferLoad(sums, place) + at(store.value.b, names, *c[-2:])
            out: tirx.Stmt = tirx.BufferStore(sums, total, place)
            for condition in reversed(conditions):
                out = tirx.IfThenElse(at(condition, names, *c[-2:]), out, None)
            return out

        def write(*c: Any) -> tirx.Stmt:
            names = names_of(self.rows, c)
            place = [at(i, names, *c[-2:]) for i in store.indices]
            total = tirx.BufferLoad(sums, list(c))
            if not once:
                total = tirx.BufferLoad(store.buffer, place) + total
            return tirx.BufferStore(store.buffer, total, place)

        spatial, over = "S" * len(inner), "R" * len(self.columns)
        return tirx.SeqStmt([
            self._iterate([*self.columns, *inner], over + spatial, "add", add, start),
            self._iterate(inner, spatial, "write", write),
        ])  # fmt: skip

    def _iterate(
        self,
        axes: list[Axis],
        kinds: str,
        step: str,
        body: Callable[..., tirx.Stmt],
        init: Callable[..., tirx.Stmt] | None = None,
    ) -> SparseIteration:
        variables = [tirx.Var(a.name.lower(), a.idtype) for a in axes]
        return SparseIteration(
            span=None, axes=axes, kinds=kinds, name=f"{step}_{self.rule.name}", vars=variables,
            init=init and init(*variables), body=body(*variables), annotations={},
        )  # fmt: skip


def _taken_apart(stmt: Any) -> tuple[list[Any], Any]:
    """The conditions around a store, and the store."""
    conditions = []
    while isinstance(stmt, tirx.IfThenElse):
        conditions.append(stmt.condition)
        stmt = stmt.then_case
    return conditions, stmt
