"""Programs of sparse matrices whose result is sparse: products over semirings, elementwise ones.

They are written with a dense result: :func:`sparsetir.build_assembled` makes it sparse.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial, reduce
from typing import Any

from tvm import tirx
from tvm.script import sparse_tir as T

from sparsetir.reductions import SEMIRINGS
from sparsetir.schedules.arguments import expect_one_of
from sparsetir.schedules.operators.names import IDTYPES
from sparsetir.schedules.operators.operands import Operator, register
from sparsetir.schedules.operators.problems import Problem
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.promises import with_fact
from sparsetir.sparse_ir.reduction import identity
from sparsetir.sparse_ir.script.writer import Writer, reduced

# The visited axes, and how two operands are combined.
COMBINED = {
    "add": ("union", lambda a, b: f"{a} + {b}"),
    "subtract": ("union", lambda a, b: f"{a} - {b}"),
    "multiply": ("intersect", lambda a, b: f"{a} * {b}"),
    "maximum": ("union", lambda a, b: f"T.max({a}, {b})"),
    "minimum": ("union", lambda a, b: f"T.min({a}, {b})"),
}
KRON = "kron"
MOST = 8  # the most operands
# By the names of operators, and of `COMBINED`.
ELEMENTWISE = {
    "add": "add", "sub": "subtract", "mul": "multiply", "maximum": "maximum", "minimum": "minimum",
}  # fmt: skip


@dataclass(frozen=True)
class SparseResult(Problem):
    """Products and sums of sparse matrices, whose result is sparse.

    how : a semiring, one of `COMBINED`, or `KRON`
    dtype, sums : the types of values, and of accumulators, which kernels write
    result : dtype of the result's values
    idtype : the type of indptr and indices
    count : the number of operands
    """

    how: str
    dtype: str
    sums: str
    result: str
    idtype: str = "int32"
    count: int = 2

    def __post_init__(self) -> None:
        expect_one_of(self, how=(*SEMIRINGS, *COMBINED, KRON), idtype=IDTYPES)

    @property
    def is_product(self) -> bool:
        """Whether rows and columns are multiplied, not elements."""
        return self.how in SEMIRINGS

    def program(self, gathered: bool = False) -> SparseFunc:
        """The operator as a stage-I function.

        gathered : see :func:`combined_program`
        """
        program, *how = self.made_by(gathered)
        return program(*how)

    def made_by(self, gathered: bool = False) -> tuple[Any, ...]:
        """The function that returns the program, and its arguments."""
        types = self.dtype, self.sums, self.idtype
        if self.how == KRON:
            return kron_program, *types
        if self.is_product:
            return product_program, self.how, *types
        return combined_program, self.how, self.count, gathered, *types

    def terms_program(self, idtype: str | None = None, visited: bool = False) -> SparseFunc:
        """The values of a product whose terms are listed; the list is trusted.

        idtype : the type of the lists
        visited : whether they are in the order of a product's visits, not of the result's elements
        """
        types = self.dtype, self.sums, idtype or self.idtype
        func = (product_visits_program if visited else product_terms_program)(self.how, *types)
        inside = (("A", "J"), ("B", "L"), ("C", "E")) if visited else (("B", "L"),)
        for buffer, axis in inside:
            func = with_fact(func, "inside", buffer=buffer, axis=axis)
        return func

    def elements_program(self) -> SparseFunc:
        """The values of a product on a given pattern, with a row and a column for each."""
        return product_elements_program(self.how, self.dtype, self.sums, self.idtype)

    @property
    def lists(self) -> str:
        """Positions that a plan can keep for each element: of its "terms", or of its only
        "factors"; "" if it has neither."""
        return "terms" if self.is_product else "factors" * (self.how == "multiply")

    def factors_program(self) -> SparseFunc:
        """The values of an elementwise product whose factors are listed; the list is trusted."""
        func = product_factors_program(self.count, self.dtype, self.sums, self.idtype)
        for q in range(self.count):
            func = with_fact(func, "inside", buffer=f"X{q}", axis=f"J{q}")
        return func

    def values_program(self) -> SparseFunc:
        """The values on a given pattern, each independent of the others."""
        if self.how == KRON:
            return kron_values_program(self.dtype, self.idtype)
        if self.is_product:
            return product_values_program(self.how, self.dtype, self.idtype)
        return combined_values_program(self.how, self.count, self.dtype, self.idtype)


def first_value(semiring: str, dtype: str) -> Any:
    """The semiring's zero, the value of elements that are not stored; false for `or_and`."""
    if semiring == "or_and":
        return tirx.const(0, dtype)
    return identity(SEMIRINGS[semiring].combine, dtype)


