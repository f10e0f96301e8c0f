"""Runs of elements of one row that a thread adds up: on CPUs, and on the CUDA runner."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm_ffi

import sparsetir
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from programs import PROGRAMS
from rows_common import MATRICES, check, fused, operands
from schedule_common import opened, program
from sparsetir import ScheduleError


def by_threads(rows: str, runs: bool = True, tail: str = "repeat") -> Callable[[Any], None]:
    """Blocks of 12 elements: 4 threads, each of which has 3; two columns at a time."""

    def apply(sch: Any) -> None:
        it = sch.get_sparse_iteration("spmm")
        i, j, k = sch.get_sp_iters(it)
        p = sch.positions(sch.sparse_fuse(it, [i, j]), rows=rows)
        block, thread, element = sch.split(p, [None, 4, 3], tail=tail)
        tiles, column = sch.split(k, [None, 2])
        sch.sparse_reorder(it, [tiles, block, thread, element, column])
        if runs:
            sch.segment_accumulate(element)
        sch.parallelize(tiles, "block")
        sch.parallelize(block, "block", race="atomics")
        sch.parallelize(thread, "thread", race="atomics")

    return apply


@pytest.mark.parametrize("rows", ["table", "search"])
@pytest.mark.parametrize("size", [None, 4])
def test_on_a_cpu(rows: str, size: int | None) -> None:
    """Of all elements at once, and of tiles whose last one goes beyond them."""
    idtype = "int64" if size else "int32"
    sch, it, p, k = fused(rows, idtype)
    tiles, column = sch.split(k, [None, 2])
    before, last = ([], p) if size is None else sch.split(p, [None, size])
    sch.sparse_reorder(it, [tiles, *([before] if size else []), last, column])
    steps = sch.segment_accumulate(last, dtype="float64", name="sums")
    assert [s.name for s in steps] == [
        f"spmm_{what}" for what in ("start", "reduce", "write", "again")
    ]
    assert 'sums = T.alloc_sparse_buffer((K1,), "float64", scope="local")' in sch.func.script()
    assert tvm_ffi.structural_equal(sparsetir.from_source(sch.func.script()), sch.func)
    again = sch.trace.apply(PROGRAMS["spmm"].make("float32", idtype)).func
    assert tvm_ffi.structural_equal(again, sch.func, map_free_vars=True)
    kernel = sparsetir.build(sch)

    def run(args: dict[str, Any]) -> Any:
        same = {**args, "c": args["c"].copy()}
        sparsetir.interpret(sch.func, same)
        kernel(args["a"], args["b"], args["c"], args["indptr"], args["indices"])
        np.testing.assert_allclose(same["c"], args["c"], rtol=1e-5, atol=1e-5)
        return args["c"]

    check(run, idtype)


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


WAYS = [("table", "repeat", "int64"), ("search", "guard", "int32"), ("blocks", "repeat", "int32")]
MORE = [("table", "guard", "int32"), ("search", "repeat", "int64"), ("blocks", "guard", "int64")]


@requires_cuda_text
@pytest.mark.parametrize(
    ("rows", "tail", "idtype"),
    [*WAYS, *(pytest.param(*way, marks=pytest.mark.slow) for way in MORE)],
)
def test_on_a_gpu(rows: str, tail: str, idtype: str) -> None:
    kernel = CudaStages(PROGRAMS["spmm"].make("float32", idtype), by_threads(rows, tail=tail))
    check(lambda args: kernel(args)["c"], idtype)


@requires_cuda_text
def test_one_atomic_for_each_run() -> None:
    """Of a column: chunks of 3 elements, and each row that begins within one."""
    found: dict[str, list[int]] = {}
    for rows in ("table", "blocks"):
        for runs in (False, True):
            kernel = CudaStages(program(), by_threads(rows, runs))
            counts = []
            for name in ("random", "over blocks"):
                kernel(operands(MATRICES[name], "int32"), count=True, races=False)
                counts += [kernel.function.counts.atomics, kernel.function.counts.conflicts]
            found[f"{rows}, {runs}"] = counts
    assert found["table, True"] == found["blocks, True"]
    assert found["table, False"] == found["blocks, False"]
    expected = []
    for name in ("random", "over blocks"):
        csr = sp.csr_array(MATRICES[name])
        begins = set(range(0, csr.nnz, 3)) | set(csr.indptr[:-1]) - {csr.nnz}
        expected.append(5 * len(begins))
    assert found["table, True"][::2] == expected
    assert found["table, False"][::2] == [5 * MATRICES[n].nnz for n in ("random", "over blocks")]
    for few, many in zip(found["table, True"], found["table, False"], strict=True):
        assert few < 0.75 * many


# -- refused --------------------------------------------------------------------------------------


def _of_rows(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    sch.segment_accumulate(i)


def _of_a_sparse_loop(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    sch.segment_accumulate(j)


def _of_any_length(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    sch.segment_accumulate(sch.positions(sch.sparse_fuse(it, [i, j])))


def _of_a_workspace(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    p = sch.positions(sch.sparse_fuse(it, [i, j]))
    sch.precompute("C", p, [k], scope="global")
    sch.segment_accumulate(p)


def _of_threads(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    p = sch.positions(sch.sparse_fuse(it, [i, j]))
    sch.sparse_reorder(it, [k, p])
    sch.parallelize(p, "thread", race="ignore", per_block=32)
    sch.segment_accumulate(p)


def _of_columns(sch: Any, it: Any, i: Any, j: Any, k: Any) -> None:
    sch.segment_accumulate(k)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_of_a_sparse_loop, "expected a loop over a dense axis, got 'J'"),
        (_of_rows, "expected spatial loops of constant extent inside of 'I', got 'J'; split"),
        (_of_any_length, "expected spatial loops of constant extent inside of 'I_J', got 'K'"),
        (_of_a_workspace, "expected an iteration without nested ones, before parallelize"),
        (
            _of_threads,
            r"\['I_J'\] is divided among workers; expected segment_accumulate before parallelize",
        ),
        (_of_columns, "expected visits of 'K' to add to the rows that a table gives, got"),
    ],
)
def test_refused(change: Callable[..., Any], message: str) -> None:
    sch, it, loops = opened()
    with pytest.raises(ScheduleError, match=f"segment_accumulate: {message}"):
        change(sch, it, *loops)


def test_refused_maxima() -> None:
    text = program().script()
    added = "C[i, k] + A[i, j] * B[j, k]"
    assert added in text
    func = sparsetir.from_source(text.replace(added, "T.max(C[i, k], A[i, j] * B[j, k])"))
    sch, it, (i, j, k) = opened(func)
    p = sch.positions(sch.sparse_fuse(it, [i, j]))
    sch.sparse_reorder(it, [k, p])
    with pytest.raises(
        ScheduleError, match=r"segment_accumulate: expected a body of the form X\[..\] = X\[..\]"
    ):
        sch.segment_accumulate(p)
