"""Sparse results: programs that assemble them, their kernels, what is refused."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tvm_ffi

import sparsetir
from drawing import examples
from merged_programs import Drawn, products, programs
from pairs import by_default, by_turns
from programs import PROGRAMS, copied
from programs.merged import dense_of, stored_of
from refusals import refuse
from small import text_of
from sparse_programs import Tensors
from sparsetir.runtime import assembled, pool
from sparsetir.runtime.assembled import AssembledKernel, Bounds, CsrArrays
from sparsetir.runtime.assembled_levels import build_assembled
from sparsetir.sparse_ir.assemble import assemble
from stage2 import golden

RESULT = "c_bounds", "c_width"  # of `bound`
DRAWN = programs().filter(lambda drawn: re.search(r"C\[i, j", drawn.text) is not None)


def given_to(program: str, case: str = "small", dtype: str = "float32", idtype: str = "int32"):
    args = PROGRAMS[program].inputs(np.random.default_rng(1), case, dtype, idtype)
    return {name: x for name, x in args.items() if name != "c"}


def built(program: str, dtype: str = "float32", idtype: str = "int32") -> Any:
    return build_assembled(PROGRAMS[program].make(dtype, idtype), "C")


def expected_of(program: str, args: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The mask of a result's elements, and the dense result."""
    if program == "add_csr":
        mask = stored_of(args, "a") | stored_of(args, "b")
        return mask, dense_of(args, "a") + dense_of(args, "b")
    left, right = {**args, "n": args["l"]}, {**args, "m": args["l"]}
    mask = stored_of(left, "a").astype(int) @ stored_of(right, "b").astype(int) > 0
    return mask, dense_of(left, "a") @ dense_of(right, "b")


def open_text(program: str, dtype: str = "float32", idtype: str = "int32") -> str:
    """The same with an axis that is assembled."""
    text = PROGRAMS[program].make(dtype, idtype).script()
    text = re.sub(r"dense_fixed\(n,", "sparse_variable(I, (n, None), (c_ptr, c_idx),", text)
    return text.replace("c: T.handle,", "c: T.handle, c_ptr: T.handle, c_idx: T.handle,")


def check(result: CsrArrays, mask: np.ndarray, dense: np.ndarray, text: str = "") -> None:
    np.testing.assert_array_equal(np.diff(result.indptr), mask.sum(axis=1), text)
    np.testing.assert_array_equal(result.indices, np.nonzero(mask)[1], text)
    np.testing.assert_array_equal(result.values, dense[mask], text)


def check_kernel(func: Any, drawn: Drawn, mask: np.ndarray, dense: np.ndarray) -> None:
    """The result, with short rows in another way, too; and the values of its pattern once more."""
    with mock.patch.object(sparsetir.sparse_ir.assemble, "SHORT", 3):
        kernel = build_assembled(func, "C")
    args = {k: v for k, v in drawn.arguments.items() if k != "c"}
    result, whole = kernel(**args), kernel.bound.completed(args, *RESULT)
    each = [kernel.bounds(whole, kernel.bound), kernel.bounds(whole)]
    made_of = [kernel.assembled(whole, bounds, levels) for bounds in each for levels in (None, 0)]
    for other in (result, *made_of):
        check(other, mask, dense, drawn.text)
    again = kernel.values_of(result.indptr, result.indices, **args)
    np.testing.assert_array_equal(again, result.values, drawn.text)


@examples(3, 200, drawn=DRAWN)
def test_random_programs(drawn: Drawn) -> None:
    """The sparse result stores what is visited, in order; the rest of the dense one is not."""
    func = sparsetir.from_source(drawn.text)
    dense = copied(drawn.arguments)
    sparsetir.interpret(func, dense)
    visited = copied(drawn.arguments)  # 1 where anything is, whatever the values
    term = re.sub(r"(C\[[^]]*\] = ).*$", r"\g<1>1.0", drawn.text.splitlines()[-1])
    plain = [line for line in drawn.text.splitlines()[:-1] if "T.init" not in line]
    plain = [line for line in plain if not re.search(r"C\[[^]]*\] = 0.0", line)]
    sparsetir.interpret(sparsetir.from_source("\n".join([*plain, term])), visited)
    mask = visited["c"] == 1
    mask = mask.any(axis=2) if mask.ndim == 3 else mask
    check_kernel(func, drawn, mask, dense["c"])


