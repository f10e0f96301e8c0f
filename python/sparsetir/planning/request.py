"""Checked requests for plans, searches and remote devices, and the choice of configs.

The base class of all operators' requests, and the request of operators on a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from tvm.target import Target

from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor
from sparsetir.formats import Format, Operand, Pattern
from sparsetir.formats.converted import ConvertedFormat
from sparsetir.records.record import Key
from sparsetir.records.task import Config, Task, statistics, thread_text
from sparsetir.reductions import REDUCERS, REDUCTION_NAMES, names_of
from sparsetir.runtime import pool
from sparsetir.runtime.arrays import dtype_name, gathers_often, is_array, itemsize
from sparsetir.runtime.pipeline import Stages, lower_template
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.names import DTYPES, MESSAGES, NAMED, message_parts
from sparsetir.schedules.operators.operands import Operator
from sparsetir.schedules.operators.problems import (
    CsrPattern,
    Product,
    Spmm,
    accumulator,
    vector_lanes,
)
from sparsetir.schedules.operators.registry import OF_MATRICES, OPERATORS
from sparsetir.schedules.search.by_format import by_format, on_engine
from sparsetir.schedules.search.choose import Statistics, candidates
from sparsetir.schedules.search.locality import Locality
from sparsetir.schedules.search.shared_columns import long_rows, on_diagonals, shared_columns
from sparsetir.schedules.search.spaces import Space, space
from sparsetir.schedules.targets import is_gpu, vector_registers
from sparsetir.schedules.template import Branch, Choices, Template
from sparsetir.schedules.templates.of_program import check_choices
from sparsetir.schedules.templates.registry import template_of, templates_for
from sparsetir.schedules.templates.row_tile import ROWS_UNPACKED

# Defaults of options, if not None.
DEFAULTS = {"reduce": "sum", "weighted": True, "semiring": "plus_times"}
# Fields of problems for which tuning makes no records unless they have their defaults.
UNUSUAL = ("out", "values", "added", "in_blocks")


@dataclass(frozen=True)
class Request:
    """Checked arguments of a plan of any operator, and values derived from them.

    A subclass for each kind of operand chooses configs; by default the first values of the branch
    that is searched, on a CPU.

    name : the operator's name, as the caller wrote it
    matrix : a SparseTensor, :class:`sparsetir.records.task.Matrices`, or a pattern without values
    problem : the problem that kernels are compiled for
    features : sizes that configs are chosen for, those of the result last
    sizes : further sizes besides the pattern's, by the names of the program's parameters
    callers : "feat" and "heads" of the caller, and sizes of the record's other dimensions
    there : names of the present operands, "a" for values and "out" for the result
    threads : threads of the CPU
    statistics : statistics of a matrix, by which its configs are chosen
    """

    operator: Operator
    name: str
    matrix: Any
    problem: Any
    features: tuple[int, ...]
    sizes: Mapping[str, int | float]
    callers: Mapping[str, Any]
    there: tuple[str, ...]
    threads: int
    target: Target
    statistics: Any = None

    @property
    def feat(self) -> int:
        """Features of the result; for softmax the number of contiguous values of an element."""
        return self.features[-1]

    @property
    def feat_in(self) -> int:
        """Features of the first operand."""
        return self.features[0]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the operands, of values "a" if any are read, and of the result "out"."""
        shapes = self.operator.shapes
        return shapes(self.matrix.shape, self.matrix.nnz, there=self.there, **self.callers)

    @cached_property
    def pattern(self) -> Any:
        """The matrix's pattern for templates, in the index type of the problem."""
        return csr_pattern(self.matrix, self.problem.idtype)

    @property
    def values(self) -> np.ndarray | None:
        """The values of the matrix; None if each run has its own."""
        return self.matrix.values if isinstance(self.matrix, SparseTensor) else None

    @property
    def is_trusted(self) -> bool:
        """Whether the matrix is a trusted pattern, whose values are passed in each run."""
        return self.operator.on == "matrix" and isinstance(self.matrix, CsrPattern)

    @property
    def is_recorded(self) -> bool:
        """Whether tuning may have recorded a config for this request."""
        on, plain = self.operator.on, not any(getattr(self.problem, x, None) for x in UNUSUAL)
        tuned = on == "matrix" or not self.gpu
        has_values = isinstance(self.matrix, SparseTensor)
        return plain and tuned and (has_values or on in ("relations", "matrices"))

    def task(self) -> Task:
        """The task by which records of tuning are looked up."""
        matrix = self.pattern if self.operator.on == "relations" else self.matrix
        op, reduce, heads = self.about()
        dtype, target, threads = self.problem.dtype, self.target, self.threads
        return Task(op, matrix, self.feat, dtype, reduce, heads, target, threads)

    def key(self, device: str | None = None) -> Key:
        """The key of records of tuning; device : its name, if another machine measures."""
        return Key.of(self.task(), device)

    def traits(self) -> dict[str, float]:
        """Numbers whose differences tell how similar two matrices are, for records."""
        return statistics(self.matrix)

    def title(self, name: str = "") -> str:
        """A line for people; name : the name of the matrix."""
        (op, reduce, heads), (m, n) = self.about(), self.matrix.shape
        on = f" on {name}" if name else ""
        words = [] if self.operator.vectors else [f"{self.feat} features"]
        words += [reduce] if reduce != "sum" else []
        words += [f"{heads} heads"] if heads is not None else []
        words += [self.problem.dtype, *thread_text(self)]
        return f"{op}{on} ({m:,} x {n:,}, {self.matrix.nnz:,} elements), {', '.join(words)}"

    @property
    def whole(self) -> Request:
        """The request with features padded by zeros to whole vectors."""
        return self

    def gathers_often(self, config: Config) -> bool:
        """Whether rows of B are gathered unpacked, so often that aligning them first pays.

        See :func:`sparsetir.runtime.arrays.gathers_often`.
        """
        stats = self.statistics
        if not isinstance(self.problem, Spmm):
            return False
        often = gathers_often(stats.nnz, stats.n, stats.feat * stats.bytes)
        return often and not getattr(config, "pack", False)

    @property
    def gpu(self) -> bool:
        """Whether the target is a GPU."""
        return is_gpu(self.target)

    def about(self) -> tuple[str, str, int | None]:
        """The operator, kind and heads by which records of tuning are looked up."""
        raise NotImplementedError

    def tried(self) -> Branch:
        """The branch that a search on a CPU tries."""
        raise NotImplementedError

    def on_gpu(self) -> list[Config]:
        """Configs for a GPU, the default first: those that its templates try."""
        request = self.problem, self.task().matrix, self, self.target
        lists = (t.configs(*request) for t in templates_for(self.problem, True) if t.configs)
        return [config for each in lists for config in each]

    def candidates(self) -> list[Config]:
        """Configs worth measuring, that of :meth:`chosen` first."""
        return self.on_gpu() if self.gpu else self.tried().one_by_one()

    def space(self) -> Space:
        """The search space of configs, on a CPU."""
        return Space((self.tried(),))

    def chosen(self) -> Config:
        """The default config."""
        if self.gpu:
            return self.on_gpu()[0]
        branch = self.tried()
        return branch.make(**{name: values[0] for name, values in branch.choices.items()})

    def config_for_format(self, format: Format) -> Config:
        """The config for a format; raises ValueError if the operator has no choice of formats."""
        raise wrong("plan", "format", f"None for '{self.name}'", f"{format!r}")

    def check(self, config: Config) -> None:
        """Raise for a config of a suitable template that does not support the sizes."""
        if isinstance(config, Choices):
            check_choices(config, self.problem, self.sizes)

    def template(self, config: Config) -> Template:
        """The template of a config; raises TypeError if it is not a config for this problem, and
        ScheduleError if it does not support the sizes."""
        template = template_of(config, self.problem, self.gpu)
        self.check(config)
        return template

    def stages(self, config: Config) -> Stages:
        """All stages of the kernel for a config."""
        return lower_template(self.template(config), self.problem, config, self.target)


