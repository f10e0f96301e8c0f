"""What plans of products and sums of sparse matrices are asked for, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.planning.request import About, Common, OneByOne, Request
from sparsetir.planning.sparse_results import (
    INT32,
    PRODUCTS,
    WIDER,
    check_shapes,
    csr,
    elements_pay,
    how_computed,
)
from sparsetir.records.task import Config, Matrices
from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.gpu.row_tables import RowTables, dtypes_of
from sparsetir.schedules.gpu.sparse_results import ElementThreads, TermLanes
from sparsetir.schedules.operators.registry import OF_MATRICES
from sparsetir.schedules.operators.sparse_results import ELEMENTWISE, KRON, SparseResult
from sparsetir.schedules.template import Branch
from sparsetir.schedules.templates.sparse_results import Assembled, branch

GPU_DTYPES = ("float32", "float64", "int32", "int64")  # sums in memory are in no other type


class OnMatrices(OneByOne):
    """Configs by how much there is to do."""

    def check(self, wanted: Request, config: Config) -> None:
        """See :class:`Choosing`."""
        expected, product = "", wanted.problem.is_product
        if isinstance(config, TermLanes) and not product:
            expected = "ElementThreads"
        if isinstance(config, RowTables):
            expected = self._without_tables(wanted)
        if isinstance(config, Assembled) and (config.listed or config.dotted):
            masked = wanted.matrices.mask is not None
            name = "listed" if config.listed else "dotted"
            known = masked or (config.listed and config.kept)
            expected = "" if product and known else f"{name}=False without a mask"
        if expected:
            raise ValueError(
                f"plan: argument 'config': expected {expected} for '{wanted.name}', got {config}"
            )

    @staticmethod
    def _without_tables(wanted: Request) -> str:
        """What a request that hash tables do not serve is to have; "" for others."""
        problem = wanted.problem
        if wanted.name != "spgemm":
            return "ElementThreads" + " or TermLanes" * problem.is_product
        dtypes = dtypes_of(problem.how)
        if problem.dtype not in dtypes:
            return f"ElementThreads or TermLanes but for {', '.join(dtypes)} with '{problem.how}'"
        return ""

    def about(self, wanted: Request) -> About:
        """See :class:`Choosing`."""
        masked = "-masked" * (wanted.matrices.mask is not None)
        return About(wanted.operator.name, f"{wanted.problem.how}{masked}", None)

    def on_gpu(self, wanted: Request) -> list[Config]:
        """See :class:`OneByOne`."""
        found: list[Config] = [ElementThreads(), ElementThreads(64), ElementThreads(256)]
        return [*found, *map(TermLanes, (1, 4, 8, 32))] if wanted.problem.is_product else found

    def tried(self, wanted: Request) -> Branch:
        """See :class:`OneByOne`."""
        (each, mask), product = wanted.matrices, wanted.problem.is_product
        dotted = False
        if product and mask is not None:
            dotted = elements_pay(csr(each[0]), csr(each[1]), csr(mask), wanted.name == "inner")
        first = Assembled(
            gathered=wanted.problem.how in ("add", "subtract"), parallel=wanted.threads > 1,
            dotted=dotted,
        )  # fmt: skip
        masked = mask is not None
        return branch(wanted.problem, first, wanted.threads, masked)


ON_MATRICES = OnMatrices()


def sparse_request(
    op: str,
    matrix: Any,
    feat: Any = None,
    *more: Any,
    common: Common,
    semiring: str = "plus_times",
    mask: Any = None,
) -> Request:
    """See :func:`sparsetir.planning.plan.requested`."""
    dtype, _, target, threads = common
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
    own = np.result_type(*(x.dtype for x in each)) if dtype is None else np.dtype(dtype)
    how, computed = how_computed("plan", sums, semiring, own)
    name = str(computed)
    if is_gpu(target):
        if name not in GPU_DTYPES or own != computed:
            raise ValueError(
                f"plan: argument 'dtype': expected one of {', '.join(GPU_DTYPES)} for '{op}' on a "
                f"GPU, got {own}"
            )
        if how == "multiply" and known is not None:
            raise ValueError("plan: argument 'mask': expected None for 'mul' on a GPU")
    wide = any(x.pattern.idtype == "int64" for x in (*each, known) if x is not None)
    matrices = Matrices(each, known)
    wide = wide or (op == KRON and max(matrices.result_shape(op)) > INT32)
    problem = SparseResult(
        how, name, WIDER.get(name, name), str(own), "int64" if wide else "int32", len(each)
    )
    return Request(
        operator, op, matrices, problem, (len(each),), {}, {"feat": None}, ("out",),
        threads, target, ON_MATRICES,
    )  # fmt: skip
