"""Operators on sparse matrices with a sparse result: arguments and results of their kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from tvm.target import Target

from sparsetir.data.scipy_patterns import adopt_matrix
from sparsetir.data.sources import Stored, is_sparse
from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.formats.pattern import Pattern
from sparsetir.reductions import check_semiring
from sparsetir.runtime.arrays import dtype_name
from sparsetir.runtime.assembled import AssembledKernel, Numeric
from sparsetir.runtime.build import build
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.sparse_results import (
    KRON,
    MOST,
    SparseResult,
    combined_program,
    kron_program,
    product_program,
)
from sparsetir.sparse_ir.assemble import WORD
from sparsetir.sparse_ir.gradient import gradient
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.schedule.gallop import RATIO

WIDER = {"float16": "float32", "bfloat16": "float32"}  # types of accumulators
# Arithmetic on bools, as in scipy.
OF_BOOLS = {"plus_times": "or_and", "add": "maximum", "multiply": "minimum"}
Shape = tuple[int, ...]
# Above this many columns per element the workspace of a row would be larger than the matrix.
NARROW, NARROW_COLUMNS = 4, 1 << 20
# Sums of GATHERED operands or more are gathered, if they have an element or more per WORTH groups
# of columns that a row scans.
GATHERED, WORTH, GROUP = 3, 3, WORD**2
SEARCHED = 3  # ratio of steps from which searches are worth their code
INT32 = int(np.iinfo(np.int32).max)
MEMBERS = [f"a{q}" for q in range(MOST)]  # parameters of `combined_program`
STEP = 4  # terms that take as long as a step of intersecting a row and a column


class Csr(NamedTuple):
    """A matrix: indptr and indices of NumPy, columns of each row increasing; values of any kind."""

    indptr: np.ndarray
    indices: np.ndarray
    values: Any
    shape: Shape


def product(A: Csr, B: Csr, semiring: str = "plus_times", mask: Csr | None = None) -> Csr:
    """A B over a semiring; a mask is the result's pattern, and restricts the computation to it.

    Values are of one dtype, not bool, and the result's are a NumPy array; sums of 16-bit values are
    returned in float32.
    """
    if is_wide(B):
        narrow, mask, columns = without_empty_columns(B, mask)
        result = product(A, narrow, semiring, mask)
        return result._replace(indices=columns[result.indices], shape=(A.shape[0], B.shape[1]))
    (m, between), n = A.shape, B.shape[1]
    how, sizes = (product_program, semiring), {"m": m, "l": between, "n": n}
    return _run(how, "ab", (A, B), sizes, (m, n), mask)


def inner(A: Csr, B: Csr, semiring: str = "plus_times", mask: Csr | None = None) -> Csr:
    """A times the transposed B: inner products of their rows; see :func:`product`."""
    dotted = mask is not None and elements_pay(A, B, mask, by_rows=True)
    (a, b, pattern), columns, _ = factors("inner", (A, B), mask, dotted)
    if pattern is not None and mask is not None:
        how = _by_elements if dotted else product
        return mask._replace(values=how(a, b, semiring, pattern).values)
    result = product(a, b, semiring)
    indices = result.indices if columns is None else columns[result.indices]
    return result._replace(indices=indices, shape=(A.shape[0], B.shape[0]))


def vecdot(A: Csr, B: Csr, semiring: str = "plus_times", mask: None = None) -> Csr:
    """Inner products of corresponding rows, as a diagonal matrix."""
    del mask
    m, numbers = A.shape[0], np.arange(A.shape[0] + 1, dtype=idtype_of(A, B))
    return _by_elements(A, B, semiring, Csr(numbers, numbers[:-1], None, (m, m)))


def kron(A: Csr, B: Csr) -> Csr:
    """The Kronecker product; see :func:`product`."""
    shape = A.shape[0] * B.shape[0], A.shape[1] * B.shape[1]
    sizes = dict(zip("mnpq", (*A.shape, *B.shape), strict=True))
    return _run((kron_program,), "ab", (A, B), sizes, shape, None, max(shape) > INT32)


def product_gradient(op: str, wrt: str, A: Csr, B: Csr, C: Csr) -> Any:
    """The gradient of a product or Kronecker product for the values of A or B, from those of the
    other; C holds the result's gradient. float32 or float64."""
    ours, other = (A, B) if wrt == "a" else (B, A)
    idtype, dtype = idtype_of(A, B, C), dtype_name(C.values)
    sizes = dict(zip("mnpq" if op == KRON else "mlln", (*A.shape, *B.shape), strict=True))
    named = arguments("abc", (A, B, C), sizes, idtype)
    kernel = _gradient_kernel(op, wrt, dtype, idtype)
    named |= {"grad_c": C.values, "a" if ours is B else "b": other.values}
    passed = {x: named[x] for x in kernel.signature.names if x in named}
    return Numeric(kernel, passed, f"grad_{wrt}")()