@examples(3, 200, product=products())
def test_random_products(product: tuple[Drawn, np.ndarray]) -> None:
    """The interpreter's results, where there is an element; and again at that pattern."""
    drawn, mask = product
    func = sparsetir.from_source(drawn.text)
    dense = copied(drawn.arguments)
    sparsetir.interpret(func, dense)
    check_kernel(func, drawn, mask, dense["c"])


@pytest.mark.parametrize("program", ["add_csr", "spgemm"])
def test_the_programs_are_of_the_language(program: str) -> None:
    """Programs print and parse back; the interpreter fills as kernels do; their text is known."""
    parts = assemble(PROGRAMS[program].make("float32", "int32"), "C")
    for func in parts[:7]:
        assert tvm_ffi.structural_equal(sparsetir.from_source(func.script()), func)
    assert parts.fill.script() == golden(f"{program}_fill")
    args = given_to(program)
    mask, dense = expected_of(program, args)
    rows, room = args["m"], mask.size
    indices, values = np.full(room, -1, "int32"), np.zeros(room, "float32")
    ends = np.zeros(rows, "int64")
    more = {
        parts.parts: 2, parts.room: room, parts.rows_ptr: np.array([0, 2, rows], "int32"),
        parts.starts: np.array([0, 2 * mask.shape[1], room]), parts.ends: ends,
        parts.indices: indices, parts.values: values,
    }  # fmt: skip
    sparsetir.interpret(parts.fill, {**args, **more})
    counts = [mask[part].sum(axis=1).cumsum() for part in (slice(2), slice(2, None))]
    np.testing.assert_array_equal(ends, np.concatenate(counts))
    first, begin = ends[1], 2 * mask.shape[1]
    places = [*range(first), *range(begin, begin + ends[-1])]
    np.testing.assert_array_equal(indices[places], np.nonzero(mask)[1])
    np.testing.assert_allclose(values[places], dense[mask], rtol=1e-6)


@pytest.mark.parametrize("program", ["add_csr", "spgemm"])
def test_gradients_of_axes_that_are_assembled(program: str) -> None:
    """Gradients take the given pattern, and its nnz."""
    func, args = sparsetir.from_source(open_text(program, "float64")), given_to(program)
    args = {k: v.astype("float64") if k in "ab" else v for k, v in args.items()}
    mask, _ = expected_of(program, args)
    grad = np.where(mask, np.random.default_rng(0).random(mask.shape), 0)
    left, right = dense_of({**args, "n": args.get("l", args["n"])}, "a"), args
    for name in "ab":
        derived = sparsetir.gradient(func, name, transpose=False)
        assert "c_nnz" in [str(p.name) for p in derived.params]
        indptr = np.concatenate([[0], np.cumsum(mask.sum(axis=1))]).astype("int32")
        more = {"c_ptr": indptr, "c_idx": np.nonzero(mask)[1].astype("int32"), "grad_c": grad[mask]}
        more |= {"c_nnz": mask.sum(), f"grad_{name}": np.full(len(args[name]), np.nan)}
        call = {str(p.name): {**args, **more}[str(p.name)] for p in derived.params}
        sparsetir.interpret(derived, call)
        exact = grad
        if program == "spgemm":
            right = dense_of({**args, "m": args["l"]}, "b")
            exact = grad @ right.T if name == "a" else left.T @ grad
        rows = np.repeat(np.arange(len(exact)), np.diff(args[f"{name}_ptr"]))
        np.testing.assert_allclose(call[f"grad_{name}"], exact[rows, args[f"{name}_idx"]])


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize("program", ["add_csr", "spgemm"])
def test_rows_in_parts_and_in_rounds(program: str, idtype: str, monkeypatch: Any) -> None:
    """Rows on several threads, and where memory does not hold all at once."""
    kernel = built(program, "float64", idtype)
    monkeypatch.setattr(assembled, "WORK_OF_A_PART", 1)
    for case in ("small", "empty", "dense_row"):
        args = given_to(program, case, "float64", idtype)
        mask, dense = expected_of(program, args)
        for threads, room in ((1, 1 << 30), (3, 1 << 30), (3, 7), (2, 0)):
            monkeypatch.setattr(assembled, "ROOM", room)
            monkeypatch.setattr(pool, "count", lambda threads=threads: threads)
            result = kernel(**args)
            np.testing.assert_array_equal(np.diff(result.indptr), mask.sum(axis=1))
            np.testing.assert_array_equal(result.indices, np.nonzero(mask)[1])
            np.testing.assert_allclose(result.values, dense[mask], rtol=1e-13)
            assert {x.dtype.name for x in result[:2]} == {idtype}


