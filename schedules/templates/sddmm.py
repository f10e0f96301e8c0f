"""SDDMM on a CPU: OUT[e] = X[rows[e]] . Y[cols[e]], where e goes over the non-zeros.

The kernel knows no rows: workers get equally many non-zeros, and short rows cost no more than long
ones. (The fused iteration space of SparseTIR, section 4.2.2, with the row of each non-zero given
instead of searched for.) A few non-zeros at a time are summed in vectors along the features, one
register each; then the lanes of these registers are added up together (see `lane_sums`).
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from tvm import s_tir, tirx
from tvm.script import sparse_tir as T

from sparsetir.schedules.operators.problems import Arranged, CsrPattern, Sddmm, vector_lanes
from sparsetir.schedules.passes.known_bounds import trust_indices
from sparsetir.schedules.passes.lane_sums import add_lanes
from sparsetir.schedules.passes.parallel_loops import apply_kinds, run_in_parallel
from sparsetir.schedules.templates.feature_tiles import Tiled
from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["SddmmGroups", "arrange", "coordinates", "program", "schedule"]

GROUP = 8
TILE_VECTORS = 8
# Vectors of a row that code is written out for: more take long to compile. Above, tiles are gone
# through in a loop, so narrow that LLVM leaves it one: written out in part it takes longer.
MAX_STRAIGHT = 16
LOOP_VECTORS = 4
# Rows of Y of a part: what stays in a core's second-level cache beside rows of X.
PART_BYTES = 3 * 2**18
# Elements per row of X and Y from which on a copy pays.
PACK_DEGREE = 24


@dataclass(frozen=True)
class SddmmGroups(Tiled):
    """How a CPU kernel is made.

    lanes : of a vector, a power of two, at most the number of features
    group : non-zeros whose lanes are added up together, a power of two; at most `lanes`, where a
        vector has more than one. Their sums stay in registers while they are below 1 KiB
    vectors : in a tile of features
    feat : None for a kernel that serves every multiple of a tile, lanes * vectors; else the one
        feature size it serves, in whole tiles and a rest, whose last vector may overlap the one
        before
    parts : parts of the columns that are gone through one after the other, so that their rows of Y
        stay in cache; how many is not compiled in
    pack : first copy X and Y, so that their rows begin at whole vectors, in the type that sums are
        in; with `feat`
    """

    lanes: int = 16
    group: int = GROUP
    vectors: int = TILE_VECTORS
    feat: int | None = None
    parts: int = 1
    pack: bool = False

    def __post_init__(self) -> None:
        lanes, group, vectors, feat = self.lanes, self.group, self.vectors, self.feat
        _expect("lanes", lanes > 0 and not lanes & (lanes - 1), "a power of two", lanes)
        fits = lanes == 1 or 1 <= group <= lanes
        wanted = f"a power of two up to lanes = {lanes}"
        _expect("group", group > 0 and fits and not group & (group - 1), wanted, group)
        _expect("vectors", vectors >= 1, "1 or more", vectors)
        least = max(lanes, lanes * (vectors - 1) + 1)
        _expect("feat", feat is None or feat >= least, f"{least} or more features", feat)
        _expect("parts", self.parts >= 1, "1 or more", self.parts)
        _expect("pack", feat is not None or not self.pack, "False where 'feat' is None", self.pack)

    @staticmethod
    def for_features(problem: Sddmm, feat: int, vector_bits: int = 512) -> SddmmGroups:
        """A good config for a feature size; sizes with the same config share a kernel."""
        lanes = vector_lanes(problem, vector_bits)
        while lanes > feat:
            lanes //= 2
        group = min(GROUP, lanes) if lanes > 1 else GROUP
        if feat % (lanes * TILE_VECTORS) == 0:
            return SddmmGroups(lanes, group)
        return SddmmGroups(lanes, group, SddmmGroups.vectors_of(feat, lanes), feat)

    @staticmethod
    def vectors_of(feat: int, lanes: int) -> int:
        """Vectors in a tile of a kernel for one feature size: all, unless they are many."""
        vectors = -(-feat // lanes)
        return vectors if vectors <= MAX_STRAIGHT else LOOP_VECTORS

    @staticmethod
    def for_pattern(
        problem: Sddmm, m: int, n: int, nnz: int, feat: int, vector_bits: int = 512
    ) -> SddmmGroups:
        """A good config for a pattern of `nnz` elements in (m, n).

        Parts pay where a part of a row has elements enough for its row of X to be loaded for. A
        copy pays where rows begin within vectors and are read often.
        """
        found = SddmmGroups.for_features(problem, feat, vector_bits)
        parts = max(1, -(-n * feat * np.dtype(problem.dtype).itemsize // PART_BYTES))
        pack = feat % found.lanes != 0 and nnz >= PACK_DEGREE * (m + n)
        return replace(found, parts=parts if nnz >= parts * m else 1, pack=pack)

    @property
    def tile(self) -> int:
        """Features of a tile."""
        return self.lanes * self.vectors

    @property
    def whole_tiles(self) -> int | None:
        """Tiles that are gone through in a loop; None where that is an argument of the kernel."""
        return None if self.feat is None else self.feat // self.tile

    @property
    def rest_vectors(self) -> int:
        """Vectors that the features behind the whole tiles take."""
        return 0 if self.feat is None else -(-(self.feat % self.tile) // self.lanes)

    @property
    def row_vectors(self) -> int:
        """Vectors of a row, of a config with `feat`."""
        return -(-(self.feat or 0) // self.lanes)

    @property
    def compiled(self) -> SddmmGroups:
        """What of the config the kernel depends on: that there are parts, not how many."""
        return replace(self, parts=min(self.parts, 2))


def _expect(argument: str, condition: bool, wanted: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"SddmmGroups: argument '{argument}': expected {wanted}, got {got}")


def program(problem: Sddmm, config: SddmmGroups) -> SparseFunc:
    """The stage-I function, over groups of non-zeros.

    Its arrays, with a dimension of heads before the first three where the problem is batched:

    x, y : (m, feat), (n, feat)
    out : (nnz,)
    rows, cols : (nnz,) of each non-zero, in any order. The kernel does not check them.
    places : (nnz,) where in `out` the result of each is; without parts it is where its row is in
        `rows`, and `places` is absent
    """
    dtype, idtype, acc = problem.dtype, problem.idtype, problem.accumulator
    lanes, group, vectors, feat = config.lanes, config.group, config.vectors, config.feat
    tile, batched, size = config.tile, problem.batched, getattr(T, idtype)
    in_parts, pack = bool(config.parts > 1), bool(config.pack)
    whole, rest, last_vector = config.whole_tiles, config.rest_vectors, config.row_vectors - 1
    looped, after, behind = whole != 0, rest != 0, (whole or 0) * vectors
    overlaps = feat is not None and feat % lanes != 0
    zero = tirx.const(0.0, acc)

    def place(u: Any, lane: Any) -> Any:
        """A feature of vector u of a row that may be the last one."""
        return (u * lanes if feat is None else T.min(u * lanes, feat - lanes)) + lane

    def once(value: Any, u: Any, lane: Any) -> Any:
        """Zero where a vector overlaps the one before, which has the value too."""
        return T.Select(place(u, lane) >= u * lanes, value, zero) if overlaps else value

    def product(x: Any, y: Any, i: Any, j: Any, u: Any, lane: Any) -> Any:
        """Of a feature of vector u in a whole tile."""
        at = (u, lane) if pack else (u * lanes + lane,)
        return T.cast(x[(*i, *at)], acc) * T.cast(y[(*j, *at)], acc)

    def rest_product(x: Any, y: Any, i: Any, j: Any, v: Any, lane: Any) -> Any:
        """Of a feature of vector v behind the whole tiles."""
        u = behind + v
        if pack:
            return product(x, y, i, j, u, lane)
        at = place(u, lane)
        return once(T.cast(x[(*i, at)], acc) * T.cast(y[(*j, at)], acc), u, lane)

    def last(g: Any, nnz: Any) -> Any:
        """A non-zero of the last group, which may not be whole: the very last one fills it up."""
        return T.min(nnz // group * group + g, nnz - 1)

    @T.prim_func
    def sddmm(
        x: T.handle, y: T.handle, out: T.handle, rows: T.handle, cols: T.handle, places: T.handle,
        heads: size, m: size, n: size, nnz: size, tiles: size,
    ) -> None:  # fmt: skip
        M = T.dense_fixed(m, idtype)
        N = T.dense_fixed(n, idtype)
        E = T.dense_fixed(nnz, idtype)
        O = T.dense_fixed(nnz // group, idtype)
        R = T.dense_fixed(T.min(nnz % group, 1), idtype)
        G = T.dense_fixed(group, idtype)
        P = T.dense_fixed(tiles if feat is None else whole, idtype)
        K = T.dense_fixed(tiles * tile if feat is None else feat, idtype)
        V = T.dense_fixed(vectors, idtype)
        W = T.dense_fixed(rest, idtype)
        L = T.dense_fixed(lanes, idtype)
        if batched:
            H = T.dense_fixed(heads, idtype)
        X = T.match_sparse_buffer(x, (H, M, K) if batched else (M, K), dtype)
        Y = T.match_sparse_buffer(y, (H, N, K) if batched else (N, K), dtype)
        OUT = T.match_sparse_buffer(out, (H, E) if batched else (E,), dtype)
        ROWS = T.match_sparse_buffer(rows, (E,), idtype)
        COLS = T.match_sparse_buffer(cols, (E,), idtype)
        if in_parts:
            PLACES = T.match_sparse_buffer(places, (E,), idtype)
        PARTS = T.alloc_sparse_buffer((O, G, L), acc, "local")
        REST = T.alloc_sparse_buffer((O, G, L), acc, "local")
        SUMS = T.alloc_sparse_buffer((O, G), acc, "local")
        LAST_PARTS = T.alloc_sparse_buffer((R, G, L), acc, "local")
        LAST_REST = T.alloc_sparse_buffer((R, G, L), acc, "local")
        LAST_SUMS = T.alloc_sparse_buffer((R, G), acc, "local")
        if pack:
            U = T.dense_fixed(config.row_vectors, idtype)
            FULL = T.dense_fixed(config.row_vectors - 1, idtype)
            XS = T.alloc_sparse_buffer((H, M, U, L) if batched else (M, U, L), acc)
            YS = T.alloc_sparse_buffer((H, N, U, L) if batched else (N, U, L), acc)
            with T.sp_iter((H, M) if batched else (M,), "SS"[not batched :], "pack_x") as i:
                with T.sp_iter([FULL, L], "SS", "copy_x") as [u, l]:
                    XS[(*i, u, l)] = T.cast(X[(*i, u * lanes + l)], acc)
                with T.sp_iter([L], "S", "copy_last_x") as [l]:
                    XS[(*i, last_vector, l)] = once(
                        T.cast(X[(*i, place(last_vector, l))], acc), last_vector, l
                    )
            with T.sp_iter((H, N) if batched else (N,), "SS"[not batched :], "pack_y") as j:
                with T.sp_iter([FULL, L], "SS", "copy_y") as [u, l]:
                    YS[(*j, u, l)] = T.cast(Y[(*j, u * lanes + l)], acc)
                with T.sp_iter([L], "S", "copy_last_y") as [l]:
                    YS[(*j, last_vector, l)] = once(
                        T.cast(Y[(*j, place(last_vector, l))], acc), last_vector, l
                    )
        with T.sp_iter((H, O) if batched else (O,), "SS"[not batched :], "groups") as at:
            if after:
                with T.sp_iter([G, W, L], "SRS", "rest") as [g, v, l]:
                    with T.init():
                        REST[at[-1], g, l] = zero
                    REST[at[-1], g, l] = REST[at[-1], g, l] + rest_product(
                        XS if pack else X, YS if pack else Y,
                        (*at[:-1], ROWS[at[-1] * group + g]),
                        (*at[:-1], COLS[at[-1] * group + g]), v, l,
                    )  # fmt: skip
            if looped:
                with T.sp_iter([G, P, V, L], "SRRS", "parts") as [g, p, v, l]:
                    with T.init():
                        PARTS[at[-1], g, l] = REST[at[-1], g, l] if after else zero
                    PARTS[at[-1], g, l] = PARTS[at[-1], g, l] + product(
                        XS if pack else X, YS if pack else Y, (*at[:-1], ROWS[at[-1] * group + g]),
                        (*at[:-1], COLS[at[-1] * group + g]), p * vectors + v, l,
                    )  # fmt: skip
            with T.sp_iter([G, L], "SR", "sums") as [g, l]:
                with T.init():
                    SUMS[at[-1], g] = zero
                SUMS[at[-1], g] = SUMS[at[-1], g] + (PARTS if looped else REST)[at[-1], g, l]
            with T.sp_iter([G], "S", "write") as [g]:
                if in_parts:
                    OUT[(*at[:-1], PLACES[at[-1] * group + g])] = T.cast(SUMS[at[-1], g], dtype)
                else:
                    OUT[(*at[:-1], at[-1] * group + g)] = T.cast(SUMS[at[-1], g], dtype)
        with T.sp_iter((H, R) if batched else (R,), "SS"[not batched :], "last") as at:
            if after:
                with T.sp_iter([G, W, L], "SRS", "last_rest") as [g, v, l]:
                    with T.init():
                        LAST_REST[at[-1], g, l] = zero
                    LAST_REST[at[-1], g, l] = LAST_REST[at[-1], g, l] + rest_product(
                        XS if pack else X, YS if pack else Y,
                        (*at[:-1], ROWS[last(g, nnz)]), (*at[:-1], COLS[last(g, nnz)]), v, l,
                    )  # fmt: skip
            if looped:
                with T.sp_iter([G, P, V, L], "SRRS", "last_parts") as [g, p, v, l]:
                    with T.init():
                        LAST_PARTS[at[-1], g, l] = LAST_REST[at[-1], g, l] if after else zero
                    LAST_PARTS[at[-1], g, l] = LAST_PARTS[at[-1], g, l] + product(
                        XS if pack else X, YS if pack else Y, (*at[:-1], ROWS[last(g, nnz)]),
                        (*at[:-1], COLS[last(g, nnz)]), p * vectors + v, l,
                    )  # fmt: skip
            with T.sp_iter([G, L], "SR", "last_sums") as [g, l]:
                with T.init():
                    LAST_SUMS[at[-1], g] = zero
                LAST_SUMS[at[-1], g] = (
                    LAST_SUMS[at[-1], g] + (LAST_PARTS if looped else LAST_REST)[at[-1], g, l]
                )
            with T.sp_iter([G], "S", "last_write") as [g]:
                if in_parts:
                    OUT[(*at[:-1], PLACES[last(g, nnz)])] = T.cast(LAST_SUMS[at[-1], g], dtype)
                else:
                    OUT[(*at[:-1], nnz // group * group + g)] = T.cast(LAST_SUMS[at[-1], g], dtype)

    params = [p for p in cast(Any, sddmm).params if in_parts or p.name != "places"]
    return cast(Any, sddmm).replace(params=params)


def coordinates(matrix: CsrPattern) -> tuple[np.ndarray, np.ndarray]:
    """(nnz,) row and column of each non-zero, of the dtype of the pattern's arrays."""
    indptr, indices, (m, _) = matrix
    return np.repeat(np.arange(m, dtype=indptr.dtype), np.diff(indptr)), indices


