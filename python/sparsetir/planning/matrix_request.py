"""What plans of operators on a matrix are asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.formats import Format
from sparsetir.planning.request import (
    Request,
    adopted_matrix,
    check_counts,
    check_dtypes,
    csr_pattern,
    default_threads,
    features_of,
    idtype_for,
)
from sparsetir.planning.vocabulary import operator as named_operator
from sparsetir.records.task import Task
from sparsetir.runtime import pool
from sparsetir.runtime.arrays import CACHE_LINE, LEAST_ALIGNED, itemsize
from sparsetir.runtime.matrix_engine import allowed
from sparsetir.runtime.targets import resolve_target
from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.operators.operands import Operator
from sparsetir.schedules.operators.problems import CsrPattern, Spmm
from sparsetir.schedules.operators.registry import OPERATORS
from sparsetir.schedules.passes.amx_tiles import PRODUCTS, has_product
from sparsetir.schedules.search.by_format import by_format
from sparsetir.schedules.search.choose import Statistics, candidates
from sparsetir.schedules.search.locality import Locality
from sparsetir.schedules.search.spaces import Space, space
from sparsetir.schedules.templates.amx import BLOCKS, configs

# Nonzeros of a column from which on a copy of B that begins at a cache line pays.
ALIGNED_DEGREE = 24


@dataclass(frozen=True)
class MatrixRequest(Request):
    """An operator on a matrix; :func:`matrix_request` makes it.

    matrix : a CsrPattern where there are no values
    problem : what kernels are compiled for
    statistics : what configs are chosen by
    target : a `tvm.target.Target`
    """

    operator: Operator
    matrix: SparseMatrix | CsrPattern
    problem: Any
    feat: int
    heads: int | None
    statistics: Statistics
    target: Any

    @property
    def name(self) -> str:
        """Of the operator."""
        return self.operator.name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of operands, of values "a" if the operator reads any, and of the result "out"."""
        m, n = self.matrix.shape
        return self.operator.shapes((m, n), self.matrix.nnz, self.feat, self.heads)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes beside those of the pattern, by the names of the parameters of operators."""
        return {"heads": self.heads or 1, "feat": self.feat}

    @property
    def threads(self) -> int:
        """Of the CPU."""
        return self.statistics.threads

    def gathers_often(self, config: Any) -> bool:
        """Whether rows of B are gathered as they are, so often that to align them pays first.

        Rows of whole cache lines that begin within one take 1.1 to 1.7 times as long to gather (Zen
        3, one thread, 13 to 85 nonzeros a column); a copy as long as 1 to 4 of them.
        """
        given = self.statistics
        row = given.feat * given.bytes
        often = given.nnz >= ALIGNED_DEGREE * given.n and given.n * row >= LEAST_ALIGNED
        copied = getattr(config, "pack", False)
        return isinstance(self.problem, Spmm) and often and not copied and row % CACHE_LINE == 0

    @cached_property
    def pattern(self) -> CsrPattern:
        """Where the matrix has elements, in the type of the problem."""
        return csr_pattern(self.matrix, self.problem.idtype)

    def engine(self, format: Any = None) -> list[Any]:
        """Configs for the CPU's matrix engine, where there is one that suits the pattern.

        format : the one that stores the matrix; by default blocks that fill tiles

        Of a SparseMatrix alone: a CsrPattern has no values, and to bring them into blocks in each
        run would take longer than is won.
        """
        spmm = isinstance(self.problem, Spmm) and isinstance(self.matrix, SparseMatrix)
        if not spmm or not has_product(self.target, self.problem.dtype):
            return []
        if allowed(PRODUCTS[self.problem.dtype].features):
            return []
        formats = BLOCKS if format is None else (format,)
        return configs(self.problem, self.pattern, self.statistics, self.target, formats)

    def config_of(self, format: Any) -> Any:
        """The config for a format."""
        if not isinstance(format, Format) or format.order not in (None, 2):
            raise TypeError(
                "plan: argument 'format': expected a format of matrices, such as "
                f"sparsetir.formats.BSR(32, 32), got {format!r}"
            )
        if not isinstance(self.problem, Spmm):
            return super().config_of(format)
        found = self.engine(format)
        if found:
            return found[0]
        pattern = self.pattern.coordinates
        return by_format(format, self.problem, pattern, self.statistics, self.target)

    def task(self) -> Task:
        """See :class:`Request`; of a SparseMatrix."""
        assert isinstance(self.matrix, SparseMatrix)
        reduce = getattr(self.problem, "reduce", "sum")
        return Task(
            self.operator.name, self.matrix, self.feat, self.problem.dtype, reduce, self.heads,
            self.target, self.threads,
        )  # fmt: skip

    @property
    def is_recorded(self) -> bool:
        """See :class:`Request`; records are for the default type of the result."""
        return self.has_values and getattr(self.problem, "out", None) is None

    def chosen(self) -> Any:
        """See :class:`Request`."""
        if self.gpu and self.problem.dtype == "int8":
            raise ValueError(
                "plan: argument 'format': expected one that tensor cores take, for 'int8' on a "
                "GPU, such as sparsetir.formats.BSR(32, 32), got None"
            )
        return self.candidates()[0]

    def candidates(self) -> list[Any]:
        """See :class:`Request`."""
        return [*self.engine(), *candidates(self.problem, self.statistics, self.target)]

    def space(self) -> Space:
        """See :class:`Request`."""
        return space(self.problem, self.pattern, self.statistics, self.target)


OPTIONS = ("reduce", "heads", "format", "out_dtype")


def matrix_request(
    op: str,
    matrix: Any,
    feat: Any = None,
    *,
    dtype: str | None = None,
    reduce: str = "sum",
    heads: int | None = None,
    target: Any = "llvm",
    threads: int | None = None,
    out_dtype: str | None = None,
) -> MatrixRequest:
    """The arguments of :func:`sparsetir.plan`, checked; raises as it does."""
    given, (op, reduce, ones) = op, named_operator("plan", op, reduce, OPERATORS)
    operator = OPERATORS[op]
    feat, dtype, heads = features_of(op, feat, dtype, heads, operator.vectors)
    check_dtypes(dtype=dtype, out_dtype=out_dtype)
    if out_dtype is not None and not hasattr(operator.problem, "out"):
        raise ValueError(f"plan: argument 'out_dtype': expected None for '{op}', got {out_dtype!r}")
    check_counts(feat=feat, heads=heads, threads=threads)
    if operator.vectors and feat != 1:
        raise ValueError(f"plan: argument 'feat': expected 1 for '{op}', got {feat}")
    if heads is not None and not operator.takes_heads:
        raise ValueError(f"plan: argument 'heads': expected None for '{op}', got {heads!r}")
    if operator.reductions == ("sum",) and reduce != "sum":
        raise ValueError(f"plan: argument 'reduce': expected 'sum' for '{op}', got {reduce!r}")
    message = given != op and op == "spmm" and reduce != "sum"
    found = adopted_matrix(given, matrix, each_once=message and (reduce == "mean" or not ones))
    if ones:
        if not isinstance(found, SparseMatrix):
            raise ValueError("plan: argument 'op': expected no copy for a matrix without values")
        values = np.ones(found.nnz, found.dtype)
        if reduce == "sum" and found is not matrix and found.places is not None:
            values = found.arrange(np.ones(len(found.places), found.dtype))  # parallel edges count
        found = found.with_values(values)
    matrix = found
    own = str(matrix.dtype) if isinstance(matrix, SparseMatrix) else "float32"
    m, n, feat = *matrix.shape, int(feat)
    idtype = idtype_for(m, n, matrix.nnz, feat)
    problem = operator.compiled_for(dtype or own, reduce, heads is not None, idtype, out_dtype)
    threads = int(threads or default_threads())
    target = resolve_target(target)
    longest = 0  # as if no row stood out: hyb is for coordinates in order, each once
    if is_gpu(target) and isinstance(matrix, SparseMatrix):
        longest = int(np.diff(matrix.pattern.indptr).max(initial=0))
    block = 1
    asked = not is_gpu(target) or problem.dtype in ("float16", "bfloat16")
    if asked and operator.reads_values and isinstance(matrix, SparseMatrix):
        block = matrix.pattern.full_block
    statistics = Statistics(
        m,
        n,
        matrix.nnz,
        int(feat),
        threads,
        itemsize(problem.dtype),
        longest,
        block,
        pool.work_of_threads(),
    )
    if isinstance(problem, Spmm) and not is_gpu(target) and statistics.asks_for_locality:
        columns = matrix.indices if isinstance(matrix, CsrPattern) else matrix.pattern.coords[1]
        statistics = replace(statistics, locality=Locality.of(columns))
    return MatrixRequest(operator, matrix, problem, feat, heads, statistics, target)