@pytest.mark.parametrize(("program", "threads", "rounds"), [
    ("add_csr", 1, False), ("add_csr", 3, False), ("add_csr", 1, True), ("spgemm", 1, False),
])  # fmt: skip
def test_bounds_of_rows_are_for_parts(
    program: str, threads: int, rounds: bool, monkeypatch: Any
) -> None:
    """A sum on one thread takes none; results whose size only they tell, and rounds, do."""
    kernel = built(program, "float64", "int32")
    args = given_to(program, "small", "float64", "int32")
    named = kernel.bound.completed(args, "c_bounds", "c_width")
    monkeypatch.setattr(assembled, "WORK_OF_A_PART", 1)
    monkeypatch.setattr(assembled, "ROOM", 1 if rounds else 1 << 30)
    monkeypatch.setattr(pool, "count", lambda: threads)
    whole = kernel.bounds(named).part is not None
    assert whole == (program == "add_csr" and threads == 1 and not rounds)


def test_several_iterations() -> None:
    """Each iteration adds to what the first one sets; the interpreter runs them in turn."""
    func = sparsetir.from_source(TWICE)
    args = given_to("add_csr")
    names = {"b": "a2", "b_ptr": "a2_ptr", "b_idx": "a2_idx", "a_nnz": "nnz", "b_nnz": "nnz2"}
    args = {names.get(name, name): x for name, x in args.items()}
    args["x"] = np.arange(args["m"], dtype="float32")
    dense = {**args, "c": np.full((args["m"], args["n"]), np.nan, "float32")}
    sparsetir.interpret(func, dense)
    b = {**args, "b": args["a2"], "b_ptr": args["a2_ptr"], "b_idx": args["a2_idx"]}
    mask = stored_of(args, "a") | stored_of(b, "b")
    kernel = build_assembled(func, "C")
    result = kernel(**args)
    check(result, mask, dense["c"])
    np.testing.assert_array_equal(
        kernel.values_of(result.indptr, result.indices, **args), result.values
    )


