"""Runs of elements of one row that a thread adds up: on CPUs, and on the CUDA runner."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsetir
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from programs import PROGRAMS
from rows_common import check, fused
from schedule_common import program, read_back


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
    read_back(sch, program(idtype=idtype))
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
    kernel = CudaStages(program(idtype=idtype), by_threads(rows, tail=tail))
    check(lambda args: kernel(args)["c"], idtype)
