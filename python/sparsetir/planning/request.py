"""What plans, searches and devices elsewhere are asked for, checked, and how configs are chosen.

Of all operators, and of those on a matrix.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
from tvm.target import Target

from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor
from sparsetir.formats import Format, Operand, Pattern
from sparsetir.formats.converted import ConvertedFormat
from sparsetir.records.task import Config, Matrices, Task
from sparsetir.reductions import REDUCTION_NAMES, REDUCTIONS
from sparsetir.runtime import pool
from sparsetir.runtime.arrays import CACHE_LINE, LEAST_ALIGNED, dtype_name, is_array, itemsize
from sparsetir.runtime.pipeline import Stages, lower_template
from sparsetir.runtime.refusals import wrong
from sparsetir.runtime.signature import Signature
from sparsetir.schedules.operators.names import MESSAGES, NAMED, message_parts
from sparsetir.schedules.operators.operands import Operator, rounded
from sparsetir.schedules.operators.problems import CsrPattern, Spmm, accumulator
from sparsetir.schedules.operators.registry import OPERATORS
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.passes.amx_tiles import PRODUCTS, has_product
from sparsetir.schedules.search.by_format import by_format
from sparsetir.schedules.search.choose import Statistics, candidates
from sparsetir.schedules.search.locality import Locality
from sparsetir.schedules.search.spaces import Space, space
from sparsetir.schedules.targets import allowed, is_gpu
from sparsetir.schedules.template import Branch, Choices, Template
from sparsetir.schedules.templates.amx import BLOCKS, configs
from sparsetir.schedules.templates.of_program import check_choices
from sparsetir.schedules.templates.registry import template_of
from sparsetir.sparse_ir.lower_sparse_iter import lower_sparse_iter
from sparsetir.sparse_ir.position_space import SIGNATURE

# Of options that are not None by default.
DEFAULTS = {"reduce": "sum", "weighted": True, "semiring": "plus_times"}
# Nonzeros of a column from which on a copy of B that begins at a cache line pays.
ALIGNED_DEGREE = 24
# Fields of problems that others than by default have no records: not what was tuned.
UNUSUAL = ("out", "values", "added", "in_blocks")


class Common(NamedTuple):
    """Checked arguments that plans of all operators have.

    dtype, heads : None where they are not given
    threads : of the CPU
    """

    dtype: str | None
    heads: int | None
    target: Target
    threads: int


class About(NamedTuple):
    """Fields of a :class:`sparsetir.records.task.Task`."""

    op: str
    reduce: str
    heads: int | None


@dataclass(frozen=True)
class Request:
    """Checked arguments of a plan, of any operator, and what follows from them.

    Operators on different things have classes of their own, which choose configs.

    name : of the operator, as it was asked for
    matrix : a SparseTensor, several matrices, or a pattern where there are no values
    problem : what kernels are compiled for
    features : that configs are chosen for, those of the result last
    sizes : numbers beside those of the pattern, by the names of the program's parameters
    callers : "feat" and "heads" as the caller has them, and sizes of the record's other letters
    there : operands that there are, "a" for values and "out" for the result
    threads : of the CPU
    statistics : what configs for matrices are chosen by
    """

    operator: Operator
    name: str
    matrix: SparseTensor | CsrPattern | RelationPattern | Matrices
    problem: Any
    features: tuple[int, ...]
    sizes: Mapping[str, int | float]
    callers: Mapping[str, Any]
    there: tuple[str, ...]
    threads: int
    target: Target
    statistics: Statistics | None = None

    @property
    def feat(self) -> int:
        """Features of the result; of softmax the values of an element that lie side by side."""
        return self.features[-1]

    @property
    def feat_in(self) -> int:
        """Features that are multiplied first."""
        return self.features[0]

    @property
    def matrices(self) -> Matrices:
        """Of an operator on several."""
        assert isinstance(self.matrix, Matrices)
        return self.matrix

    @property
    def given(self) -> Statistics:
        """Of a matrix."""
        assert self.statistics is not None
        return self.statistics

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of operands, of values "a" if any are read, and of the result "out"."""
        matrix: Any = self.matrix
        found = self.operator.shapes
        return found(matrix.shape, matrix.nnz, there=self.there, **self.callers)

    @property
    def scratch(self) -> Mapping[str, tuple[int, str]]:
        """Elements and type of the arrays that a kernel has for its own use, by parameter."""
        sizes = {"e": self.matrix.nnz, "h": int(self.sizes.get("heads", 1))}
        acc = self.problem.accumulator
        return {n: (prod(sizes[d] for d in own), acc) for n, own in self.operator.scratch.items()}

    @property
    def function(self) -> str:
        """Of `sparsetir.ops`, that does the same with gradients."""
        return self.operator.function or self.name

    @cached_property
    def pattern(self) -> Any:
        """Where the matrix has elements, as templates take it, in the type of the problem."""
        assert isinstance(self.matrix, SparseMatrix | CsrPattern)
        return csr_pattern(self.matrix, self.problem.idtype)

    @property
    def values(self) -> np.ndarray | None:
        """Of the matrix; None where each run is given its own."""
        return getattr(self.matrix, "values", None) if self.has_values else None

    @property
    def has_values(self) -> bool:
        """Whether the matrix has values, and is not a pattern that is trusted."""
        return isinstance(self.matrix, SparseTensor)

    @property
    def is_trusted(self) -> bool:
        """Whether it is a matrix without values, whose configs are for those of each run."""
        return self.operator.on == "matrix" and isinstance(self.matrix, CsrPattern)

    @property
    def is_recorded(self) -> bool:
        """Whether tuning may have recorded a config for it."""
        on, plain = self.operator.on, not any(getattr(self.problem, x, None) for x in UNUSUAL)
        tuned = on == "matrix" or not self.gpu
        return plain and tuned and (self.has_values or on in ("relations", "matrices"))

    def task(self) -> Task:
        """What records of tuning are looked up by."""
        matrix: Any = self.pattern if self.operator.on == "relations" else self.matrix
        op, reduce, heads = self.about()
        dtype, target, threads = self.problem.dtype, self.target, self.threads
        return Task(op, matrix, self.feat, dtype, reduce, heads, target, threads)

    @property
    def whole(self) -> Request:
        """The same for features that fill vectors, with zeros behind those that are given."""
        return self

    def gathers_often(self, config: Config) -> bool:
        """Whether rows of B are gathered as they are, so often that to align them pays first.

        Rows of whole cache lines that begin within one take 1.1 to 1.7 times as long to gather (Zen
        3, one thread, 13 to 85 nonzeros a column); a copy as long as 1 to 4 of them.
        """
        given = self.statistics
        if given is None or not isinstance(self.problem, Spmm):
            return False
        row = given.feat * given.bytes
        often = given.nnz >= ALIGNED_DEGREE * given.n and given.n * row >= LEAST_ALIGNED
        return often and not getattr(config, "pack", False) and row % CACHE_LINE == 0

    @property
    def gpu(self) -> bool:
        """Whether it is for a GPU."""
        return is_gpu(self.target)

    def about(self) -> About:
        """What records of tuning are looked up by."""
        raise NotImplementedError

    def candidates(self) -> list[Config]:
        """Configs worth measuring, that of :meth:`chosen` first."""
        raise NotImplementedError

    def space(self) -> Space:
        """The configs that a search goes through, on a CPU."""
        raise NotImplementedError

    def chosen(self) -> Config:
        """The config of a plan whose user names none."""
        return self.candidates()[0]

    def of_format(self, format: Format) -> Config:
        """The config for a format; raises ValueError where none is chosen by one."""
        raise wrong("plan", "format", f"None for '{self.name}'", f"{format!r}")

    def check(self, config: Config) -> None:
        """Raise for a config, of a template that serves the problem, that does not serve sizes."""
        if isinstance(config, Choices):
            check_choices(config, self.problem, self.sizes)

    def template(self, config: Config) -> Template:
        """The template of a config; raises TypeError for what is no config for this, and
        ScheduleError where it does not serve the sizes."""
        found = template_of(config, self.problem, self.gpu)
        self.check(config)
        return found

    def stages(self, config: Config) -> Stages:
        """All stages of the kernel for a config."""
        return lower_template(self.template(config), self.problem, config, self.target)

    def arguments(self) -> dict[str, Any]:
        """Of the plain program, with random values and operands, but what it writes."""
        rng, dtype = np.random.default_rng(0), self.problem.dtype
        program = self.template(self.chosen()).program(self.problem)
        signature = Signature(lower_sparse_iter(program).attrs[SIGNATURE])
        pattern = self.pattern.arguments()
        known = {**pattern, **self.sizes}
        found = {name: known[name] for name in signature.names if name in known}
        given = [found.get(name) for name in signature.names]
        for i in signature.arrays:
            name = signature.names[i]
            if name not in pattern and i not in signature.outputs:
                shape = signature.expected_shape(i, given)
                # Far enough from zero to divide by.
                drawn = rng.uniform(0.5, 1, shape) * rng.choice([-1, 1], shape)
                found[name] = rounded(drawn, dtype).astype(dtype)
        return found