def drawn_pair(seed: int = 0) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Two small matrices as arguments of `PAIR`, and dense; values are of +-1 to 4."""
    rng, args = np.random.default_rng(seed), {}
    pair = [rng.integers(-4, 5, s) * (rng.random(s) < 0.4) for s in ((5, 6), (4, 7))]
    for name, dense in zip(("a", "b"), pair, strict=True):
        ptr = np.concatenate([[0], np.cumsum((dense != 0).sum(axis=1))]).astype("int32")
        args |= {name: dense[dense != 0].astype("float32"), f"{name}_ptr": ptr}
        args |= {f"{name}_idx": np.nonzero(dense)[1].astype("int32")}
    return {**args, "n": 6, "p": 4, "q": 7}, *pair


def test_rows_of_several_loops(monkeypatch: Any) -> None:
    """A Kronecker product: its rows in parts, too, that begin with those of the outer loop."""
    args, a, b = drawn_pair()
    kernel, exact = build_assembled(sparsetir.from_source(KRON)), np.kron(a, b)
    monkeypatch.setattr(assembled, "WORK_OF_A_PART", 1)
    for threads, room in ((1, 1 << 30), (3, 1 << 30), (3, 7), (2, 0)):
        monkeypatch.setattr(assembled, "ROOM", room)
        monkeypatch.setattr(pool, "count", lambda threads=threads: threads)
        check(kernel(**args), exact != 0, exact)
    nothing = {
        **args,
        "b": args["b"][:0],
        "b_ptr": np.zeros(1, "int32"),
        "p": 0,
        "b_idx": args["b_idx"][:0],
    }
    assert kernel(**nothing).indptr.tolist() == [0]
    with pytest.raises(
        ValueError, match="kron: expected a result whose rows one loop iterates over"
    ):
        kernel.values_of(np.zeros(21, "int32"), np.zeros(0, "int32"), **args)


COMPUTED = ["j1 + j2", "2 * j2 - j1", "j2 + 3", "j1 * 7 + (6 - j2)"]


@pytest.mark.parametrize("column", by_default(COMPUTED, "2 * j2 - j1", "j1 * 7 + (6 - j2)"))
@pytest.mark.default("j1 * 7 + (6 - j2)")
def test_columns_that_are_computed(column: str) -> None:
    """Columns in any order, with several visits, and out of range."""
    args, a, b = drawn_pair(1)
    args, b = {**args, "b_ptr": args["b_ptr"][[0, 1, 2, 3, 4, 4]]}, np.vstack([b, 0 * b[:1]])
    text = ROWS.replace("COLUMN", column)
    expected, mask = np.zeros((5, 9)), np.zeros((5, 9), bool)
    for i, j1, j2 in zip(*np.nonzero(a[:, :, None] * b[:, None, :] != 0), strict=True):
        place = eval(column, {"j1": j1, "j2": j2})
        if 0 <= place < 9:
            expected[i, place] += a[i, j1] * b[i, j2]
            mask[i, place] = True
    kernel = build_assembled(sparsetir.from_source(text))
    whole = kernel.bound.completed(args, *RESULT)
    for levels in (None, 0, 1, 2, 3):
        result = kernel.assembled(whole, kernel.bounds(whole, kernel.bound), levels)
        check(result, mask, expected)
    again = kernel.values_of(result.indptr, result.indices, **args)
    np.testing.assert_array_equal(again, result.values)


def dots(**how: Any) -> Tensors:
    """A product of CSR and CSC, which visits all rows and columns."""
    case = Tensors("A=ds:ik", "B=ds:jk", **how).result("ds", "ij").declare("N = T.dense_fixed(nj)")
    loops = "i=IA; j=N; k=T.intersect(KA, T.attach(KB, N))"
    return case.iterate(loops, "SSR", "{C} = {C} + {A} * {B}", "0.0")


def large(**how: Any) -> Tensors:
    case = Tensors("A=ds:ij", **how).result("ds", "ij")
    return case.iterate("i=IA; j=JA", "SS", "{C} = {A}", condition="{A} > 2.5")


def large_with_features(**how: Any) -> Tensors:
    case = Tensors("A=ds:ij", **how).result("dsd", "ijk")
    return case.iterate(
        "i=IA; j=JA; k=KC", "SSS", "{C} = {A}", condition="{A} > T.cast(k, 'float32')"
    )


def above_diagonal(**how: Any) -> Tensors:
    case = Tensors("A=ds:ik", "B=ds:kj", **how).result("ds", "ij")
    loops = "i=IA; k=KA; j=T.attach(JB, KA)"
    return case.iterate(loops, "SRS", "{C} = {C} + {A} * {B}", "0.0", "j > i")


def columns_of_fibers(**how: Any) -> Tensors:
    """Two levels that are merged, one under the other, as the columns of a row."""
    case = Tensors("A=dss:ijk", "B=dss:ijk:IA", **how).result("ds", "il")
    case.loads["C"], case.args["nl"], case.sizes["l"] = "C[i, j * nk + k]", 35, 35
    return case.iterate("i=IA; j=T.union(JA, JB); k=T.union(KA, KB)", "SSS", "{C} = {A} + {B}")


def expected_where_written(name: str, case: Tensors) -> tuple[np.ndarray, np.ndarray]:
    a, b = case.dense["A"], case.dense.get("B")
    if name == "large":
        return np.where(a > 2.5, a, 0), a > 2.5
    if name == "large_with_features":
        mask = a[:, :, None] > np.arange(case.sizes["k"])
        return np.where(mask, a[:, :, None], 0), mask.any(axis=2)
    if name == "columns_of_fibers":
        mask = case.mask["A"] | case.mask["B"]
        return (a + b).reshape(len(a), -1), mask.reshape(len(a), -1)
    result = np.einsum("ik,jk->ij", a, b)
    result = np.triu(result, 1) if name == "above_diagonal" else result
    return result, result > 0


@pytest.mark.parametrize(
    "make", by_turns([dots, large, large_with_features, above_diagonal, columns_of_fibers], 2)
)
@pytest.mark.default("dots", "large_with_features")
def test_what_is_written_is_stored(make: Any) -> None:
    """Other visited places are not stored; short rows are assembled in another way, too."""
    kernel = build_assembled(sparsetir.from_source(make().text))
    assert isinstance(kernel, AssembledKernel)
    for n, density in enumerate((0.4, 0.0, 1.0, 0.15)):
        case = make(seed=n, density=density)
        expected, stored = expected_where_written(make.__name__, case)
        bounds = kernel.bounds(kernel.bound.completed(case.args, *RESULT), kernel.bound)
        for levels in (0, 1, 2, 3):
            dense, mask = case.decoded(kernel.assembled(case.args, bounds, levels))
            np.testing.assert_array_equal(mask, stored)
            np.testing.assert_array_equal(dense, expected)


def test_levels_by_how_many_elements_rows_have() -> None:
    ends, few = np.array([0, 60, 60, 60, 160]), 40 * 4 * 64 * 64
    levels = [Bounds(ends, 4, n).levels for n in (40 * 64, 40 * 64 + 2, few, few + 64)]
    assert levels == [1, 2, 2, 3]
    assert [Bounds(np.array([0, 16, n, 60]), 3, few).levels for n in (32, 33)] == [0, 3]


def test_rows_that_are_not_stored() -> None:
    """Rows of DCSR: others are empty; of a pattern that has them they hold the first value."""
    for init in ("", "3.0"):
        body = "{C} = {C} + {A}" if init else "{C} = {A}"
        case = Tensors("A=ss:ij").result("ds", "ij").iterate("o=O; i=IA; j=JA", "SSS", body, init)
        kernel = build_assembled(sparsetir.from_source(case.text))
        assert isinstance(kernel, AssembledKernel)
        dense, mask = case.decoded(kernel(**case.args))
        want = case.dense["A"] + float(init or 0) * case.mask["A"]
        np.testing.assert_array_equal(mask, case.mask["A"])
        np.testing.assert_array_equal(dense, want)
        indptr, indices = np.arange(0, 43, 7, "int32"), np.tile(np.arange(7, dtype="int32"), 6)
        values = kernel.values_of(indptr, indices, **case.args)
        np.testing.assert_array_equal(values.reshape(6, 7), np.where(mask, want, float(init or 0)))


def test_intersections_search_long_rows() -> None:
    """Long rows are searched, except for those with padding, which cannot be."""
    args = given_to("add_csr")
    text = PROGRAMS["add_csr"].make("float32", "int32").script().replace("union", "intersect")
    mask = stored_of(args, "a") & stored_of(args, "b")
    with mock.patch.object(assembled, "LONGER", 1):
        kernel = build_assembled(sparsetir.from_source(text))
        result = kernel(**args)
        assert "J1_far" in kernel.fill(1).stages["III"].script()
    check(result, mask, (dense_of(args, "a") + dense_of(args, "b")).astype("float32"))
    padded = """
    I = T.dense_fixed(m)
    J1 = T.sparse_fixed(I, (n, 2), p)
    J2 = T.sparse_fixed(I, (n, 2), q)
    N = T.sparse_variable(I, (n, None), (c_ptr, c_idx))
    A = T.match_sparse_buffer(a, (I, J1), "float32")
    C = T.match_sparse_buffer(c, (I, N), "float32")
    with T.sp_iter([I, T.intersect(J1, J2)], "SS", "it") as [i, j]:
        C[i, j] = A[i, j]