def term_of(semiring: str, out: str, a: Any, b: Any) -> Any:
    """The expression of one term of a product, in the type of the computation."""
    a, b = T.cast(a, out), T.cast(b, out)
    times = SEMIRINGS[semiring].times
    if times == "and":
        return T.cast(tirx.all(a != 0, b != 0), out)
    return a * b if times == "*" else a + b


def _csr(write: Writer, name: str, axes: str, length: str, dtype: str, buffer: str = "") -> None:
    """Declare the columns of a CSR matrix below its rows, `axes`, and its values."""
    rows, columns = axes.split()
    arrays = f"{name}_indptr", f"{name}_indices"
    write.variable(columns, rows, length, f"{name}_nnz", *arrays)
    write.buffer(name, axes, dtype, buffer)


def _products(
    semiring: str, write: Writer, dtype: str, params: str, iteration: tuple[Any, ...],
    result: str, a: str, b: str, begun: bool = False,
) -> SparseFunc:  # fmt: skip
    """A function whose last iteration reduces products over a semiring.

    iteration : its name, axes, kinds and loops
    begun : whether the result is set to `first` before
    """
    name, axes, kinds, loops = iteration
    combine = SEMIRINGS[semiring].combine
    lines = reduced(combine, result, f"term({a}, {b})", dtype, dtype, "first")
    write.visit(name, axes, kinds, lines[2 * begun :], loops)
    first, term = first_value(semiring, dtype), partial(term_of, semiring, dtype)
    return write.program(params, first=first, term=term)


@cache
def product_program(semiring: str, dtype: str, out: str, idtype: str) -> SparseFunc:
    """C = A B over a semiring, as a stage-I function.

    dtype, out : the types of the values of A and B, and of C, in which terms are computed

    a : (a_nnz,) ; b : (b_nnz,) ; c : the values of C, whose pattern is assembled
    a_indptr, a_indices, b_indptr, b_indices : patterns, (m, l) and (l, n), in CSR
    """
    write = Writer("spgemm", idtype)
    write.dense(I="m")
    _csr(write, "a", "I J", "l", dtype)
    write.dense(L="l")
    _csr(write, "b", "L K", "n", dtype)
    write.variable("N", "I", "n", "None", "c_indptr", "c_indices")
    write.buffer("c", "I N", out)
    params = "a a_indptr a_indices b b_indptr b_indices c c_indptr c_indices m l n a_nnz b_nnz"
    iteration = "spgemm", ["I", "J", "T.attach(K, J)"], "SRS", "i j k"
    return _products(semiring, write, out, params, iteration, "C[i, k]", "A[i, j]", "B[j, k]")


@cache
def combined_program(
    op: str, count: int, gathered: bool, dtype: str, out: str, idtype: str
) -> SparseFunc:
    """C = A0 + A1 + ..., or another of `COMBINED`, where any of them stores an element, or all do.

    gathered : a sum visits one operand after the other, and adds to a workspace, instead of
        co-iterating all of them

    a0, a1, ... : (a0_nnz,), ... ; c : (m, n)
    a0_indptr, a0_indices, ... : patterns, (m, n), in CSR
    """
    over, join = COMBINED[op]
    names = [f"a{q}" for q in range(count)]
    write = Writer(op, idtype)
    write.dense(I="m", N="n")
    for a in names:
        _csr(write, a, f"I J{a}", "n", dtype)
    write.buffer("c", "I N", out)
    terms = [f'T.cast({a.upper()}[i, j], "{out}")' for a in names]
    if gathered:
        write.visit("zero", "I N", "SS", [f'C[i, j] = T.cast(0, "{out}")'], "i j")
        signs = ["+", *("-" if op == "subtract" else "+" for _ in names[1:])]
        for a, term, sign in zip(names, terms, signs, strict=True):
            line = f"C[i, j] = C[i, j] {sign} {term}"
            write.visit(f"{op}_{a}", f"I J{a}", "SS", [line], "i j")
    else:
        members = ", ".join(f"J{a}" for a in names)
        axes = f"T.{over}({members})" if count > 1 else members
        write.visit(op, ["I", axes], "SS", [f"C[i, j] = {reduce(join, terms)}"], "i j")
    arrays = " ".join(f"{a} {a}_indptr {a}_indices" for a in names)
    return write.program(f"{arrays} c m n {' '.join(f'{a}_nnz' for a in names)}")