class OneByOne(Request):
    """Whose configs are what a search on a CPU tries, the first values being the default's."""

    def tried(self) -> Branch:
        """What a search on a CPU tries."""
        raise NotImplementedError

    def on_gpu(self) -> list[Config]:
        """Configs for a GPU, the default first."""
        raise NotImplementedError

    def chosen(self) -> Config:
        if self.gpu:
            return self.on_gpu()[0]
        branch = self.tried()
        found = branch.make(**{name: values[0] for name, values in branch.choices.items()})
        assert found is not None
        return found

    def candidates(self) -> list[Config]:
        return self.on_gpu() if self.gpu else self.tried().one_by_one()

    def space(self) -> Space:
        return Space((self.tried(),))


def adopted_matrix(
    op: str, matrix: object, each_once: bool = False, in_order: bool = False
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
    op: str, feat: Any, common: Common, vectors: bool = False
) -> tuple[int, str | None, int | None]:
    """The number of features, dtype and heads, of the dense operand where it is given for that.

    feat : a number; or the operand, whose dtype and heads are taken where none are given
    vectors : whether operands have no dimension of features, and need no number
    """
    dtype, heads, _, _ = common
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
    """Raise for an operand of so many dimensions whose second one has the rows, not the first."""
    if not is_array(given) or len(given.shape) != dims:
        return
    if given.shape[0] not in rows and given.shape[1] in rows:
        expected = f"heads as the second dimension of the operand of '{op}'"
        raise wrong("plan", "feat", expected, f"shape {tuple(given.shape)}")


