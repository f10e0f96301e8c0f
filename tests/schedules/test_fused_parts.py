"""Parts of decomposed programs in one launch: counts, runs as CUDA text on a CPU, and refusals."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from cuda_runner import requires_cuda_text
from cuda_stages import CUDA, CudaStages
from refusals import in_order
from schedule_common import table
from small import small, text_of
from sparsetir.formats import Hyb, Operand
from sparsetir.schedules.passes.launches import count_launches
from sparsetir.sparse_ir.legal import parallelizable
from sparsetir.sparse_ir.races import FREE

SPMM = small("spmm", """
with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[j, k]
""", A="I J", B="N K", C="I K")  # fmt: skip
SDDMM = small("sddmm", """
with T.sp_iter([I, J, K], "SSR", "sddmm") as [i, j, k]:
    with T.init():
        O[i, j] = 0.0
    O[i, j] = O[i, j] + X[i, k] * Y[j, k]
""", O="I J", X="I K", Y="N K")  # fmt: skip


def graph(rows: int = 40, columns: int = 90, most: int = 80) -> sp.csr_array:
    """Rows of very different lengths, empty ones among them."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.zipf(1.4, rows) - 1, most)
    places = [np.sort(rng.choice(columns, n, replace=False)) for n in lengths]
    indptr = np.append(0, np.cumsum(lengths))
    values = rng.uniform(0.5, 1, indptr[-1]).astype("float32")
    return sp.csr_array((values, np.concatenate(places), indptr), (rows, columns))


def decomposed(func: Any, name: str, fmt: Any, matrix: Any = None) -> tuple[Any, dict[str, Any]]:
    """The function over a format, and the arguments of a matrix's pattern and values in it."""
    operand = Operand.of(func, name)
    matrix = graph() if matrix is None else matrix
    converted = fmt.convert(sparsetir.SparseMatrix(matrix).pattern, operand)
    func = converted.decompose(func)
    if name == "A":
        _, func = sparsetir.extract_preprocess(func)
        return func, converted.arguments(A=matrix.data)
    return func, {**converted.arguments(), **converted.values(O=matrix.data)}


def launches(func: Any, schedule: Any = None) -> int:
    return count_launches(sparsetir.lower(func, schedule, target=CUDA)["II scheduled"])


@requires_cuda_text
def test_spmm_over_ten_buckets() -> None:
    """One launch after that of the init; without fusion one for each bucket."""
    matrix, b = graph(), np.random.default_rng(1).uniform(-1, 1, (90, 21)).astype("float32")
    func, args = decomposed(SPMM, "A", Hyb(1, 9), matrix)
    assert launches(func) == 11
    run = CudaStages(func, sparsetir.horizontal_fuse)
    assert count_launches(run.stages["II scheduled"]) == 2
    sizes = {"m": 40, "n": 90, "feat": 21}
    out = run({**args, **sizes, "b": b, "c": np.full((40, 21), np.nan, "float32")})
    np.testing.assert_allclose(out["c"], matrix @ b, rtol=1e-4, atol=1e-4)


@requires_cuda_text
@pytest.mark.slow
def test_sddmm_over_ten_buckets() -> None:
    """One launch that computes, and one that copies back."""
    matrix, rng = graph(), np.random.default_rng(1)
    x, y = (rng.uniform(-1, 1, (n, 21)).astype("float32") for n in (40, 90))
    func, args = decomposed(SDDMM, "O", Hyb(1, 9), matrix)
    assert launches(func) == 20
    run = CudaStages(func, sparsetir.horizontal_fuse)
    assert count_launches(run.stages["II scheduled"]) == 2
    args |= {"indptr": matrix.indptr.astype("int32"), "indices": matrix.indices.astype("int32")}
    args |= {"m": 40, "n": 90, "nnz": matrix.nnz, "feat": 21, "x": x, "y": y}
    out = run({**args, "o": np.full(matrix.nnz, np.nan, "float32")})
    exact = np.einsum("ek,ek->e", x[matrix.nonzero()[0]], y[matrix.indices])
    np.testing.assert_allclose(out["o"], exact, rtol=1e-4, atol=1e-4)


def test_a_lowered_schedule_says_which_parts_it_leaves() -> None:
    """Their updates cannot become atomic any more; they can before."""
    func, _ = decomposed(SPMM, "A", Hyb(1, 3))
    names = [f"spmm_hyb_1_3_p0_b{b}" for b in range(4)]
    for atomic in (False, True):
        sch = sparsetir.Schedule(func)
        for name in names if atomic else ():
            sch.atomic(sch.get_sparse_iteration(name))
        sch.lower()
        with warnings.catch_warnings(record=True) as caught:
            sparsetir.horizontal_fuse(sch)
        told = f"horizontal_fuse: {', '.join(names)} remain a launch each, as each updates"
        assert [str(w.message).startswith(told) for w in caught] == [True] * (not atomic)
        assert launches(sch) == (2 if atomic else 5)


