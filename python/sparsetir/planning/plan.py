"""Plans: operators compiled for a pattern, and run on any values and features.

>>> import numpy as np, scipy.sparse as sp, sparsetir
>>> a = sp.random_array((1000, 800), density=0.01, format="csr", dtype="float32", rng=0)
>>> run = sparsetir.plan("spmm", a, feat=64)
>>> b = np.ones((800, 64), "float32")
>>> bool(np.allclose(run(b), a @ b, atol=1e-4))
True
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar, overload

import numpy as np
from tvm.ir import save_json

from sparsetir.data import hooks
from sparsetir.data.sources import VALUE_DTYPES, is_sparse
from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.formats import Format
from sparsetir.planning.along_request import edge_request, relational_request
from sparsetir.planning.padded_plan import HeadsPlan, PaddedPlan
from sparsetir.planning.request import (
    Request,
    check_counts,
    check_dtypes,
    default_threads,
    matrix_request,
    refuse_options,
)
from sparsetir.planning.run_plan import Plan, compiled
from sparsetir.planning.sparse_plan import RowTablesPlan, SparsePlan, ValuesPlan
from sparsetir.planning.sparse_request import sparse_request
from sparsetir.records.records import by_record, recorded_config, there_are_records
from sparsetir.records.task import Config
from sparsetir.runtime import pool
from sparsetir.runtime.arrays import dtype_name, is_array, is_torch
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.pipeline import lower
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators import spmm
from sparsetir.schedules.operators.names import is_along_edges, is_message
from sparsetir.schedules.operators.operands import Operator
from sparsetir.schedules.operators.problems import CsrPattern, Spmm
from sparsetir.schedules.operators.registry import ALONG, OF_MATRICES, OPERATORS
from sparsetir.schedules.search.choose import choose
from sparsetir.schedules.targets import TargetLike, resolve_target
from sparsetir.schedules.template import Choices

MAKERS = {
    "matrix": matrix_request,
    "edges": edge_request,
    "relations": relational_request,
    "matrices": sparse_request,
}
# The place of the first product among those of a matrix, which makes no plan.
FIRST = "first"
# All options of operators; each operator has some of them.
OPTIONS = {
    name for each in (OPERATORS, ALONG, OF_MATRICES) for x in each.values() for name in x.options
}
COUNTS = ("heads", "threads", "feat_in", "edge_feat")  # options that are counts
# Sizes that the config of a padded plan is for; None if it supports any.
SIZES = ("feat_in", "feat")
MOST_LIKES = 256
T = TypeVar("T")
EIGHTHS = 4  # leading bits that similar sizes share


@overload
def plan(
    op: str,
    matrix: object,
    feat: object = None,
    *more: object,
    dtype: str | None = None,
    reduce: str = "sum",
    heads: int | None = None,
    target: TargetLike = "llvm",
    threads: int | None = None,
    format: Format | None = None,
    config: Config | None = None,
    out_dtype: str | None = None,
    feat_in: int | None = None,
    weighted: bool = True,
    edge_feat: int | None = None,
    scale: float | None = None,
    semiring: str = "plus_times",
    mask: object = None,
) -> Plan: ...


@overload
def plan(
    op: str, matrix: object = None, feat: object = None, *more: object, **options: Any
) -> Any: ...


def plan(
    op: str,
    matrix: object = None,
    feat: object = None,
    *more: object,
    dtype: str | None = None,
    reduce: str = "sum",
    heads: int | None = None,
    target: TargetLike = "llvm",
    threads: int | None = None,
    format: Format | None = None,
    config: Config | None = None,
    out_dtype: str | None = None,
    feat_in: int | None = None,
    weighted: bool = True,
    edge_feat: int | None = None,
    scale: float | None = None,
    semiring: str = "plus_times",
    mask: object = None,
    **operands: object,
) -> Any:
    """Compile an operator and prepare a pattern for it.

    Parameters
    ----------
    op : str
        "spmm", C[i, k] = reduce over the stored j of A[i, j] * B[j, k]; "spmv", the same for
        vectors; "sddmm", OUT[i, j] = sum over k of X[i, k] * Y[j, k] at the stored elements (the
        values of the matrix are ignored); "rgms", Y[i, l] = sum over the stored (r, i, j) and over
        k of A[r, i, j] * X[j, k] * W[r, k, l], whose `config` has the feature sizes.
        Messages and their reduction, OUT[i] = reduce over the stored j of message(u[j], e[(i, j)]),
        by DGL's names: "u_add_e_max", "copy_e_sum" and so on, the reduction in the name or in
        `reduce`; "u_mul_e_sum" and the like are "spmm", "copy_u_sum" the same with ones for values,
        "u_dot_v" is "sddmm". "softmax" (or "sparse_softmax") and "edge_softmax" over the elements
        of each row; "attention", OUT[i] = sum over the stored j of softmax(scale * q[i] . k[j]) *
        v[j].
        On sparse matrices, with a sparse result: "spgemm", "inner", "kron", and "add", "sub",
        "mul", "maximum" and "minimum" by element, see :meth:`sparsetir.SparseMatrix.add`.
        Or an expression, such as "C[i, k] = A[i, j] * X[j, k]": the other arguments are then
        those of :func:`sparsetir.einsum`.
    matrix : SparseMatrix, or anything it can be made from (an edge_index, a file, ...)
        Its values are the default of a run. Or a
        :class:`sparsetir.schedules.operators.problems.CsrPattern`, which is trusted: columns of a
        row may be in any order and repeat, like edges of a graph. It has no values, so that each
        run needs its own. For "rgms" a SparseTensor by (relation, row, column), or a
        :class:`sparsetir.schedules.operators.relations.RelationPattern`, without values.
    feat : int or array
        Features of the dense operands; or the dense operand itself, B or X, whose features, dtype
        and heads are used. Required, except for "spmv", which has none. For operators on sparse
        matrices the second matrix.
    *more : sparse matrices
        The third to eighth matrix, for "add", "mul", "maximum" and "minimum".
    dtype : {"float32", "float16", "bfloat16", "float64"}, optional
        The type of values, dense operands and result; by default that of the matrix. Sums are in
        float32, or float64 for float64.
    reduce : str
        As for :func:`sparsetir.ops.spmm`: "sum" or "add", "mean", "max" and so on.
    heads : int, optional
        The second dimension of operands, values and result, as in `sparsetir.ops`: (n, heads,
        feat), (nnz, heads).
    target : str, dict or tvm.target.Target
        The same as for :func:`sparsetir.build`.
    threads : int, optional
        Threads of the CPU to divide the rows among; by default all.
    format : Format, optional
        The format that stores the matrix, such as `sparsetir.formats.BSR(32, 32)` for pruned
        weights; for sums with one matrix. By default it is chosen: on a CPU blocks if the matrix
        consists of dense ones, like block-pruned weights, else CSR.
    config : optional
        The config of a template, which names the format; by default the one that tuning has
        recorded for the same problem on this machine (see :mod:`sparsetir.records.records`), else
        one chosen by the sizes of the pattern and the target. For a CsrPattern by its sizes alone:
        `sparsetir.ops`, which has such patterns, looks up records itself.
    out_dtype : str, optional
        The type of the result of "spmm" and "spmv": float32 for 16-bit operands, int32 for "int8",
        whose sums are in int32 (on a GPU with a format that tensor cores support); by default
        `dtype`. Records of tuning are for the default.
    feat_in : int, optional
        Features of x in "rgms", and of q and k in "attention"; by default `feat`, that of the
        result.
    weighted : bool
        For "rgms": whether edges have values; otherwise all are 1. "rgms" takes no reduce, heads or
        format. Feature sizes that are not a multiple of the vector width are zero-padded, which
        copies the operands.
    edge_feat : int, optional
        For messages: features of e, 1 or `feat`, which is then an operand after u; by default e is
        the values of the matrix, one number per element.
    scale : float, optional
        The factor of scores in "attention", by default 1 / sqrt(feat_in).
    semiring : str
        The semiring of "spgemm" and "inner", see :meth:`sparsetir.SparseMatrix.matmul`.
    mask : sparse matrix, optional
        The pattern of the result, for operators on sparse matrices.
    **operands
        The operands of an expression.

    Returns
    -------
    Plan
        For an expression an :class:`ExpressionPlan`.
        With a sparse result a :class:`SparsePlan`, which is called with values and keeps the
        result's pattern, or a :class:`ValuesPlan` or :class:`RowTablesPlan` on a GPU.

    Raises
    ------
    ValueError, TypeError
        For invalid arguments.
    ScheduleError
        If the config does not support the problem.
    RuntimeError
        If there is no such device.

    Notes
    -----
    A plan copies the values and indices of the matrix, or stores them in its format: in CSR once 8
    bytes per element of float32 with int32 indices. So later writes to the matrix change no result,
    whatever the config; pass other values with each run, and make another plan for another pattern.
    Index arrays of a CsrPattern or a RelationPattern are used without copies or checks: they must
    not change while the plan exists.

    Per-edge operands (e, and values of a softmax) are in the order of the pattern, like values; use
    :meth:`SparseMatrix.arrange` to reorder them. For these operators a matrix in another order is
    refused, unless it is a SparseMatrix, and so are duplicate elements. A softmax takes no `feat`.
    Kernels of "spmm", "spmv" and "sddmm" have heads first: with heads, their plans copy operands
    and results.
    """
    if isinstance(op, str) and ("=" in op or "->" in op):
        arguments = [x for x in (matrix, feat, *more) if x is not None]
        # Options of other operators may be names of operands here.
        options = {
            "dtype": dtype, "heads": heads, "threads": threads, "config": config,
            "out_dtype": out_dtype, "feat_in": feat_in, "edge_feat": edge_feat, "scale": scale,
            "mask": mask, "target": None if target == "llvm" else target,
            "weighted": None if weighted is True else weighted,
        }  # fmt: skip
        set_options = {name: x for name, x in options.items() if x is not None}
        for name in set_options.keys() - re.findall(r"\w+", op):
            raise TypeError(f"plan: argument '{name}': expected none for an expression")
        operands |= set_options
        operands |= {"reduce": reduce, "semiring": semiring, "format": format}
        return hooks.expression(op, *arguments, **operands)
    if operands:
        raise TypeError(f"plan: argument '{next(iter(operands))}': expected none of this name")
    if matrix is None:
        raise TypeError("plan: argument 'matrix': expected a sparse matrix, got none")
    wanted = requested(
        op, matrix, feat, *more, dtype=dtype, reduce=reduce, heads=heads, target=target,
        threads=threads, format=format, out_dtype=out_dtype, feat_in=feat_in, weighted=weighted,
        edge_feat=edge_feat, scale=scale, semiring=semiring, mask=mask,
    )  # fmt: skip
    if format is not None:
        if config is not None:
            raise wrong("plan", "format", "None with a config", f"{format!r}")
        config = wanted.config_for_format(format)
    return plan_for_callers(wanted, config)


def plan_for_callers(wanted: Request, config: Config | None = None) -> Plan:
    """The plan of a request, like :func:`plan_of`, with heads as the second dimension."""
    planned = plan_of(wanted, config)
    return HeadsPlan.of(planned) if getattr(wanted.problem, "batched", False) else planned


def plan_of(wanted: Request, config: Config | None = None) -> Plan:
    """The plan of a request.

    config : by default the recorded one for this problem, or else the one chosen by sizes
    """
    if config is not None:
        return plan_with(wanted, config)
    if wanted.is_trusted:
        return _unbound(wanted, wanted.pattern).on(wanted)
    return made_for(wanted, partial(plan_with, wanted))


def plan_with(wanted: Request, config: Config, chosen_by: str = "user") -> Plan:
    """The plan of a request with a config, padded to the config's sizes where needed."""
    if wanted.operator.on == "matrices":
        on_gpu = RowTablesPlan if getattr(config, "finds_pattern", False) else ValuesPlan
        return (on_gpu if wanted.gpu else SparsePlan)(wanted, config, chosen_by)
    whole = wanted.whole
    padded = whole is not wanted and whole.sizes != wanted.sizes
    if padded and whole.sizes == {**whole.sizes, **{n: getattr(config, n) for n in SIZES}}:
        return PaddedPlan(wanted, whole, config, chosen_by)
    return Plan(wanted, config, chosen_by)


