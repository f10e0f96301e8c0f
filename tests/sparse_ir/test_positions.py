"""Position space: `pos`, `coord`, and cuts of loops over stored elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from csr_zoo import ZOO
from programs import PROGRAMS
from rows_common import operands
from schedule_common import gives, opened, program, read_back, steps, table
from small import text_of

# Cuts, and the head of the iteration that they make.
CUTS = """
split(j, [None, 3])  # [I, J_tiles0, T.part(J, J_part), K], "SRRS"
split(j, [None, 2, 3])  # [I, J_tiles0, J_tiles1, T.part(J, J_part), K], "SRRRS"
coord(j); split(j, [None, 2, 3])  # [I, J_tiles0, J_tiles1, T.part(J, J_part), K], "SRRRS"
coord(j); pos(j); split(j, [None, 3])  # [I, J_tiles0, T.part(J, J_part), K], "SRRS"
pos(i); split(i, [None, 3])  # [I_tiles, T.part(I, I_part), J, K], "SSRS"
divide(j, 3)  # [I, J_parts, T.part(J, J_part), K], "SRRS"
coord(j); divide(j, 3)  # [I, J_parts, T.part(J, J_part), K], "SRRS"
split(sparse_fuse(it, [i, j]), [None, 5])
    [I_J_parts, I_J_piece, T.part(T.attach(J, I_J_piece), I_J_part), K], "SSRS"
divide(sparse_fuse(it, [i, j]), 500)
    [I_J_parts, I_J_piece, T.part(T.attach(J, I_J_piece), I_J_part), K], "SSRS"
divide(sparse_fuse(it, [i, j]), "chunks", by="work")
    [I_J_parts, I_J_piece, T.part(T.attach(J, I_J_piece), I_J_part), K], "SSRS"
"""


def check_spmm(sch: Any, idtype: str, feat: int = 5, interpret: bool = True) -> None:
    """The interpreter, and a kernel with an unchanged signature, on extreme matrices."""
    kernel = sparsetir.build(sch)
    for name, matrix in ZOO.items():
        args = operands(matrix, idtype, feat)
        want = sp.csr_array(matrix) @ args["b"].astype("float64")
        have = args | {"c": args["c"].copy()}
        kernel(args["a"], args["b"], have["c"], args["indptr"], args["indices"])
        np.testing.assert_allclose(have["c"], want, rtol=1e-4, atol=1e-5, err_msg=name)
        if interpret and args["nnz"] * feat < 4000:
            sparsetir.interpret(sch.func, args)
            np.testing.assert_allclose(args["c"], want, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize(("section", "code", "head"), table(CUTS))
def test_cuts_compute_the_same(section: str, code: str, head: list[str], idtype: str) -> None:
    func = program(idtype=idtype)
    sch, it, _ = opened(func)
    steps(code, sch, it)[1]()
    text = sch.func.script()
    assert head[0] in text
    assert "T.sp_iter_attr" not in text  # a cut ends what pos and coord have chosen
    read_back(sch, func)
    check_spmm(sch, idtype)
    if head[0].startswith("[I_J_parts") or "J_tiles1" in head[0]:
        assert "__global__" in sparsetir.build(sch.func, {"kind": "cuda", "arch": "sm_90"}).source()


def chunked(pre: str = "", idtype: str = "int32", tail: str = "guard", by: str = "work") -> Any:
    """SpMM in chunks of equal work; `pre` says where the sum of a piece is precomputed."""
    sch, it, (i, j, k) = opened(program(idtype=idtype))
    o, i, j = sch.divide(sch.sparse_fuse(it, [i, j]), "chunks", by=by)
    if not pre:
        sch.parallelize(o, race="temporary")
        return sch
    p, v, lane = sch.split(k, [None, 2, 4], tail=tail)
    first = pre == "tiles first"
    sch.sparse_reorder(it, [p, o, i, j, v, lane] if first else [o, i, p, j, v, lane])
    sch.precompute("C", i if first else p, [v, lane])
    sch.parallelize([p, o] if first else o, race="temporary")
    return sch


@pytest.mark.parametrize(
    ("pre", "idtype", "tail", "by"),
    [
        ("", "int32", "guard", "work"),
        ("tiles", "int64", "guard", "positions"),
        ("tiles", "int32", "shift", "work"),
        ("tiles", "int32", "exact", "positions"),
        ("tiles first", "int32", "shift", "work"),
    ],
)
def test_equal_work(pre: str, idtype: str, tail: str, by: str) -> None:
    """Empty rows are zeros, one giant row is summed from many chunks; the init is gone."""
    sch = chunked(pre, idtype, tail, by)
    text = sch.func.script()
    assert "spmm_init" not in text and "if i != C_row[i_parts]:" in text
    read_back(sch, program(idtype=idtype))
    check_spmm(sch, idtype, 16 if tail == "exact" else 13)
    assert "for i_parts in T.parallel(chunks)" in sparsetir.build(sch).stages["II"].script() or (
        pre == "tiles first"
    )


OUTPUTS = text_of("total", """
with T.sp_iter([I, J, K], "SRS", "total") as [i, j, k]:
    with T.init():
        Y[i, k] = W[i, k]
    Y[i, k] = T.max(Y[i, k], A[i, j, k])