"""
    names = ("a", "p", "q", "c", "c_ptr", "c_idx")
    handles = ", ".join([*(f"{x}: T.handle" for x in names), "m: T.int32", "n: T.int32"])
    kernel = build_assembled(sparsetir.from_source(f"@T.prim_func\ndef f({handles}):{padded}"))
    p, q = np.int32([0, 2, 1, -1]), np.int32([2, 3, 0, 1])
    result = kernel(a=np.arange(4, dtype="float32"), p=p, q=q, m=2, n=4)
    assert result.indices.tolist() == [2, 1] and result.values.tolist() == [1, 2]


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    args = given_to("add_csr", dtype="float64", idtype="int64")
    kernel = built("add_csr", "float64", "int64")
    arrays = {k: v for k, v in args.items() if isinstance(v, np.ndarray)}
    result = kernel(**{**args, **{k: torch.from_numpy(v) for k, v in arrays.items()}})
    assert all(isinstance(x, torch.Tensor) for x in result)
    check(CsrArrays(*(x.numpy() for x in result)), *expected_of("add_csr", args))


def test_more_elements_than_an_index_numbers() -> None:
    kernel = built("add_csr")
    kernel.most = 3
    with pytest.raises(OverflowError, match="add_csr: the result has .* expected int64 indices"):
        kernel(**given_to("add_csr"))


def test_calls_that_are_refused() -> None:
    kernel, product = built("add_csr"), built("spgemm")
    assembled = sparsetir.from_source(open_text("add_csr"))
    all_of_it, args = given_to("add_csr"), given_to("spgemm")
    without = {k: v for k, v in all_of_it.items() if k not in ("n", "b_idx")}
    n, b_idx = all_of_it["n"], all_of_it["b_idx"]
    refuse(
        """
        kernel(**all_of_it, d=3)  # TypeError: no argument 'd'; there are a, a_ptr
        kernel(**without, b_idx=b_idx)  # TypeError: argument 'n' is missing
        kernel(**without, n=n)  # TypeError: argument 'b_idx' is missing
        kernel(**{**all_of_it, "a_idx": all_of_it["a_idx"][::-1].copy()})
            # StructureError: strictly increasing
        product.values_of([0], 3, **args)  # TypeError: argument 'c_indptr': expected
        product.values_of(np.arange(14, dtype="int32"), np.full(13, 99, "int32"), **args)
            # StructureError: indices in [0, 7), got 99
        product.values_of(np.arange(13, dtype="int32"), np.zeros(12, "int32"), **args)
            # ValueError: 'c_indptr': expected shape (14
        product.values_of(np.arange(14), np.zeros(13, int), **args)
            # TypeError: 'c_indptr': expected dtype int32, got int64
        product.values_of(np.int32([0] + [2] * 13), np.int32([3, 1]), **args)
            # StructureError: strictly increasing
        build_assembled(PROGRAMS["add_csr"].make("float32", "int32"), "C", "cuda")
            # ValueError: argument 'target': expected a CPU, got 'cuda'
        sparsetir.build(assembled)  # ValueError: function 'add_csr': .. None for 'J', which the
        sparsetir.interpret(assembled, {})  # ValueError: interpret: .. see build_assembled
        sparsetir.lower_sparse_iter(assembled)  # ValueError: lower_sparse_iter: .. whose nnz is gi
        sparsetir.Schedule(assembled)  # ValueError: Schedule: .. got None for 'J'
        build_assembled(assembled, "A")  # ValueError: argument 'result': expected the one result
        build_assembled("add_csr", "C")
            # ValueError: argument 'func': expected a stage-I function, got str
        """,
        globals(),
        locals(),
    )


TWICE = text_of("twice", """
with T.sp_iter([I, N], "SS", "zero") as [i, j]:
    C[i, j] = 0.0
