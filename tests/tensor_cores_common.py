"""Block-sparse matrices, kernels of them on tensor cores, and what they must give."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tvm.script import sparse_tir as T

from cuda_stages import CudaStages
from sparsetir.formats import SRBCRS, Format, Operand
from sparsetir.formats.decompose import decompose_format, extract_preprocess
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.templates import spmm_tensor_cores
from sparsetir.schedules.templates.spmm_tensor_cores import TensorCores
from sparsetir.sparse_ir.nodes import SparseFunc
from spmm_gpu_common import as_dtype, bfloat16_arrays

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false

SEEDS = (0, 1, 2)  # orders of warps
SUMS = {"float16": "float32", "bfloat16": "float32", "int8": "int32"}


def spmm(dtype: str, out: str, idtype: str = "int32") -> SparseFunc:
    """The plain product, as a user writes it, with a result of another type than the operands."""
    sums, size = SUMS[dtype], getattr(T, idtype)

    @T.prim_func
    def spmm(
        a: T.handle, b: T.handle, out_: T.handle, indptr: T.handle, indices: T.handle,
        m: size, n: size, nnz: size, feat: size,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        N = T.dense_fixed(n, idtype)
        K = T.dense_fixed(feat, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (N, K), dtype)
        C = T.match_sparse_buffer(out_, (I, K), out)
        with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
            with T.init():
                C[i, k] = T.cast(0, out)
            C[i, k] = T.cast(
                T.cast(C[i, k], sums) + T.cast(A[i, j], sums) * T.cast(B[j, k], sums), out
            )

    return spmm


class Kernel(NamedTuple):
    """A program, decomposed by a format, scheduled by a config, as CUDA text."""

    run: CudaStages
    format: Format
    dtype: str
    out: str
    idtype: str


@functools.cache
def kernel(
    config: TensorCores, dtype: str = "float16", out: str = "float32", idtype: str = "int32"
) -> Kernel:
    """A kernel for each config."""
    operand = Operand({"A": dtype}, ("I", "J"), idtype)
    rules = config.format.rules(operand)
    unmasked = [rule.name for rule in rules if rule.masked]
    _, func = extract_preprocess(decompose_format(spmm(dtype, out, idtype), rules, unmasked))
    run = CudaStages(func, spmm_tensor_cores.apply, config, arch="sm_80")
    return Kernel(run, config.format, dtype, out, idtype)


def blocks_of(fmt: Format) -> tuple[int, int]:
    """Rows and columns of a block or tile."""
    return (fmt.t, 1) if isinstance(fmt, SRBCRS) else (fmt.rows, fmt.cols)  # type: ignore[attr-defined]


def pattern(
    fmt: Format, shape: tuple[int, int], counts: Sequence[int], share: float = 0.7, seed: int = 0
) -> np.ndarray:
    """Where elements are: blocks of a format that are filled to a share.

    counts : of blocks in a row of blocks, over and over; as many as there are columns at most
    """
    rng, (rows, cols) = np.random.default_rng(seed), blocks_of(fmt)
    grid = -(-shape[0] // rows), -(-shape[1] // cols)
    blocks = np.zeros(grid, bool)
    for row in range(grid[0]):
        count = min(counts[row % len(counts)], grid[1])
        blocks[row, rng.permutation(grid[1])[:count]] = True
    mask = np.kron(blocks, np.ones((rows, cols))).astype(bool)[: shape[0], : shape[1]]
    return mask & (rng.random(shape) < share)


def numbers(rng: Any, shape: Any, dtype: str) -> np.ndarray:
    """Random ones of a type."""
    if dtype == "int8":
        return rng.integers(-128, 128, shape).astype("int8")
    return rng.standard_normal(shape).astype(as_dtype(dtype))


def check(
    made: Kernel, mask: np.ndarray, feat: int, seeds: Sequence[int] = SEEDS, b: Any = None
) -> np.ndarray:
    """Run a kernel and compare; also the result.

    b : the dense operand; by default random
    """
    rng = np.random.default_rng(1)
    m, n = mask.shape
    rows, columns = np.nonzero(mask)
    indptr = np.concatenate([[0], np.cumsum(mask.sum(axis=1))]).astype(made.idtype)
    matrix = CsrPattern(indptr, columns.astype(made.idtype), (m, n))
    values = numbers(rng, len(rows), made.dtype)
    b = numbers(rng, (n, feat), made.dtype) if b is None else b
    stored = matrix.stored_in(made.format, Operand({"A": made.dtype}, ("I", "J"), made.idtype))
    out = np.full((m, feat), 7, as_dtype(made.out))
    args = {**stored.arguments(True), **stored.values(A=values)}
    args |= {"b": b, "out_": out, "m": m, "n": n, "feat": feat}
    with bfloat16_arrays():
        found = made.run(args, seeds=seeds)["out_"]
    dense = np.zeros((m, n))
    dense[rows, columns] = values.astype("float64")
    wide = b.astype("float64")
    if np.isfinite(wide).all():
        compare(found, dense @ wide, np.abs(dense) @ np.abs(wide), int(mask.sum(axis=1).max()))
    return found


def compare(found: np.ndarray, exact: np.ndarray, scale: np.ndarray, terms: int) -> None:
    """A result in sums of float32, rounded to its type: an error of each is of the scale."""
    kind = str(found.dtype)
    if kind == "int32":
        np.testing.assert_array_equal(found, exact.astype("int64"))
        return
    last = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[kind]
    allowed = (terms + 2) * 2.0**-23 * scale + last * np.abs(exact) + 1e-7
    wrong = np.abs(found.astype("float64") - exact) > allowed
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} are wrong, first at {np.argwhere(wrong)[0]}"
    )
