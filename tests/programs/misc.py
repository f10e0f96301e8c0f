"""Format changes, gathers, maxima, and several iterations over one buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import sparse_tir as T

from small import making

from .common import Arrays, Program, csr, finite, garbage, mask2, parents_of, scatter_sum, values
from .matrix import csr_inputs, spmm_inputs

BLOCK = 3


# Copy a CSR matrix into blocks; elements outside of the stored blocks are dropped.
make_csr_to_bsr = making("csr_to_bsr", """
with T.sp_iter([IO, JO, II, JI], "SSSS", "zero") as [io, jo, ii, ji]:
    B[io, jo, ii, ji] = 0.0
with T.sp_iter([I, J], "SS", "copy") as [i, j]:
    B[i // block, j // block, i % block, j % block] = A[i, j]
""", """
IO = T.dense_fixed(mb)
JO = T.sparse_variable(IO, (nb, nnzb), (block_ptr, block_idx))
II = T.dense_fixed(block)
JI = T.dense_fixed(block)
""", A="I J", B="IO JO II JI")  # fmt: skip


def csr_to_bsr_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of csr_to_bsr; "dense_row" lacks a block that holds elements."""
    mask = mask2(rng, case)
    indptr, indices = csr(mask, idtype)
    (m, n), nnz = mask.shape, len(indices)
    mb, nb = -(-m // BLOCK), -(-n // BLOCK)
    padded = np.zeros((mb * BLOCK, nb * BLOCK), bool)
    padded[:m, :n] = mask
    blocks = padded.reshape(mb, BLOCK, nb, BLOCK).any(axis=(1, 3))
    if case == "dense_row":
        blocks[:, 1] = False
    block_ptr, block_idx = csr(blocks, idtype)
    return {
        "a": values(rng, nnz, dtype),
        "b": garbage((len(block_idx), BLOCK, BLOCK), dtype),
        "indptr": indptr,
        "indices": indices,
        "block_ptr": block_ptr,
        "block_idx": block_idx,
        "m": m,
        "n": n,
        "nnz": nnz,
        "mb": mb,
        "nb": nb,
        "nnzb": len(block_idx),
        "block": BLOCK,
    }


def csr_to_bsr_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Blocks cut out of the dense matrix."""
    dense = np.zeros((args["mb"] * BLOCK, args["nb"] * BLOCK))
    dense[parents_of(args["indptr"]), args["indices"]] = args["a"]
    blocks = dense.reshape(args["mb"], BLOCK, args["nb"], BLOCK).transpose(0, 2, 1, 3)
    return {"b": blocks[parents_of(args["block_ptr"]), args["block_idx"]]}


def make_strided_gather(dtype: str, idtype: str) -> Any:
    """OUT[i, j] = A[i * stride + j]; beyond the end of A there are zeros."""
    Index = getattr(T, idtype)

    @T.prim_func
    def strided_gather(
        a: T.handle, out: T.handle, size: Index, rows: Index, width: Index, stride: Index
    ) -> None:
        N = T.dense_fixed(size, idtype)
        I = T.dense_fixed(rows, idtype)
        J = T.dense_fixed(width, idtype)
        A = T.match_sparse_buffer(a, (N,), dtype)
        OUT = T.match_sparse_buffer(out, (I, J), dtype)
        with T.sp_iter([I, J], "SS", "gather") as [i, j]:
            OUT[i, j] = A[i * stride + j]

    return strided_gather


def strided_gather_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of strided_gather."""
    del idtype
    rows, width = mask2(rng, case).shape
    size = 0 if case == "empty" else rows * 2 + 1
    a = values(rng, size, dtype)
    if case == "nonfinite":
        a[0], a[-1] = np.nan, np.inf
    return {
        "a": a,
        "out": garbage((rows, width), dtype),
        "size": size,
        "rows": rows,
        "width": width,
        "stride": 2,
    }


def strided_gather_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """The same on an array with zeros appended."""
    padded = np.zeros(args["size"] + 2 * args["rows"] + args["width"])
    padded[: args["size"]] = args["a"]
    i, j = np.indices((args["rows"], args["width"]))
    return {"out": padded[i * args["stride"] + j]}


# Y[i] = the largest stored value of row i, the smallest number where there is none.
make_row_max = making("row_max", """
with T.sp_iter([I, J], "SR", "row_max") as [i, j]:
    with T.init():
        Y[i] = T.min_value(dtype)
    Y[i] = T.max(Y[i], A[i, j])
""", A="I J", Y="I")  # fmt: skip


def row_max_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of row_max; every value is negative."""
    args = csr_inputs(rng, case, dtype, idtype)
    args["a"] = (args["a"] - 2).astype(dtype)
    return {**args, "y": garbage(args["m"], dtype)}


def row_max_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """Maximum of each row."""
    out = np.full(args["m"], float(np.finfo(args["a"].dtype).min))
    np.maximum.at(out, parents_of(args["indptr"]), args["a"].astype(np.float64))
    return {"y": out}


# OUT[i, j] = A[i, j] / (1 + sum of row i), two iterations that share buffers.
make_normalized = making("normalized_rows", """
DEGREE = T.alloc_sparse_buffer((I,), dtype)
with T.sp_iter([I, J], "SR", "degree") as [i, j]:
    with T.init():
        DEGREE[i] = 1.0
    DEGREE[i] = DEGREE[i] + A[i, j]
with T.sp_iter([I, J], "SS", "divide") as [i, j]:
    OUT[i, j] = A[i, j] / DEGREE[i]
""", A="I J", OUT="I J")  # fmt: skip


def normalized_inputs(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """Arguments of normalized_rows; the values are not negative."""
    args = csr_inputs(rng, case, dtype, idtype)
    args["a"] = np.abs(args["a"])
    return {**args, "out": garbage(args["nnz"], dtype)}


def normalized_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """The same on arrays."""
    rows, a = parents_of(args["indptr"]), args["a"].astype(np.float64)
    return {"out": a / (1 + scatter_sum(args["m"], rows, a))[rows]}


# C = A B, then C = C + C * C: the second iteration updates what the first one wrote.
make_spmm_accumulate = making("spmm_accumulate", """
with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[j, k]
with T.sp_iter([I, K], "SS", "update") as [i, k]:
    C[i, k] = C[i, k] + C[i, k] * C[i, k]
""", "I\nJ\nJ_ = T.dense_fixed(n)\nK", A="I J", B="J_ K", C="I K")  # fmt: skip


def spmm_accumulate_oracle(args: Arrays) -> dict[str, np.ndarray]:
    """A product, then element-wise."""
    terms = args["a"].astype(np.float64)[:, None] * args["b"][args["indices"]]
    total = scatter_sum(args["c"].shape, parents_of(args["indptr"]), terms)
    return {"c": total + total * total}


PROGRAMS = [
    Program("csr_to_bsr", make_csr_to_bsr, csr_to_bsr_inputs, csr_to_bsr_oracle, ("b",)),
    Program(
        "strided_gather",
        make_strided_gather,
        strided_gather_inputs,
        strided_gather_oracle,
        ("out",),
    ),
    finite("row_max", make_row_max, row_max_inputs, row_max_oracle, ("y",)),
    finite("normalized_rows", make_normalized, normalized_inputs, normalized_oracle, ("out",)),
    Program("spmm_accumulate", make_spmm_accumulate, spmm_inputs, spmm_accumulate_oracle, ("c",)),
]