def test_a_loop_of_one_visit_and_own_positions_need_no_proof() -> None:
    """The root of a bucket; rows in pieces, where the result lies over the pieces."""
    func, _ = decomposed(SDDMM, "O", Hyb(1, 0))
    sch = sparsetir.Schedule(func)
    for name in ("sddmm_hyb_1_0_p0_b0", "restore_O_hyb_1_0_p0_b0"):
        root, rows, *_ = sch.get_sp_iters(sch.get_sparse_iteration(name))
        sch.parallelize([root, rows], "block")
    assert launches(sch) == 2


TWO = """
with T.sp_iter([I], "S", "first") as [i]:
    {}
with T.sp_iter([I], "S", "second") as [i]:
    {}
"""
REFUSED = table("""
"B[i] = A[i]", "C[i] = B[i]"  # 'first0' and 'second0' .. no order .. one writes 'B'
"B[i] = A[i]", "B[i] = C[i]"  # one writes 'B' .. name it in 'independent' .. atomics
"B[i] = B[i] * A[i]", "B[i] = B[i] * C[i]"  # one writes 'B'
"B[i] = A[i]", "C[i] = A[i]", parts=["first", "third"]  # among ['first', 'second'], got 'third'
"B[i] = A[i]", "C[i] = A[i]", parts="first"  # a list of iterations .. got 'first'
"B[i] = A[i]", "C[i] = A[i]", parts=[3]  # a list of iterations .. got 3
"B[i] = A[i]", "C[i] = A[i]", independent=["X"]  # buffers among .. got 'X'
"B[i] = A[i]", "C[i] = A[i]", max_threads=64  # at most 64 threads, got 128
""")


@pytest.mark.parametrize(("section", "call", "words"), REFUSED)
def test_refusals(section: str, call: str, words: list[str]) -> None:
    """Naming parts raises the reason; by default they stay apart."""

    def fuse(first: str, second: str, parts: Any = ("first", "second"), **options: Any) -> None:
        func = small("two", TWO.format(first, second), A="I", B="I", C="I")
        if not options and parts == ("first", "second"):
            assert launches(func, sparsetir.horizontal_fuse) == 2
        sparsetir.horizontal_fuse(sparsetir.Schedule(func), parts, **options)

    with pytest.raises(sparsetir.ScheduleError, match="argument 'sch': expected a sparsetir.Sch"):
        sparsetir.horizontal_fuse(SPMM)
    with pytest.raises(sparsetir.ScheduleError) as raised:
        eval(f"fuse({call})", {"fuse": fuse})
    in_order(str(raised.value), words)


PIECES = """
U = T.dense_fixed(1)
R = T.sparse_variable(U, (m, pieces), (starts, rows), unique=False)
S = T.sparse_fixed(R, (n, 2), slots)
"""


@pytest.mark.parametrize(
    ("store", "free"), [("O[u, r, s]", 3), ("O[u, r + 0, s]", 3), ("O[u, 1, s]", 1)]
)
def test_rows_in_pieces_store_at_their_own_positions(store: str, free: int) -> None:
    """A coordinate that is stored twice has two elements, which no other visit writes."""
    text = text_of("pieces", f"""
with T.sp_iter([U, R, S, K], "SSSR", "pieces") as [u, r, s, k]:
    with T.init():
        {store} = 0.0
    {store} = {store} + X[r, k] * Y[s, k]
""", PIECES, O="U R S", X="I K", Y="N K")  # fmt: skip
    func = sparsetir.from_source(text)
    facts = parallelizable(func, func.body)
    assert [fact == FREE for fact in facts] == [n < free for n in range(4)]
    rng = np.random.default_rng(0)
    slots = np.array([[0, 4], [1, 2], [0, -1], [2, 3], [0, 1], [4, -1]], "int32")
    args = {
        "x": rng.random((5, 3), "float32"), "y": rng.random((5, 3), "float32"),
        "rows": np.array([3, 3, 1, 1, 1, 0], "int32"), "starts": np.array([0, 6], "int32"),
        "slots": slots.ravel(),
    }  # fmt: skip
    outs = [np.full(12, -7, "float32") for _ in range(2)]
    sparsetir.build(func)(**args, o=outs[0])
    sparsetir.interpret(func, {**args, "o": outs[1], "m": 5, "n": 5, "pieces": 6, "feat": 3})
    np.testing.assert_allclose(*outs, rtol=1e-6)