def made_for(
    wanted: Request,
    make: Callable[[Config, str], T],
    pattern: Callable[[], CsrPattern] | None = None,
) -> T:
    """Call `make` with the config recorded for a request, or else with the one chosen by sizes.

    make : function of a config and "record" or "default"
    pattern : returns the pattern, with sorted columns, of a matrix without values; records are not
        looked up for such a matrix without it
    """
    default = wanted.whole.chosen()
    result = None

    def recorded(config: Config) -> T:
        if isinstance(config, Choices):
            wanted.check(config)
        return make(config, "record")

    if wanted.is_recorded or pattern is not None:  # other errors appear with the default
        result = by_record(recorded_config(wanted.task(), pattern), recorded)
    return result or make(default, "default")


def requested(
    op: object, matrix: object, feat: object = None, *more: object, **options: Any
) -> Request:
    """Check the arguments of :func:`plan`, without `config`, and make a request; raises likewise.

    All plans, searches and lowerings of an operator by its name begin here.
    """
    record = record_of(op, feat, options.get("heads"), options.get("edge_feat"))
    if more and record.on != "matrices":
        raise TypeError(f"plan: expected one matrix for {op!r}, got {1 + len(more)} more operands")
    refuse_options(op, {n: x for n, x in options.items() if n in OPTIONS}, record.options)
    check_dtypes(dtype=options.get("dtype"), out_dtype=options.get("out_dtype"))
    counts = {name: options[name] for name in COUNTS if options.get(name) is not None}
    check_counts(**counts)
    options |= {name: int(value) for name, value in counts.items()}
    options["target"] = resolve_target(options.get("target", "llvm"), "plan")
    options["threads"] = options.get("threads") or default_threads()
    others = {"format", *OPTIONS.difference(record.options)}
    operator_options = {name: x for name, x in options.items() if name not in others}
    return MAKERS[record.on](op, matrix, feat, *more, **operator_options)


