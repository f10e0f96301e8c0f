"""Format changes, gathers, maxima, and several iterations over one buffer."""

from __future__ import annotations

import numpy as np

from .common import (
    FINITE,
    Arrays,
    csr_arrays,
    mask2,
    parents_of,
    program,
    rows_of,
    scatter_sum,
    values,
)
from .matrix import ALL, csr_inputs, csr_product

BLOCK = 3


def _with_blocks(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    """ "dense_row" lacks a block that holds elements."""
    mask = mask2(rng, case)
    m, n = mask.shape
    mb, nb = -(-m // BLOCK), -(-n // BLOCK)
    padded = np.zeros((mb * BLOCK, nb * BLOCK), bool)
    padded[:m, :n] = mask
    blocks = padded.reshape(mb, BLOCK, nb, BLOCK).any(axis=(1, 3))
    if case == "dense_row":
        blocks[:, 1] = False
    args = csr_arrays(mask, idtype)
    args |= csr_arrays(blocks, idtype, "block_ptr", "block_idx", "nnzb", "mb", "nb")
    return {**args, "a": values(rng, args["nnz"], dtype), "block": BLOCK}


def _in_blocks(args: Arrays) -> np.ndarray:
    """Blocks cut out of the dense matrix."""
    dense = np.zeros((args["mb"] * BLOCK, args["nb"] * BLOCK))
    dense[rows_of(args), args["indices"]] = args["a"]
    blocks = dense.reshape(args["mb"], BLOCK, args["nb"], BLOCK).transpose(0, 2, 1, 3)
    return blocks[parents_of(args["block_ptr"]), args["block_idx"]]


def _strides(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    rows, width = mask2(rng, case).shape
    size = 0 if case == "empty" else rows * 2 + 1
    a = values(rng, size, dtype)
    if case == "nonfinite":
        a[0], a[-1] = np.nan, np.inf
    return {"a": a, "size": size, "rows": rows, "width": width, "stride": 2}


def _gathered(args: Arrays) -> np.ndarray:
    """The result on an array with zeros appended."""
    padded = np.zeros(args["size"] + 2 * args["rows"] + args["width"])
    padded[: args["size"]] = args["a"]
    i, j = np.indices((args["rows"], args["width"]))
    return padded[i * args["stride"] + j]


def _negative(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    args = csr_inputs(rng, case, dtype, idtype)
    return {**args, "a": (args["a"] - 2).astype(dtype)}


def _positive(rng: np.random.Generator, case: str, dtype: str, idtype: str) -> Arrays:
    args = csr_inputs(rng, case, dtype, idtype)
    return {**args, "a": np.abs(args["a"])}


def _maxima(args: Arrays) -> np.ndarray:
    out = np.full(args["m"], float(np.finfo(args["dtype"]).min))
    np.maximum.at(out, rows_of(args), args["a"])
    return out


def _normalized(args: Arrays) -> np.ndarray:
    rows = rows_of(args)
    return args["a"] / (1 + scatter_sum(args["m"], rows, args["a"]))[rows]


PROGRAMS = [
    # Copy a CSR matrix into blocks; elements outside of the stored blocks are dropped.
    program("csr_to_bsr", """
with T.sp_iter([IO, JO, II, JI], "SSSS", "zero") as [io, jo, ii, ji]:
    B[io, jo, ii, ji] = 0.0
with T.sp_iter([I, J], "SS", "copy") as [i, j]:
    B[i // block, j // block, i % block, j % block] = A[i, j]
""", """
IO = T.dense_fixed(mb)
JO = T.sparse_variable(IO, (nb, nnzb), (block_ptr, block_idx))
II = T.dense_fixed(block)
JI = T.dense_fixed(block)
""", _with_blocks, _in_blocks, A="I J", B="IO JO II JI", b="out nnzb block block"),
    # OUT[i, j] = A[i * stride + j]; beyond the end of A there are zeros.
    program("strided_gather", """
with T.sp_iter([I, J], "SS", "gather") as [i, j]:
    OUT[i, j] = A[i * stride + j]
""", """
N = T.dense_fixed(size)
I = T.dense_fixed(rows)
J = T.dense_fixed(width)
""", _strides, _gathered, "a out size rows width stride", A="N", OUT="I J", out="out rows width"),
    # Y[i] = the largest stored value of row i, the smallest number where there is none.
    program("row_max", """
with T.sp_iter([I, J], "SR", "row_max") as [i, j]:
    with T.init():
        Y[i] = T.min_value(dtype)
    Y[i] = T.max(Y[i], A[i, j])
""", "", _negative, _maxima, cases=FINITE, A="I J", Y="I", y="out m"),
    # OUT[i, j] = A[i, j] / (1 + sum of row i), two iterations that share buffers.
    program("normalized_rows", """
DEGREE = T.alloc_sparse_buffer((I,), dtype)
with T.sp_iter([I, J], "SR", "degree") as [i, j]:
    with T.init():
        DEGREE[i] = 1.0
    DEGREE[i] = DEGREE[i] + A[i, j]
with T.sp_iter([I, J], "SS", "divide") as [i, j]:
    OUT[i, j] = A[i, j] / DEGREE[i]
""", "", _positive, _normalized, cases=FINITE, A="I J", OUT="I J", out="out nnz"),
    # C = A B, then C = C + C * C: the second iteration updates what the first one wrote.
    program("spmm_accumulate", """
with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[j, k]
with T.sp_iter([I, K], "SS", "update") as [i, k]:
    C[i, k] = C[i, k] + C[i, k] * C[i, k]
""", ALL, csr_inputs, lambda args: csr_product(args) + csr_product(args) ** 2,
        A="I J", B="J_ K", C="I K", b="fill n feat", c="out m feat"),
]  # fmt: skip