@cache
def _gradient_kernel(op: str, wrt: str, dtype: str, idtype: str) -> Kernel:
    how = KRON if op == KRON else "plus_times"
    program = SparseResult(how, dtype, dtype, dtype, idtype).program()
    return build(gradient(program, wrt, transpose=False), check=False)


def _by_elements(A: Csr, B: Csr, semiring: str, mask: Csr) -> Csr:
    dtype = dtype_name(A.values)
    problem = SparseResult(semiring, dtype, WIDER.get(dtype, dtype), dtype, idtype_of(A, B, mask))
    kernel = _elements_kernel(problem, ratio_of(A, B, mask))
    return mask._replace(
        values=Numeric(kernel, element_arguments(A, B, mask, problem.idtype), "out")()
    )


@cache
def _elements_kernel(problem: SparseResult, ratio: int) -> Kernel:
    sch = Schedule(problem.elements_program())
    in_ratio(sch, ratio)
    return build(sch)


def element_arguments(A: Csr, B: Csr, mask: Csr, idtype: str) -> dict[str, Any]:
    """The arguments of kernels of `elements_program`, except `out`; B is stored by columns."""
    sizes = dict(zip("mln", (*A.shape, B.shape[0]), strict=True))
    named = arguments(("x0", "x1"), (A, B), sizes, idtype)
    return named | {
        "indptr": mask.indptr.astype(idtype, copy=False), "nnz": len(mask.indices),
        "indices": mask.indices.astype(idtype, copy=False),
    }  # fmt: skip


def elements_pay(A: Csr, B: Csr, mask: Csr, by_rows: bool = False) -> bool:
    """Whether intersecting a row of A and a column of B for each element of the mask takes less
    time than computing all terms.

    by_rows : whether the columns are the rows of B
    """
    if is_wide(B) and by_rows:
        B, narrow, _ = without_empty_columns(B, A)
        A = narrow or A
    elif is_wide(B):
        B, narrow, _ = without_empty_columns(B, mask)
        mask = narrow or mask
    along, across = np.diff(B.indptr), np.bincount(B.indices, minlength=B.shape[1])
    of_terms, columns = (across, along) if by_rows else (along, across)
    steps = min(_steps(A, columns, mask)) + len(mask.indices)
    return bool(STEP * steps < of_terms[A.indices].sum() + len(B.indices))


def _steps(A: Csr, columns: np.ndarray, mask: Csr) -> tuple[float, float]:
    """Steps of intersecting rows of A with columns of these lengths for all elements of a mask: by
    merging, and with searches in long ones."""
    a, b = np.repeat(np.diff(A.indptr), np.diff(mask.indptr)), columns[mask.indices]
    short, long = np.minimum(a, b), np.maximum(a, b)
    searched = 2 * short * np.log2(np.maximum(long, 1) / np.maximum(short, 1) + 1)
    return float((a + b).sum()), float(np.where(long >= RATIO * short, searched, a + b).sum())


def ratio_of(A: Csr, B: Csr, mask: Csr) -> int:
    """The ratio of lengths from which rows are searched, 0 for never; B is stored by columns.

    Code that may search also takes longer for a step.
    """
    steps, searched = _steps(A, np.diff(B.indptr), mask)
    return RATIO if searched * SEARCHED < steps else 0


def in_ratio(sch: Schedule, ratio: int) -> None:
    """Schedule `elements_program` to search from this ratio of lengths."""
    sch.gallop(sch.get_sp_iters(sch.get_sparse_iteration("elements"))[-1], ratio)


