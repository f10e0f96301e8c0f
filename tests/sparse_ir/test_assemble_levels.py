"""Sparse results of any levels, written in any order: values, patterns, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsetir
from pairs import by_turns
from refusals import refuse
from sparse_programs import Tensors
from sparsetir.runtime.assembled_levels import CsfArrays, LevelsKernel

ADDS, PRODUCT = "{C} = {C} + ", "{C} = {C} + {A} * {B}"


def add_dcsr(**how: Any) -> Tensors:
    case = Tensors("A=ss:ij", "B=ss:ij", **how).result("ss", "ij").declare("R = T.union(IA, IB)")
    return case.iterate("o=O; i=R; j=T.union(JA, JB)", "SSS", "{C} = {A} + {B}")


def add_csf(**how: Any) -> Tensors:
    case = Tensors("A=sss:ijk", "B=sss:ijk", **how).result("sss", "ijk")
    case.declare("R = T.union(IA, IB)", "S = T.union(JA, JB)")
    return case.iterate("o=O; i=R; j=S; k=T.union(KA, KB)", "SSSS", "{C} = {A} + {B}")


def tensor_times_matrix(**how: Any) -> Tensors:
    case = Tensors("A=dss:ijk", "B=ds:kl", **how).result("dss", "ijl")
    return case.iterate("i=IA; j=JA; k=KA; l=T.attach(LB, KA)", "SSRS", PRODUCT, "0.0")


def tensor_times_features(**how: Any) -> Tensors:
    case = Tensors("A=sss:ijk", "B=dd:kl", **how).result("ssd", "ijl")
    return case.iterate("o=O; i=IA; j=JA; k=KA; l=LC", "SSSRS", PRODUCT, "0.0")


def outer_products(**how: Any) -> Tensors:
    case = Tensors("A=ds:ki", "B=ds:kj:KA", **how).result("ds", "ij")
    return case.iterate("k=KA; i=IA; j=JB", "RSS", PRODUCT, "0.0")


def transposed(**how: Any) -> Tensors:
    case = Tensors("A=ds:ij", **how).result("ds", "ji")
    return case.iterate("i=IA; j=JA", "SS", "{C} = {A}")


def kron(**how: Any) -> Tensors:
    case = Tensors("A=ds:ij", "B=ds:kl", **how).result("dsss", "ijkl")
    return case.iterate("i=IA; j=JA; k=KB; l=LB", "SSSS", "{C} = {A} * {B}")


def column_sums(**how: Any) -> Tensors:
    case = Tensors("A=ds:ij", **how).result("s", "j")
    return case.iterate("i=IA; j=JA; o=O", "RSS", ADDS + "{A}", "0.0")


def sum_and_product(**how: Any) -> Tensors:
    case = Tensors("A=ds:ik", "B=ds:kj", "D=ds:ij:IA", **how).result("ds", "ij")
    case.iterate("i=IA; j=JD", "SS", "{C} = {D}")
    return case.iterate("i=IA; k=KA; j=T.attach(JB, KA)", "SRS", PRODUCT)


def largest_under_condition(**how: Any) -> Tensors:
    case = Tensors("A=ds:ik", "B=ds:kj", **how).result("ss", "ij")
    body = "{C} = T.max({C}, {A} * {B})"
    loops = "o=O; i=IA; k=KA; j=T.attach(JB, KA)"
    return case.iterate(loops, "SSRS", body, "3.0", "{A} > 2.5 and j > i")


def rows_with_large_sums(**how: Any) -> Tensors:
    """A condition on a buffer that another iteration writes."""
    case = Tensors("A=ss:ij", **how).result("ss", "ji").declare(
        "I = T.dense_fixed(ni, 'int32')", "X = T.alloc_sparse_buffer((I,), 'float32')"
    )  # fmt: skip
    loops = 'with T.sp_iter([O, IA, JA], "SSR", "sums") as [o, i, j]:'
    sums = ["    with T.init():", "        X[i] = 0.0", "    X[i] = X[i] + A[o, i, j]"]
    case.declare(loops, *sums)
    return case.iterate("o=O; i=IA; j=JA", "SSS", "{C} = {A} - X[i]", condition="X[i] > 5.5")


def product(of: str, case: Tensors, *names: str) -> tuple[Any, Any]:
    """Values and pattern of a sum of products."""
    masks = [case.mask[n].astype(int) for n in names]
    return np.einsum(of, *(case.dense[n] for n in names)), np.einsum(of, *masks) > 0


def union(case: Tensors) -> tuple[Any, Any]:
    return case.dense["A"] + case.dense["B"], case.mask["A"] | case.mask["B"]


def with_features(case: Tensors) -> tuple[Any, Any]:
    return np.einsum("ijk,kl->ijl", case.dense["A"], case.dense["B"]), case.mask["A"].any(axis=2)


def added(case: Tensors) -> tuple[Any, Any]:
    values, mask = product("ik,jk->ij", case, "A", "B")
    return case.dense["D"] + values, case.mask["D"] | mask


def largest(case: Tensors) -> tuple[Any, Any]:
    pairs = np.einsum("ik,jk->ijk", case.dense["A"] * (case.dense["A"] > 2.5), case.dense["B"])
    pairs *= np.triu(np.ones(pairs.shape[:2], int), 1)[:, :, None]
    mask = pairs.any(axis=2)
    return np.where(mask, np.maximum(pairs.max(axis=2), 3), 0), mask


def large_rows(case: Tensors) -> tuple[Any, Any]:
    sums = case.dense["A"].sum(axis=1)[:, None]
    mask = case.mask["A"] & (sums > 5.5)
    return np.where(mask, case.dense["A"] - sums, 0), mask


CASES: dict[Callable[..., Tensors], Callable[[Tensors], tuple[Any, Any]]] = {
    add_dcsr: union,
    add_csf: union,
    tensor_times_matrix: lambda case: product("ijk,kl->ijl", case, "A", "B"),
    tensor_times_features: with_features,
    outer_products: lambda case: product("ik,jk->ij", case, "A", "B"),
    transposed: lambda case: (case.dense["A"], case.mask["A"]),
    kron: lambda case: product("ij,kl->ijkl", case, "A", "B"),
    column_sums: lambda case: product("ij->j", case, "A"),
    sum_and_product: added,
    largest_under_condition: largest,
    rows_with_large_sums: large_rows,
}


def inputs(make: Callable[..., Tensors]) -> list[Tensors]:
    """Operands with elements, without, and full ones."""
    return [make(seed=n, density=d) for n, d in enumerate((0.4, 0.0, 1.0, 0.15))]


@pytest.mark.parametrize("make", by_turns(CASES, 2), ids=lambda make: make.__name__)
@pytest.mark.default("outer_products", "sum_and_product", "rows_with_large_sums")
def test_results(make: Callable[..., Tensors]) -> None:
    """Values and patterns are NumPy's: what is written is stored, and nothing else."""
    kernel = sparsetir.build_assembled(sparsetir.from_source(make().text))
    assert isinstance(kernel, LevelsKernel)
    for case in inputs(make):
        dense, mask = case.decoded(kernel(**case.args))
        values, stored = CASES[make](case)
        np.testing.assert_array_equal(mask, stored)
        np.testing.assert_array_equal(dense, values)


