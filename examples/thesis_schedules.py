"""Schedules for CPUs of Senanayake's thesis (appendix A), line by line beside their originals.

(R. Senanayake, "A Unified Iteration Space Transformation Framework for Sparse and Dense Tensor
Algebra", 2020.) Above each line of ours stands the line of the thesis, in a comment. Two things
differ throughout:

- A program is written with its loops in an order, so that `order` is needed where a line of the
  thesis changes it. The loop over rows has other axes under it: tiles of it are of positions, which
  `pos` says. "NoRaces" is what `parallelize` asks for by itself.
- TACO leaves vectors and registers to the C compiler. Here they are stage II: after `lower()`,
  `in_vectors` unrolls the loops over a workspace of constant size and makes the last one a vector.

    python examples/thesis_schedules.py

checks each on a random input with empty rows, and times it beside the default schedule and scipy.
`python -m bench mttkrp` measures MTTKRP on tensors from files, beside loops in C++.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from thesis_inputs import COLUMNS, best, problem

import sparsetir
from sparsetir import Schedule, build
from sparsetir.schedules.passes.opaque_step_loop import opaque_step_loop
from sparsetir.schedules.passes.parallel_loops import in_vectors, run_in_parallel
from sparsetir.schedules.passes.prefetch import prefetch_gathered

# isort: split
from tvm.script import sparse_tir as T  # which sparsetir adds to TVM

LANES = 16  # of a vector


# -- programs: each is plain, and says what is computed alone ------------------------------------


def spmv(dtype: str = "float32", idtype: str = "int32") -> Any:
    """y(i) = A(i, j) * x(j)"""
    Index = getattr(T, idtype)

    @T.prim_func
    def spmv(
        a: T.handle, x: T.handle, y: T.handle, indptr: T.handle, indices: T.handle,
        m: Index, n: Index, nnz: Index,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_ = T.dense_fixed(n, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        X = T.match_sparse_buffer(x, (J_,), dtype)
        Y = T.match_sparse_buffer(y, (I,), dtype)
        with T.sp_iter([I, J], "SR", "spmv") as [i, j]:
            with T.init():
                Y[i] = 0.0
            Y[i] = Y[i] + A[i, j] * X[j]

    return spmv


def spmm(dtype: str = "float32", idtype: str = "int32") -> Any:
    """C(i, k) = A(i, j) * B(j, k)"""
    Index = getattr(T, idtype)

    @T.prim_func
    def spmm(
        a: T.handle, b: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
        m: Index, n: Index, nnz: Index, feat: Index,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J_ = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (J_, K), dtype)
        C = T.match_sparse_buffer(c, (I, K), dtype)
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[i, k] = 0.0
            C[i, k] = C[i, k] + A[i, j] * B[j, k]

    return spmm


def mttkrp3(dtype: str = "float32", idtype: str = "int32") -> Any:
    """A(i, j) = B(i, k, l) * D(l, j) * C(k, j)"""
    return mttkrp(3, dtype, idtype)


def mttkrp4(dtype: str = "float32", idtype: str = "int32") -> Any:
    """A(i, j) = B(i, k, l, m) * E(m, j) * D(l, j) * C(k, j)"""
    return mttkrp(4, dtype, idtype)


def mttkrp5(dtype: str = "float32", idtype: str = "int32") -> Any:
    """A(i, j) = B(i, k, l, m, n) * F(n, j) * E(m, j) * D(l, j) * C(k, j)"""
    return mttkrp(5, dtype, idtype)


MTTKRP = """
@T.prim_func
def mttkrp({handles}, {sizes}, columns: T.{idtype}) -> None:
    I = T.dense_fixed(size_i, "{idtype}")
    J = T.dense_fixed(columns, "{idtype}")
{axes}
    A = T.match_sparse_buffer(a, (I, J), "{dtype}")
    B = T.match_sparse_buffer(b, (I, {sparse}), "{dtype}")
    with T.sp_iter([I, {sparse}, J], "S{reduced}S", "mttkrp") as [i, {inner}, j]:
        with T.init():
            A[i, j] = 0.0
        A[i, j] = A[i, j] + B[i, {inner}] * {factors}
