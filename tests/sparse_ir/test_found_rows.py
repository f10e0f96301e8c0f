"""Rows of positions that kernels search for, and runs of a row: on CPUs, on the CUDA runner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm.error import DiagnosticError

import sparsetir
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from pairs import by_turns
from programs import PROGRAMS
from rows_common import MATRICES, check, fused, operands
from schedule_common import gives, program, read_back, steps, table
from small import text_of

# -- on a CPU -------------------------------------------------------------------------------------


# Cuts of the loop `ij` over positions; an empty one iterates over all elements, and carries rows.
CUTS = """
pos(ij)  # all elements
split(ij, [None, 2, 3], tail="repeat")  # two cuts
split(ij, [None, 7])  # the last tile goes to positions that there are not
pos(ij); divide(ij, 3)  # parts
tiles, each = split(ij, [None, 4], tail="repeat"); sparse_reorder(it, [tiles, k, each])
    each feature begins a tile anew
tiles, each = split(ij, [None, 4], tail="repeat"); sparse_reorder(it, [each, tiles, k])
    positions go back in the outer loop, where each visit searches
tiles, each = split(ij, [None, 4], tail="repeat"); precompute("C", tiles, [each, k], scope="global")
    a workspace
"""


@pytest.mark.parametrize(
    ("n", "code"), by_turns([(n, row.values[1]) for n, row in enumerate(table(CUTS))], 2)
)
def test_on_a_cpu(n: int, code: str) -> None:
    idtype = ("int32", "int64")[n % 2]
    sch, it, *_ = fused(("search", "blocks")[n // 2 % 2], idtype)
    steps(code, sch, it)[1]()
    read_back(sch, program(idtype=idtype))
    text = sparsetir.lower_sparse_iter(sch.func).script()
    assert "I_at[" not in text
    assert "find_I_at_first" in text
    assert "start_I_at_carried" in text
    kernel = sparsetir.build(sch)

    def run(args: dict[str, Any]) -> Any:
        kernel(args["a"], args["b"], args["c"], args["indptr"], args["indices"])
        return args["c"]

    check(run, idtype)
    args = operands(MATRICES["at ends"], idtype)
    same = {**args, "c": args["c"].copy()}
    sparsetir.interpret(sch.func, same)
    np.testing.assert_allclose(same["c"], run(args), rtol=1e-4, atol=1e-4)


# Sums of a tensor of order 3.
LEVELS = text_of("sums", """
with T.sp_iter([I, J, K], "SRR", "sums") as [i, j, k]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j, k] * X[j]
""", """
J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
K = T.sparse_variable(J, (p, nnz_k), (k_ptr, k_idx))
J_ = T.dense_fixed(n)
""", A="I J K", X="J_", Y="I")  # fmt: skip
# Elements of the fibers of each row; some rows and some fibers are empty.
FIBERS = ([], [[]], [[3, 0], [], [0], [0, 0, 4, 0], []], [[], [], [2, 1]], [[9]])


def within(lengths: Any) -> Any:
    """0, 1, .. for each length."""
    return np.array([x for n in lengths for x in range(n)])


@pytest.mark.parametrize("size", [None, 2])
def test_levels_of_a_tensor(size: int | None) -> None:
    """The fiber of an element is searched for, and the row of this fiber."""
    sch = sparsetir.Schedule(sparsetir.from_source(LEVELS))
    it = sch.get_sparse_iteration("sums")
    p = sch.positions(sch.sparse_fuse(it, sch.get_sp_iters(it)), rows="search")
    if size is not None:
        sch.split(p, [None, size], tail="repeat")
    kernel, rng = sparsetir.build(sch), np.random.default_rng(0)
    for fibers in FIBERS:
        lengths = [n for row in fibers for n in row]
        nnz_j, nnz_k = len(lengths), sum(lengths)
        rows = np.repeat(np.arange(len(fibers)), [len(row) for row in fibers])
        args = {
            "a": rng.random(nnz_k, dtype="float32"), "x": rng.random(7, dtype="float32"),
            "y": np.zeros(len(fibers), "float32"),
            "j_ptr": np.cumsum([0, *map(len, fibers)]), "j_idx": within(map(len, fibers)),
            "k_ptr": np.cumsum([0, *lengths]), "k_idx": within(lengths),
        }  # fmt: skip
        for name in ("j_ptr", "j_idx", "k_ptr", "k_idx"):
            args[name] = args[name].astype("int32")
        fiber = np.repeat(np.arange(nnz_j), lengths)
        want = np.zeros(len(fibers))
        np.add.at(want, rows[fiber], args["a"] * args["x"][args["j_idx"][fiber]].astype("float64"))
        sizes = {"m": len(fibers), "n": 7, "p": 9, "nnz_j": nnz_j, "nnz_k": nnz_k}
        gives(sch, {**args, **sizes}, {"y": want}, 1e-5, 1e-6, kernel)


# -- on a GPU -------------------------------------------------------------------------------------


def by_threads(rows: str, tail: str = "repeat", runs: bool = False) -> Callable[[Any], None]:
    """Blocks of 12 elements: 4 threads, each of which has 3; or runs, two columns at a time."""

    def apply(sch: Any) -> None:
        it = sch.get_sparse_iteration("spmm")
        i, j, k = sch.get_sp_iters(it)
        p = sch.positions(sch.sparse_fuse(it, [i, j]), rows=rows)
        block, thread, element = sch.split(p, [None, 4, 3], tail=tail)
        tiles, *columns = sch.split(k, [None, 2]) if runs else (k,)
        sch.sparse_reorder(it, [tiles, block, thread, element, *columns])
        if runs:
            sch.segment_accumulate(element)
        sch.parallelize(tiles, "block")
        sch.parallelize(block, "block", race="atomics")
        sch.parallelize(thread, "thread", race="atomics")

    return apply


def by_chunks(rows: str) -> Callable[[Any], None]:
    """The same by one loop over blocks and threads; features lie between these and elements."""

    def apply(sch: Any) -> None:
        it = sch.get_sparse_iteration("spmm")
        i, j, k = sch.get_sp_iters(it)
        p = sch.positions(sch.sparse_fuse(it, [i, j]), rows=rows)
        chunk, element = sch.split(p, [None, 3], tail="repeat")
        sch.sparse_reorder(it, [chunk, k, element])
        sch.parallelize(chunk, "thread", race="atomics", per_block=4)

    return apply


def by_lanes(rows: str) -> Callable[[Any], None]:
    """Runs of equal rows, each element searched for: Sgap's {1 nnz, c col, 4}."""

    def apply(sch: Any) -> None:
        it = sch.get_sparse_iteration("spmm")
        i, j, k = sch.get_sp_iters(it)
        p = sch.positions(sch.sparse_fuse(it, [i, j]), rows=rows)
        blocks, lanes = sch.split(p, [None, 12], tail="repeat")
        tiles, column = sch.split(k, [None, 2])
        sch.sparse_reorder(it, [tiles, blocks, lanes, column])
        sch.precompute("C", lanes, [column])
        sch.parallelize([tiles, blocks], "block", race="atomics")
        sch.parallelize(lanes, "thread", race="segment(4)")

    return apply