def record_of(
    op: object, feat: Any = None, heads: object = None, edge_feat: object = None
) -> Operator:
    """The operator's record, which defines the options of :func:`plan` for these arguments."""
    if not isinstance(op, str):
        return OPERATORS["spmm"]  # its request refuses the name
    if op == "rgms":
        return ALONG["rgms"]
    if op in OF_MATRICES and (
        not is_message(op) or isinstance(feat, SparseMatrix) or is_sparse(feat)
    ):
        return OF_MATRICES[op]
    # A product that is a message is "spmm", unless it has heads or features of edges.
    batched = heads is not None or (is_array(feat) and len(feat.shape) > 2)
    if is_along_edges(op, more=batched or edge_feat is not None):
        return ALONG.get(op, ALONG["messages"])
    return OPERATORS.get(op, OPERATORS["spmm"])


# Patterns that are new in each step have similar sizes, and the same kernels.
_by_size = lru_cache(1024)(choose)
_likes: dict[Hashable, tuple[Request, Plan]] = {}
NO_PATTERN = CsrPattern(np.zeros(1, np.int32), np.zeros(0, np.int32), (0, 0))


def plan_per_run(op: str, pattern: CsrPattern, feat: int, **options: object) -> Plan:
    """:func:`plan` for a trusted pattern and operands that are known to fit.

    Fast if a pattern of similar sizes was planned before, and locality does not matter: then only
    work that depends on the pattern itself remains.

    options : dtype, reduce, heads and target
    """
    sizes = (*pattern.shape, pattern.nnz)
    about = (x >> max(0, x.bit_length() - EIGHTHS) for x in sizes)
    key = op, feat, *options.values(), *about, *map(int.bit_length, sizes), pool.count()
    cached = _likes.get(key)
    if cached is not None:
        like, settled = cached
        return settled.on(replace(like, matrix=pattern))
    wanted = requested(op, pattern, feat, **options)
    settled, statistics = _unbound(wanted, pattern), wanted.statistics
    in_row_panels = getattr(settled.config, "in_row_panels", False)
    if not in_row_panels and not statistics.asks_for_locality and max(sizes) < 1 << 30:
        if len(_likes) >= MOST_LIKES:
            _likes.clear()
        _likes[key] = replace(wanted, matrix=NO_PATTERN), settled
    result = settled.on(wanted)
    settled.compile_seconds = 0.0  # for later plans
    return result