"""
LEVEL = """
    {K} = T.sparse_variable({above}, (size_{k}, nnz_{k}), ({k}_ptr, {k}_idx), "{idtype}")
    {K}_ = T.dense_fixed(size_{k}, "{idtype}")
    {C} = T.match_sparse_buffer({c}, ({K}_, J), "{dtype}")
"""


def mttkrp(order: int, dtype: str, idtype: str) -> Any:
    """The product of any order; B is dense along i, and compressed along the others (CSF)."""
    inner, factors = "klmn"[: order - 1], "cdef"[: order - 1]
    levels = [
        LEVEL.strip("\n").format(
            K=k.upper(), k=k, C=c.upper(), c=c, above=above.upper(), idtype=idtype, dtype=dtype
        )
        for k, c, above in zip(inner, factors, "i" + inner, strict=False)
    ]
    handles = [*"ab", *factors, *(f"{k}_{part}" for k in inner for part in ("ptr", "idx"))]
    sizes = ["size_i", *(f"{what}_{k}" for k in inner for what in ("size", "nnz"))]
    return sparsetir.from_source(
        MTTKRP.format(
            handles=", ".join(f"{name}: T.handle" for name in handles),
            sizes=", ".join(f"{name}: T.{idtype}" for name in sizes),
            axes="\n".join(levels), sparse=", ".join(inner.upper()), inner=", ".join(inner),
            reduced="R" * len(inner), idtype=idtype, dtype=dtype,
            factors=" * ".join(f"{c.upper()}[{k}, j]" for c, k in
                               reversed(list(zip(factors, inner, strict=True)))),
        )
    )  # fmt: skip


# -- schedules -----------------------------------------------------------------------------------


def a1_spmv(sch: Schedule) -> None:
    """A.1, "SPMV CPU"."""
    CHUNK_SIZE = 32
    it = sch.get_sparse_iteration("spmv")
    i, j = sch.get_sp_iters(it)
    # stmt.split(i, i0, i1, CHUNK_SIZE)
    sch.pos(i)
    i0, i1 = sch.split(i, [None, CHUNK_SIZE])
    #     .order({i0, i1, j})
    sch.sparse_reorder(it, [i0, i1, j])
    #     .parallelize(i0, ParallelUnit::CPUThread, OutputRaceStrategy::NoRaces)
    sch.parallelize(i0, "cpu", race="none")


def a3_spmm(sch: Schedule) -> None:
    """A.3, "SPMM CPU"; serves 16 columns and more."""
    CHUNK_SIZE = 8
    TILE_SIZE = 8
    it = sch.get_sparse_iteration("spmm")
    i, j, k = sch.get_sp_iters(it)
    # stmt.split(i, i0, i1, CHUNK_SIZE)
    sch.pos(i)
    i0, i1 = sch.split(i, [None, CHUNK_SIZE])
    #     .pos(j, jpos, A(i,j))
    sch.pos(j)
    #     .split(jpos, jpos0, jpos1, TILE_SIZE)
    jpos0, jpos1 = sch.split(j, [None, TILE_SIZE])
    # (no counterpart: the C compiler cuts k into vectors. Here they have a constant length, and the
    # last one begins earlier where it would reach beyond the last column)
    k0, k1 = sch.split(k, [None, LANES], tail="shift")
    #     .order({i0, i1, jpos0, k, jpos1})
    sch.sparse_reorder(it, [i0, i1, jpos0, k0, k1, jpos1])
    # (no counterpart: TACO adds to C in memory, which the C compiler may keep in a register. Here a
    # tile's sum is in one until the tile is done)
    steps = sch.precompute("C", k0, [k1])
    #     .parallelize(i0, ParallelUnit::CPUThread, OutputRaceStrategy::NoRaces)
    sch.parallelize(i0, "cpu", race="none")
    #     .parallelize(k, ParallelUnit::CPUVector, OutputRaceStrategy::IgnoreRaces)
    # Vectors are stage II; that they do not race is proven, not ignored.
    stage_two = sch.lower()
    for name in ("spmm_init", steps[0].name, steps[2].name):
        in_vectors(stage_two, name, 1)
    lanes = stage_two.get_loops(stage_two.get_sblock(f"{steps[1].name}0"))[0]
    run_in_parallel(stage_two, lanes, "vectorized")


def mttkrp_loops(sch: Schedule) -> tuple[Any, Any, list[Any], list[Any]]:
    """(iteration, i, the sparse loops inside of it, [j0, j1]) of MTTKRP with 32 columns."""
    it = sch.get_sparse_iteration("mttkrp")
    i, *inner, j = sch.get_sp_iters(it)
    # (no counterpart: TACO's tensors have their sizes, so that "{Dimension(j)}" is known)
    sch.bound(j, COLUMNS, "exact")
    return it, i, inner, sch.split(j, [None, LANES])


def a5_mttkrp3(sch: Schedule) -> None:
    """A.5, "MTTKRP Order-3 CPU"."""
    CHUNK_SIZE = 32
    it, i, [k, l], j = mttkrp_loops(sch)
    # IndexExpr precomputedExpr = B(i,k,l) * D(l,j);
    # A(i,j) = precomputedExpr * C(k,j);
    # (the expression is not named: it is what does not stand still inside of k)
    # stmt.order({i1, i2, k, l, j})
    sch.sparse_reorder(it, [i, k, l, *j])
    #     .precompute(precomputedExpr, j, j, precomputed)
    steps = sch.precompute("A", k, j, hoist=True, name="precomputed")
    #     .split(i, i1, i2, CHUNK_SIZE)
    sch.pos(i)
    i1, i2 = sch.split(i, [None, CHUNK_SIZE])
    #     .parallelize(i1, ParallelUnit::CPUThread, OutputRaceStrategy::NoRaces)
    sch.parallelize(i1)
    in_registers(sch, steps)


def a6_mttkrp4(sch: Schedule) -> None:
    """A.6, "MTTKRP Order-4 CPU"."""
    CHUNK_SIZE = 32
    it, i, [k, l, m], j = mttkrp_loops(sch)
    # stmt.order({i, k, l, m, j})
    sch.sparse_reorder(it, [i, k, l, m, *j])
    # IndexExpr BDE = BE * D(l, j);
    #     .precompute(BDE, j, j, BDE_workspace)
    start, reduce, write = sch.precompute("A", k, j, hoist=True, name="BDE_workspace")
    # IndexExpr BE = B(i,k,l,m) * E(m,j);
    #     .precompute(BE, j, j, BE_workspace)
    l, m, *j = sch.get_sp_iters(reduce)
    steps = sch.precompute("BDE_workspace", l, j, hoist=True, name="BE_workspace")
    #     .split(i, i1, i2, CHUNK_SIZE)
    sch.pos(i)
    i1, i2 = sch.split(i, [None, CHUNK_SIZE])
    #     .parallelize(i1, ParallelUnit::CPUThread, OutputRaceStrategy::NoRaces)
    sch.parallelize(i1)
    in_registers(sch, [start, *steps, write])


def a7_mttkrp5(sch: Schedule) -> None:
    """A.7, "MTTKRP Order-5 CPU"."""
    CHUNK_SIZE = 32
    it, i, [k, l, m, n], j = mttkrp_loops(sch)
    # stmt.order({i, k, l, m, n, j})
    sch.sparse_reorder(it, [i, k, l, m, n, *j])
    # IndexExpr BDEF = BEF * D(l, j);
    #     .precompute(BDEF, j, j, BDEF_workspace)
    start, reduce, write = sch.precompute("A", k, j, hoist=True, name="BDEF_workspace")
    # IndexExpr BEF = BF * E(m,j);
    #     .precompute(BEF, j, j, BEF_workspace)
    l, m, n, *j = sch.get_sp_iters(reduce)
    start_l, reduce, write_l = sch.precompute(
        "BDEF_workspace", l, j, hoist=True, name="BEF_workspace"
    )
    # IndexExpr BF = B(i,k,l,m,n) * F(n,j);
    #     .precompute(BF, j, j, BF_workspace)
    m, n, *j = sch.get_sp_iters(reduce)
    steps = sch.precompute("BEF_workspace", m, j, hoist=True, name="BF_workspace")
    #     .split(i, i1, i2, CHUNK_SIZE)
    sch.pos(i)
    i1, i2 = sch.split(i, [None, CHUNK_SIZE])
    #     .parallelize(i1, ParallelUnit::CPUThread, OutputRaceStrategy::NoRaces)
    sch.parallelize(i1)
    in_registers(sch, [start, start_l, *steps, write_l, write])


def in_registers(sch: Schedule, steps: list[Any]) -> None:
    """Stage II: workspaces in registers, by unrolling j0 and making j1 a vector."""
    stage_two = sch.lower()
    for name in ["mttkrp_init", *(step.name for step in steps)]:
        in_vectors(stage_two, name)


def a12_spmm_tiled(sch: Schedule) -> None:
    """A.12, "SpMM on CPU Tiled"; no vectors, as the innermost loop is the reduction."""
    TILE_SIZE = 8
    it = sch.get_sparse_iteration("spmm")
    i, j, k = sch.get_sp_iters(it)
    # stmt.pos(j, jpos, A(i, j))
    sch.pos(j)
    #     .split(jpos, jpos0, jpos1, TILE_SIZE)
    jpos0, jpos1 = sch.split(j, [None, TILE_SIZE])
    #     .order({i, jpos0, k, jpos1})
    sch.sparse_reorder(it, [i, jpos0, k, jpos1])


def a13_spmm(sch: Schedule) -> None:
    """A.13, "SpMM on CPU No Tiling"."""
    it = sch.get_sparse_iteration("spmm")
    i, j, k = sch.get_sp_iters(it)
    # IndexStmt stmt = C.getAssignment().concretize();
    # (in the order of the thesis's variables, which TACO changes where a format asks for it)
    sch.sparse_reorder(it, [i, j, k])


# (name in the appendix, program, schedule)
SCHEDULES: list[tuple[str, Callable[..., Any], Callable[[Schedule], None]]] = [
    ("A.1", spmv, a1_spmv),
    ("A.3", spmm, a3_spmm),
    ("A.5", mttkrp3, a5_mttkrp3),
    ("A.6", mttkrp4, a6_mttkrp4),
    ("A.7", mttkrp5, a7_mttkrp5),
    ("A.12", spmm, a12_spmm_tiled),
    ("A.13", spmm, a13_spmm),
]


# -- MTTKRP, tuned ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """Beyond the thesis, for any order.

    levels : how many levels of the tensor each loop inside of the rows goes through. One over
        several levels visits the elements of the last, without a loop for each fibre above them,
        and reads the coordinates of the others from arrays. All loops but the last have a workspace
        for what is inside of them, and so do the rows
    prefetch : how many elements ahead rows of the last operand are asked for; 0 for never
    """

    levels: tuple[int, ...] = (1, 1)
    prefetch: int = 0

    @staticmethod
    def space(order: int) -> list[Tuned]:
        """Configs to try: all partitions of the levels, with prefetch or not."""
        return [Tuned(levels, ahead) for levels in _parted(order - 1) for ahead in (0, 8)]

    @staticmethod
    def for_counts(counts: Sequence[int]) -> Tuned:
        """A good config for a tensor that stores so many elements in each level below the rows.

        Each element of a loop takes as long as it has rows of operands to multiply with, and to
        begin and end a loop takes about as long as one of these.
        """

        def cost(levels: tuple[int, ...]) -> int:
            ends = [sum(levels[: n + 1]) - 1 for n in range(len(levels))]
            visits = sum(n * counts[end] for n, end in zip(levels, ends, strict=True))
            return visits + sum(counts[end] for end in ends[:-1])

        return Tuned(min(_parted(len(counts)), key=cost))


def _parted(levels: int) -> list[tuple[int, ...]]:
    """All ways to part so many levels into loops."""
    out = [(levels,)]
    for first in range(1, levels):
        out += [(first, *rest) for rest in _parted(levels - first)]
    return out


def tuned_mttkrp(sch: Schedule, config: Tuned) -> None:
    """Schedules A.5 to A.7 where each loop has one level, with a row's sum in registers."""
    it, i, inner, j = mttkrp_loops(sch)
    sch.sparse_reorder(it, [i, *inner, *j])
    for place, levels in enumerate(config.levels, 1):
        if levels > 1:  # what hangs under them hangs under their positions then
            sch.positions(sch.sparse_fuse(it, sch.get_sp_iters(it)[place : place + levels]))
    i, *inner, _, _ = sch.get_sp_iters(it)
    sch.parallelize(i)
    reduce, held, reductions, steps = it, "A", [], []
    for n, at in enumerate([i, *inner[:-1]]):
        loops = {h.name: h for h in sch.get_sp_iters(reduce)}
        lanes = [loops[h.name] for h in j]
        name = f"ws_{at.name}"
        start, reduce, write = sch.precompute(held, loops[at.name], lanes, hoist=n > 0, name=name)
        held, reductions, steps = name, [*reductions, reduce], [*steps, start, write]
    stage_two = sch.lower()
    for step in [*steps, reduce]:
        in_vectors(stage_two, step)
    if config.prefetch:
        last = "CDEF"[sum(config.levels) - 1]
        sch.rewrite(prefetch_gathered, reduce, last, config.prefetch, COLUMNS)
    for step in reductions:  # most fibres hold a few elements
        sch.rewrite(opaque_step_loop, step)


