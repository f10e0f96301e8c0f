"""`T.part`: an axis visited part by part, at the storage positions of another one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import tvm

import sparsetir
from csr_zoo import ZOO
from schedule_common import gives, table
from small import small, text_of
from sparsetir.sparse_ir.nodes import sparse_iterations
from sparsetir.sparse_ir.parallel import parallel_units

BODY = """
with T.sp_iter({}, "spmm") as [{}]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[j, k]
"""
# Declarations, the iteration, and its coordinates.
PROGRAM = {
    "row blocks": (
        "O = T.dense_fixed(blocks)\nIB = T.dense_variable(O, (m, m), row_ptr)",
        '[O, T.part(I, IB), J, K], "SSRS"', "o, i, j, k"),
    "column parts": (
        "Q = T.sparse_fixed(I, (parts, parts), part_of)\n"
        "JQ = T.dense_variable(Q, (n, nnz), part_ptr)",
        '[I, Q, T.part(J, JQ), K], "SRRS"', "i, q, j, k"),
    "ragged parts": (
        "Q = T.dense_variable(I, (parts, most), q_ptr)\n"
        "JQ = T.dense_variable(Q, (n, nnz), part_ptr)",
        '[I, Q, T.part(J, JQ), K], "SRRS"', "i, q, j, k"),
    "chunks": (
        "O = T.dense_fixed(chunks)\nE = T.dense_variable(O, (nnz, nnz), chunk_ptr)",
        '[O, T.part(T.fuse(I, J), E), K], "RSRS"', "o, i, j, k"),
}  # fmt: skip


def make(program: str, idtype: str = "int32") -> Any:
    axes, *over = PROGRAM[program]
    body = BODY.format(*over)
    text = text_of("spmm", body, axes, idtype=idtype, A="I J", B="N K", C="I K")
    return sparsetir.from_source(text)


def cut(size: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Boundaries of parts, some of them empty, also where there are more parts than positions."""
    return np.array([0, *np.sort(rng.integers(0, size + 1, parts - 1)), size])