def adopted_matrix(
    op: str, matrix: object, each_once: bool = False, in_order: bool = False
) -> SparseMatrix | CsrPattern:
    """Convert a plan's matrix to a SparseMatrix or a CsrPattern.

    each_once : refuse duplicate elements, which a SparseMatrix would add up
    in_order : refuse unsorted elements, because an operand or the result has numbers per element in
        the order of a SparseMatrix, which would go to the wrong edges

    A SparseMatrix and a CsrPattern are returned unchanged. Raises ValueError as described.
    """
    if isinstance(matrix, SparseMatrix | CsrPattern):
        return matrix
    adopted = SparseMatrix.adopt("plan", "matrix", matrix)
    places = adopted.places
    if places is None:
        return adopted
    if each_once and len(places) > adopted.nnz:
        raise ValueError(
            f"plan: argument 'matrix': expected each element once for '{op}', got {len(places)} of "
            f"which {len(places) - adopted.nnz} repeat others; sparsetir.ops keeps them apart"
        )
    if in_order:
        raise ValueError(
            f"plan: argument 'matrix': expected elements in the order of rows, then columns, for "
            f"'{op}', which has numbers for each; give A = sparsetir.SparseMatrix(...), whose "
            "A.arrange(numbers) brings them into its order"
        )
    return adopted


