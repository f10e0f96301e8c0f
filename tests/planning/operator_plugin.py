"""Operators of a record and a program, as a plug-in registers them: that of CONTRIBUTING.md, and
one that reads values."""

import linecache
import re
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from sparsetir.schedules.operators.operands import OfProgram, Operator, register
from sparsetir.schedules.operators.problems import memoized
from sparsetir.sparse_ir.script.parser import from_source

GATED = """
@T.prim_func
def gated(
    a: T.handle, b: T.handle, g: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
    m: T.{idtype}, n: T.{idtype}, nnz: T.{idtype}, feat: T.{idtype},
):
    I = T.dense_fixed(m, "{idtype}")
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "{idtype}")
    N = T.dense_fixed(n, "{idtype}")
    K = T.dense_fixed(feat, "{idtype}")
    A = T.match_sparse_buffer(a, (I, J), "{dtype}")
    B = T.match_sparse_buffer(b, (N, K), "{dtype}")
    G = T.match_sparse_buffer(g, (I, K), "{dtype}")
    OUT = T.match_sparse_buffer(out, (I, K), "{dtype}")
    with T.sp_iter([I, J, K], "SRS", "gated") as [i, j, k]:
        with T.init():
            OUT[i, k] = T.cast(0, "{dtype}")
        OUT[i, k] = OUT[i, k] + A[i, j] * B[j, k] * T.tanh(G[i, k])
"""


@memoized
def gated(problem):
    return from_source(GATED.format(dtype=problem.dtype, idtype=problem.idtype))


def exact_gated(problem, pattern, values, operands):
    b, g = (np.asarray(x, "float64") for x in operands)
    a = sp.csr_array(
        (np.asarray(values, "float64"), pattern.indices, pattern.indptr), pattern.shape
    )
    size = np.abs(a) @ np.abs(b)
    return (a @ b) * np.tanh(g), size


# Two iterations; the second reads what the first writes. Products have no gradient.
NORMED = """
@T.prim_func
def {name}(
    x: T.handle, y: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
    m: T.{idtype}, n: T.{idtype}, nnz: T.{idtype}, feat: T.{idtype},
):
    I = T.dense_fixed(m, "{idtype}")
    J = T.sparse_variable(I, (n, nnz), (indptr, indices), "{idtype}")
    N = T.dense_fixed(n, "{idtype}")
    K = T.dense_fixed(feat, "{idtype}")
    X = T.match_sparse_buffer(x, (I, K), "{dtype}")
    Y = T.match_sparse_buffer(y, (N,), "{dtype}")
    OUT = T.match_sparse_buffer(out, (I, J), "{dtype}")
    S = T.alloc_sparse_buffer((I,), "{dtype}")
    with T.sp_iter([I, K], "SR", "squares") as [i, k]:
        with T.init():
            S[i] = T.cast({first}, "{dtype}")
        S[i] = S[i] {operator} X[i, k] * X[i, k]
    with T.sp_iter([I, J], "SS", "normed") as [i, j]:
        OUT[i, j] = S[i] * Y[j]
"""


@memoized
def normed(problem):
    types = {"dtype": problem.dtype, "idtype": problem.idtype}
    return from_source(NORMED.format(name="normed", first=1, operator="*", **types))


@memoized
def scaled(problem):
    types = {"dtype": problem.dtype, "idtype": problem.idtype}
    return from_source(NORMED.format(name="scaled", first=0, operator="+", **types))


def contributed():
    """The operators that the block of the page registers."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "def distances" in b)
    # TVMScript reads the source again.
    linecache.cache["<distances>"] = (len(block), None, block.splitlines(True), "<distances>")
    exec(compile(block, "<distances>", "exec"), {"__name__": "distances_record"})


contributed()
register(
    Operator(
        "gated", OfProgram, "sums of gated rows", {"b": "n feat", "g": "m feat", "out": "m feat"},
        True, exact_gated, reductions=("sum",), program=gated,
    )
)  # fmt: skip
for program in (normed, scaled):
    register(
        Operator(
            program.__name__, OfProgram, "by squares of rows",
            {"x": "m feat", "y": "n", "out": "nnz"}, False, None, reductions=("sum",),
            program=program,
        )
    )  # fmt: skip
