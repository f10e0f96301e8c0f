"""Programs of sparse matrices whose result is sparse: products over semirings, element by element.

They say the result as a dense one: :func:`sparsetir.build_assembled` makes it sparse.
"""

# pyright: reportInvalidTypeForm=false, reportAttributeAccessIssue=false
# (TVMScript is Python in form only.)

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
from sparsetir.schedules.operators.problems import Problem, reduced
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.promises import with_fact
from sparsetir.sparse_ir.reduction import identity
from sparsetir.sparse_ir.script.parser import from_source

# What is visited, and how two operands are combined.
COMBINED = {
    "add": ("union", lambda a, b: f"{a} + {b}"),
    "subtract": ("union", lambda a, b: f"{a} - {b}"),
    "multiply": ("intersect", lambda a, b: f"{a} * {b}"),
    "maximum": ("union", lambda a, b: f"T.max({a}, {b})"),
    "minimum": ("union", lambda a, b: f"T.min({a}, {b})"),
}
KRON = "kron"
MOST = 8  # operands
# By the names of operators, and of `COMBINED`.
ELEMENTWISE = {
    "add": "add", "sub": "subtract", "mul": "multiply", "maximum": "maximum", "minimum": "minimum",
}  # fmt: skip


@dataclass(frozen=True)
class SparseResult(Problem):
    """Products and sums of sparse matrices, whose result is sparse.

    how : a semiring, one of `COMBINED`, or `KRON`
    dtype, sums : of values, and of what they are summed in, which kernels write
    result : dtype of the result's values
    idtype : of indptr and indices
    count : operands
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
        """The function that makes the program, and its arguments."""
        types = self.dtype, self.sums, self.idtype
        if self.how == KRON:
            return kron_program, *types
        if self.is_product:
            return product_program, self.how, *types
        return combined_program, self.how, self.count, gathered, *types

    def terms_program(self, idtype: str | None = None, visited: bool = False) -> SparseFunc:
        """The values of a product whose terms are listed, which is trusted.

        idtype : of the lists
        visited : they are in the order of a product's visits, not of the result's elements
        """
        types = self.dtype, self.sums, idtype or self.idtype
        func = (product_visits_program if visited else product_terms_program)(self.how, *types)
        inside = (("A", "J"), ("B", "L"), ("C", "E")) if visited else (("B", "L"),)
        for buffer, axis in inside:
            func = with_fact(func, "inside", buffer=buffer, axis=axis)
        return func

    def elements_program(self) -> SparseFunc:
        """The values of a product at a pattern that is given, by a row and a column for each."""
        return product_elements_program(self.how, self.dtype, self.sums, self.idtype)

    @property
    def lists(self) -> str:
        """Places that a plan can keep of each element: of its "terms", or of its only "factors";
        "" where it has neither."""
        return "terms" if self.is_product else "factors" * (self.how == "multiply")

    def factors_program(self) -> SparseFunc:
        """The values of a product by element, of factors that are listed, which is trusted."""
        func = product_factors_program(self.count, self.dtype, self.sums, self.idtype)
        for q in range(self.count):
            func = with_fact(func, "inside", buffer=f"X{q}", axis=f"J{q}")
        return func

    def values_program(self) -> SparseFunc:
        """The values at a given pattern, each independent of the others."""
        if self.how == KRON:
            return kron_values_program(self.dtype, self.idtype)
        if self.is_product:
            return product_values_program(self.how, self.dtype, self.idtype)
        return combined_values_program(self.how, self.count, self.dtype, self.idtype)


def first_value(semiring: str, dtype: str) -> Any:
    """The semiring's zero, which what is not stored stands for; of `or_and` false."""
    if semiring == "or_and":
        return tirx.const(0, dtype)
    return identity(SEMIRINGS[semiring].combine, dtype)