def factors(
    op: str, each: Sequence[Csr], mask: Csr | None, dotted: bool
) -> tuple[tuple[Csr, Csr, Csr | None], np.ndarray | None, np.ndarray | None]:
    """The operands of "spgemm" or "inner", and the mask, in the form of kernels.

    dotted : whether to store B by columns

    Empty columns are dropped if dense rows would be long. Also returns the result's columns,
    None for all, and the permutation of B's values, None for the same order.
    """
    (A, B), columns, places = each, None, None
    if op == "inner" and is_wide(B):
        B, narrow, _ = without_empty_columns(B, A)
        A = narrow or A
    elif op != "inner" and is_wide(B):
        B, mask, columns = without_empty_columns(B, mask)
    if (op == "inner") != dotted:
        turned, places = by_columns(B)
        B = turned._replace(values=None if B.values is None else B.values[places])
        if op == "inner" and is_wide(B):
            B, mask, columns = without_empty_columns(B, mask)
    return (A, B, mask), columns, places


def by_columns(matrix: Csr) -> tuple[Csr, np.ndarray]:
    """The transposed pattern, and the positions of its elements in the matrix."""
    m, n = matrix.shape
    idtype = matrix.indices.dtype
    rows = np.repeat(np.arange(m, dtype=idtype), np.diff(matrix.indptr))
    places = np.argsort(matrix.indices, kind="stable")
    indptr = np.zeros(n + 1, idtype)
    np.cumsum(np.bincount(matrix.indices, minlength=n), out=indptr[1:])
    return Csr(indptr, rows[places], None, (n, m)), places.astype(idtype)


def idtype_of(*matrices: Csr) -> str:
    """The index type that holds the indices of all matrices."""
    for x in matrices:
        if x.indices.itemsize == 8:
            return "int64"
    return "int32"


def combined(op: str, matrices: Sequence[Csr], mask: Csr | None = None) -> Csr:
    """Combine matrices element by element, by one of `COMBINED`; see :func:`product`."""
    (m, n), count = matrices[0].shape, len(matrices)
    how = combined_program, op, count, is_gathered(op, matrices, mask is not None)
    return _run(how, MEMBERS, matrices, {"m": m, "n": n}, (m, n), mask)


def is_gathered(op: str, matrices: Sequence[Csr], known: bool = False) -> bool:
    """Whether a sum adds one operand after the other to a workspace: for many operands whose rows
    are worth its bitmap, and always at a known pattern, which needs none."""
    if op not in ("add", "subtract") or known:
        return known and op in ("add", "subtract")
    return gathering_pays(matrices[0].shape, [len(x.indices) for x in matrices])


def gathering_pays(shape: Shape, elements: Sequence[int]) -> bool:
    """Whether a sum of matrices of this shape and these numbers of elements has many operands,
    whose rows are worth a bitmap."""
    rows, columns = shape
    return len(elements) >= GATHERED and columns * rows <= GROUP * WORTH * sum(elements)


def sparse_operation(
    op: str, *matrices: object, semiring: str = "plus_times", mask: object = None
) -> Any:
    """Compute one of `PRODUCTS` or `COMBINED` of a :class:`SparseMatrix` and others.

    Returns the pattern and values of the result; NotImplemented if one is not a sparse matrix.
    """
    caller = f"SparseMatrix.{op}"
    operands: list[Csr] = []
    for x in matrices:
        if not isinstance(x, SparseMatrix):
            if not is_sparse(x):
                return NotImplemented
            x = adopt_matrix(caller, "other", x)
        operands.append(csr(x))
    kept = None if mask is None else SparseMatrix.adopt(caller, "mask", mask)
    check_shapes(caller, op, [x.shape for x in operands], None if kept is None else kept.shape)
    types = {x.values.dtype for x in operands}
    dtype = np.result_type(*types) if len(types) > 1 else types.pop()
    how, computed = computation(caller, op, semiring, dtype)
    if types or computed != dtype:
        operands = [x._replace(values=x.values.astype(computed, copy=False)) for x in operands]
    result = result_of(op, how, operands, None if kept is None else csr(kept))
    values = result.values.astype(dtype, copy=False)
    if kept is not None:
        return Stored(kept.pattern, values)
    pattern = Pattern.from_csr(result.indptr, result.indices, result.shape, check=False)
    pattern.checked = True
    return Stored(pattern, values)


def result_of(op: str, how: str, operands: Sequence[Csr], mask: Csr | None) -> Csr:
    """Compute one of `PRODUCTS` over a semiring, a Kronecker product, or one of `COMBINED`."""
    if op == KRON:
        return kron(*operands)
    return PRODUCTS[op](*operands, how, mask) if op in PRODUCTS else combined(how, operands, mask)