# How elements combine, what they begin with, and whether the visits of one are no combination.
UPDATES = {
    "sum": ("{C} + {A} * {B}", "0", np.add, False), "many": ("{C} * {A}", "1", np.multiply, False),
    "least": ("T.min({A}, {C})", "3", np.minimum, False), "last": ("{A} * {B}", "", None, False),
    "sum from 2": ("{C} + {A} * {B}", "2", np.add, True),
    "halves": ("({C} + {A}) // 2", "0", lambda c, a: (c + a) // 2, True),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("case", UPDATES)
@pytest.mark.default("sum-float32", "many-int64", "least-float32")
def test_rows_that_are_filled(case: str, dtype: str) -> None:
    """Elements that are written several times, in any order, and once; from the second call on."""
    text, first, update, listed = UPDATES[case]
    if "//" in text and dtype != "int64":
        pytest.skip("divisions of integers")
    t = Tensors("A=ds:ki", "B=ds:kj:KA").result("ds", "ij")
    init = first and f"T.{dtype}({first})"
    t.iterate("k=KA; i=IA; j=JB", "RSS" if init else "SSS", "{C} = " + text, init)
    func = sparsetir.from_source(t.text.replace(",))", f",), '{dtype}')").replace(
        "JB))", f"JB), '{dtype}')").replace("IA))", f"IA), '{dtype}')").replace(
        "JC))", f"JC), '{dtype}')"))  # fmt: skip
    kernel = sparsetir.build_assembled(func)
    assert isinstance(kernel, LevelsKernel)
    for n, density in enumerate((0.4, 0.0, 1.0, 0.15)):
        t = Tensors("A=ds:ki", "B=ds:kj:KA", seed=n, density=density).result("ds", "ij")
        want, mask = np.zeros((6, 7)), np.zeros((6, 7), bool)
        for k, i, j in np.argwhere(t.mask["A"].T[:, :, None] & t.mask["B"].T[:, None]):
            a, b = t.dense["A"][i, k], t.dense["B"][j, k]
            term = a if "{B}" not in text else a * b
            held = want[i, j] if mask[i, j] else float(first or 0)
            want[i, j], mask[i, j] = update(held, term) if update else term, True
        args = {**t.args, "a": t.args["a"].astype(dtype), "b": t.args["b"].astype(dtype)}
        dense, stored = t.decoded(kernel(**args))
        np.testing.assert_array_equal(stored, mask)
        np.testing.assert_array_equal(dense, want)
    assert kernel._by_rows is not listed


def test_more_than_there_is_room_for(monkeypatch: Any) -> None:
    """The coordinates are listed again, with the same results as in one go."""
    case = add_csf(idtype="int64")
    kernel = sparsetir.build_assembled(sparsetir.from_source(case.text))
    assert isinstance(kernel, LevelsKernel)
    values, stored = CASES[add_csf](case)
    for room in (0, 1, stored.sum(), 999):
        kernel._room = room
        result = kernel(**case.args)
        dense, mask = case.decoded(result)
        np.testing.assert_array_equal(mask, stored)
        np.testing.assert_array_equal(dense, values)
        assert {x.dtype.name for level in result.levels for x in level} == {"int64"}


def test_coordinates_too_long_for_one_number() -> None:
    """Axes whose lengths have a product of 2^63 or more."""
    sizes = dict.fromkeys("ij", 1 << 55)
    t = Tensors(idtype="int64", sizes=sizes).result("ss", "ij")
    t.declare(
        "E = T.dense_fixed(3, 'int64')", "P = T.match_sparse_buffer(p, (E,), 'int64')",
        "Q = T.match_sparse_buffer(q, (E,), 'int64')",
    )  # fmt: skip
    t.args |= {"p": np.array([5, 1 << 54, 5]), "q": np.array([1 << 54, 7, 3])}
    t.iterate("o=O; e=E", "SS", "C[o, P[e], Q[e]] = T.cast(e, 'float32')")
    (rows, columns), values = sparsetir.build_assembled(sparsetir.from_source(t.text))(**t.args)
    assert rows[1].tolist() == [5, 1 << 54] and columns[0].tolist() == [0, 2, 3]
    assert columns[1].tolist() == [3, 1 << 54, 7] and values.tolist() == [2, 0, 1]


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    t = tensor_times_matrix()
    kernel = sparsetir.build_assembled(sparsetir.from_source(t.text))
    args = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in t.args.items()}
    result = kernel(**args)
    arrays = [result.values, *(x for level in result.levels for x in level)]
    assert all(isinstance(x, torch.Tensor) for x in arrays)
    numpy = CsfArrays([(p.numpy(), i.numpy()) for p, i in result.levels], result.values.numpy())
    np.testing.assert_array_equal(t.decoded(numpy)[0], CASES[tensor_times_matrix](t)[0])


def with_lines(*lines: str) -> Any:
    """A kernel of a program with these lines."""
    case = Tensors("A=ss:ij").result("ss", "ij").declare(*lines)
    case.handles += ["d_ptr", "d_idx"]
    return sparsetir.build_assembled(sparsetir.from_source(case.text))


LOOPS = 'with T.sp_iter([O, IA, JA], "SSS", "{}") as [o, i, j]:'


def test_refusals() -> None:
    case = add_dcsr()
    kernel = sparsetir.build_assembled(sparsetir.from_source(case.text))
    one, two = LOOPS.format("one"), LOOPS.format("two")
    init = ["    with T.init():", "        C[o, i, j] = 1.0"]
    both = [one, *init, "    C[o, i, j] = A[o, i, j]", two, *init, "    C[o, i, j] = 2.0"]
    of_i = [one, *init[:1], "        C[o, i, j] = T.cast(i, 'float32')", "    C[o, i, j] = 2.0"]
    reads = [one, "    if C[o, i, j] < 1.0:", "        C[o, i, j] = A[o, i, j]"]
    apart = ["N = T.dense_fixed(nj)", "M = T.sparse_variable(N, (nj, None), (d_ptr, d_idx))"]
    apart += [one, "    C[o, i, j] = 1.0"]
    outputs = [one, "    C[o, i, j] = 1.0", "    A[o, i, j] = 1.0"]
    without = {k: v for k, v in case.args.items() if k != "a"}
    refuse(
        """
        with_lines(*both)  # ValueError: build_assembled: function 'f': result 'C': expected a
            T.init() in the first iteration that writes it alone .. got those of ['one', 'two']
        with_lines(*of_i)  # ValueError: expected T.init() to write a constant where the body writes
        with_lines(*reads)
            # ValueError: expected where it is written not to depend on what it holds
        with_lines(*outputs)  # ValueError: expected one result of the program, got ['A', 'C']
        with_lines(*apart)
            # Exception: axis 'M': nnz None .. expected it under a dense_fixed axis, or the one such
                axis before it
        kernel(**case.args, d=3)  # TypeError: no argument 'd'
        kernel(**without)  # TypeError: argument 'a' is missing
        kernel(**{**case.args, "a1_idx": case.args["a1_idx"][::-1].copy()})
            # StructureError: strictly increasing
        sparsetir.build_assembled(sparsetir.from_source(case.text), "A")
            # ValueError: assemble: function 'f': expected one axis to assemble, got ['IC', 'JC']
        sparsetir.build_assembled(sparsetir.from_source(case.text), target="cuda")
            # ValueError: argument 'target': expected a CPU, got 'cuda'
        sparsetir.build(sparsetir.from_source(case.text))  # ValueError: got None for 'IC'
        """,
        globals(),
        locals(),
    )


def test_more_elements_than_an_index_numbers(monkeypatch: Any) -> None:
    case = add_dcsr()
    kernel = sparsetir.build_assembled(sparsetir.from_source(case.text))
    monkeypatch.setattr(kernel, "most", 3)
    with pytest.raises(OverflowError, match="f: the result has .* expected int64 indices"):
        kernel(**case.args)