""", "J = T.dense_variable(I, (nnz, nnz), indptr)\nK = T.dense_fixed(4)", "float16",
    A="I J K", W="I K", Y="I K")  # fmt: skip


@pytest.mark.parametrize("precomputed", [False, True])
def test_other_sums_that_are_carried(precomputed: bool) -> None:
    """A maximum, an init that reads, half precision, rows of positions alone."""
    sch = sparsetir.Schedule(sparsetir.from_source(OUTPUTS))
    it = sch.get_sparse_iteration("total")
    i, j, k = sch.get_sp_iters(it)
    o, i, j = sch.split(sch.sparse_fuse(it, [i, j]), [None, 3])
    if precomputed:
        sch.precompute("Y", i, [k], dtype="float32")
    sch.parallelize(o, race="temporary")
    assert "total_init" not in sch.func.script()
    lengths = np.array([0, 1, 17, 0, 2, 3, 0])
    rng = np.random.default_rng(0)
    a, w = (rng.uniform(-1, 1, (n, 4)).astype("float16") for n in (lengths.sum(), len(lengths)))
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype("int32")
    rows = np.repeat(np.arange(len(lengths)), lengths)
    want = w.copy()
    np.maximum.at(want, rows, a)
    args = {"a": a, "w": w, "y": want, "indptr": indptr, "m": len(w), "nnz": len(a)}
    gives(sch, args, {"y": want}, rtol=0)


def test_an_init_that_sets_more_is_kept() -> None:
    """Half of the columns are added to; the others are set and stay."""
    text = PROGRAMS["spmm"].make("float32", "int32").script()
    head = text.split("    with T.sp_iter", 1)[0]
    lines = (
        "    H = T.dense_fixed(2)\n    with T.sp_iter([I, K], \"SS\", \"first\") as [i, k]:\n"
        "        C[i, k] = 7.0\n    with T.sp_iter([I, J, H], \"SRS\", \"spmm\") as [i, j, k]:\n"
        "        C[i, k] = C[i, k] + A[i, j] * B[j, k]\n"
    )  # fmt: skip
    func = sparsetir.from_source(head + lines)
    sch = sparsetir.Schedule(func)
    it = sch.get_sparse_iteration("spmm")
    i, j, h = sch.get_sp_iters(it)
    o, i, j = sch.divide(sch.sparse_fuse(it, [i, j]), 5)
    sch.precompute("C", i, [h])
    sch.parallelize(o, race="temporary")
    assert '"first"' in sch.func.script()
    plain, cut = (operands(ZOO["empty rows"], "int32") for _ in range(2))
    sparsetir.interpret(func, plain)
    sparsetir.interpret(sch.func, cut)
    np.testing.assert_allclose(cut["c"], plain["c"], rtol=1e-5)
    assert np.all(cut["c"][:, 2:] == 7.0)
