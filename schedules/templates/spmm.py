"""Sparse times dense on a CPU: C[i, k] = reduce over the stored j of A[i, j] * B[j, k].

What makes it fast, in order of effect: all features of a tile are summed up in registers; what is
gathered stays in cache (tiles of features outermost, then parts of the columns; both copied
together where rows of B are far apart); gathered rows are asked for ahead; threads get rows with
equal numbers of non-zeros. (SparseTIR, section 4.2.1; Senanayake et al., section 8.)
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import s_tir, tirx
from tvm.script import sparse_tir as T

from sparsetir.formats.index_arrays import INT32, starts
from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Spmm
from sparsetir.schedules.passes.parallel_loops import apply_kinds, run_in_parallel
from sparsetir.schedules.passes.prefetch import prefetch_gathered
from sparsetir.schedules.templates.feature_tiles import Tiled
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["RowBlocks", "arrange", "equal_work", "program", "row_array", "schedule"]

MAX_TILE = 256
ROW_COST = 2


@dataclass(frozen=True)
class RowBlocks(Tiled):
    """How a CPU kernel is made.

    tile : features summed up in registers at a time, 1 to 256
    lanes : of a vector, a power of two, at most `tile`
    feat : None for a kernel that serves every multiple of `tile`; else the one feature size it
        serves, at least `tile`: the last tile, and the last vector of each, then begin earlier
        where they would reach too far
    tiles_first : go through all rows for a tile of features, then for the next one; else through
        all tiles for a row
    pack : copy the tile's features of B together before they are gathered, in the accumulator's
        type
    prefetch : how many non-zeros ahead rows of B are asked for; 0 for never
    parts : parts of the columns that are gone through one after the other; how many is not
        compiled in
    blocks : blocks of rows; they and the tiles are divided among the threads; not compiled in
    parallel : use all threads; to wake them takes as long as a small product
    """

    tile: int = 128
    lanes: int = 16
    feat: int | None = None
    pack: bool = False
    tiles_first: bool = True
    prefetch: int = 8
    parts: int = 1
    blocks: int = 1
    parallel: bool = True

    def __post_init__(self) -> None:
        who = "RowBlocks"
        for name in ("tile", "lanes", "prefetch", "parts", "blocks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value >= 2**31:
                raise ValueError(f"{who}: argument '{name}': expected an integer, got {value!r}")
        if not 1 <= self.tile <= MAX_TILE:
            raise ValueError(f"{who}: argument 'tile': expected 1 to {MAX_TILE}, got {self.tile}")
        if self.lanes < 1 or self.lanes & (self.lanes - 1) or self.lanes > self.tile:
            raise ValueError(
                f"{who}: argument 'lanes': expected a power of two up to tile = {self.tile}, "
                f"got {self.lanes}"
            )
        if self.feat is None and self.tile % self.lanes:
            raise ValueError(
                f"{who}: argument 'tile': expected a multiple of lanes = {self.lanes} where 'feat' "
                f"is not given, got {self.tile}"
            )
        if self.feat is not None and self.feat < self.tile:
            raise ValueError(
                f"{who}: argument 'feat': expected at least tile = {self.tile}, got {self.feat}"
            )
        for name, least in (("prefetch", 0), ("parts", 1), ("blocks", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{who}: argument '{name}': expected {least} or more, got {getattr(self, name)}"
                )

        if self.pack and not self.tiles_first:
            raise ValueError(
                f"{who}: argument 'pack': expected False without 'tiles_first', got True"
            )
        if self.parts > 1 and self.feat is not None and self.feat % self.tile:
            raise ValueError(
                f"{who}: argument 'parts': expected 1 where tiles of {self.tile} features overlap, "
                f"as {self.feat} is no multiple, got {self.parts}"
            )

    @property
    def compiled(self) -> RowBlocks:
        """What a kernel depends on: the same for all numbers of blocks, and of several parts."""
        return replace(self, parts=min(self.parts, 2), blocks=1)

    @property
    def vectors(self) -> int:
        """Vectors of a tile."""
        return -(-self.tile // self.lanes)

    def place(self, p: Any, v: Any, l: Any) -> Any:
        """Feature at lane l of vector v of tile p."""
        return self.tile_start(p) + self.in_tile(v, l)

    def tile_start(self, p: Any) -> Any:
        """First feature of tile p."""
        if self.feat is None or self.feat % self.tile == 0:
            return p * self.tile
        return tirx.min(p * self.tile, self.feat - self.tile)

    def in_tile(self, v: Any, l: Any) -> Any:
        """Place within a tile at lane l of vector v."""
        if self.tile % self.lanes == 0:
            return v * self.lanes + l
        return tirx.min(v * self.lanes, self.tile - self.lanes) + l


def program(problem: Spmm, config: RowBlocks) -> SparseFunc:
    """The stage-I function, over blocks of rows and parts of columns.

    Its arrays, beside A's values (nnz,), B (n, feat) and C (m, feat), with a dimension of heads
    before each where the problem is batched:

    block_ptr : (blocks + 1,) first row of each block
    part_ids : (m * parts,) 0 .. parts - 1 for each row; absent where the config has one part
    seg_ptr : (m * parts + 1,) first non-zero of each row's part; indptr where there is one
    indices : (nnz,) columns, in order within each row
    row : (m,) in the accumulator's type; for a mean what a row's sum is multiplied with, once, for
        a maximum what it begins with: -inf, and 0 in a row without non-zeros; absent for a sum
    """
    dtype, idtype, acc, reduce = (
        problem.dtype, problem.idtype, problem.accumulator, problem.reduce,
    )  # fmt: skip
    tile, lanes, vectors = config.tile, config.lanes, config.vectors
    feat, pack, tiles_first = config.feat, config.pack, config.tiles_first
    batched, size = problem.batched, getattr(T, idtype)
    in_parts = config.parts > 1
    spatial, in_rows = "S" * (1 + batched + tiles_first), "S" * (2 + in_parts - tiles_first)
    zero = tirx.const(0.0, acc)

    def head(outer: Any) -> Any:
        return outer[:1] if batched else []

    def stored(h: Any, o: Any, i: Any, q: Any, j: Any) -> list[Any]:
        return [*([h] if batched else []), o, i, *([q] if in_parts else []), j]

    def within(i: Any, q: Any, p: Any) -> list[Any]:
        return [i, *([q] if in_parts else []), *([] if tiles_first else [p])]

    def part(inner: Any) -> Any:
        return inner[1:2] if in_parts else []

    def carried(inner: Any, first: Any, before: Any, scale: Any) -> Any:
        """What a sum begins with: what it came to in the part before, whose mean was stored."""
        if not in_parts:
            return first
        total = T.cast(before, acc)
        return T.if_then_else(inner[1] == 0, first, total if scale is None else total / scale)

    def outside(h: Any, p: Any, o: Any) -> list[Any]:
        return [*([h] if batched else []), *([p] if tiles_first else []), o]

    def at(outer: Any, inner: Any) -> Any:
        return [*head(outer), outer[-1], inner[0]]

    def place(outer: Any, inner: Any, v: Any, l: Any) -> Any:
        return config.place(outer[-2] if tiles_first else inner[-1], v, l)

    @T.prim_func
    def spmm(
        a: T.handle, b: T.handle, out: T.handle, row: T.handle, block_ptr: T.handle,
        part_ids: T.handle, seg_ptr: T.handle, indices: T.handle, heads: size,
        blocks: size, parts: size, m: size, n: size, nnz: size, tiles: size,
    ) -> None:  # fmt: skip
        O = T.dense_fixed(blocks, idtype)
        I = T.dense_variable(O, (m, m), block_ptr, idtype)
        if in_parts:
            Q = T.sparse_fixed(I, (parts, parts), part_ids, idtype)
        J = T.sparse_variable(Q if in_parts else I, (n, nnz), (seg_ptr, indices), idtype)
        N = T.dense_fixed(n, idtype)
        P = T.dense_fixed(tiles if feat is None else -(-feat // tile), idtype)
        K = T.dense_fixed(tiles * tile if feat is None else feat, idtype)
        V = T.dense_fixed(vectors, idtype)
        L = T.dense_fixed(lanes, idtype)
        if batched:
            H = T.dense_fixed(heads, idtype)
        A = T.match_sparse_buffer(
            a, stored(H if batched else O, O, I, Q if in_parts else O, J), dtype
        )
        B = T.match_sparse_buffer(b, (H, N, K) if batched else (N, K), dtype)
        C = T.match_sparse_buffer(out, (H, O, I, K) if batched else (O, I, K), dtype)
        if reduce != "sum":
            ROW = T.match_sparse_buffer(row, (O, I), acc)
        if pack:
            PANEL = T.alloc_sparse_buffer((N, V, L), acc)
        ACC = T.alloc_sparse_buffer((V, L), acc, "local")
        with T.sp_iter(outside(H if batched else O, P, O), spatial, "outer") as outer:
            if pack:
                with T.sp_iter([N, V, L], "SSS", "pack") as [j, v, l]:
                    PANEL[j, v, l] = T.cast(B[(*head(outer), j, place(outer, (), v, l))], acc)
            with T.sp_iter(within(I, Q if in_parts else O, P), in_rows, "rows") as inner:
                with T.sp_iter([J, V, L], "RSS", "reduce") as [j, v, l]:
                    with T.init():
                        ACC[v, l] = carried(
                            inner,
                            ROW[outer[-1], inner[0]] if reduce == "max" else zero,
                            C[(*at(outer, inner), place(outer, inner, v, l))] if in_parts else zero,
                            ROW[outer[-1], inner[0]] if reduce == "mean" else None,
                        )
                    ACC[v, l] = problem.combine(
                        ACC[v, l],
                        T.cast(A[(*at(outer, inner), *part(inner), j)], acc)
                        * (
                            PANEL[j, v, l]
                            if pack
                            else T.cast(B[(*head(outer), j, place(outer, inner, v, l))], acc)
                        ),
                    )
                with T.sp_iter([V, L], "SS", "write") as [v, l]:
                    C[(*at(outer, inner), place(outer, inner, v, l))] = T.cast(
                        ACC[v, l] * ROW[outer[-1], inner[0]] if reduce == "mean" else ACC[v, l],
                        dtype,
                    )

    unused = {"row"} if reduce == "sum" else set()
    unused |= set() if batched else {"heads"}
    unused |= set() if config.feat is None else {"tiles"}
    unused |= set() if in_parts else {"part_ids", "parts"}
    return spmm.replace(params=[p for p in spmm.params if p.name not in unused])


def arrange(matrix: CsrPattern, problem: Spmm, config: RowBlocks) -> Arranged:
    """The arguments of :func:`program` that depend on the pattern alone.

    Raises ScheduleError for more parts of rows than the index type counts.
    """
    indptr, indices, (m, n) = matrix
    blocks, parts = max(1, min(config.blocks, m)), config.parts
    if problem.idtype == "int32" and m * parts > INT32:
        raise ScheduleError(
            f"spmm.arrange: argument 'config': expected parts * m to be at most {INT32} with "
            f"indices of int32, got {parts} * {m}"
        )
    found: dict[str, np.ndarray | int] = {
        "block_ptr": equal_work(indptr, blocks, ROW_COST),
        "seg_ptr": indptr,
        "indices": indices,
        "blocks": blocks,
        "m": m,
        "n": n,
        "nnz": len(indices),
    }
    if parts > 1:
        width = max(1, -(-n // parts))
        place = np.repeat(np.arange(m, dtype=indptr.dtype), np.diff(indptr)) * parts
        place += indices // width
        found["seg_ptr"] = starts(np.bincount(place, minlength=m * parts), indptr.dtype)
        found["part_ids"] = np.tile(np.arange(parts, dtype=indptr.dtype), m)
        found["parts"] = parts
    if problem.reduce != "sum":
        found["row"] = row_array(indptr, problem)
    return Arranged(found)


def equal_work(indptr: np.ndarray, blocks: int, cost: int) -> np.ndarray:
    """(blocks + 1,) first rows of blocks with about as much work each.

    A row costs as much as its non-zeros and `cost` more, to begin and to write it.
    """
    m = len(indptr) - 1
    work = indptr.astype("int64") + cost * np.arange(m + 1)
    inner = np.searchsorted(work, work[-1] * np.arange(1, blocks) // blocks)
    return np.concatenate([[0], inner, [m]]).astype(indptr.dtype)


def row_array(indptr: np.ndarray, problem: Spmm) -> np.ndarray:
    """(m,) what `row` of :func:`program` is for a mean or a maximum."""
    counts = np.diff(indptr)
    if problem.reduce == "mean":
        return (1.0 / np.maximum(counts, 1)).astype(problem.accumulator)
    return np.where(counts > 0, -np.inf, 0.0).astype(problem.accumulator)


def schedule(
    func: tirx.PrimFunc, problem: Spmm, config: RowBlocks, target: Any = None
) -> tirx.PrimFunc:
    """Schedule the stage-II form of :func:`program`; the function given is left as it is."""
    del problem, target
    sch = s_tir.Schedule(s_tir.renew_defs(func))
    reduce, write = sch.get_sblock("reduce0"), sch.get_sblock("write0")
    if config.parallel:
        run_in_parallel(sch, sch.fuse(*sch.get_loops(sch.get_sblock("outer0"))), "parallel")
    if config.parts > 1:
        i, q, *_ = sch.get_loops(sch.get_sblock("rows0"))
        sch.reorder(q, i)
    if config.pack:
        _in_vectors(sch, sch.get_sblock("pack0"))
    for block in (reduce, write):
        _in_vectors(sch, block)
    _in_vectors(sch, sch.decompose_reduction(reduce, sch.get_loops(reduce)[0]))
    out = apply_kinds(sch.mod["main"])
    if not config.prefetch:
        return out
    gathered = "PANEL" if config.pack else "B"
    return prefetch_gathered(out, "reduce0_update", gathered, config.prefetch, config.tile)


def _in_vectors(sch: Any, block: Any) -> None:
    *_, v, l = sch.get_loops(block)
    sch.unroll(v)
    sch.vectorize(l)