@cache
def kron_program(dtype: str, out: str, idtype: str) -> SparseFunc:
    """The Kronecker product: blocks of B, each times an element of A.

    a : (a_nnz,) ; b : (b_nnz,) ; c : the values of C, whose pattern is assembled
    a_indptr, a_indices, b_indptr, b_indices : patterns, (m, n) and (p, q), in CSR
    """
    write = Writer("kron", idtype)
    write.dense(I1="m")
    _csr(write, "a", "I1 J1", "n", dtype)
    write.dense(I2="p")
    _csr(write, "b", "I2 J2", "q", dtype)
    write.dense(I="m * p")
    write.variable("J", "I", "n * q", "None", "c_indptr", "c_indices")
    write.buffer("c", "I J", out)
    value = f'T.cast(A[i1, j1], "{out}") * T.cast(B[i2, j2], "{out}")'
    line = f"C[i1 * p + i2, j1 * q + j2] = {value}"
    write.visit("kron", "I1 I2 J1 J2", "SSSS", [line])
    arrays = "a a_indptr a_indices b b_indptr b_indices c c_indptr c_indices"
    return write.program(f"{arrays} m n p q a_nnz b_nnz")


@cache
def kron_values_program(dtype: str, idtype: str) -> SparseFunc:
    """The values of a Kronecker product on a given pattern, an element at a time.

    x0 : (x0_nnz,) of A ; x1 : (x1_nnz,) of B ; out : (nnz,)
    indptr, indices, x0_indptr, ... : patterns, (m, n), (x0_m, x0_n) and (p, q), in CSR
    """
    write = Writer("kron_values", idtype)
    write.dense(I="m")
    write.variable("K", "I", "n", "nnz", "indptr", "indices")
    write.dense(I1="x0_m")
    _csr(write, "x0", "I1 J1", "x0_n", dtype, "A")
    write.dense(I2="p")
    _csr(write, "x1", "I2 J2", "q", dtype, "B")
    write.buffer("out", "I K", dtype, "C")
    line = "C[i, k] = A[i // p, k // q] * B[i % p, k % q]"
    write.visit("values", ["T.fuse(I, K)"], "SS", [line], "i k")
    arrays = "x0 x1 out indptr indices x0_indptr x0_indices x1_indptr x1_indices"
    return write.program(f"{arrays} m n nnz x0_m x0_n p q x0_nnz x1_nnz")


@cache
def product_values_program(semiring: str, dtype: str, idtype: str) -> SparseFunc:
    """The values of C = A B over a semiring on a given pattern, an element at a time.

    x0 : (x0_nnz,) of A ; x1 : (x1_nnz,) of B, in any order ; out : (nnz,)
    indptr, indices, x0_indptr, x0_indices : patterns of C, (m, n), and A, (m, l), in CSR
    x1_indptr, x1_indices, x1_places : that of B, (l, n), by columns (CSC), and the positions of its
        elements in x1
    """
    write = Writer("spgemm_values", idtype)
    write.dense(I="m")
    write.variable("K", "I", "n", "nnz", "indptr", "indices")
    _csr(write, "x0", "I J", "l", dtype, "A")
    write.dense(N="n")
    write.variable("L", "N", "l", "x1_nnz", "x1_indptr", "x1_indices")
    write.dense(E="x1_nnz")
    write.buffer("x1", "E", dtype, "B")
    write.buffer("x1_places", "N L", idtype, "P")
    write.buffer("out", "I K", dtype, "C")
    arrays = "x0 x1 out indptr indices x0_indptr x0_indices x1_indptr x1_indices x1_places"
    axes = "T.fuse(I, K)", "T.intersect(J, T.attach(L, K))"
    write.visit("begun", axes[:1], "SS", ["C[i, k] = first"], "i k")
    return _products(
        semiring, write, dtype, f"{arrays} m l n nnz x0_nnz x1_nnz",
        ("values", axes, "SSR", "i k j"), "C[i, k]", "A[i, j]", "B[P[k, j]]", True,
    )  # fmt: skip