with T.sp_iter([I, J], "SS", "one") as [i, j]:
    C[i, j] = C[i, j] + A[i, j] * X[i]
with T.sp_iter([I, J2], "SS", "two") as [i, j]:
    C[i, j] = C[i, j] - A2[i, j]
""", """
I2 = T.dense_fixed(m)
J = T.sparse_variable(I, (n, nnz), (a_ptr, a_idx))
J2 = T.sparse_variable(I, (n, nnz2), (a2_ptr, a2_idx))
J3 = T.dense_fixed(n)
""", A="I J", A2="I J2", X="I", C="I N")  # fmt: skip
PAIR = """@T.prim_func
def kron(
    a: T.handle, a_ptr: T.handle, a_idx: T.handle, b: T.handle, b_ptr: T.handle, b_idx: T.handle,
    c: T.handle, c_ptr: T.handle, c_idx: T.handle, m: T.int32, n: T.int32, p: T.int32, q: T.int32,
    a_nnz: T.int32, b_nnz: T.int32,
):
    I1 = T.dense_fixed(m)
    J1 = T.sparse_variable(I1, (n, a_nnz), (a_ptr, a_idx))
    I2 = T.dense_fixed(p)
    J2 = T.sparse_variable(I2, (q, b_nnz), (b_ptr, b_idx))
    A = T.match_sparse_buffer(a, (I1, J1), "float32")
    B = T.match_sparse_buffer(b, (I2, J2), "float32")
