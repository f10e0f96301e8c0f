"""What plans, searches and devices elsewhere are asked for: checked once, in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.formats import Format, Operand
from sparsetir.formats.converted import ConvertedFormat
from sparsetir.planning.compiled import compiled
from sparsetir.planning.vocabulary import operator as named_operator
from sparsetir.records.task import Task
from sparsetir.runtime import pool
from sparsetir.runtime.arrays import CACHE_LINE, LEAST_ALIGNED, dtype_name, is_array, itemsize
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.matrix_engine import allowed
from sparsetir.runtime.pipeline import Stages, lower_template
from sparsetir.runtime.targets import resolve_target
from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.operators.operands import OPERATORS, Operator
from sparsetir.schedules.operators.problems import CsrPattern, Spmm
from sparsetir.schedules.passes.amx_tiles import PRODUCTS, has_product
from sparsetir.schedules.search.by_format import by_format
from sparsetir.schedules.search.choose import Statistics
from sparsetir.schedules.search.locality import Locality
from sparsetir.schedules.template import Template
from sparsetir.schedules.templates.amx import BLOCKS, configs
from sparsetir.schedules.templates.registry import template_of

# Nonzeros of a column from which on a copy of B that begins at a cache line pays.
ALIGNED_DEGREE = 24


class KernelRequest:
    """What plans of all operators ask: which kernel it is to be, for a config.

    problem : what kernels are compiled for
    target : a `tvm.target.Target`
    """

    problem: Any
    target: Any

    @property
    def gpu(self) -> bool:
        """Whether it is for a GPU."""
        return is_gpu(self.target)

    def template(self, config: Any) -> Template:
        """The template of a config; raises TypeError for what is no config for this."""
        return template_of(config, self.problem, self.gpu)

    def stages(self, config: Any) -> Stages:
        """All stages of the kernel for a config."""
        return lower_template(self.template(config), self.problem, config, self.target)


def compiled_by(config: Any, problem: Any, target: Any) -> Kernel:
    """The kernel that the template of a config makes for a problem."""

    def stages() -> Stages:
        template = template_of(config, problem, is_gpu(target))
        return lower_template(template, problem, config, target)

    return compiled((problem, config), target, stages)


@dataclass(frozen=True)
class Request(KernelRequest):
    """An operator on a matrix; :func:`request` makes it.

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
    def values(self) -> np.ndarray | None:
        """Of the matrix; None where each run is given its own."""
        return self.matrix.values if isinstance(self.matrix, SparseMatrix) else None

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
            raise ValueError(f"plan: argument 'format': expected None for '{self.name}'")
        found = self.engine(format)
        if found:
            return found[0]
        pattern = self.pattern.coordinates
        return by_format(format, self.problem, pattern, self.statistics, self.target)

    def task(self) -> Task:
        """What records of tuning are looked up by; of a SparseMatrix."""
        assert isinstance(self.matrix, SparseMatrix)
        reduce = getattr(self.problem, "reduce", "sum")
        return Task(
            self.operator.name, self.matrix, self.feat, self.problem.dtype, reduce, self.heads,
            self.target, self.statistics.threads,
        )  # fmt: skip


def request(
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
) -> Request:
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
    return Request(operator, matrix, problem, feat, heads, statistics, target)


def adopted_matrix(
    op: str, matrix: Any, each_once: bool = False, in_order: bool = False
) -> SparseMatrix | CsrPattern:
    """What a plan takes for a matrix, as one of these.

    each_once : whether elements that are alike must not be one, as they become in a SparseMatrix
    in_order : whether an operand or the result has numbers for each element, in the order of a
        SparseMatrix: edges that come in another would get those of others

    A SparseMatrix and a CsrPattern are as their maker wants them. Raises ValueError for others that
    are not so.
    """
    if isinstance(matrix, SparseMatrix | CsrPattern):
        return matrix
    found = SparseMatrix.adopt("plan", "matrix", matrix)
    places = found.places
    if places is None:
        return found
    if each_once and len(places) > found.nnz:
        raise ValueError(
            f"plan: argument 'matrix': expected each element once for '{op}', got {len(places)} of "
            f"which {len(places) - found.nnz} repeat others; sparsetir.ops takes them apart"
        )
    if in_order:
        raise ValueError(
            f"plan: argument 'matrix': expected elements in the order of rows, then columns, for "
            f"'{op}', which has numbers for each; give A = sparsetir.SparseMatrix(...), whose "
            "A.arrange(numbers) brings them into its order"
        )
    return found