def features_of(
    op: str, feat: Any, dtype: str | None, heads: int | None, vectors: bool = False
) -> tuple[int, str | None, int | None]:
    """The number of features, dtype and heads, read from the dense operand if it is passed.

    feat : a number; or the operand, whose dtype and heads are the defaults
    dtype, heads : None if not passed
    vectors : whether operands have no dimension of features, and need no number
    """
    if feat is None and not vectors:
        expected = f"the number of features for '{op}', or the dense operand, which has it"
        raise wrong("plan", "feat", expected, "None", TypeError)
    feat = 1 if feat is None else feat
    if is_array(feat) and len(feat.shape):
        least = 1 if vectors else 2
        if len(feat.shape) not in (least, least + 1):
            expected = f"a number, or an operand of {least} dimensions, or {least + 1} with heads"
            raise wrong("plan", "feat", expected, f"shape {tuple(feat.shape)}")
        dtype = dtype or dtype_name(feat)
        if heads is None and len(feat.shape) > least:
            heads = int(feat.shape[1])
        feat = 1 if vectors else int(feat.shape[-1])
    check_counts(feat=feat, heads=heads)
    return int(feat), dtype, heads


def refuse_heads_first(op: str, given: Any, dims: int, rows: Container[int]) -> None:
    """Raise for an operand of `dims` dimensions whose rows are in the second, not the first."""
    if not is_array(given) or len(given.shape) != dims:
        return
    if given.shape[0] not in rows and given.shape[1] in rows:
        expected = f"heads as the second dimension of the operand of '{op}'"
        raise wrong("plan", "feat", expected, f"shape {tuple(given.shape)}")


def check_dtypes(**dtypes: object) -> None:
    """Raise for names of dtypes that are not strings; None is accepted."""
    for name, dtype in dtypes.items():
        if dtype is not None and not isinstance(dtype, str):
            raise TypeError(f"plan: argument '{name}': expected a name as 'float32', got {dtype!r}")


def check_counts(**counts: object) -> None:
    """Raise unless values are integers of 1 or more; None is accepted except for 'feat'."""
    for name, value in counts.items():
        if value is None and name != "feat":
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"plan: argument '{name}': expected 1 or more, got {value!r}")


def default_threads() -> int:
    """The number of threads that plans divide rows among: those of the kernels' pool."""
    return pool.count()


def csr_pattern(matrix: SparseMatrix | CsrPattern, idtype: str) -> CsrPattern:
    """The pattern of a matrix, with indices of a type.

    For a SparseMatrix a copy, as kernels trust indices and the user may write to those of the
    matrix; it shares the conversions that the matrix caches, which are copies, too. The arrays of a
    CsrPattern are trusted.
    """
    if isinstance(matrix, CsrPattern):
        indptr, indices = (x.astype(idtype, copy=False) for x in matrix[:2])
        return type(matrix)(indptr, indices, matrix.shape)
    pattern, (m, n) = matrix.pattern, matrix.shape
    indptr, indices = (np.array(x, idtype) for x in (pattern.indptr, pattern.columns))
    copied = _OfMatrix(indptr, indices, (m, n))
    if pattern.idtype != idtype:  # the matrix caches no conversions of this type
        return CsrPattern(*copied)
    copied.matrix = matrix
    return copied


class _OfMatrix(CsrPattern):
    """The pattern of a SparseMatrix."""

    matrix: SparseMatrix

    @cached_property
    def coordinates(self) -> Pattern:
        return self.matrix.pattern

    def stored_in(self, format: Format, operand: Operand) -> ConvertedFormat:
        return self.matrix.to(format, operand)


def refuse_options(op: object, given: Mapping[str, object], takes: Iterable[str]) -> None:
    """Raise for options that the operator does not have, unless they have their defaults.

    takes : names of options that the operator has
    """
    for name, value in given.items():
        default = DEFAULTS.get(name)
        same = value == default if isinstance(value, str) else value is default
        if name not in takes and not same:
            raise wrong("plan", name, f"{default!r} for {op!r}", f"{value!r}")


