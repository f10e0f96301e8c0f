"""What plans, searches and devices elsewhere are asked for: what all of them have, and checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from sparsetir.data.sparse_tensor import SparseMatrix, SparseTensor
from sparsetir.formats import Format, Operand
from sparsetir.formats.converted import ConvertedFormat
from sparsetir.planning.compiled import compiled
from sparsetir.records.task import Task
from sparsetir.runtime import pool
from sparsetir.runtime.arrays import dtype_name, is_array
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.pipeline import Stages, lower_template
from sparsetir.schedules.default import is_gpu
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.search.spaces import Space
from sparsetir.schedules.template import Choices, Template
from sparsetir.schedules.templates.registry import template_of

# Of options that are not None by default.
DEFAULTS = {"reduce": "sum", "weighted": True}


class Request:
    """What plans of all operators are made by: arguments that were checked, and what follows.

    name : of the operator, as it was asked for
    matrix : a pattern where there are no values
    problem : what kernels are compiled for
    feat : features of the result
    shapes : of operands, of values "a" if any are read, and of the result "out"
    sizes : numbers beside those of the pattern, by the names of the program's parameters
    pattern : where the matrix has elements, as templates take it, in the type of the problem
    target : a `tvm.target.Target`
    threads : of the CPU
    """

    name: str
    matrix: Any
    problem: Any
    feat: int
    shapes: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, Any]
    pattern: Any
    target: Any
    threads: int

    def task(self) -> Task:
        """What records of tuning are looked up by."""
        raise NotImplementedError

    def chosen(self) -> Any:
        """The config of a plan whose user names none."""
        raise NotImplementedError

    def candidates(self) -> list[Any]:
        """Configs worth measuring, that of :meth:`chosen` first."""
        raise NotImplementedError

    def space(self) -> Space:
        """The configs that a search goes through."""
        raise NotImplementedError

    # What only some have:

    @property
    def function(self) -> str:
        """Of `sparsetir.ops`, that does the same with gradients."""
        return self.name

    @property
    def values(self) -> np.ndarray | None:
        """Of the matrix; None where each run is given its own."""
        return getattr(self.matrix, "values", None) if self.has_values else None

    @property
    def has_values(self) -> bool:
        """Whether the matrix has values, and is not a pattern that is trusted."""
        return isinstance(self.matrix, SparseTensor)

    @property
    def whole(self) -> Any:
        """The same for features that fill vectors, with zeros behind those that are given."""
        return self

    @property
    def scratch(self) -> Mapping[str, tuple[int, str]]:
        """Elements and type of the arrays that a kernel has for its own use, by parameter."""
        return {}

    @property
    def is_recorded(self) -> bool:
        """Whether tuning may have recorded a config for it."""
        return self.has_values

    def of_choices(self, **choices: Any) -> Any:
        """A config of the choices by name that older versions recorded."""
        return Choices(choices)

    def gathers_often(self, config: Any) -> bool:
        """Whether rows of B are gathered so often that to align them pays first."""
        del config
        return False

    def config_of(self, format: Any) -> Any:
        """The config for a format; raises ValueError where none is chosen by one."""
        raise ValueError(
            f"plan: argument 'format': expected None for '{self.name}', got {format!r}"
        )

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


def refuse_options(op: Any, given: Mapping[str, Any], takes: Iterable[str]) -> None:
    """Raise where an operator is asked for with what others take, and is given for it.

    takes : names of options that this one has
    """
    for name, value in given.items():
        default = DEFAULTS.get(name)
        same = value == default if isinstance(value, str) else value is default
        if name not in takes and not same:
            raise ValueError(
                f"plan: argument '{name}': expected {default!r} for {op!r}, got {value!r}"
            )


def idtype_for(*sizes: int) -> str:
    """int32 where it holds all that is counted; offsets into values are 64-bit either way."""
    return "int32" if max(sizes) < 2**31 - 1 else "int64"