@cache
def product_elements_program(semiring: str, dtype: str, sums: str, idtype: str) -> SparseFunc:
    """The values of C = A B over a semiring on a given pattern, with B by columns.

    x0 : (x0_nnz,) of A ; x1 : (x1_nnz,) of B ; out : (nnz,) of C, in the type `sums`
    indptr, indices, x0_indptr, x0_indices : patterns of C, (m, n), and A, (m, l), in CSR
    x1_indptr, x1_indices : that of the transposed B, (n, l), in CSR
    """
    write = Writer("spgemm_elements", idtype)
    write.dense(I="m")
    write.variable("K", "I", "n", "nnz", "indptr", "indices")
    _csr(write, "x0", "I J", "l", dtype, "A")
    write.dense(N="n")
    _csr(write, "x1", "N L", "l", dtype, "B")
    write.buffer("out", "I K", sums, "C")
    arrays = "x0 x1 out indptr indices x0_indptr x0_indices x1_indptr x1_indices"
    axes = "I", "K", "T.intersect(J, T.attach(L, K))"
    return _products(
        semiring, write, sums, f"{arrays} m l n nnz x0_nnz x1_nnz",
        ("elements", axes, "SSR", "i k j"), "C[i, k]", "A[i, j]", "B[k, j]",
    )  # fmt: skip


@cache
def product_terms_program(semiring: str, dtype: str, sums: str, idtype: str) -> SparseFunc:
    """The values of C = A B over a semiring with a known list of each element's terms.

    x0 : (x0_nnz,) of A ; x1 : (x1_nnz,) of B ; out : (nnz,) of C, in the type `sums`
    begins : (nnz + 1,), offsets of the terms of each element of C
    x0_places, x1_places : (terms,) positions in A, increasing for each element of C, and in B
    """
    write = Writer("spgemm_terms", idtype)
    write.dense(E="nnz")
    write.variable("S", "E", "x0_nnz", "terms", "begins", "x0_places")
    write.dense(J="x0_nnz", L="x1_nnz")
    for name, axes, of, buffer in (
        ("x0", "J", dtype, "A"), ("x1", "L", dtype, "B"), ("x1_places", "E S", idtype, "P"),
        ("out", "E", sums, "C"),
    ):  # fmt: skip
        write.buffer(name, axes, of, buffer)
    params = "x0 x1 out begins x0_places x1_places nnz terms x0_nnz x1_nnz"
    iteration = "terms", "E S", "SR", "e s"
    return _products(semiring, write, sums, params, iteration, "C[e]", "A[s]", "B[P[e, s]]")