def idtype_for(*sizes: int) -> str:
    """int32 if it holds all counts; offsets into values are 64-bit in any case."""
    return "int32" if max(sizes) < 2**31 - 1 else "int64"


def reduction(caller: str, name: object, among: Iterable[str] = REDUCERS) -> str:
    """The reduction that a name stands for.

    caller : name of the function, for errors
    among : the reductions that it accepts

    Raises ValueError for other names.
    """
    reduce = REDUCTION_NAMES.get(name) if isinstance(name, str) else None
    if reduce is None or reduce not in among:
        raise wrong(caller, "reduce", ", ".join(names_of(among)), f"{name!r}")
    return reduce


def message(
    caller: str, op: object, reduce: object = None, among: Iterable[str] = REDUCERS
) -> tuple[str, str]:
    """One of the values of `MESSAGES`, and one of `REDUCERS`.

    op : a name of `MESSAGES`, or one followed by a reduction, such as "u_mul_e_sum"
    reduce : None for the reduction in the name, or else a sum
    """
    kind, named = message_parts(op)
    if kind is None:
        expected = f"one of {', '.join(MESSAGES)}, or one with a reduction, such as 'u_mul_e_sum'"
        raise wrong(caller, "op", expected, f"{op!r}")
    if named is None:
        return kind, reduction(caller, "sum" if reduce is None else reduce, among)
    if reduce is not None and reduction(caller, reduce, among) != named:
        raise wrong(caller, "reduce", f"none with {op!r}", repr(reduce))
    return kind, reduction(caller, named, among)


# -- operators on a matrix ------------------------------------------------------------------------


class OnMatrix(Request):
    """A request whose configs are chosen by the statistics of the matrix."""

    def __reduce__(self) -> tuple[Callable[[], Request], tuple[()]]:
        """Pickle the arguments: in other processes, operators of plug-ins are other objects."""
        options = {
            "dtype": self.problem.dtype, "heads": self.callers["heads"], "reduce": self.about()[1],
            "out_dtype": getattr(self.problem, "out", None), "target": self.target,
            "threads": self.threads,
        }  # fmt: skip
        return partial(matrix_request, self.name, self.matrix, self.feat, **options), ()

    def engine(self, format: Format | None = None) -> list[Config]:
        """Configs for the target's matrix engine, if it has one that suits the pattern.

        format : the format of the matrix; by default blocks that fill tiles

        Only for a SparseMatrix: a CsrPattern has no values, and converting them to blocks in each
        run would take longer than the engine saves.
        """
        if not isinstance(self.problem, Spmm) or not isinstance(self.matrix, SparseMatrix):
            return []
        return on_engine(self.problem, self.pattern, self.statistics, self.target, format)

    def config_for_format(self, format: Format) -> Config:
        if not isinstance(format, Format) or format.order not in (None, 2):
            expected = "a format of matrices, such as sparsetir.formats.BSR(32, 32)"
            raise wrong("plan", "format", expected, f"{format!r}", TypeError)
        if not isinstance(self.problem, Product):
            return super().config_for_format(format)
        first, rest = self.engine(format), (self.statistics, self.target)
        if first:
            return first[0]
        return by_format(format, self.problem, self.pattern.coordinates, *rest)

    def about(self) -> tuple[str, str, int | None]:
        reduce = getattr(self.problem, "reduce", "sum")
        return self.operator.name, reduce, self.callers["heads"]

    def chosen(self) -> Config:
        if self.gpu and self.problem.dtype == "int8":
            raise ValueError(
                "plan: argument 'format': expected one that tensor cores take, for 'int8' on a "
                "GPU, such as sparsetir.formats.BSR(32, 32), got None"
            )
        return self.candidates()[0]

    def candidates(self) -> list[Config]:
        return [*self.engine(), *candidates(self.problem, self.statistics, self.target)]

    def space(self) -> Space:
        return space(self.problem, self.pattern, self.statistics, self.target)


