"""What plans of operators on a matrix are asked for, checked; and how configs are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.formats import Format
from sparsetir.planning.request import (
    About,
    Choosing,
    Common,
    Request,
    adopted_matrix,
    features_of,
    idtype_for,
    refuse_heads_first,
)
from sparsetir.planning.vocabulary import operator as named_operator
from sparsetir.records.task import Config
from sparsetir.runtime import pool
from sparsetir.runtime.arrays import itemsize
from sparsetir.runtime.refusals import wrong
from sparsetir.runtime.targets import allowed
from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.operators.problems import CsrPattern, Spmm
from sparsetir.schedules.operators.registry import OPERATORS
from sparsetir.schedules.passes.amx_tiles import PRODUCTS, has_product
from sparsetir.schedules.search.by_format import by_format
from sparsetir.schedules.search.choose import Statistics, candidates
from sparsetir.schedules.search.locality import Locality
from sparsetir.schedules.search.spaces import Space, space
from sparsetir.schedules.templates.amx import BLOCKS, configs


class OnMatrix(Choosing):
    """Configs by the statistics of a matrix."""

    def engine(self, wanted: Request, format: Format | None = None) -> list[Config]:
        """Configs for the CPU's matrix engine, where there is one that suits the pattern.

        format : the one that stores the matrix; by default blocks that fill tiles

        Of a SparseMatrix alone: a CsrPattern has no values, and to bring them into blocks in each
        run would take longer than is won.
        """
        problem, target = wanted.problem, wanted.target
        spmm = isinstance(problem, Spmm) and isinstance(wanted.matrix, SparseMatrix)
        if not spmm or not has_product(target, problem.dtype):
            return []
        if allowed(PRODUCTS[problem.dtype].features):
            return []
        formats = BLOCKS if format is None else (format,)
        return [*configs(problem, wanted.pattern, wanted.given, target, formats)]

    def of_format(self, wanted: Request, format: Format) -> Config:
        """See :class:`Choosing`."""
        if not isinstance(format, Format) or format.order not in (None, 2):
            expected = "a format of matrices, such as sparsetir.formats.BSR(32, 32)"
            raise wrong("plan", "format", expected, f"{format!r}", TypeError)
        if not isinstance(wanted.problem, Spmm):
            return super().of_format(wanted, format)
        found, asked = self.engine(wanted, format), (wanted.given, wanted.target)
        if found:
            return found[0]
        return by_format(format, wanted.problem, wanted.pattern.coordinates, *asked)

    def about(self, wanted: Request) -> About:
        """See :class:`Choosing`."""
        reduce = getattr(wanted.problem, "reduce", "sum")
        return About(wanted.operator.name, reduce, wanted.callers["heads"])

    def chosen(self, wanted: Request) -> Config:
        """See :class:`Choosing`."""
        if wanted.gpu and wanted.problem.dtype == "int8":
            raise ValueError(
                "plan: argument 'format': expected one that tensor cores take, for 'int8' on a "
                "GPU, such as sparsetir.formats.BSR(32, 32), got None"
            )
        return super().chosen(wanted)

    def candidates(self, wanted: Request) -> list[Config]:
        """See :class:`Choosing`."""
        by_sizes = candidates(wanted.problem, wanted.given, wanted.target)
        return [*self.engine(wanted), *by_sizes]

    def space(self, wanted: Request) -> Space:
        """See :class:`Choosing`."""
        return space(wanted.problem, wanted.pattern, wanted.given, wanted.target)


ON_MATRIX = OnMatrix()


def matrix_request(
    op: str,
    matrix: Any,
    feat: Any = None,
    *,
    common: Common,
    reduce: str = "sum",
    out_dtype: str | None = None,
) -> Request:
    """See :func:`sparsetir.planning.plan.requested`."""
    given, (op, reduce, ones) = op, named_operator("plan", op, reduce, OPERATORS)
    operator = OPERATORS[op]
    operand = feat
    feat, dtype, heads = features_of(op, feat, common, operator.vectors)
    if out_dtype is not None and not hasattr(operator.problem, "out"):
        raise ValueError(f"plan: argument 'out_dtype': expected None for '{op}', got {out_dtype!r}")
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
    refuse_heads_first(op, operand, 2 if operator.vectors else 3, matrix.shape)
    own = str(matrix.dtype) if isinstance(matrix, SparseMatrix) else "float32"
    m, n = matrix.shape
    idtype = idtype_for(m, n, matrix.nnz, feat)
    problem = operator.compiled_for(dtype or own, reduce, heads is not None, idtype, out_dtype)
    threads, target = common.threads, common.target
    longest = 0  # as if no row stood out: hyb is for coordinates in order, each once
    if is_gpu(target) and isinstance(matrix, SparseMatrix):
        longest = int(np.diff(matrix.pattern.indptr).max(initial=0))
    block = 1
    asked = not is_gpu(target) or problem.dtype in ("float16", "bfloat16")
    if asked and operator.reads_values and isinstance(matrix, SparseMatrix):
        block = matrix.pattern.full_block
    size, pays = itemsize(problem.dtype), pool.work_of_threads()
    statistics = Statistics(m, n, matrix.nnz, feat, threads, size, longest, block, pays)
    if isinstance(problem, Spmm) and not is_gpu(target) and statistics.asks_for_locality:
        columns = matrix.indices if isinstance(matrix, CsrPattern) else matrix.pattern.columns
        statistics = replace(statistics, locality=Locality.of(columns))
    there = (*operator.dims, *["a"] * operator.reads_values)
    sizes, callers = {"heads": heads or 1, "feat": feat}, {"heads": heads, "feat": feat}
    return Request(
        operator, op, matrix, problem, (feat,), sizes, callers, there, threads, target, ON_MATRIX,
        statistics,
    )  # fmt: skip
