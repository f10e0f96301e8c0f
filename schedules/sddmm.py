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

from sparsetir.schedules.feature_tiles import Tiled
from sparsetir.schedules.known_bounds import trust_indices
from sparsetir.schedules.lane_sums import add_lanes
from sparsetir.schedules.loop_kinds import apply_marks, mark
from sparsetir.schedules.problems import Arranged, CsrPattern, Sddmm, vector_lanes
from sparsetir.sparse_ir.allocations import allocate_in_visits, block_with
from sparsetir.sparse_ir.nodes import SparseFunc

__all__ = ["SddmmGroups", "arrange", "coordinates", "program", "schedule"]

GROUP = 8
TILE_VECTORS = 8
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
        feature size it serves, in one tile whose last vector may overlap the one before
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
        fits = feat is None or -(-feat // lanes) == vectors and feat >= lanes
        wanted = f"more than {lanes * (vectors - 1)} and at most {lanes * vectors} features"
        _expect("feat", fits, wanted, feat)
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
        return SddmmGroups(lanes, group, -(-feat // lanes), feat)

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
    def last_vector(self) -> int:
        """Where the last vector begins, of a config with `feat`."""
        return (self.feat or self.tile) - self.lanes

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
    overlaps = feat is not None and feat % lanes != 0

    def place(p: Any, v: Any, lane: Any) -> Any:
        if overlaps:
            return T.min(v * lanes, config.last_vector) + lane
        return p * tile + v * lanes + lane

    def once(value: Any, v: Any, lane: Any) -> Any:
        """Zero where a vector overlaps the one before, which has the value too."""
        if not overlaps:
            return value
        return T.Select(place(0, v, lane) >= v * lanes, value, tirx.const(0.0, acc))

    def product(a: Any, b: Any, v: Any, lane: Any) -> Any:
        value = T.cast(a, acc) * T.cast(b, acc)
        return value if pack else once(value, v, lane)

    def row(array: Any, i: Any, p: Any, v: Any, lane: Any) -> Any:
        return array[(*i, v, lane) if pack else (*i, place(p, v, lane))]

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
        P = T.dense_fixed(tiles if feat is None else 1, idtype)
        K = T.dense_fixed(tiles * tile if feat is None else feat, idtype)
        V = T.dense_fixed(vectors, idtype)
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
        SUMS = T.alloc_sparse_buffer((O, G), acc, "local")
        LAST_PARTS = T.alloc_sparse_buffer((R, G, L), acc, "local")
        LAST_SUMS = T.alloc_sparse_buffer((R, G), acc, "local")
        if pack:
            XS = T.alloc_sparse_buffer((H, M, V, L) if batched else (M, V, L), acc)
            YS = T.alloc_sparse_buffer((H, N, V, L) if batched else (N, V, L), acc)
            with T.sp_iter(
                (H, M, V, L) if batched else (M, V, L), "SSSS"[not batched :], "pack_x"
            ) as at:
                XS[(*at[:-1], at[-1])] = once(
                    T.cast(X[(*at[:-2], place(0, at[-2], at[-1]))], acc), at[-2], at[-1]
                )
            with T.sp_iter(
                (H, N, V, L) if batched else (N, V, L), "SSSS"[not batched :], "pack_y"
            ) as at:
                YS[(*at[:-1], at[-1])] = once(
                    T.cast(Y[(*at[:-2], place(0, at[-2], at[-1]))], acc), at[-2], at[-1]
                )
        with T.sp_iter((H, O) if batched else (O,), "SS"[not batched :], "groups") as at:
            with T.sp_iter([G, P, V, L], "SRRS", "parts") as [g, p, v, l]:
                with T.init():
                    PARTS[at[-1], g, l] = tirx.const(0.0, acc)
                PARTS[at[-1], g, l] = PARTS[at[-1], g, l] + product(
                    row(XS if pack else X, (*at[:-1], ROWS[at[-1] * group + g]), p, v, l),
                    row(YS if pack else Y, (*at[:-1], COLS[at[-1] * group + g]), p, v, l), v, l,
                )  # fmt: skip
            with T.sp_iter([G, L], "SR", "sums") as [g, l]:
                with T.init():
                    SUMS[at[-1], g] = tirx.const(0.0, acc)
                SUMS[at[-1], g] = SUMS[at[-1], g] + PARTS[at[-1], g, l]
            with T.sp_iter([G], "S", "write") as [g]:
                if in_parts:
                    OUT[(*at[:-1], PLACES[at[-1] * group + g])] = T.cast(SUMS[at[-1], g], dtype)
                else:
                    OUT[(*at[:-1], at[-1] * group + g)] = T.cast(SUMS[at[-1], g], dtype)
        with T.sp_iter((H, R) if batched else (R,), "SS"[not batched :], "last") as at:
            with T.sp_iter([G, P, V, L], "SRRS", "last_parts") as [g, p, v, l]:
                with T.init():
                    LAST_PARTS[at[-1], g, l] = tirx.const(0.0, acc)
                LAST_PARTS[at[-1], g, l] = LAST_PARTS[at[-1], g, l] + product(
                    row(XS if pack else X, (*at[:-1], ROWS[last(g, nnz)]), p, v, l),
                    row(YS if pack else Y, (*at[:-1], COLS[last(g, nnz)]), p, v, l), v, l,
                )  # fmt: skip
            with T.sp_iter([G, L], "SR", "last_sums") as [g, l]:
                with T.init():
                    LAST_SUMS[at[-1], g] = tirx.const(0.0, acc)
                LAST_SUMS[at[-1], g] = LAST_SUMS[at[-1], g] + LAST_PARTS[at[-1], g, l]
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
    del target
    func = _with_own_buffers(trust_indices(func, "ROWS", "COLS", "PLACES"), 1 + problem.batched)
    sch = s_tir.Schedule(s_tir.renew_defs(func))
    mark(sch, sch.get_loops(sch.get_sblock("groups0"))[-1], "parallel")
    for name in ("pack_x0", "pack_y0") if config.pack else ():
        *_, rows, vectors, lane = sch.get_loops(sch.get_sblock(name))
        mark(sch, rows, "parallel")
        sch.unroll(vectors)
        sch.vectorize(lane)
    for name in ("parts0", "last_parts0"):
        parts = sch.get_sblock(name)
        group, tiles, vectors, lane = sch.get_loops(parts)
        sch.unroll(group)
        sch.unroll(vectors)
        sch.vectorize(lane)
        init = sch.decompose_reduction(parts, tiles)
        sch.vectorize(sch.get_loops(init)[-1])
    write = sch.get_loops(sch.get_sblock("write0"))[-1]
    (sch.unroll if config.parts > 1 else sch.vectorize)(write)
    func = next(iter(sch.mod.functions.values()))
    if config.lanes > 1:
        func = add_lanes(add_lanes(func, "sums0"), "last_sums0")
    return apply_marks(func)


def _with_own_buffers(func: tirx.PrimFunc, loops: int) -> tirx.PrimFunc:
    """Give each visit of the two iterations buffers of its own, as none sees another's."""
    root = func.body.block
    free = {name: list(range(loops)) for name in ("groups0", "last0")}
    body, rest = allocate_in_visits(root.body, list(root.alloc_buffers), free)
    root = block_with(root, body=body, alloc_buffers=rest)
    return func.with_body(s_tir.SBlockRealize([], True, root))