def _unbound(wanted: Request, pattern: CsrPattern) -> Plan:
    """The default plan of a CsrPattern, not yet bound to a pattern."""
    default = _by_size(wanted.problem, wanted.statistics.rounded, wanted.target)
    return Plan.unbound(wanted, _per_run(default, pattern), "default")


def _per_run(config: Config, pattern: CsrPattern) -> Config:
    """The config adapted to values passed in each run, and to unsorted columns."""
    config = getattr(config, "unpacked", config)
    in_row_panels = getattr(config, "in_row_panels", False)
    return getattr(config, "by_rows", config) if in_row_panels and not pattern.increases else config


def plan_candidates(
    op: str, matrix: object, feat: object = None, *more: object, **options: object
) -> list[Config]:
    """Configs worth measuring, the default of :func:`plan` first.

    Parameters
    ----------
    op, matrix, feat, *more, **options
        As for :func:`plan`.

    Returns
    -------
    list
        Values for `config` of :func:`plan`.
    """
    return requested(op, matrix, feat, *more, **options).whole.candidates()


MOST_PLANS = 16  # per matrix
ONCE = ("float32", "float64")  # types of :func:`multiply_once`


def product(matrix: Any, x: Any, plans: dict[Any, Any], ops: Callable[[], Any]) -> Any:
    """See :meth:`sparsetir.SparseMatrix.__matmul__`.

    plans : plans of this matrix, by operator, shape and dtype
    ops : returns `sparsetir.ops`, which multiplies torch tensors
    """
    if not is_array(x):
        return NotImplemented
    if len(x.shape) not in (1, 2) or x.shape[0] != matrix.shape[1]:
        n = matrix.shape[1]
        raise ValueError(
            f"SparseMatrix: argument 'x' of A @ x: expected shape ({n},) or ({n}, feat), got "
            f"{tuple(x.shape)}"
        )
    if is_torch(x):
        return ops().spmv(matrix, x) if x.dim() == 1 else ops().spmm(matrix, x)
    matrix.drop_if_written()
    x = np.asarray(x)
    dtype = x.dtype if x.dtype == matrix.dtype else _common_dtype(matrix, x)
    x = np.ascontiguousarray(x, dtype)
    key = x.shape[1:], dtype
    if key[0] == (0,):
        return np.empty((matrix.shape[0], 0), dtype)
    is_expression = dtype.kind in "biu"  # operators are for floats alone
    if key not in plans:
        matrix.pattern.check_rows()  # its owner may have written to the arrays that it shares
        once = None if plans or there_are_records() else _product_once(matrix, x)
        if once is not None:
            plans[FIRST] = None
            return once
        plans.pop(FIRST, None)
        while len(plans) >= MOST_PLANS:
            plans.pop(next(iter(plans)))
        if is_expression:
            text = "ij,j->i" if x.ndim == 1 else "ij,jk->ik"
            kept = np.broadcast_to(dtype.type(0), x.shape)  # small, as the plan keeps its operands
            plans[key] = hooks.expression(text, matrix, kept)
        else:
            plans[key] = plan("spmv" if x.ndim == 1 else "spmm", matrix, x)
    made = plans[key]
    return made(A1=x).astype(dtype, copy=False) if is_expression else made(x)


