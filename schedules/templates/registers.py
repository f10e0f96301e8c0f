"""Decomposed SpMM with the features of a row of threads in registers: a rewrite of stage I."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import ir, tirx

from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.templates.gpu_features import FeaturePlaces, opaque
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
)
from sparsetir.sparse_ir.position_space import as_dtype
from sparsetir.sparse_ir.verify import verify

__all__ = ["INIT", "Registers"]

INIT = "spmm_init"


class Registers:
    """Rewrites decomposed iterations: threads have features, and reduce rows in registers.

    Before, for each rule::

        with T.sp_iter([IO, IB, JB, K], "SSRS", "spmm_<rule>") as [io, ib, jb, k]:
            C[ib, k] = C[ib, k] + A[io, ib, jb] * B[jb, k]

    After, where `at` is the place of lane `l` of vector `w` of thread `x` in tile `p`::

        with T.sp_iter([P, IO, IB, X], "SSSS", "spmm_<rule>") as [p, io, ib, x]:
            with T.sp_iter([W, L], "SS", "start_<rule>") as [w, l]:
                SUM[w, l] = 0.0
            with T.sp_iter([JB], "R", "elements_<rule>") as [jb]:
                with T.sp_iter([W, L], "SS", "load_<rule>") as [w, l]:
                    LOADED[w, l] = B[jb, at]
                with T.sp_iter([W, L], "SS", "add_<rule>") as [w, l]:
                    SUM[w, l] = SUM[w, l] + A[io, ib, jb] * LOADED[w, l]
            with T.sp_iter([W, L], "SS", "finish_<rule>") as [w, l]:
                OUT[w, l] = SUM[w, l]
            with T.sp_iter([W, L], "SS", "write_<rule>") as [w, l]:
                if SHARED[ib] == 0:
                    C[ib, at] = OUT[w, l]
            with T.sp_iter([W, L], "SS", "share_<rule>") as [w, l]:
                if SHARED[ib] == 1:
                    atomicAdd(C[ib, at], OUT[w, l])

    Means are multiplied with ROW[ib] at the end, and maxima begin with -inf. The init sets all of C
    to zero: then whole rows are written, and pieces of the others added. Without `shares` there is
    neither SHARED nor the addition, and no row may be stored in pieces.
    """

    def __init__(self, func: SparseFunc, problem: Spmm, config: Any, shares: bool) -> None:
        self.func, self.problem, self.at = func, problem, FeaturePlaces(config)
        self.B, self.C = func.buffer("B"), func.buffer("C")
        scalars = {p.name: p for p in func.params}
        self.P = _dense("P", self.at.tiles(scalars.get("tiles")))
        self.W, self.X = _dense("W", config.coarsen), _dense("X", config.threads)
        self.L = _dense("L", config.vector)
        self.locals: list[SparseBuffer] = []
        self.rows: dict[str, SparseBuffer] = {}  # parameters with an element for each row
        if problem.reduce == "mean":
            self._row_parameter("ROW", problem.accumulator)
        if shares:
            self._row_parameter("SHARED", "int8")

    def _row_parameter(self, name: str, dtype: str) -> None:
        axis = self.func.axis("I")
        handle = ir.Var(name.lower(), ir.PointerType(ir.PrimType("void")))
        var = buffer_var([axis.length], dtype, name)
        self.rows[name] = SparseBuffer(var=var, axes=[axis], handle=handle)

    def rewrite(self, rules: list[FormatRewriteRule]) -> SparseFunc:
        """The function with an iteration for the init and one for each rule."""
        body = [self._init(), *(self._part(rule) for rule in rules)]
        params = list(self.func.params)
        params[2:2] = [b.handle for b in self.rows.values()]
        func = self.func.replace(
            params=params,
            axes=[*self.func.axes, self.P, self.W, self.X, self.L],
            buffers=[*self.func.buffers, *self.rows.values(), *self.locals],
            body=tirx.SeqStmt(body),
        )
        verify(func)
        return func

    def _init(self) -> SparseIteration:
        dtype = self.problem.dtype
        zeros = self._local("ZEROS", dtype)  # TVM makes no vector of a bfloat16 constant

        def row(p: Any, i: Any, x: Any) -> tirx.Stmt:
            def zero(w: Any, l: Any) -> tirx.Stmt:
                return tirx.BufferStore(zeros, tirx.const(0, dtype), [w, l])

            def clear(w: Any, l: Any) -> tirx.Stmt:
                return self._write(p, opaque(i), x, w, l, tirx.BufferLoad(zeros, [w, l]))

            return tirx.SeqStmt([self._features("zero", zero), self._features("clear", clear)])

        return _iterate([self.P, self.func.axis("I"), self.X], "SSS", INIT, row)

    def _part(self, rule: FormatRewriteRule) -> SparseIteration:
        name = rule.name
        root, pieces, slots = (self.func.axis(rule.renamed(n)) for n in rule.axes_after_rewrite)
        values = self.func.buffer(rule.renamed("A"))
        dtype, total = self.problem.dtype, self.problem.accumulator
        loaded, out = self._local(f"LOADED_{name}", dtype), self._local(f"OUT_{name}", dtype)
        sums = self._local(f"SUM_{name}", total)
        start = float("-inf") if self.problem.reduce == "max" else 0.0

        def row(p: Any, o: Any, i: Any, x: Any) -> tirx.Stmt:
            def begin(w: Any, l: Any) -> tirx.Stmt:
                return tirx.BufferStore(sums, tirx.const(start, total), [w, l])

            def elements(j: Any) -> tirx.Stmt:
                def load(w: Any, l: Any) -> tirx.Stmt:
                    element = tirx.BufferLoad(self.B.var, [j, self.at.load(p, w, x, l)])
                    return tirx.BufferStore(loaded, element, [w, l])

                def add(w: Any, l: Any) -> tirx.Stmt:
                    value = tirx.Cast(total, tirx.BufferLoad(values.var, [o, i, j]))
                    term = value * tirx.Cast(total, tirx.BufferLoad(loaded, [w, l]))
                    combined = self.problem.combine(sums[w, l], term)
                    return tirx.BufferStore(sums, combined, [w, l])

                return tirx.SeqStmt(
                    [self._features(f"load_{name}", load), self._features(f"add_{name}", add)]
                )

            def finish(w: Any, l: Any) -> tirx.Stmt:
                done = tirx.BufferLoad(sums, [w, l])
                if "ROW" in self.rows:
                    done = done * tirx.BufferLoad(self.rows["ROW"].var, [i])
                return tirx.BufferStore(out, tirx.Cast(dtype, done), [w, l])

            def write(w: Any, l: Any) -> tirx.Stmt:
                store = self._write(p, i, x, w, l, tirx.BufferLoad(out, [w, l]))
                return self._if_shared(i, False, store)

            def share(w: Any, l: Any) -> tirx.Stmt:
                place = tirx.BufferLoad(self.C.var, [i, self.at.load(p, w, x, l)])
                add = tirx.call_extern(
                    dtype, "atomicAdd", tirx.address_of(place), tirx.BufferLoad(out, [w, l])
                )
                return self._if_shared(i, True, self._where_stored(p, w, x, tirx.Evaluate(add)))

            steps = [
                self._features(f"start_{name}", begin),
                _iterate([slots], "R", f"elements_{name}", elements),
                self._features(f"finish_{name}", finish),
                self._features(f"write_{name}", write),
            ]
            if "SHARED" in self.rows:
                steps.append(self._features(f"share_{name}", share))
            return tirx.SeqStmt(steps)

        return _iterate([self.P, root, pieces, self.X], "SSSS", f"spmm_{name}", row)

    def _features(self, name: str, body: Callable[..., tirx.Stmt]) -> SparseIteration:
        """An iteration over the features of a thread."""
        return _iterate([self.W, self.L], "SS", name, body)

    def _write(self, p: Any, i: Any, x: Any, w: Any, l: Any, value: Any) -> tirx.Stmt:
        store = tirx.BufferStore(self.C.var, value, [i, self.at.store(p, w, x, l)])
        return self._where_stored(p, w, x, store)

    def _where_stored(self, p: Any, w: Any, x: Any, stmt: tirx.Stmt) -> tirx.Stmt:
        """A statement for the lanes that have a vector of their own."""
        return stmt if self.at.whole else tirx.IfThenElse(self.at.stored(p, w, x), stmt, None)

    def _if_shared(self, i: Any, shared: bool, stmt: tirx.Stmt) -> tirx.Stmt:
        """A statement for rows that are stored in pieces, or for the others."""
        if "SHARED" not in self.rows:
            return stmt
        flag = tirx.BufferLoad(self.rows["SHARED"].var, [i])
        return tirx.IfThenElse(flag == tirx.const(shared, "int8"), stmt, None)

    def _local(self, name: str, dtype: str) -> Any:
        axes = [self.W, self.L]
        var = buffer_var([a.length for a in axes], dtype, name, "local")
        self.locals.append(SparseBuffer(var=var, axes=axes, handle=None))
        return var


def _dense(name: str, length: Any) -> Axis:
    return Axis(name=name, kind="dense_fixed", length=as_dtype(length, "int32"))


def _iterate(
    axes: list[Axis], kinds: str, name: str, body: Callable[..., tirx.Stmt]
) -> SparseIteration:
    """An iteration; `body` makes its statement of the coordinates."""
    variables = [tirx.Var(a.name.lower(), a.idtype) for a in axes]
    return SparseIteration(
        span=None, axes=axes, kinds=kinds, name=name, vars=variables, init=None,
        body=body(*variables), annotations={},
    )  # fmt: skip