def computation(caller: str, op: str, semiring: str, dtype: np.dtype) -> tuple[str, np.dtype]:
    """The semiring or one of `COMBINED`, and the dtype that values are computed in."""
    check_semiring(caller, semiring)
    bools = dtype.kind == "b"
    if bools and op == "subtract":
        raise TypeError(f"{caller}: expected numbers, got matrices of bool")
    how = semiring if op in PRODUCTS else op
    return (OF_BOOLS.get(how, how), np.dtype(np.int8)) if bools else (how, dtype)


def check_shapes(
    caller: str, op: str, shapes: Sequence[Shape], mask: Shape | None = None, name: str = "other"
) -> None:
    """Raise unless operands and mask fit together; name : the argument of the other operands."""
    first, *others = shapes
    if op == KRON:
        m, n = (math.prod(sizes) for sizes in zip(*shapes, strict=True))
        if max(m, n) >= 2**63:
            raise wrong(caller, name, "a result of less than 2**63 rows and columns", f"{m} x {n}")
        return
    if op == "matmul":
        (other,) = others
        if other[0] != first[1]:
            expected = f"{first[1]} rows, as the first matrix of shape {first} has columns"
            raise wrong(caller, name, expected, f"shape {other}")
        first = first[0], other[1]
    elif op == "inner":
        (other,) = others
        if other[1] != first[1]:
            expected = f"{first[1]} columns, as the first matrix of shape {first} has"
            raise wrong(caller, name, expected, f"shape {other}")
        first = first[0], other[0]
    elif len(shapes) > MOST:
        raise ValueError(f"{caller}: expected at most {MOST} matrices, got {len(shapes)}")
    else:
        for shape in others:
            if shape != first:
                raise wrong(caller, name, f"shape {first}", shape)
    if mask is not None and mask != first:
        raise wrong(caller, "mask", f"shape {first}", mask)


def is_wide(B: Csr) -> bool:
    """Whether a dense row would be larger than the matrix."""
    return B.shape[1] > NARROW * len(B.indices) + NARROW_COLUMNS


def csr(matrix: SparseMatrix) -> Csr:
    """A matrix's own arrays, not copied."""
    if matrix.as_operand is None:
        matrix.as_operand = csr_of(matrix.pattern, matrix.values)
    return matrix.as_operand


def csr_of(pattern: Pattern, values: np.ndarray) -> Csr:
    """A matrix of a pattern and values, not copied."""
    pattern.check_once()
    return Csr(*pattern.csr, values, pattern.shape)


def without_empty_columns(B: Csr, mask: Csr | None) -> tuple[Csr, Csr | None, np.ndarray]:
    """B and the mask without columns that are empty in both, and the remaining columns."""
    indices = [B.indices] if mask is None else [B.indices, mask.indices]
    columns, numbers = np.unique(np.concatenate(indices), return_inverse=True)
    of_b, of_mask = np.split(numbers.astype(B.indices.dtype), [len(B.indices)])
    B = B._replace(indices=of_b, shape=(B.shape[0], len(columns)))
    return B, mask and mask._replace(indices=of_mask, shape=(mask.shape[0], len(columns))), columns


# Products of two operands over a semiring.
PRODUCTS = {"matmul": product, "inner": inner, "vecdot": vecdot}
_kernels: dict[object, AssembledKernel] = {}


def kernel_of(
    program: Callable[..., SparseFunc], *how: Hashable, target: Target | None = None
) -> AssembledKernel:
    """The kernel of a program, by its options, the types of its values and its idtype.

    target : a `tvm.target.Target`; None for this machine
    """
    key = program, *how, None if target is None else str(target)
    if key not in _kernels:
        kernel = AssembledKernel(program(*how), "c", "llvm" if target is None else target)
        _kernels[key] = kernel
    return _kernels[key]


def arguments(
    names: Iterable[str], matrices: Iterable[Csr], sizes: Mapping[str, int], idtype: str
) -> dict[str, Any]:
    """The arguments of kernels, except the result's; names : those of the matrices, or more"""
    passed: dict[str, Any] = {**sizes}
    itemsize = 8 if idtype == "int64" else 4
    for name, (indptr, indices, values, _) in zip(names, matrices, strict=False):
        if indices.itemsize != itemsize or indptr.itemsize != itemsize:
            indptr, indices = indptr.astype(idtype), indices.astype(idtype)
        nnz, rows, columns = _parameters_of(name)
        passed[name], passed[nnz] = values, len(indices)
        passed[rows], passed[columns] = indptr, indices
    return passed


