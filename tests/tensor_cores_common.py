"""Block-sparse matrices, kernels of them on tensor cores, and what they must give."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import sparsetir
from cuda_stages import CudaStages
from small import text_of
from sparsetir.formats import SRBCRS, Format, Operand
from sparsetir.formats.decompose import decompose_format
from sparsetir.formats.preprocess import extract_preprocess
from sparsetir.schedules.gpu import spmm_tensor_cores
from sparsetir.schedules.gpu.spmm_tensor_cores import TensorCores
from spmm_gpu_common import as_dtype, bfloat16_arrays, pattern_of

SEEDS = (0, 1)  # orders of warps
SUMS = {"float16": "float32", "bfloat16": "float32", "int8": "int32"}


def spmm(dtype: str, out: str, idtype: str = "int32", heads: bool = False) -> Any:
    """The plain product, as a user writes it, with a result of another type than the operands.

    heads : of one matrix with many dense operands
    """
    h, i, s = ("H, ", "h, ", "S") if heads else ("", "", "")
    wide = SUMS[dtype]
    body = f"""
with T.sp_iter([{h}I, J, K], "{s}SRS", "spmm") as [{i}i, j, k]:
    with T.init():
        C[{i}i, k] = T.cast(0, "{out}")
    C[{i}i, k] = T.cast(T.cast(C[{i}i, k], "{wide}")
        + T.cast(A[i, j], "{wide}") * T.cast(B[{i}j, k], "{wide}"), "{out}")
"""
    over = {"A": f"I J {dtype}", "B": f"{h[:1]} N K {dtype}", "C": f"{h[:1]} I K {out}"}
    axes = "H = T.dense_fixed(heads)" if heads else ""
    return sparsetir.from_source(text_of("spmm", body, axes, idtype=idtype, **over))


class Kernel(NamedTuple):
    """A program, decomposed by a format, scheduled by a config, as CUDA text."""

    run: CudaStages
    format: Format
    dtype: str
    out: str
    idtype: str


@functools.cache
def kernel(
    config: TensorCores,
    dtype: str = "float16",
    out: str = "float32",
    idtype: str = "int32",
    **options: Any,
) -> Kernel:
    """A kernel for each config; options as of `CudaFunction`."""
    operand = Operand({"A": dtype}, ("I", "J"), idtype)
    rules = config.format.rules(operand)
    unmasked = [rule.name for rule in rules if rule.masked]
    _, func = extract_preprocess(decompose_format(spmm(dtype, out, idtype), rules, unmasked))
    run = CudaStages(func, spmm_tensor_cores.apply, config, arch="sm_80", **options)
    return Kernel(run, config.format, dtype, out, idtype)


def batched_kernel(
    config: TensorCores, heads: int, shape: tuple[int, int], counts: Sequence[int], feat: int
) -> None:
    """Schedule, run and compare the product with many dense operands."""
    rules = config.format.rules(Operand({"A": "float16"}, ("I", "J"), "int32"))
    unmasked = [rule.name for rule in rules if rule.masked]
    func = spmm("float16", "float32", heads=True)
    _, func = extract_preprocess(decompose_format(func, rules, unmasked))
    run = CudaStages(func, spmm_tensor_cores.apply, config, arch="sm_80")
    rng, mask = np.random.default_rng(1), pattern(config.format, shape, counts)
    matrix, values = pattern_of(mask, "int32"), numbers(rng, int(mask.sum()), "float16")
    b = numbers(rng, (heads, shape[1], feat), "float16")
    stored = matrix.stored_in(config.format, Operand({"A": "float16"}, ("I", "J"), "int32"))
    args = {**stored.arguments(True), **stored.values(A=values), "b": b, "heads": heads}
    out = np.full((heads, shape[0], feat), 7, "float32")
    args |= {"c": out, "m": shape[0], "n": shape[1], "feat": feat}
    result = run(args, seeds=SEEDS)["c"]
    dense = np.zeros(shape)
    dense[mask] = values
    for c, x in zip(result, b.astype("float64"), strict=True):
        compare(c, dense @ x, np.abs(dense) @ np.abs(x), int(mask.sum(axis=1).max()))


def blocks_of(fmt: Format) -> tuple[int, int]:
    """Rows and columns of a block or tile."""
    return (fmt.t, 1) if isinstance(fmt, SRBCRS) else (fmt.rows, fmt.cols)


def pattern(
    fmt: Format, shape: tuple[int, int], counts: Sequence[int], share: float = 0.7, seed: int = 0
) -> np.ndarray:
    """A mask of elements: blocks of a format, filled to a share.

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


def arguments(
    built: Kernel, mask: np.ndarray, feat: int, b: Any = None
) -> tuple[dict[str, Any], np.ndarray]:
    """Arguments of a kernel by name, and values in the pattern's order; see :func:`check`."""
    rng = np.random.default_rng(1)
    m, n = mask.shape
    matrix = pattern_of(mask, built.idtype)
    values = numbers(rng, int(mask.sum()), built.dtype)
    b = numbers(rng, (n, feat), built.dtype) if b is None else b
    stored = matrix.stored_in(built.format, Operand({"A": built.dtype}, ("I", "J"), built.idtype))
    out = np.full((m, feat), 7, as_dtype(built.out))
    args = {**stored.arguments(True), **stored.values(A=values)}
    return args | {"b": b, "c": out, "m": m, "n": n, "feat": feat}, values


def check(
    built: Kernel, mask: np.ndarray, feat: int, seeds: Sequence[int] = SEEDS, b: Any = None
) -> np.ndarray:
    """Run a kernel and compare; also the result.

    b : the dense operand; by default random
    """
    args, values = arguments(built, mask, feat, b)
    with bfloat16_arrays():
        result = built.run(args, seeds=seeds)["c"]
    dense = np.zeros(mask.shape)
    dense[mask] = values.astype("float64")
    wide = args["b"].astype("float64")
    if np.isfinite(wide).all():
        compare(result, dense @ wide, np.abs(dense) @ np.abs(wide), int(mask.sum(axis=1).max()))
    return result


def compare(result: np.ndarray, exact: np.ndarray, scale: np.ndarray, terms: int) -> None:
    """A result in sums of float32, rounded to its type: an error of each is of the scale."""
    kind = str(result.dtype)
    if kind == "int32":
        np.testing.assert_array_equal(result, exact.astype("int64"))
        return
    last = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[kind]
    allowed = (terms + 2) * 2.0**-23 * scale + last * np.abs(exact) + 1e-7
    wrong = ~(np.abs(result.astype("float64") - exact) <= allowed)  # NaN is wrong, too
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} are wrong, first at {np.argwhere(wrong)[0]}"
    )
