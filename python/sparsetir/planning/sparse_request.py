"""Requests for plans of products and sums of sparse matrices."""

from __future__ import annotations

import numpy as np
from tvm.target import Target

from sparsetir.data.sources import VALUE_DTYPES
from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.request import Request
from sparsetir.planning.sparse_results import (
    INT32,
    PRODUCTS,
    WIDER,
    check_shapes,
    computation,
    csr,
    elements_pay,
)
from sparsetir.records.task import Config, Matrices, statistics, thread_text
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.registry import OF_MATRICES
from sparsetir.schedules.operators.sparse_results import ELEMENTWISE, KRON, SparseResult
from sparsetir.schedules.targets import is_gpu
from sparsetir.schedules.template import Branch
from sparsetir.schedules.templates.sparse_results import Assembled, branch

GPU_DTYPES = ("float32", "float64", "int32", "int64")  # types of atomic additions


class OnMatrices(Request):
    """A request whose configs are chosen by the amount of work."""

    def check(self, config: Config) -> None:
        alternative_for = getattr(config, "alternative_for", lambda *_: "")
        product, expected = self.problem.is_product, alternative_for(self.problem, self.name)
        if isinstance(config, Assembled) and (config.listed or config.dotted):
            masked = self.matrix.mask is not None
            name = "listed" if config.listed else "dotted"
            known = masked or (config.listed and config.kept)
            if not product:
                known = config.listed and config.kept and not masked and self.problem.lists
            expected = "" if known else f"{name}=False without a mask"
        if expected:
            raise wrong("plan", "config", f"{expected} for '{self.name}'", config)

    def about(self) -> tuple[str, str, int | None]:
        masked = "-masked" * (self.matrix.mask is not None)
        return self.operator.name, f"{self.problem.how}{masked}", None

    def traits(self) -> dict[str, float]:
        return statistics(self.matrix.each[0])

    def title(self, name: str = "") -> str:
        on = f" on {name}" if name else ""
        shapes = [(*x.shape, x.nnz) for x in self.matrix.each]
        sizes = [f"{m:,} x {n:,}, {nnz:,} elements" for m, n, nnz in shapes]
        words = [self.problem.how, *["masked"] * (self.matrix.mask is not None)]
        words += [self.problem.result, *thread_text(self)]
        return f"{self.name}{on} ({'; '.join(sizes)}), {', '.join(words)}"

    def tried(self) -> Branch:
        (each, mask), how, dotted = self.matrix, self.problem.how, False
        if self.problem.is_product and mask is not None:
            dotted = elements_pay(csr(each[0]), csr(each[1]), csr(mask), self.name == "inner")
        sums, parallel = how in ("add", "subtract"), self.threads > 1
        listed = self.problem.lists == "factors" and mask is None
        first = Assembled(gathered=sums, parallel=parallel, dotted=dotted, listed=listed)
        return branch(self.problem, first, self.threads, mask is not None)


def sparse_request(
    op: str,
    matrix: object,
    feat: object = None,
    *more: object,
    target: Target,
    threads: int,
    dtype: str | None = None,
    semiring: str = "plus_times",
    mask: object = None,
) -> Request:
    """See :func:`sparsetir.planning.plan.requested`."""
    operator = OF_MATRICES[op]
    sums = {"spgemm": "matmul", **ELEMENTWISE}.get(op, op)
    if feat is None:
        raise TypeError(f"plan: argument 'feat': expected the second matrix for '{op}', got None")
    if more and sums in (*PRODUCTS, KRON, "subtract"):
        raise TypeError(f"plan: expected two matrices for '{op}', got {2 + len(more)}")
    names = ("matrix", "feat", *(f"more[{n}]" for n in range(len(more))))
    pairs = zip(names, (matrix, feat, *more), strict=True)
    each = tuple(SparseMatrix.adopt("plan", name, x) for name, x in pairs)
    known = None if mask is None else SparseMatrix.adopt("plan", "mask", mask)
    shapes = [x.shape for x in each]
    check_shapes("plan", sums, shapes, None if known is None else known.shape, "feat")
    if dtype not in (None, *VALUE_DTYPES):
        raise wrong("plan", "dtype", f"one of {', '.join(VALUE_DTYPES)}", f"{dtype!r}")
    result_dtype = np.result_type(*(x.dtype for x in each)) if dtype is None else np.dtype(dtype)
    how, computed = computation("plan", sums, semiring, result_dtype)
    name = str(computed)
    if is_gpu(target):
        if name not in GPU_DTYPES or result_dtype != computed:
            expected = f"one of {', '.join(GPU_DTYPES)} for '{op}' on a GPU"
            raise wrong("plan", "dtype", expected, result_dtype)
        if how == "multiply" and known is not None:
            raise ValueError("plan: argument 'mask': expected None for 'mul' on a GPU")
    wide = any(x.pattern.idtype == "int64" for x in (*each, known) if x is not None)
    matrices = Matrices(each, known)
    wide = wide or (op == KRON and max(matrices.result_shape(op)) > INT32)
    problem = SparseResult(
        how, name, WIDER.get(name, name), str(result_dtype), "int64" if wide else "int32", len(each)
    )
    fixed = (len(each),), {}, {"feat": None}, ("out",)
    return OnMatrices(operator, op, matrices, problem, *fixed, threads, target)