"""
KRON = f"""{PAIR}
    I = T.dense_fixed(m * p)
    J = T.sparse_variable(I, (n * q, None), (c_ptr, c_idx))
    C = T.match_sparse_buffer(c, (I, J), "float32")
    with T.sp_iter([I1, I2, J1, J2], "SSSS", "kron") as [i1, i2, j1, j2]:
        C[i1 * p + i2, j1 * q + j2] = A[i1, j1] * B[i2, j2]
"""
ROWS = (
    PAIR.replace("B = T.match_sparse_buffer(b, (I2", "B = T.match_sparse_buffer(b, (I1").replace(
        "J2 = T.sparse_variable(I2", "J2 = T.sparse_variable(I1"
    )
    + """
    J = T.sparse_variable(I1, (9, None), (c_ptr, c_idx))
    C = T.match_sparse_buffer(c, (I1, J), "float32")
    with T.sp_iter([I1, J1, J2], "SSS", "rows") as [i, j1, j2]:
        with T.init():
            C[i, COLUMN] = 0.0
        C[i, COLUMN] = C[i, COLUMN] + A[i, j1] * B[i, j2]
"""
)
SPMM = PROGRAMS["intersect_spmm"].make("float32", "int32").script()
COO = text_of("coo", """
with T.sp_iter([O, E, L], "SSS", "coo") as [o, i, j]:
    C[i, j] = A[o, i, j]
""", """
O = T.dense_fixed(1)
E = T.sparse_variable(O, (m, nnz), (p, q), unique=False)
L = T.sparse_fixed(E, (n, 1), r)
I = T.dense_fixed(m)
J = T.sparse_variable(I, (n, None), (s, t))
""", A="O E L", C="I J", first="m n nnz")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "result", "message"),
    [
        ("union_of_three", "C", r"expected dense axes of rows and columns, .* got \['I \(dense"),
        ("add_csr", "A", r"argument 'result': expected the one result of the program, \['C'\]"),
        ("sddmm", "OUT", r"expected dense axes of rows and columns"),
        ("spmm_csc", "C", r"expected a spatial loop over its rows around all others"),
        (SPMM.replace("C[i, k] = T.float32(0.0)", "C[i, k] = D[0, k]"), "C", r"expected one const"),
        (re.sub(r" +with T.init.*\n.*\n", "", SPMM), "C", r"expected a `with T.init\(\):`"),
        (SPMM.replace("(I, K)", "(J, K)"), "C", r"to be of its length"),
        (TWICE.replace("A2[i, j]", "1.0").replace("[I, J2]", "[I2, J3]"), "C", r"the same rows"),
        (TWICE.replace("C[i, j] = 0.0", "C[i, j] = X[i]"), "C", r"expected one constant"),
        (KRON.replace("i1 * p + i2", "i2 * m + i1"), "C", r"as in i1 \* m2 \+ i2 of m1 \* m2 row"),
        (KRON.replace("dense_fixed(m * p)", "dense_fixed(m)"), "C", r"i1 \* p \+ i2 of m$"),
        (COO, "C", r"expected each row to be visited once, got 'E', which may store a row several"),
        (re.sub("(?i)(I2, )(J1, )", r"\2\1", KRON), "C", r"spatial loop over its rows"),
        (KRON.replace("i1 * p + i2", "T.Cast(\"int64\", i1)"), "C", r"of int32, got"),
        (re.sub(r" +with T.sp_iter\(\[I, N.*\n.*\n", "", TWICE), "C", r"'one': expected the first"),
    ],
)  # fmt: skip
def test_what_cannot_be_assembled(text: str, result: str, message: str) -> None:
    func = PROGRAMS[text].make("float32", "int32") if text in PROGRAMS else None
    with pytest.raises(ValueError, match=message):
        assemble(func or sparsetir.from_source(text), result)


def test_patterns_that_filling_alone_reads_are_checked() -> None:
    """B is searched at the elements of A: what is counted does not depend on it."""
    text = PROGRAMS["add_csr"].make("float32", "int32").script()
    kernel = build_assembled(sparsetir.from_source(text.replace("[I, J1_or_J2]", "[I, J1]")), "C")
    given_ = given_to("add_csr")
    result = kernel(**given_)
    np.testing.assert_array_equal(result.indices, given_["a_idx"])
    with pytest.raises(sparsetir.StructureError, match="argument 'b_idx'.* strictly increasing"):
        kernel(**{**given_, "b_idx": given_["b_idx"][::-1].copy()})