def _common_dtype(matrix: SparseMatrix, x: np.ndarray) -> np.dtype:
    if x.dtype.name not in VALUE_DTYPES:
        raise wrong("A @ x", "x", f"one of {', '.join(VALUE_DTYPES)}", x.dtype, TypeError)
    return np.result_type(x.dtype, matrix.dtype)


def _product_once(matrix: SparseMatrix, x: np.ndarray) -> np.ndarray | None:
    """`A @ x` by :func:`multiply_once`; None for types that the kernel does not support.

    With a vector, the last bits may differ from those of a plan.
    """
    pattern, dtype = matrix.pattern, x.dtype.name
    if dtype not in ONCE or pattern.idtype != pattern.indptr.dtype.name:
        return None
    b = x if x.ndim == 2 else x[:, None]
    out = np.empty((matrix.shape[0], b.shape[1]), x.dtype)
    values = matrix.values.astype(dtype, copy=False)
    try:
        multiply_once(pattern.indptr, pattern.columns, values, b, out)
    except (TypeError, ValueError, BufferError):  # such as arrays that must not be written
        return None
    return out if x.ndim == 2 else out[:, 0]


def multiply_once(indptr: Any, indices: Any, values: Any, b: Any, out: Any) -> None:
    """Multiply a matrix that may be multiplied just once, by the kernel of all patterns.

    A plan takes a millisecond, and up to twenty times as long as its kernel.

    indptr, indices, values : contiguous arrays of the matrix, which is trusted, in any library;
        both index arrays of one type
    b, out : operand (n, feat) and result (m, feat), of the type of the values, one of `ONCE`
    """
    kernel, (n, feat) = _kernel_of_all(dtype_name(b), dtype_name(indptr)), b.shape
    named = {
        "a": values, "b": b, "out": out, "indptr": indptr, "indices": indices,
        "m": out.shape[0], "n": n, "nnz": indices.shape[0], "feat": feat,
    }  # fmt: skip
    named |= kernel.compute_passed(named, estimate=True)
    kernel.entry(*(named[name] for name in kernel.signature.passed))


@lru_cache
def _kernel_of_all(dtype: str, idtype: str) -> Kernel:
    func, target = spmm.program(Spmm(dtype, idtype)), resolve_target("llvm")
    key = "product of any matrix", dtype, idtype
    return compiled(key, target, partial(lower, func, target=target), lambda: save_json(func))
