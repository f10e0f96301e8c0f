"""Problems: the part of an operator's arguments that its kernels depend on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from tvm.script import tirx as T

from sparsetir.formats import Format, Operand, Pattern
from sparsetir.formats.converted import ConvertedFormat
from sparsetir.reductions import REDUCERS
from sparsetir.schedules.arguments import expect, expect_one_of
from sparsetir.schedules.operators.names import DTYPES, IDTYPES
from sparsetir.sparse_ir.computed import compute, computed_parameters
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.index_arrays import rows_increase
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script.writer import Writer, cast, reduced, visited


class _Csr(NamedTuple):
    indptr: np.ndarray
    indices: np.ndarray
    shape: tuple[int, int]


class CsrPattern(_Csr):
    """The pattern of a matrix, in CSR.

    indptr : (m + 1,) int32 or int64, non-decreasing
    indices : (nnz,) of the same dtype, increasing within each row, unless a template accepts any
        order
    shape : (m, n)
    """

    @property
    def nnz(self) -> int:
        """Number of elements."""
        return len(self.indices)

    @cached_property
    def coordinates(self) -> Pattern:
        """The same pattern as formats take it.

        Raises StructureError if columns do not increase within each row.
        """
        return Pattern.from_csr(*self)

    @cached_property
    def increases(self) -> bool:
        """Whether columns increase in each row, so that no element is repeated."""
        return rows_increase(self.indptr, self.indices)

    @property
    def in_order(self) -> CsrPattern:
        """The pattern with the columns of each row in order, repetitions included."""
        if self.increases:
            return self
        arrays = np.empty(self.nnz, np.int8), self.indices.copy(), self.indptr
        csr = sp.csr_array(arrays, shape=self.shape)
        csr.sort_indices()
        return self._replace(indices=csr.indices)

    def stored_in(self, format: Format, operand: Operand) -> ConvertedFormat:
        """Index arrays and masks of a format; not to be written, the matrix may keep them."""
        return format.convert(self.coordinates, operand)

    def arguments(self) -> dict[str, Any]:
        """Index arrays and sizes, by operators' parameter names."""
        m, n = self.shape
        return {"indptr": self.indptr, "indices": self.indices, "m": m, "n": n, "nnz": self.nnz}


def as_given(**stored: Any) -> dict[str, Any]:
    """Values unchanged, by operators' parameter names: the parameter `a` for buffer `A`."""
    return {name.lower(): array for name, array in stored.items()}


@dataclass(frozen=True)
class Stored:
    """A matrix in CSR or a template's own storage, with the attributes of a ConvertedFormat.

    values : returns the kernel's arrays of values by parameter, from (nnz,) values of buffers by
        name
    keeps_order : whether kernels take values unchanged, in the order of the matrix
    unused : returns the share of places without an element
    """

    values: Callable[..., Mapping[str, Any]] = as_given
    keeps_order: bool = True
    unused: Callable[[], float] = float

    @property
    def padding(self) -> float:
        """The share of places without an element."""
        return self.unused()