WAYS = {
    "threads": by_threads,
    "guarded threads": functools.partial(by_threads, tail="guard"),
    "chunks": by_chunks,
    "lanes": by_lanes,
}


@requires_cuda_text
@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("rows", ["blocks", "search"])
@pytest.mark.parametrize("way", by_turns(WAYS, 2))
def test_on_a_gpu(way: str, rows: str, idtype: str) -> None:
    kernel = CudaStages(program(idtype=idtype), WAYS[way](rows))
    assert "i_at" not in kernel.called.values()
    check(lambda args: kernel(args)["c"], idtype)


# -- refused --------------------------------------------------------------------------------------


def test_refused_by_the_verifier() -> None:
    sch, *_ = fused("search")
    text = sch.func.script()
    entry = '"I_at": {"from": "search"}'
    assert entry in text
    for instead, message in [
        ('"X": {"from": "search"}', "rows of 'X': no such buffer; there are "),
        ('"B": {"from": "search"}', "rows of 'B': expected a buffer that recipe row_of_position"),
        ('"I_at": {"from": "table"}', "rows of 'I_at': expected 'from' to be among .*got 'table'"),
        ('"I_at": {"from": "blocks", "starts": "J_at"}', "rows of 'I_at': expected 'from', or "),
        ('"I_at": 1', "attribute 'rows': expected a dict by buffer, got "),
    ]:
        with pytest.raises(DiagnosticError, match=message):
            sparsetir.from_source(text.replace(entry, instead))