@cache
def _parameters_of(name: str) -> tuple[str, str, str]:
    """The names of a matrix's parameters, except that of its values."""
    return f"{name}_nnz", f"{name}_indptr", f"{name}_indices"


def _run(
    how: tuple[Any, ...], names: Iterable[str], operands: Sequence[Csr], sizes: Mapping[str, int],
    shape: Shape, mask: Csr | None, wide: bool = False,
) -> Csr:  # fmt: skip
    """Run a program's kernel; return the result in the accumulator's type.

    how : a program's function and its options, except types
    names : the operands' parameters, or more
    wide : whether its rows and columns exceed int32
    """
    dtype = dtype_name(operands[0].values)
    idtype = "int64" if wide else idtype_of(*operands, *(() if mask is None else (mask,)))
    kernel = kernel_of(*how, dtype, WIDER.get(dtype, dtype), idtype)
    named_arguments = arguments(names, operands, sizes, idtype)
    bounds = kernel.bounds(named_arguments)
    if mask is not None:
        indptr, indices = (x.astype(idtype, copy=False) for x in mask[:2])
        return mask._replace(values=kernel.at(indptr, indices, named_arguments, bounds)())
    try:
        return Csr(*kernel.assembled(named_arguments, bounds), shape)
    except OverflowError:
        if idtype == "int64":
            raise
    return _run(how, names, operands, sizes, shape, mask, wide=True)


# -- terms of a masked product, listed once for a pattern -----------------------------------------


TERMS = 1 << 22  # terms that are searched at a time, at least those of a row


def term_pairs(A: Csr, B: Csr, mask: Csr) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each element of the mask, the positions of its terms' factors in A and in B.

    A, B : (m, l) and (l, n), columns increasing in each row
    mask : (m, n), likewise

    Returns the offsets of each element's terms, (nnz + 1,), and the positions, (terms,) each, in
    the order of the inner axis; int32, or int64 if there are too many terms for it.
    """
    parts = [(mask.indices[:0],) * 3]
    for element, a, b in _visits(A, B, mask):
        order = np.argsort(element, kind="stable")
        parts.append((element[order], a[order], b[order]))
    element, a, b = _joined(parts, mask)
    begins = np.zeros(len(mask.indices) + 1, np.int64)
    np.cumsum(np.bincount(element, minlength=len(mask.indices)), out=begins[1:])
    return begins.astype(a.dtype), a, b


def term_visits(A: Csr, B: Csr, mask: Csr) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """:func:`term_pairs` in the order of A's elements, with the mask's elements for offsets."""
    return _joined([(mask.indices[:0],) * 3, *_visits(A, B, mask)], mask)


def term_ends(A: Csr, B: Csr) -> np.ndarray:
    """The ends of the terms of each element of A among all terms of A B, after a 0."""
    return np.concatenate([[0], np.cumsum(np.diff(B.indptr)[A.indices], dtype=np.int64)])


def _joined(
    parts: list[tuple[np.ndarray, ...]], mask: Csr
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate lists, in the smallest index type that holds them."""
    element, a, b = (np.concatenate(x) for x in zip(*parts, strict=True))
    idtype = np.int32 if max(len(a), len(mask.indices)) <= INT32 else np.int64
    return element.astype(idtype), a.astype(idtype), b.astype(idtype)


def _visits(A: Csr, B: Csr, mask: Csr) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the masked terms of a few rows at a time: elements of mask, A and B, in A's order."""
    m, n = mask.shape
    ends = term_ends(A, B)
    terms, of_rows = np.diff(ends), ends[A.indptr]
    keys = np.repeat(np.arange(m, dtype=np.int64), np.diff(mask.indptr)) * n + mask.indices
    first = 0
    while first < m:
        last = int(np.searchsorted(of_rows, of_rows[first] + TERMS, side="right")) - 1
        last = min(max(last, first + 1), m)
        begin, end = A.indptr[first], A.indptr[last]
        a = np.repeat(np.arange(begin, end), terms[begin:end])
        b = np.arange(len(a)) - (ends[a] - ends[begin]) + B.indptr[A.indices[a]]
        rows = np.repeat(np.arange(first, last, dtype=np.int64), np.diff(of_rows[first : last + 1]))
        wanted = rows * n + B.indices[b]
        element = np.searchsorted(keys, wanted)
        kept = np.flatnonzero(np.append(keys, -1)[element] == wanted)
        yield element[kept], a[kept], b[kept]
        first = last