def check_dtypes(**dtypes: object) -> None:
    """Raise for names of dtypes that are no texts; None is fine."""
    for name, given in dtypes.items():
        if given is not None and not isinstance(given, str):
            raise TypeError(f"plan: argument '{name}': expected a name as 'float32', got {given!r}")


def check_counts(**counts: object) -> None:
    """Raise for what is no number from 1 on; None is fine for all but 'feat'."""
    for name, value in counts.items():
        if value is None and name != "feat":
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
    indptr, indices = (np.array(x, idtype) for x in (pattern.indptr, pattern.columns))
    found = _OfMatrix(indptr, indices, (m, n))
    if pattern.idtype != idtype:  # one that it has no conversions for
        return CsrPattern(*found)
    found.matrix = matrix
    return found


class _OfMatrix(CsrPattern):
    """The pattern of a SparseMatrix."""

    matrix: SparseMatrix

    @cached_property
    def coordinates(self) -> Pattern:
        return self.matrix.pattern

    def stored_in(self, format: Format, operand: Operand) -> ConvertedFormat:
        return self.matrix.to(format, operand)


def refuse_options(op: object, given: Mapping[str, object], takes: Iterable[str]) -> None:
    """Raise where an operator is asked for with what others take, and is given for it.

    takes : names of options that this one has
    """
    for name, value in given.items():
        default = DEFAULTS.get(name)
        same = value == default if isinstance(value, str) else value is default
        if name not in takes and not same:
            raise wrong("plan", name, f"{default!r} for {op!r}", f"{value!r}")


def idtype_for(*sizes: int) -> str:
    """int32 where it holds all that is counted; offsets into values are 64-bit either way."""
    return "int32" if max(sizes) < 2**31 - 1 else "int64"


def reduction(who: str, name: object, among: Iterable[str] = REDUCTIONS) -> str:
    """The one of `REDUCTIONS` that a name means.

    who : the function, as errors name it
    among : those that it has

    Raises ValueError for other names.
    """
    found = REDUCTION_NAMES.get(name) if isinstance(name, str) else None
    if found is None or found not in among:
        known = ", ".join(name for name, kind in REDUCTION_NAMES.items() if kind in among)
        raise wrong(who, "reduce", known, f"{name!r}")
    return found


