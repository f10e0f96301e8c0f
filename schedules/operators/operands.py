"""Operators: programs, records of their operands, and their exact results.

Operands are float64 arrays for the dtype float64, float32 arrays for all others, which only hold
numbers representable in the dtype. So results can be checked even if NumPy lacks the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.reductions import LINEAR, REDUCERS
from sparsetir.schedules.arguments import expect_one_of
from sparsetir.schedules.operators.names import DTYPES, IDTYPES
from sparsetir.schedules.operators.problems import CsrPattern, Problem
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.origins import note_origin

# The largest error of an element in units of the sum of the absolute values of its terms: a few
# roundings of a result, and for float32 and float64 those of a long sum.
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2, "float64": 1e-12}
# Added to these units, as a lower bound for results near zero.
LEAST_SCALE = 0.1
# Above this many multiplications results are checked by a projection instead of element by element.
MOST_EXACT = 2**31
CHUNK = 2**22  # products computed at a time


@dataclass(frozen=True)
class OfProgram(Problem):
    """The problem of an operator with a program and no class of its own.

    op : its name
    dtype : the type of operands, values and result
    idtype : the type of indptr and indices
    """

    op: str
    dtype: str = "float32"
    idtype: str = "int32"

    def __post_init__(self) -> None:
        expect_one_of(self, dtype=DTYPES, idtype=IDTYPES)

    def program(self) -> SparseFunc:
        """The operator as a stage-I function."""
        program = OPERATORS[self.op].program
        assert program is not None
        return program(self)


@dataclass(frozen=True)
class Operator:
    """An operator on patterns.

    name : the name for `sparsetir.plan`
    problem : the class of problems that kernels are compiled for, such as Spmm
    in_steps : that for reductions in steps
    title : a one-line description
    dims : names of dimensions of the dense operands by name, then of the result "out": "m" and "n"
        are the rows and columns of the caller's matrix, "nnz" its elements, "relations", "heads",
        "blocks" of features, "feat" features of the result, "feat_in" those multiplied first,
        "edge_feat" those of edges. On a matrix heads come first, without a name
    reads_values : whether the matrix's values are an argument: "a", of dims "nnz"
    reference : (problem, CsrPattern, values, operands) -> (exact, scale), both float64 and of the
        result's shape: the result, and the sum of the absolute values of the terms of each element
        (for a maximum their largest), the unit of errors
    reductions : the supported reductions
    vectors : whether callers have no dimension of features, as is the case for an operator on a
        matrix without "feat" among `dims`
    program : (problem) -> stage-I function, whose parameters have the names of `dims`, "a" for
        values, and of :meth:`sparsetir.schedules.operators.problems.CsrPattern.arguments`
    transposed : whether it visits the columns of the caller's matrix: it takes the transposed
        pattern, whose rows these are. For gradients
    on : "matrix", the edges of one ("edges"), a tensor by (relation, row, column) ("relations"), or
        several matrices ("matrices"): how a plan takes its pattern, and chooses configs
    options : the options of `sparsetir.plan` that it has
    function : the function of `sparsetir.ops` that does the same, by default that of its name
    fit : for an operator on edges, fields of :class:`sparsetir.planning.request.Request` for
        (heads, feat), and its own options by name: problem, features, sizes, there, and as
        `callers` sizes of dimensions that it alone has. The problem has its default types
    dtypes : the supported dtypes of the result
    scratch : names of workspaces in the accumulator's type
    """

    name: str
    problem: type
    title: str
    dims: Mapping[str, str]
    reads_values: bool
    reference: Callable[..., tuple[np.ndarray, np.ndarray]] | None
    reductions: tuple[str, ...] = tuple(REDUCERS)
    vectors: bool = False
    program: Callable[..., Any] | None = None
    transposed: bool = False
    on: str = "matrix"
    options: tuple[str, ...] = ("reduce", "heads", "format", "out_dtype")
    function: str = ""
    fit: Callable[..., dict[str, Any]] | None = None
    dtypes: tuple[str, ...] = DTYPES
    scratch: tuple[str, ...] = ()
    in_steps: type | None = None

    def __post_init__(self) -> None:
        if self.on == "matrix" and not any("feat" in self.axes(name) for name in self.dims):
            object.__setattr__(self, "vectors", True)

    def axes(self, name: str) -> list[str]:
        """Names of the dimensions of an operand, of the result "out", or of values "a"."""
        return self.dims.get(name, "nnz").split()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the dense operands."""
        return tuple(name for name in self.dims if name != "out")

    def compiled_for(
        self, dtype: str, reduce: str = "sum", batched: bool = False, idtype: str = "int32",
        out: str | None = None,
    ) -> Any:  # fmt: skip
        """The problem of these types; raises ValueError for unsupported ones."""
        if self.problem is OfProgram:
            return OfProgram(self.name, dtype, idtype)
        options: dict[str, Any] = {"reduce": reduce} if len(self.reductions) > 1 else {}
        options |= {} if out is None else {"out": out}
        kind = self.in_steps if REDUCERS[reduce].steps is not None else self.problem
        return (kind or self.problem)(dtype=dtype, idtype=idtype, batched=batched, **options)

    @property
    def takes_heads(self) -> bool:
        """Whether several matrices may share a pattern, as an additional first dimension."""
        return self.problem is not OfProgram

    def shapes(
        self, shape: tuple[int, ...], nnz: int, feat: int, heads: int | None,
        there: Container[str] | None = None, **sizes: int | None,
    ) -> dict[str, tuple[int, ...]]:  # fmt: skip
        """Shapes of operands, values "a" if any, and the result "out"; for matrices heads first, as
        in kernels.

        shape, nnz : of the pattern that it takes, see `transposed`
        there : names of the operands that exist, by default all
        sizes : of other dimensions; None for one that does not exist
        """
        m, n = shape[-2:] if not self.transposed else shape[::-1]
        length_of = {"m": m, "n": n, "nnz": nnz, "relations": shape[0], "heads": heads}
        length_of |= {"feat": None if self.vectors else feat, **sizes}
        first = ["heads"] if self.on == "matrix" else []
        return {
            name: tuple(x for d in first + self.axes(name) if (x := length_of[d]) is not None)
            for name in (*self.dims, *["a"] * self.reads_values)
            if there is None or name in there
        }

    def shape_text(self, name: str) -> str:
        """The shape of an operand or the result for messages: "(nnz,)", "(m, feat)"."""
        left_out = {"blocks", "feat"} if self.vectors else {"blocks"}  # plans have no blocks
        dims = [d for d in self.axes(name) if d not in left_out]
        return f"({', '.join(dims)}{',' * (len(dims) == 1)})"

    def operands(
        self, problem: Any, shape: tuple[int, int], feat: int, heads: int | None, rng: Any
    ) -> tuple[np.ndarray, ...]:
        """Random dense operands for a matrix of this shape, uniform in [-1, 1)."""
        shapes = self.shapes(shape, 0, feat, heads)
        return tuple(_random(problem.dtype, shapes[name], rng) for name in self.names)

    def values(self, problem: Any, nnz: int, heads: int | None, rng: Any) -> np.ndarray:
        """Random values of a matrix, (nnz,) or (heads, nnz), like the operands."""
        return _random(problem.dtype, (*_heads(heads), nnz), rng)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values rounded to numbers of the dtype: float64 for "float64", else float32."""
    if dtype == "float64":
        return np.asarray(values, "float64")
    values = np.asarray(values, "float32")
    if dtype == "bfloat16":  # truncated to its 16 bits
        return (values.view("uint32") & np.uint32(0xFFFF0000)).view("float32")
    return values.astype(dtype).astype("float32")


def _random(dtype: str, shape: tuple[int, ...], rng: Any) -> np.ndarray:
    drawn = rng.random(shape, "float64" if dtype == "float64" else "float32")
    return rounded(drawn * 2 - 1, dtype)


def _heads(heads: int | None) -> tuple[int, ...]:
    return () if heads is None else (heads,)


def each_head(
    one: Callable[..., tuple[np.ndarray, np.ndarray]],
) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """A reference for problems with heads, from one for a single head."""

    def reference(
        problem: Any, pattern: CsrPattern, values: Any, operands: tuple[np.ndarray, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        if not problem.batched:
            return one(problem, pattern, values, operands)
        heads = len(operands[0])
        if values is not None:
            values = np.broadcast_to(values, (heads, len(pattern.indices)))
        each = [
            one(problem, pattern, None if values is None else values[h], [x[h] for x in operands])
            for h in range(heads)
        ]
        exact, scale = zip(*each, strict=True)
        return np.stack(exact), np.stack(scale)

    return reference


def gathered(
    rows: np.ndarray, columns: np.ndarray, x: np.ndarray, y: np.ndarray, out: np.ndarray
) -> np.ndarray:
    """out[e] = x[rows[e]] . y[columns[e]], in chunks of elements; in the dtype of x."""
    step = max(1, CHUNK // max(1, x.shape[1]))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        out[part] = np.einsum("ij,ij->i", x[rows[part]], y[columns[part]])
    return out


# By name; :mod:`sparsetir.schedules.operators.registry` imports all. Those on a matrix, which their
# records describe completely; those along edges and relations; and those on several matrices, some
# of which share names with messages.
OPERATORS: dict[str, Operator] = {}
ALONG: dict[str, Operator] = {}
OF_MATRICES: dict[str, Operator] = {}


def register(operator: Operator) -> Operator:
    """Register an operator for plans, `ops`, searches, the command line and the bench."""
    note_origin(operator.name)
    if operator.on != "matrix":
        table = OF_MATRICES if operator.on == "matrices" else ALONG
        return table.setdefault(operator.name, operator)
    for derived in [name for name in OPERATORS if name.startswith(f"{operator.name}_grad_")]:
        del OPERATORS[derived]  # gradients of a previous operator of this name
    OPERATORS[operator.name] = operator
    return operator


class Check:
    """A comparison of an operator's results with the exact one, which is computed once.

    most_exact : multiplications above which the features of a sum or mean are checked together, in
        one random direction: a sum of values with random signs hides no error, and the bound is the
        sum of the bounds
    """

    def __init__(
        self,
        operator: Operator,
        problem: Any,
        pattern: CsrPattern,
        values: Any,
        operands: tuple[np.ndarray, ...],
        most_exact: int = MOST_EXACT,
    ) -> None:
        self.tolerance = TOLERANCES[problem.dtype]
        self.direction = None
        reference = operator.reference
        if reference is None:
            raise ValueError(f"{operator.name}: its record has no exact result to check against")
        features = operands[0].shape[-1]
        heads = len(operands[0]) if getattr(problem, "batched", False) else 1
        products = len(pattern.indices) * features * heads
        of_features = "feat" in operator.axes("out") and not operator.vectors
        # Without a reduction not known to be linear.
        summed = of_features and getattr(problem, "reduce", None) in LINEAR
        if not summed or products <= most_exact:
            self.exact, self.scale = reference(problem, pattern, values, operands)
            self.shape = self.exact.shape
            return
        self.direction = np.random.default_rng(2).choice([-1.0, 1.0], features)
        towards = operands[0] @ self.direction
        sizes = np.abs(operands[0]).sum(axis=-1, dtype="float64")
        self.exact, _ = reference(problem, pattern, values, (towards,))
        _, self.scale = reference(problem, pattern, values, (sizes,))
        self.shape = (*self.exact.shape, features)

    def error(self, result: np.ndarray) -> str | None:
        """Return what is wrong with a result (float32 or float64), or None."""
        if result.shape != self.shape:
            return f"expected shape {self.shape}, got {result.shape}"
        if self.direction is not None:
            result = result @ self.direction
        # NaN compares as wrong.
        right = np.abs(result - self.exact) <= self.tolerance * (self.scale + LEAST_SCALE)
        return first_wrong(right, result, self.exact)


def first_wrong(right: np.ndarray, got: np.ndarray, want: np.ndarray) -> str | None:
    """A text with the number of wrong elements and the first of them; None if all are right."""
    if right.all():
        return None
    place = tuple(int(n) for n in np.unravel_index(int(right.argmin()), right.shape))
    text = f"{got[place]:.6g}, not {want[place]:.6g}"
    return f"{(~right).sum()} of {right.size} wrong, the first at {list(place)}: {text}"