def features_of(
    op: str, feat: Any, dtype: str | None, heads: int | None, vectors: bool = False,
    heads_at: int = 0,
) -> tuple[Any, str | None, int | None]:  # fmt: skip
    """The number of features, and what else the dense operand says where it is given for that.

    feat : a number; or the operand, whose dtype and heads are taken where none are given
    vectors : whether operands have no dimension of features, and need no number
    heads_at : their dimension in the operand, if it has them
    """
    if feat is None:
        if vectors:
            return 1, dtype, heads
        raise TypeError(
            f"plan: argument 'feat': expected the number of features for '{op}', or the dense "
            "operand, which has it, got None"
        )
    if not is_array(feat) or not len(feat.shape):
        return feat, dtype, heads
    least = 1 if vectors else 2
    if len(feat.shape) not in (least, least + 1):
        raise ValueError(
            f"plan: argument 'feat': expected a number, or an operand of {least} dimensions, or "
            f"{least + 1} with heads, got shape {tuple(feat.shape)}"
        )
    if heads is None and len(feat.shape) > least:
        heads = int(feat.shape[heads_at])
    return 1 if vectors else int(feat.shape[-1]), dtype or dtype_name(feat), heads


def check_dtypes(**dtypes: Any) -> None:
    """Raise for names of dtypes that are no texts; None is fine."""
    for name, given in dtypes.items():
        if given is not None and not isinstance(given, str):
            raise TypeError(f"plan: argument '{name}': expected a name as 'float32', got {given!r}")


def check_counts(**counts: Any) -> None:
    """Raise for what is no number from 1 on; None is fine for all but features."""
    for name, value in counts.items():
        if value is None and not name.startswith("feat"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"plan: argument '{name}': expected 1 or more, got {value!r}")


def default_threads() -> int:
    """Threads of the CPU that plans divide rows among: those of the pool that kernels run on."""
    return pool.count()


def csr_pattern(matrix: SparseMatrix | CsrPattern, idtype: str) -> CsrPattern:
    """Where a matrix has elements, with indices of a type.

    Of a SparseMatrix a copy, as kernels trust indices and the user may write to those of the
    matrix; it takes, and adds to, the conversions that the matrix keeps, which are copies too. A
    CsrPattern is trusted as it is.
    """
    if isinstance(matrix, CsrPattern):
        indptr, indices = (x.astype(idtype, copy=False) for x in matrix[:2])
        return type(matrix)(indptr, indices, matrix.shape)
    pattern, (m, n) = matrix.pattern, matrix.shape
    indptr, indices = (np.array(x, idtype) for x in (pattern.indptr, pattern.coords[1]))
    found = _OfMatrix(indptr, indices, (m, n))
    if pattern.idtype != idtype:  # one that it has no conversions for
        return CsrPattern(*found)
    found.matrix = matrix
    return found


class _OfMatrix(CsrPattern):
    """The pattern of a SparseMatrix."""

    matrix: SparseMatrix

    @cached_property
    def coordinates(self) -> Any:
        return self.matrix.pattern

    def stored_in(self, format: Format, operand: Operand) -> ConvertedFormat:
        return self.matrix.to(format, operand)


def refuse_options(op: Any, **given: Any) -> None:
    """Raise where an operator is asked for with what others take, and is given for it."""
    for name, value in given.items():
        if name == "weighted" and value is not True:
            raise ValueError(f"plan: argument 'weighted': expected True for {op!r}, got {value!r}")
        if name != "weighted" and value is not None:
            raise ValueError(f"plan: argument '{name}': expected None for {op!r}, got {value!r}")


def idtype_for(*sizes: int) -> str:
    """int32 where it holds all that is counted; offsets into values are 64-bit either way."""
    return "int32" if max(sizes) < 2**31 - 1 else "int64"