def main() -> None:
    """Check and time each."""
    parser = argparse.ArgumentParser(description="Schedules of Senanayake's thesis.")
    parser.add_argument("--scale", type=float, default=1.0, help="of the inputs (default: 1)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each (default: 2)")
    options = parser.parse_args()
    entries = [(name, program, schedule) for name, program, schedule in SCHEDULES]
    for order, program in ((3, mttkrp3), (4, mttkrp4), (5, mttkrp5)):
        config = Tuned((1,) * (order - 1))
        entries.append((f"tuned {order}", program, partial(tuned_mttkrp, config=config)))
    print("TACO is no Python package and is not built here: its times are missing.")
    print(f"{'':8} {'program':8} {'thesis':>9} {'default':>9} {'scipy':>9}   in ms")
    for name, program, schedule in entries:
        args, result, exact, scipy = problem(program.__name__, options.scale)
        sch = Schedule(program())
        schedule(sch)
        calls: dict[str, Callable[[], Any]] = {"scipy": scipy}
        for which, kernel in (("thesis", build(sch)), ("default", build(program()))):
            args[result] = np.full_like(args[result], np.nan)
            kernel(**args)
            np.testing.assert_allclose(args[result], exact, rtol=1e-4, atol=1e-4)
            calls[which] = partial(kernel, **args)
        times = best(calls, options.seconds)
        columns = [f"{times[which] * 1e3:9.3f}" for which in ("thesis", "default", "scipy")]
        print(f"{name:8} {program.__name__:8} {' '.join(columns)}")


if __name__ == "__main__":
    main()