def arguments(program: str, matrix: Any, parts: int, idtype: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    m, n = matrix.shape
    csr = sp.csr_array(matrix)
    csr.sort_indices()
    args = {
        "a": csr.data.astype("float32"), "b": rng.uniform(-1, 1, (n, 5)).astype("float32"),
        "c": np.full((m, 5), np.nan, "float32"), "indptr": csr.indptr.astype(idtype),
        "indices": csr.indices.astype(idtype), "m": m, "n": n, "nnz": csr.nnz, "feat": 5,
    }  # fmt: skip
    if program == "row blocks":
        return args | {"row_ptr": cut(m, parts, rng).astype(idtype), "blocks": parts}
    if program == "chunks":
        return args | {"chunk_ptr": cut(csr.nnz, parts, rng).astype(idtype), "chunks": parts}
    # Where the columns of each part begin in each row.
    columns = cut(n, parts, rng)[:-1]
    rows = [csr.indices[a:b] for a, b in zip(csr.indptr, csr.indptr[1:])]
    starts = [
        first + np.searchsorted(row, columns) for first, row in zip(csr.indptr, rows, strict=False)
    ]
    ptr = np.concatenate([*starts, [csr.nnz]]).astype(idtype)
    args |= {"part_ptr": ptr, "parts": parts}
    if program == "column parts":
        return args | {"part_of": np.tile(np.arange(parts, dtype=idtype), m)}
    return args | {"q_ptr": np.arange(m + 1, dtype=idtype) * parts, "most": m * parts}


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("program", PROGRAM)
def test_parts_compute_the_whole(program: str, idtype: str) -> None:
    """The interpreter's result and that of kernels, scheduled or not; empty rows are zeros."""
    func = make(program, idtype)
    kernels = [sparsetir.build(f) for f in (func, sparsetir.lower_sparse_iter(func))]
    for name, matrix in ZOO.items():
        for parts in (1, 3, 80):
            args = arguments(program, matrix, parts, idtype)
            want = sp.csr_array(matrix) @ args["b"].astype("float64")
            for run in [lambda f: sparsetir.interpret(func, f)] * (parts < 80) + kernels:
                have = args | {"c": args["c"].copy()}
                run(have) if run not in kernels else run(**have)
                np.testing.assert_allclose(have["c"], want, rtol=1e-4, atol=1e-5, err_msg=name)


SCALE = text_of("scale", """
with T.sp_iter([ONE, R, Q, T.part(T.attach(J, R), JQ)], "SSSS", "scale") as [o, r, q, j]:
    Y[r, j] = X[r, j] * 2.0
""", """
ONE = T.dense_fixed(1)
R = T.sparse_variable(ONE, (m, rows), (r_ptr, r_idx))
Q = T.dense_variable(R, (n, pieces), q_ptr)
JQ = T.dense_variable(Q, (n, nnz), part_ptr)
""", X="I J", Y="I J")  # fmt: skip


def test_parts_of_an_attached_axis() -> None:
    """The rows that R stores, by pieces: of two elements, of one, and an empty one."""
    func = sparsetir.from_source(SCALE)
    args = {
        "x": np.arange(1, 6, dtype="float32"), "y": np.zeros(5, "float32"),
        "r_ptr": np.array([0, 2], "int32"), "r_idx": np.array([0, 2], "int32"),
        "indptr": np.array([0, 3, 3, 5], "int32"),
        "indices": np.array([0, 1, 3, 2, 3], "int32"), "q_ptr": np.array([0, 2, 4], "int32"),
        "part_ptr": np.array([0, 2, 3, 3, 5], "int32"),
        "m": 3, "n": 4, "rows": 2, "nnz": 5, "pieces": 4,
    }  # fmt: skip
    gives(func, args, {"y": args["x"] * 2}, rtol=0)


def test_slots_below_fused_parts() -> None:
    """A fused chain down to padded slots, whose joint positions are slots."""
    func = small("scale", """
with T.sp_iter([O, T.part(T.fuse(I, J), E)], "SSS", "scale") as [o, i, j]:
    Y[i, j] = X[i, j] * 2.0
""", """
J = T.sparse_fixed(I, (n, w), indices)
O = T.dense_fixed(chunks)
E = T.dense_variable(O, (m * w, m * w), chunk_ptr)
""", X="I J", Y="I J")  # fmt: skip
    (it,) = sparse_iterations(func)
    assert parallel_units(it) == [0, 1]
    args = {
        "x": np.arange(1, 7, dtype="float32"), "y": np.zeros(6, "float32"),
        "indices": np.array([0, 2, 1, -1, 0, 1], "int32"),
        "chunk_ptr": np.array([0, 3, 3, 6], "int32"), "m": 3, "n": 3, "w": 2, "chunks": 3,
    }  # fmt: skip
    for run in (lambda **kw: sparsetir.interpret(func, kw), sparsetir.build(func)):
        have = args | {"y": args["y"].copy()}
        run(**have)
        np.testing.assert_array_equal(have["y"], [2, 4, 6, 0, 10, 12])


# What is written instead of what in the text of "row blocks", and what the verifier says.
REFUSED = """
T.part(I, IB) => T.part(I, O)  # expected 'O' to be a dense_variable axis, got a dense_
T.part(I, IB), J => T.part(I, IB), I  # axis 'I' is iterated twice
([O, T.part(I, IB) => ([N, T.part(I, IB)
    part('I', 'IB'): expected axis 'O', the parent of 'IB', to be iterated outside
(O, (m, m), row_ptr => (O, (m, n), row_ptr
    part('I', 'IB'): expected parts of all positions of 'I', nnz = m of 'IB', got n
(m, m), row_ptr, idtype="int32") => (m, m), row_ptr, idtype="int64")
    expected 'IB' of the idtype of 'I', int32, got int64
I, IB), J, K], "SSRS", "spmm") as [o, => T.fuse(I, N), IB), J, K], "SSSRS", "spmm") as [o, x,
    expected fused axes from a root down, ['N'], got ['I', 'N']
T.part(I, IB) => T.part(7, IB)  # part: argument 'axis': expected an axis, got 7
T.part(I, IB) => T.part(T.part(I, IB), IB)  # part: argument 'axis': expected an axis, got GroupRef
"""


@pytest.mark.parametrize(("_", "change", "words"), table(REFUSED))
def test_refused(_: str, change: str, words: list[str]) -> None:
    old, new = change.split(" => ")
    text = make("row blocks").script()
    assert old in text
    with pytest.raises(tvm.error.DiagnosticError) as error:
        sparsetir.from_source(text.replace(old, new))
    assert words[0] in str(error.value)