@pytest.mark.parametrize("tail", ["guard", "repeat", "shift"])
@pytest.mark.parametrize("rows", ["table", "search"])
def test_visits_that_go_in_strides(rows: str, tail: str) -> None:
    """Each of four lanes has every fourth element, and a run ends before the lane's row does."""
    idtype = "int32"
    for case in ("dense_row", "small"):
        sch, it, p, k = fused(rows, idtype)
        outer, lane = sch.split(p, [None, 4], tail=tail)
        tiles, column = sch.split(k, [None, 2])
        sch.sparse_reorder(it, [tiles, outer, lane, column])
        sch.segment_accumulate(outer)
        program = PROGRAMS["spmm"]
        args = program.inputs(np.random.default_rng(0), case, "float32", idtype)
        expected = program.oracle(args)["c"]
        sparsetir.interpret(sch.func, args)
        np.testing.assert_allclose(args["c"], expected, rtol=1e-5, atol=1e-5)


@requires_cuda_text
@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("tail", by_turns(["repeat", "guard"], 2))
@pytest.mark.parametrize("rows", ["table", "search", "blocks"])
@pytest.mark.default("search-repeat-int64")
def test_runs_on_a_gpu(rows: str, tail: str, idtype: str) -> None:
    kernel = CudaStages(program(idtype=idtype), by_threads(rows, tail, runs=True))
    check(lambda args: kernel(args)["c"], idtype)


BELOW = text_of("below", """
with T.sp_iter([F, T.fuse(O, I), J], "RSSS", "it") as [f, o, i, j]:
    with T.init():
        OUT[o, i, j] = -1.0
    OUT[o, i, j] = OUT[o, i, j] + A[o, i, j] * B[f]
""", """
O = T.dense_fixed(1)
I = T.sparse_variable(O, (m, rows), (i_ptr, i_idx))
J = T.sparse_variable(I, (n, nnz_j), (j_ptr, j_idx))
F = T.dense_fixed(feat)
""", A="O I J", B="F", OUT="O I J")  # fmt: skip


def test_init_of_elements_below_searched_rows() -> None:
    """The loop over `j` needs `o`, which a visit searches for: the init has loops before."""
    kernel, rng = sparsetir.build(sparsetir.from_source(BELOW)), np.random.default_rng(0)
    for rows in FIBERS:
        lengths = np.array([*map(len, rows)], "int32")
        m, nnz = len(lengths), lengths.sum()
        i_ptr, i_idx = np.array([0, m], "int32"), np.arange(m, dtype="int32")
        j_ptr, j_idx = np.cumsum([0, *lengths]), within(lengths)
        a, b = rng.random(nnz, dtype="float32"), rng.random(5, dtype="float32")
        out = np.full_like(a, np.nan)
        kernel(
            i_ptr=i_ptr, i_idx=i_idx, j_ptr=j_ptr.astype("int32"), j_idx=j_idx.astype("int32"),
            m=m, n=7, rows=m, nnz_j=int(nnz), feat=5, a=a, b=b, out=out,
        )  # fmt: skip
        np.testing.assert_allclose(out, a * b.sum() - 1, rtol=1e-5)