def arrange(matrix: CsrPattern, problem: Sddmm, config: SddmmGroups) -> Arranged:
    """The arguments of :func:`program` that depend on the pattern alone."""
    del problem
    rows, cols = coordinates(matrix)
    m, n = matrix.shape
    sizes = {"m": m, "n": n, "nnz": len(cols)}
    if config.parts == 1:
        return Arranged({"rows": rows, "cols": cols, **sizes})
    width = max(1, -(-n // config.parts))
    order = np.argsort(cols // width, kind="stable")
    places = order.astype(cols.dtype)
    return Arranged({"rows": rows[order], "cols": cols[order], "places": places, **sizes})


def schedule(
    func: tirx.PrimFunc, problem: Sddmm, config: SddmmGroups, target: Any = None
) -> tirx.PrimFunc:
    """Schedule the stage-II form of :func:`program`; the function given is left as it is."""
    del problem, target
    func = trust_indices(func, "ROWS", "COLS", "PLACES")
    sch = s_tir.Schedule(s_tir.renew_defs(func))
    race = "ignore" if config.parts > 1 else "none"  # no place occurs twice in `places`
    run_in_parallel(sch, sch.get_loops(sch.get_sblock("groups0"))[-1], "parallel", race)
    for name in "xy" if config.pack else "":
        run_in_parallel(sch, sch.get_loops(sch.get_sblock(f"pack_{name}0"))[-1], "parallel")
        for step in ("copy", "copy_last"):
            sch.vectorize(sch.get_loops(sch.get_sblock(f"{step}_{name}0"))[-1])
    for name in ("parts0", "last_parts0") if config.whole_tiles != 0 else ():
        parts = sch.get_sblock(name)
        group, tiles, *_ = sch.get_loops(parts)
        if config.feat is not None:  # narrow tiles: all sums of a group take turns
            sch.reorder(tiles, group)
        _in_vectors(sch, parts, group, tiles)
    for name in ("rest0", "last_rest0") if config.rest_vectors else ():
        rest = sch.get_sblock(name)
        group, vectors, _ = sch.get_loops(rest)
        _in_vectors(sch, rest, group, vectors)
    write = sch.get_loops(sch.get_sblock("write0"))[-1]
    (sch.unroll if config.parts > 1 else sch.vectorize)(write)
    func = next(iter(sch.mod.functions.values()))
    if config.lanes > 1:
        func = add_lanes(add_lanes(func, "sums0"), "last_sums0")
    return apply_kinds(func)


def _in_vectors(sch: Any, block: Any, group: Any, outer: Any) -> None:
    """Straight code of vectors for a sum over the loops from `outer` on."""
    *_, vectors, lane = sch.get_loops(block)
    sch.unroll(group)
    sch.unroll(vectors)
    sch.vectorize(lane)
    init = sch.decompose_reduction(block, outer)
    sch.vectorize(sch.get_loops(init)[-1])