@cache
def product_visits_program(semiring: str, dtype: str, sums: str, idtype: str) -> SparseFunc:
    """The values of C = A B over a semiring, with terms in the order of A's elements.

    x0 : (x0_nnz,) of A ; x1 : (x1_nnz,) of B ; out : (nnz,) of C, in the type `sums`
    begins : (parts + 1,), offsets of parts of the terms that share no element of C
    places, x0_places, x1_places : (terms,) positions in C, in A and in B
    """
    write = Writer("spgemm_visits", idtype)
    write.dense(P="parts")
    write.variable("S", "P", "terms", "terms", "begins")
    write.dense(E="nnz", J="x0_nnz", L="x1_nnz")
    for name, axes, of, buffer in (
        ("x0", "J", dtype, "A"), ("x1", "L", dtype, "B"), ("places", "P S", idtype, "X"),
        ("x0_places", "P S", idtype, "X0"), ("x1_places", "P S", idtype, "X1"),
        ("out", "E", sums, "C"),
    ):  # fmt: skip
        write.buffer(name, axes, of, buffer)
    params = "x0 x1 out begins places x0_places x1_places nnz parts terms x0_nnz x1_nnz"
    write.visit("begun", "E", "S", ["C[e] = first"])
    places = "C[X[p, s]]", "A[X0[p, s]]", "B[X1[p, s]]"
    iteration = "visits", "P S", "SS", "p s"
    return _products(semiring, write, sums, params, iteration, *places, True)


@cache
def product_factors_program(count: int, dtype: str, sums: str, idtype: str) -> SparseFunc:
    """The values of an elementwise product with a known list of each element's factors.

    x0, x1, ... : (x0_nnz,), ... ; out : (nnz,), in the type `sums`
    x0_places, x1_places, ... : (nnz,) positions in x0, in x1, ...
    """
    each = range(count)
    write = Writer("multiply_factors", idtype)
    write.dense(E="nnz")
    for q in each:
        write.dense(**{f"J{q}": f"x{q}_nnz"})
        write.buffer(f"x{q}", f"J{q}", dtype)
        write.buffer(f"x{q}_places", "E", idtype, f"P{q}")
    write.buffer("out", "E", sums, "C")
    value = " * ".join(f'T.cast(X{q}[P{q}[e]], "{sums}")' for q in each)
    write.visit("elements", "E", "S", [f"C[e] = {value}"])
    arrays = " ".join(f"x{q} x{q}_places" for q in each)
    return write.program(f"{arrays} out nnz {' '.join(f'x{q}_nnz' for q in each)}")


@cache
def combined_values_program(op: str, count: int, dtype: str, idtype: str) -> SparseFunc:
    """The values of C = A0 + A1 + ..., or another of `COMBINED`, on a given pattern.

    x0, x1, ... : (x0_nnz,), ... ; out : (nnz,)
    indptr, indices, x0_indptr, x0_indices, ... : patterns, (m, n), in CSR
    """
    names = [f"x{q}" for q in range(count)]
    write = Writer(f"{op}_values", idtype)
    write.dense(I="m")
    write.variable("K", "I", "n", "nnz", "indptr", "indices")
    write.buffer("out", "I K", dtype, "C")
    for x in names:
        _csr(write, x, f"I J{x}", "n", dtype)
    value = reduce(COMBINED[op][1], [f"{x.upper()}[i, k]" for x in names])
    write.visit("values", ["T.fuse(I, K)"], "SS", [f"C[i, k] = {value}"], "i k")
    arrays = [*names, "out", "indptr", "indices"]
    arrays += [f"{x}_{kind}" for x in names for kind in ("indptr", "indices")]
    return write.program([*arrays, "m", "n", "nnz", *(f"{x}_nnz" for x in names)])


_of_matrices = partial(
    Operator, problem=SparseResult, reads_values=True, reference=None, on="matrices"
)
for _name in ELEMENTWISE:
    register(
        _of_matrices(
            _name, title="sparse matrices by element, to a sparse one", reductions=(),
            dims={"b": "m n", "out": "m n"}, options=("mask",),
        )
    )  # fmt: skip
register(
    _of_matrices(
        KRON, title="Kronecker product of sparse matrices", reductions=(),
        dims={"b": "p q", "out": "m*p n*q"}, options=(),
    )
)  # fmt: skip
register(
    _of_matrices(
        "inner", title="inner products of sparse rows",
        reductions=tuple(SEMIRINGS), dims={"b": "l n", "out": "m l"}, options=("semiring", "mask"),
    )
)  # fmt: skip
register(
    _of_matrices(
        "spgemm", title="sparse times sparse, to a sparse one", reductions=tuple(SEMIRINGS),
        dims={"b": "n l", "out": "m l"}, options=("semiring", "mask"),
    )
)  # fmt: skip