class Arranged(NamedTuple):
    """Arguments of a kernel that come from a matrix.

    stored : the matrix in the kernel's format, which converts arrays of values: a
        :class:`Stored` or a ConvertedFormat
    arguments : arrays and numbers that only depend on the pattern, by parameter
    overrides : computed parameters that the config chooses, such as the number of blocks of rows;
        those that a kernel does not have are ignored
    """

    stored: Any
    arguments: Mapping[str, Any]
    overrides: Mapping[str, Any] = {}

    def computed(self, func: SparseFunc, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """The computed parameters of a kernel's function, on this pattern."""
        computed = computed_parameters(func)
        overrides = {name: value for name, value in self.overrides.items() if name in computed}
        return compute(func, {**sizes, **self.arguments}, overrides)


def in_csr(matrix: CsrPattern, problem: Any, config: Any) -> Arranged:
    """Arrange a matrix for templates whose kernels take CSR unchanged and leave no numbers open."""
    del problem, config
    return Arranged(Stored(), matrix.arguments())


class Problem:
    """The part of an operator's arguments that a kernel is compiled for; of type `dtype`."""

    dtype: str

    @property
    def accumulator(self) -> str:
        """The type of accumulators."""
        return accumulator(self.dtype)


@dataclass(frozen=True)
class Product(Problem):
    """C[i, k] = reduce over the stored j of A[i, j] * B[j, k]; a feature size of 1 is SpMV.

    dtype : the type of A's values, of B and of C; sums are float32 (float64 for float64)
    idtype : the type of indptr and indices
    reduce : one of REDUCERS, such as "mean" (the sum over the number of stored elements of the
        row); a row without elements is zero in all of them, and a maximum or minimum keeps NaN
    batched : whether heads share the pattern: A is (heads, nnz), B (heads, n, feat), C (heads, m,
        feat)
    out : the type of C, by default that of B: float32 for 16-bit types too. Sums of int8, for
        templates that have them, are int32
    """

    dtype: str = "float32"
    idtype: str = "int32"
    reduce: str = "sum"
    batched: bool = False
    out: str | None = None

    def __post_init__(self) -> None:
        whole = self.out == "int32" and self.reduce == "sum"
        dtypes = (*DTYPES, "int8") if whole else DTYPES
        expect_one_of(self, dtype=dtypes, idtype=IDTYPES, reduce=REDUCERS)
        wide = self.out is None or self.out in (self.dtype, self.accumulator)
        expect(self, "out", wide, f"None, '{self.dtype}' or '{self.accumulator}'")

    @property
    def operand(self) -> Operand:
        """A as formats take it."""
        return Operand({"A": self.dtype}, ("I", "J"), self.idtype)


class Spmm(Product):
    """A product whose rows are reduced in one pass, which many templates serve."""


class SpmmInSteps(Product):
    """A product with a reduction in steps, which schedules of programs in general serve."""


def unsupported(problem: Any, dtypes: Collection[str] = ()) -> str | None:
    """What makes a problem other than a sum of one matrix, of one of some types if given; or None.

    For templates that only serve such sums.
    """
    if problem.batched:
        return "heads"
    if problem.reduce != "sum":
        return f"reduce='{problem.reduce}'"
    return f"dtype '{problem.dtype}'" if dtypes and problem.dtype not in dtypes else None


def refuse_unsupported(
    caller: str, config: Any, problem: Any, dtypes: Collection[str] = ()
) -> None:
    """Raise ScheduleError for a problem that :func:`unsupported` names; caller : for its text."""
    missing = unsupported(problem, dtypes)
    if missing is not None:
        types = f" in {' or '.join(sorted(dtypes))}" if dtypes else ""
        raise ScheduleError(
            f"{caller}: argument 'config': {type(config).__name__} serves sums of one "
            f"matrix{types}, got {missing}"
        )


@dataclass(frozen=True)
class Sddmm(Problem):
    """OUT[i, j] = sum over k of X[i, k] * Y[j, k] where an element is stored.

    dtype : the type of X, Y and OUT; sums are float32 (float64 for float64)
    idtype : the type of indptr and indices
    batched : whether heads share the pattern: X is (heads, m, feat), Y (heads, n, feat), OUT
        (heads, nnz)
    """

    dtype: str = "float32"
    idtype: str = "int32"
    batched: bool = False

    def __post_init__(self) -> None:
        expect_one_of(self, dtype=DTYPES, idtype=IDTYPES)


def memoized(program: Callable[..., SparseFunc]) -> Callable[..., SparseFunc]:
    """A program (problem) -> function as templates call it, (problem, config=None): the plain one,
    whatever the config, cached by problem, since parsing takes as long as lowering."""
    cached = functools.lru_cache(maxsize=64)(program)

    @functools.wraps(program)
    def kept(problem: Any, config: Any = None) -> SparseFunc:
        del config
        return cached(problem)

    return kept


def reduce_at_rows(
    write: Writer, name: str, outer: str, inner: str, reduce: str, out: str, term: str, acc: str,
    stored: str,
) -> dict[str, Any]:  # fmt: skip
    """Write the iteration that reduces a term over elements J of rows I, using a number for each
    row, `row`, if the reduction needs one.

    outer, inner : names of the axes around the elements, and of those inside
    acc, stored : types of the term and of the result

    Returns Python values that the lines use.
    """
    reducer, first = REDUCERS[reduce], f"T.{stored}(0)"
    steps, row = reducer.steps, reducer.row
    around, within = ("S" * len(axes.split()) for axes in (outer, inner))
    if steps is not None:
        row = REDUCERS[steps.shift or "max"].row  # zero in rows without elements alone
    if row is not None:
        write.buffer("row", "I", acc)
        write.attribute("computed", {"row": {"recipe": row, "indptr": "$indptr"}})
    if steps is None:
        if reducer.is_scaled:
            term = f"({term}) * ROW[i]"
        elif reducer.is_extremum:
            first = cast("ROW[i]", acc, stored)
        lines = reduced(reducer.combine, out, term, acc, stored, first)
        write.visit(name, f"{outer} J {inner}", f"{around}R{within}", lines)
        return {}
    write.local(acc, TOTAL="")
    body, done = [], "finish(TOTAL[()])"
    if steps.shift:
        write.local(acc, TOP="", SHIFT="")
        most = reduced(REDUCERS[steps.shift].combine, "TOP[()]", term, acc, acc)
        finite = f'T.And(TOP[()] > T.{acc}("-inf"), TOP[()] < T.{acc}("inf"))'
        body += visited("shift", "J", "R", most)
        body.append(f"SHIFT[()] = T.Select({finite}, TOP[()], T.{acc}(0))")
        term, done = f"{term} - SHIFT[()]", f"{done} + SHIFT[()]"
    total = reduced(reducer.combine, "TOTAL[()]", f"each({term})", acc, acc)
    body += visited("combine", "J", "R", total)
    done = f"T.Select(ROW[i] == T.{acc}(0), T.{acc}(0), {done})"
    body.append(f"{out} = {cast(done, acc, stored)}")
    write.visit(name, f"{outer} {inner}", around + within, body)
    return {"each": partial(steps.each, T), "finish": partial(steps.finish, T)}


def accumulator(dtype: str) -> str:
    """The type in which products of `dtype` are accumulated."""
    return {"float64": "float64", "int8": "int32", "int32": "int32"}.get(dtype, "float32")


def summed(dtype: str) -> str:
    """The type of accumulators in registers for results of `dtype`."""
    return accumulator(dtype) if "float" in dtype else dtype


def vector_lanes(problem: Product | Sddmm, vector_bits: int) -> int:
    """Accumulators per vector register of a CPU, at least one."""
    return max(1, vector_bits // (8 * np.dtype(problem.accumulator).itemsize))