def message(
    who: str, op: object, reduce: object = None, among: Iterable[str] = REDUCTIONS
) -> tuple[str, str]:
    """One of the values of `MESSAGES`, and one of `REDUCTIONS`.

    op : a name of `MESSAGES`, or one with a reduction behind it, as "u_mul_e_sum"
    reduce : None for that in the name, or a sum
    """
    kind, named = message_parts(op)
    if kind is None:
        expected = f"one of {', '.join(MESSAGES)}, or one with a reduction, as 'u_mul_e_sum'"
        raise wrong(who, "op", expected, f"{op!r}")
    if named is None:
        return kind, reduction(who, "sum" if reduce is None else reduce, among)
    if reduce is not None and reduction(who, reduce, among) != named:
        raise ValueError(f"{who}: argument 'reduce': expected none beside {op!r}, got {reduce!r}")
    return kind, reduction(who, named, among)


# -- operators on a matrix ------------------------------------------------------------------------


class OnMatrix(Request):
    """Whose configs are chosen by the statistics of the matrix."""

    def engine(self, format: Format | None = None) -> list[Config]:
        """Configs for the CPU's matrix engine, where there is one that suits the pattern.

        format : the one that stores the matrix; by default blocks that fill tiles

        Of a SparseMatrix alone: a CsrPattern has no values, and to bring them into blocks in each
        run would take longer than is won.
        """
        problem, target = self.problem, self.target
        spmm = isinstance(problem, Spmm) and isinstance(self.matrix, SparseMatrix)
        if not spmm or not has_product(target, problem.dtype):
            return []
        if allowed(PRODUCTS[problem.dtype].features):
            return []
        formats = BLOCKS if format is None else (format,)
        return [*configs(problem, self.pattern, self.given, target, formats)]

    def of_format(self, format: Format) -> Config:
        if not isinstance(format, Format) or format.order not in (None, 2):
            expected = "a format of matrices, such as sparsetir.formats.BSR(32, 32)"
            raise wrong("plan", "format", expected, f"{format!r}", TypeError)
        if not isinstance(self.problem, Spmm):
            return super().of_format(format)
        found, asked = self.engine(format), (self.given, self.target)
        if found:
            return found[0]
        return by_format(format, self.problem, self.pattern.coordinates, *asked)

    def about(self) -> About:
        reduce = getattr(self.problem, "reduce", "sum")
        return About(self.operator.name, reduce, self.callers["heads"])

    def chosen(self) -> Config:
        if self.gpu and self.problem.dtype == "int8":
            raise ValueError(
                "plan: argument 'format': expected one that tensor cores take, for 'int8' on a "
                "GPU, such as sparsetir.formats.BSR(32, 32), got None"
            )
        return super().chosen()

    def candidates(self) -> list[Config]:
        return [*self.engine(), *candidates(self.problem, self.given, self.target)]

    def space(self) -> Space:
        return space(self.problem, self.pattern, self.given, self.target)


def matrix_request(
    op: str,
    matrix: object,
    feat: object = None,
    *,
    common: Common,
    reduce: str = "sum",
    out_dtype: str | None = None,
) -> Request:
    """See :func:`sparsetir.planning.plan.requested`."""
    given, (op, reduce, ones) = op, _operator(op, reduce)
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
    results = dict.fromkeys((dtype or own, accumulator(dtype or own)))
    if out_dtype not in (None, *results):
        expected = f"None, {' or '.join(map(repr, results))}"
        raise wrong("plan", "out_dtype", expected, f"{out_dtype!r}")
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
    return OnMatrix(
        operator, op, matrix, problem, (feat,), sizes, callers, there, threads, target, statistics
    )


def _operator(op: object, reduce: object) -> tuple[str, str, bool]:
    """One of `OPERATORS`, one of `REDUCTIONS`, and whether all values of the matrix are to be one.

    op : a name of `OPERATORS`, or DGL's for what one of them computes: "u_mul_e_sum" and the like,
        "copy_u_sum" and the like, "u_dot_v"
    reduce : "sum" where the name says which
    """
    if isinstance(op, str) and op in OPERATORS:
        return op, reduction("plan", reduce), False
    if isinstance(op, str) and op == "u_dot_v":
        return "sddmm", reduction("plan", reduce), False
    if message_parts(op)[0] not in ("mul", "copy_u"):
        known = ", ".join(dict.fromkeys((*OPERATORS, *NAMED)))
        expected = f"one of {known}, a message as u_add_e_max or copy_u_mean, or u_dot_v"
        raise wrong("plan", "op", expected, f"{op!r}")
    # "sum" is what is asked for where nothing is.
    named = None if reduction("plan", reduce) == "sum" and message_parts(op)[1] else reduce
    kind, reduce = message("plan", op, named)
    return "spmm", reduce, kind == "copy_u"