def matrix_request(
    op: str,
    matrix: object,
    feat: object = None,
    *,
    target: Target,
    threads: int,
    dtype: str | None = None,
    heads: int | None = None,
    reduce: str = "sum",
    out_dtype: str | None = None,
) -> Request:
    """See :func:`sparsetir.planning.plan.requested`."""
    op_name, (op, reduce, ones) = op, _operator(op, reduce)
    operator = OPERATORS[op]
    operand = feat
    feat, dtype, heads = features_of(op, feat, dtype, heads, operator.vectors)
    if out_dtype is not None and not hasattr(operator.problem, "out"):
        raise ValueError(f"plan: argument 'out_dtype': expected None for '{op}', got {out_dtype!r}")
    if operator.vectors and feat != 1:
        raise ValueError(f"plan: argument 'feat': expected 1 for '{op}', got {feat}")
    if heads is not None and not operator.takes_heads:
        raise ValueError(f"plan: argument 'heads': expected None for '{op}', got {heads!r}")
    if operator.reductions == ("sum",) and reduce != "sum":
        raise ValueError(f"plan: argument 'reduce': expected 'sum' for '{op}', got {reduce!r}")
    each_once = reduce == "mean" or reduce != "sum" and not ones
    adopted = adopted_matrix(op_name, matrix, each_once)
    if ones:
        if not isinstance(adopted, SparseMatrix):
            raise ValueError("plan: argument 'op': expected no copy for a matrix without values")
        values = np.ones(adopted.nnz, adopted.dtype)
        if reduce == "sum" and adopted is not matrix and adopted.places is not None:
            each = np.ones(len(adopted.places), adopted.dtype)
            values = adopted.arrange(each)  # parallel edges count
        adopted = adopted.with_values(values)
    matrix = adopted
    refuse_heads_first(op, operand, 2 if operator.vectors else 3, matrix.shape)
    default = str(matrix.dtype) if isinstance(matrix, SparseMatrix) else "float32"
    m, n = matrix.shape
    idtype = idtype_for(m, n, matrix.nnz, feat)
    results = dict.fromkeys((dtype or default, accumulator(dtype or default)))
    if (dtype or default) not in DTYPES and out_dtype is None:
        expected = f"one of {', '.join(DTYPES)} (expressions take others: see sparsetir.einsum)"
        name = "matrix" if dtype is None else "dtype"
        raise wrong("plan", name, expected, f"{dtype or default!r}")
    if out_dtype not in (None, *results):
        expected = f"None, {' or '.join(map(repr, results))}"
        raise wrong("plan", "out_dtype", expected, f"{out_dtype!r}")
    problem = operator.compiled_for(dtype or default, reduce, heads is not None, idtype, out_dtype)
    longest = 0  # as if rows were even: hyb needs sorted coordinates without duplicates
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
    on_cpu = isinstance(problem, Spmm) and not is_gpu(target)
    if on_cpu and isinstance(matrix, SparseMatrix) and long_rows(m, n, matrix.nnz):
        arrays = matrix.pattern.indptr, matrix.pattern.columns
        statistics = replace(statistics, shared=round(shared_columns(*arrays, n, ROWS_UNPACKED), 1))
    if on_cpu and feat == 1 and isinstance(matrix, SparseMatrix):
        arrays = matrix.pattern.indptr, matrix.pattern.columns
        lanes = vector_lanes(problem, vector_registers(target)[0])
        statistics = replace(statistics, diagonals=on_diagonals(*arrays, n, lanes))
    there = (*operator.dims, *["a"] * operator.reads_values)
    sizes, callers = {"heads": heads or 1, "feat": feat}, {"heads": heads, "feat": feat}
    return OnMatrix(
        operator, op, matrix, problem, (feat,), sizes, callers, there, threads, target, statistics
    )


def _operator(op: object, reduce: object) -> tuple[str, str, bool]:
    """One of `OPERATORS`, one of `REDUCERS`, and whether all values of the matrix count as 1.

    op : a name of `OPERATORS`, or DGL's for what one of them computes: "u_mul_e_sum" and the like,
        "copy_u_sum" and the like, "u_dot_v"
    reduce : "sum" if the name includes a reduction
    """
    if isinstance(op, str) and op in OPERATORS:
        return op, reduction("plan", reduce), False
    if isinstance(op, str) and op == "u_dot_v":
        return "sddmm", reduction("plan", reduce), False
    if message_parts(op)[0] not in ("mul", "copy_u"):
        known = ", ".join(dict.fromkeys((*NAMED, *OPERATORS, *OF_MATRICES)))
        expected = f"one of {known}, a message such as u_add_e_max or copy_u_mean, or u_dot_v"
        raise wrong("plan", "op", expected, f"{op!r}")
    # "sum" is the default, which a reduction in the name overrides.
    named = None if reduction("plan", reduce) == "sum" and message_parts(op)[1] else reduce
    kind, reduce = message("plan", op, named)
    return "spmm", reduce, kind == "copy_u"