def term_of(semiring: str, out: str, a: Any, b: Any) -> Any:
    """The expression of one term of a product, in the type that it is computed in."""
    a, b = T.cast(a, out), T.cast(b, out)
    times = SEMIRINGS[semiring].times
    if times == "and":
        return T.cast(tirx.all(a != 0, b != 0), out)
    return a * b if times == "*" else a + b


@cache
def product_program(semiring: str, dtype: str, out: str, idtype: str) -> Any:
    """C = A B over a semiring, as a stage-I function.

    dtype, out : of the values of A and B, and of C, which terms are computed in

    a : (a_nnz,) ; b : (b_nnz,) ; c : (m, n)
    a_indptr, a_indices, b_indptr, b_indices : patterns, (m, l) and (l, n), in CSR
    """
    how, _ = SEMIRINGS[semiring]
    size, first = getattr(T, idtype), first_value(semiring, out)
    term = partial(term_of, semiring, out)

    @T.prim_func
    def spgemm(
        a: T.handle, a_indptr: T.handle, a_indices: T.handle, b: T.handle, b_indptr: T.handle,
        b_indices: T.handle, c: T.handle, m: size, l: size, n: size, a_nnz: size, b_nnz: size,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        J = T.sparse_variable(I, (l, a_nnz), (a_indptr, a_indices), idtype)
        L = T.dense_fixed(l, idtype)
        K = T.sparse_variable(L, (n, b_nnz), (b_indptr, b_indices), idtype)
        N = T.dense_fixed(n, idtype)
        A = T.match_sparse_buffer(a, (I, J), dtype)
        B = T.match_sparse_buffer(b, (L, K), dtype)
        C = T.match_sparse_buffer(c, (I, N), out)
        with T.sp_iter([I, J, T.attach(K, J)], "SRS", "spgemm") as [i, j, k]:
            with T.init():
                C[i, k] = first
            C[i, k] = reduced(how, C[i, k], term(A[i, j], B[j, k]))

    return spgemm


@cache
def combined_program(
    op: str, count: int, gathered: bool, dtype: str, out: str, idtype: str
) -> SparseFunc:
    """C = A0 + A1 + ..., or another of `COMBINED`, where any of them stores something, or all do.

    gathered : a sum iterates over one operand after the other, and adds to a workspace, instead of
        over all of them at once

    a0, a1, ... : (a0_nnz,), ... ; c : (m, n)
    a0_indptr, a0_indices, ... : patterns, (m, n), in CSR
    """
    over, join = COMBINED[op]
    names = [f"a{q}" for q in range(count)]
    params = [f"{a}: T.handle, {a}_indptr: T.handle, {a}_indices: T.handle" for a in names]
    sizes = ", ".join(f"{x}: T.{idtype}" for x in ("m", "n", *(f"{a}_nnz" for a in names)))
    lines = [f'I = T.dense_fixed(m, "{idtype}")', f'N = T.dense_fixed(n, "{idtype}")']
    for a in names:
        arrays = f"(n, {a}_nnz), ({a}_indptr, {a}_indices)"
        lines.append(f'J{a} = T.sparse_variable(I, {arrays}, "{idtype}")')
        lines.append(f'{a.upper()} = T.match_sparse_buffer({a}, (I, J{a}), "{dtype}")')
    lines.append(f'C = T.match_sparse_buffer(c, (I, N), "{out}")')
    terms = [f'T.cast({a.upper()}[i, j], "{out}")' for a in names]

    def iteration(axes: str, name: str, value: str) -> list[str]:
        return [f'with T.sp_iter([I, {axes}], "SS", "{name}") as [i, j]:', f"    C[i, j] = {value}"]

    if gathered:
        lines += iteration("N", "zero", f'T.cast(0, "{out}")')
        signs = ["+", *("-" if op == "subtract" else "+" for _ in names[1:])]
        for a, term, sign in zip(names, terms, signs, strict=True):
            lines += iteration(f"J{a}", f"{op}_{a}", f"C[i, j] {sign} {term}")
    else:
        members = ", ".join(f"J{a}" for a in names)
        axes = f"T.{over}({members})" if count > 1 else members
        lines += iteration(axes, op, reduce(join, terms))
    head = f"@T.prim_func\ndef {op}({', '.join(params)}, c: T.handle, {sizes}):"
    return from_source("\n    ".join([head, *lines]))


@cache
def kron_program(dtype: str, out: str, idtype: str) -> Any:
    """The Kronecker product: blocks of B, each times an element of A.

    a : (a_nnz,) ; b : (b_nnz,) ; c : the values of C, whose pattern is assembled
    a_indptr, a_indices, b_indptr, b_indices : patterns, (m, n) and (p, q), in CSR
    """
    size = getattr(T, idtype)

    @T.prim_func
    def kron(
        a: T.handle, a_indptr: T.handle, a_indices: T.handle, b: T.handle, b_indptr: T.handle,
        b_indices: T.handle, c: T.handle, c_indptr: T.handle, c_indices: T.handle, m: size, n: size,
        p: size, q: size, a_nnz: size, b_nnz: size,
    ) -> None:  # fmt: skip
        I1 = T.dense_fixed(m, idtype)
        J1 = T.sparse_variable(I1, (n, a_nnz), (a_indptr, a_indices), idtype)
        I2 = T.dense_fixed(p, idtype)
        J2 = T.sparse_variable(I2, (q, b_nnz), (b_indptr, b_indices), idtype)
        I = T.dense_fixed(m * p, idtype)
        J = T.sparse_variable(I, (n * q, None), (c_indptr, c_indices), idtype)
        A = T.match_sparse_buffer(a, (I1, J1), dtype)
        B = T.match_sparse_buffer(b, (I2, J2), dtype)
        C = T.match_sparse_buffer(c, (I, J), out)
        with T.sp_iter([I1, I2, J1, J2], "SSSS", "kron") as [i1, i2, j1, j2]:
            C[i1 * p + i2, j1 * q + j2] = T.cast(A[i1, j1], out) * T.cast(B[i2, j2], out)

    return kron


@cache
def kron_values_program(dtype: str, idtype: str) -> Any:
    """The values of a Kronecker product at a pattern that is given, an element at a time.

    x0 : (x0_nnz,) of A ; x1 : (x1_nnz,) of B ; out : (nnz,)
    indptr, indices, x0_indptr, ... : patterns, (m, n), (x0_m, x0_n) and (p, q), in CSR
    """
    size = getattr(T, idtype)

    @T.prim_func
    def kron_values(
        x0: T.handle, x1: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
        x0_indptr: T.handle, x0_indices: T.handle, x1_indptr: T.handle, x1_indices: T.handle,
        m: size, n: size, nnz: size, x0_m: size, x0_n: size, p: size, q: size, x0_nnz: size,
        x1_nnz: size,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        K = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        I1 = T.dense_fixed(x0_m, idtype)
        J1 = T.sparse_variable(I1, (x0_n, x0_nnz), (x0_indptr, x0_indices), idtype)
        I2 = T.dense_fixed(p, idtype)
        J2 = T.sparse_variable(I2, (q, x1_nnz), (x1_indptr, x1_indices), idtype)
        A = T.match_sparse_buffer(x0, (I1, J1), dtype)
        B = T.match_sparse_buffer(x1, (I2, J2), dtype)
        C = T.match_sparse_buffer(out, (I, K), dtype)
        with T.sp_iter([T.fuse(I, K)], "SS", "values") as [i, k]:
            C[i, k] = A[i // p, k // q] * B[i % p, k % q]

    return kron_values


@cache
def product_values_program(semiring: str, dtype: str, idtype: str) -> Any:
    """The values of C = A B over a semiring at a pattern that is given, an element at a time.

    x0 : (x0_nnz,) of A ; x1 : (x1_nnz,) of B, in any order ; out : (nnz,)
    indptr, indices, x0_indptr, x0_indices : patterns of C, (m, n), and A, (m, l), in CSR
    x1_indptr, x1_indices, x1_places : that of B, (l, n), by columns (CSC), and where its elements
        are in x1
    """
    how, _ = SEMIRINGS[semiring]
    size, first = getattr(T, idtype), first_value(semiring, dtype)
    term = partial(term_of, semiring, dtype)

    @T.prim_func
    def spgemm_values(
        x0: T.handle, x1: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
        x0_indptr: T.handle, x0_indices: T.handle, x1_indptr: T.handle, x1_indices: T.handle,
        x1_places: T.handle, m: size, l: size, n: size, nnz: size, x0_nnz: size, x1_nnz: size,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        K = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J = T.sparse_variable(I, (l, x0_nnz), (x0_indptr, x0_indices), idtype)
        N = T.dense_fixed(n, idtype)
        L = T.sparse_variable(N, (l, x1_nnz), (x1_indptr, x1_indices), idtype)
        E = T.dense_fixed(x1_nnz, idtype)
        A = T.match_sparse_buffer(x0, (I, J), dtype)
        B = T.match_sparse_buffer(x1, (E,), dtype)
        P = T.match_sparse_buffer(x1_places, (N, L), idtype)
        C = T.match_sparse_buffer(out, (I, K), dtype)
        with T.sp_iter([T.fuse(I, K)], "SS", "begun") as [i, k]:
            C[i, k] = first
        with T.sp_iter(
            [T.fuse(I, K), T.intersect(J, T.attach(L, K))], "SSR", "values"
        ) as [i, k, j]:  # fmt: skip
            C[i, k] = reduced(how, C[i, k], term(A[i, j], B[P[k, j]]))

    return spgemm_values


@cache
def product_elements_program(semiring: str, dtype: str, sums: str, idtype: str) -> Any:
    """The values of C = A B over a semiring at a pattern that is given, where B is by columns.

    x0 : (x0_nnz,) of A ; x1 : (x1_nnz,) of B ; out : (nnz,) of C, in the type `sums`
    indptr, indices, x0_indptr, x0_indices : patterns of C, (m, n), and A, (m, l), in CSR
    x1_indptr, x1_indices : that of the transposed B, (n, l), in CSR
    """
    how, _ = SEMIRINGS[semiring]
    size, first = getattr(T, idtype), first_value(semiring, sums)
    term = partial(term_of, semiring, sums)

    @T.prim_func
    def spgemm_elements(
        x0: T.handle, x1: T.handle, out: T.handle, indptr: T.handle, indices: T.handle,
        x0_indptr: T.handle, x0_indices: T.handle, x1_indptr: T.handle, x1_indices: T.handle,
        m: size, l: size, n: size, nnz: size, x0_nnz: size, x1_nnz: size,
    ) -> None:  # fmt: skip
        I = T.dense_fixed(m, idtype)
        K = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        J = T.sparse_variable(I, (l, x0_nnz), (x0_indptr, x0_indices), idtype)
        N = T.dense_fixed(n, idtype)
        L = T.sparse_variable(N, (l, x1_nnz), (x1_indptr, x1_indices), idtype)
        A = T.match_sparse_buffer(x0, (I, J), dtype)
        B = T.match_sparse_buffer(x1, (N, L), dtype)
        C = T.match_sparse_buffer(out, (I, K), sums)
        with T.sp_iter(
            [I, K, T.intersect(J, T.attach(L, K))], "SSR", "elements"
        ) as [i, k, j]:  # fmt: skip
            with T.init():
                C[i, k] = first
            C[i, k] = reduced(how, C[i, k], term(A[i, j], B[k, j]))

    return spgemm_elements


@cache
def product_terms_program(semiring: str, dtype: str, sums: str, idtype: str) -> Any:
    """The values of C = A B over a semiring where it is known which elements their terms are of.

    x0 : (x0_nnz,) of A ; x1 : (x1_nnz,) of B ; out : (nnz,) of C, in the type `sums`
    begins : (nnz + 1,), where the terms of each element of C begin
    x0_places, x1_places : (terms,) elements of A, which increase for each of C, and of B
    """
    how, _ = SEMIRINGS[semiring]
    size, first = getattr(T, idtype), first_value(semiring, sums)
    term = partial(term_of, semiring, sums)

    @T.prim_func
    def spgemm_terms(
        x0: T.handle, x1: T.handle, out: T.handle, begins: T.handle, x0_places: T.handle,
        x1_places: T.handle, nnz: size, terms: size, x0_nnz: size, x1_nnz: size,
    ) -> None:  # fmt: skip
        E = T.dense_fixed(nnz, idtype)
        S = T.sparse_variable(E, (x0_nnz, terms), (begins, x0_places), idtype)
        J = T.dense_fixed(x0_nnz, idtype)
        L = T.dense_fixed(x1_nnz, idtype)
        A = T.match_sparse_buffer(x0, (J,), dtype)
        B = T.match_sparse_buffer(x1, (L,), dtype)
        P = T.match_sparse_buffer(x1_places, (E, S), idtype)
        C = T.match_sparse_buffer(out, (E,), sums)
        with T.sp_iter([E, S], "SR", "terms") as [e, s]:
            with T.init():
                C[e] = first
            C[e] = reduced(how, C[e], term(A[s], B[P[e, s]]))

    return spgemm_terms


@cache
def product_visits_program(semiring: str, dtype: str, sums: str, idtype: str) -> Any:
    """The values of C = A B over a semiring, of terms in the order of A's elements.

    x0 : (x0_nnz,) of A ; x1 : (x1_nnz,) of B ; out : (nnz,) of C, in the type `sums`
    begins : (parts + 1,), terms of parts that have no element of C in common
    places, x0_places, x1_places : (terms,) elements of C, of A and of B
    """
    how, _ = SEMIRINGS[semiring]
    size, first = getattr(T, idtype), first_value(semiring, sums)
    term = partial(term_of, semiring, sums)

    @T.prim_func
    def spgemm_visits(
        x0: T.handle, x1: T.handle, out: T.handle, begins: T.handle, places: T.handle,
        x0_places: T.handle, x1_places: T.handle, nnz: size, parts: size, terms: size, x0_nnz: size,
        x1_nnz: size,
    ) -> None:  # fmt: skip
        P = T.dense_fixed(parts, idtype)
        S = T.dense_variable(P, (terms, terms), begins, idtype)
        E = T.dense_fixed(nnz, idtype)
        J = T.dense_fixed(x0_nnz, idtype)
        L = T.dense_fixed(x1_nnz, idtype)
        A = T.match_sparse_buffer(x0, (J,), dtype)
        B = T.match_sparse_buffer(x1, (L,), dtype)
        X = T.match_sparse_buffer(places, (P, S), idtype)
        X0 = T.match_sparse_buffer(x0_places, (P, S), idtype)
        X1 = T.match_sparse_buffer(x1_places, (P, S), idtype)
        C = T.match_sparse_buffer(out, (E,), sums)
        with T.sp_iter([E], "S", "begun") as [e]:
            C[e] = first
        with T.sp_iter([P, S], "SS", "visits") as [p, s]:
            C[X[p, s]] = reduced(how, C[X[p, s]], term(A[X0[p, s]], B[X1[p, s]]))

    return spgemm_visits


@cache
def product_factors_program(count: int, dtype: str, sums: str, idtype: str) -> SparseFunc:
    """The values of a product by element where it is known which elements its factors are.

    x0, x1, ... : (x0_nnz,), ... ; out : (nnz,), in the type `sums`
    x0_places, x1_places, ... : (nnz,) elements of x0, of x1, ...
    """
    each = range(count)
    params = [f"x{q}: T.handle, x{q}_places: T.handle" for q in each]
    sizes = ", ".join(f"{x}: T.{idtype}" for x in ("nnz", *(f"x{q}_nnz" for q in each)))
    lines = [f'E = T.dense_fixed(nnz, "{idtype}")']
    for q in each:
        lines.append(f'J{q} = T.dense_fixed(x{q}_nnz, "{idtype}")')
        lines.append(f'X{q} = T.match_sparse_buffer(x{q}, (J{q},), "{dtype}")')
        lines.append(f'P{q} = T.match_sparse_buffer(x{q}_places, (E,), "{idtype}")')
    lines.append(f'C = T.match_sparse_buffer(out, (E,), "{sums}")')
    value = " * ".join(f'T.cast(X{q}[P{q}[e]], "{sums}")' for q in each)
    lines += ['with T.sp_iter([E], "S", "elements") as [e]:', f"    C[e] = {value}"]
    head = f"@T.prim_func\ndef multiply_factors({', '.join(params)}, out: T.handle, {sizes}):"
    return from_source("\n    ".join([head, *lines]))


@cache
def combined_values_program(op: str, count: int, dtype: str, idtype: str) -> SparseFunc:
    """The values of C = A0 + A1 + ..., or another of `COMBINED`, at a pattern that is given.

    x0, x1, ... : (x0_nnz,), ... ; out : (nnz,)
    indptr, indices, x0_indptr, x0_indices, ... : patterns, (m, n), in CSR
    """
    _, join = COMBINED[op]
    names = [f"x{q}" for q in range(count)]
    params = [f"{x}: T.handle" for x in (*names, "out", "indptr", "indices")]
    params += [f"{x}_{kind}: T.handle" for x in names for kind in ("indptr", "indices")]
    params += [f"{x}: T.{idtype}" for x in ("m", "n", "nnz", *(f"{x}_nnz" for x in names))]
    lines = [
        f'I = T.dense_fixed(m, "{idtype}")',
        f'K = T.sparse_variable(I, (n, nnz), (indptr, indices), "{idtype}")',
        f'C = T.match_sparse_buffer(out, (I, K), "{dtype}")',
    ]
    for x in names:
        arrays = f"(n, {x}_nnz), ({x}_indptr, {x}_indices)"
        lines.append(f'J{x} = T.sparse_variable(I, {arrays}, "{idtype}")')
        lines.append(f'{x.upper()} = T.match_sparse_buffer({x}, (I, J{x}), "{dtype}")')
    value = reduce(join, [f"{x.upper()}[i, k]" for x in names])
    lines += ['with T.sp_iter([T.fuse(I, K)], "SS", "values") as [i, k]:', f"    C[i, k] = {value}"]
    head = f"@T.prim_func\ndef {op}_values({', '.join(params)}):"
    return from_source("\n    ".join([head, *lines]))


_of_matrices = partial(
    Operator, problem=SparseResult, reads_values=True, reference=None, on="matrices"
)
for _name in ELEMENTWISE:
    register(
        _of_matrices(
            _name, title="sparse matrices by element, to a sparse one", reductions=(),
            dims={"b": "mn", "out": "mn"}, options=("mask",),
        )
    )  # fmt: skip
register(
    _of_matrices(
        KRON, title="Kronecker product of sparse matrices", reductions=(),
        dims={"b": "pq", "out": "uv"}, options=(),
    )
)  # fmt: skip
register(
    _of_matrices(
        "inner", title="inner products of sparse rows",
        reductions=tuple(SEMIRINGS), dims={"b": "ln", "out": "ml"}, options=("semiring", "mask"),
    )
)  # fmt: skip
register(
    _of_matrices(
        "spgemm", title="sparse times sparse, to a sparse one", reductions=tuple(SEMIRINGS),
        dims={"b": "nl", "out": "ml"}, options=("semiring", "mask"),
    )
)  # fmt: skip
