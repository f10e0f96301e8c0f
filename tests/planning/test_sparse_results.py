"""Operators of sparse matrices whose result is sparse, beside scipy and dense arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import strategies as st

from csr_zoo import ZOO
from drawing import examples
from refusals import refusals
from sparsetir import SparseMatrix, StructureError, plan
from sparsetir.planning import sparse_results
from sparsetir.schedules.operators.sparse_results import product_program
from sparsetir.schedules.templates.sparse_results import Assembled

IN_ROWS = {"add": np.add, "maximum": np.maximum, "minimum": np.minimum, "multiply": np.multiply}


def matrix(rng: np.random.Generator, shape: Any, density: float = 0.3, dtype: str = "float64"):
    """Values are small integers, so that all sums are exact."""
    data = sp.random_array(shape, density=density, format="csr", rng=rng)
    data.data = rng.integers(-4, 5, data.nnz).astype(dtype)
    data.sort_indices()
    return data


def stored(a: Any) -> np.ndarray:
    """The mask of stored elements of a matrix."""
    a = a.to_scipy() if isinstance(a, SparseMatrix) else a
    return sp.csr_array((np.ones(a.nnz), a.indices, a.indptr), shape=a.shape).toarray() > 0


def check(result: SparseMatrix, mask: np.ndarray, dense: np.ndarray) -> None:
    """The result stores its elements in order; the values are exact, and of the type."""
    np.testing.assert_array_equal(stored(result), mask)
    assert result.nnz == mask.sum()
    np.testing.assert_array_equal(result.to_scipy().toarray(), np.where(mask, dense, 0))


def product_of(A: Any, B: Any) -> tuple[np.ndarray, np.ndarray]:
    """The mask of stored elements of a product, and the product."""
    return stored(A).astype(int) @ stored(B).astype(int) > 0, A.toarray() @ B.toarray()


@pytest.mark.parametrize("name", ZOO)
def test_products_and_sums_of_the_zoo(name: str) -> None:
    rng = np.random.default_rng(0)
    A = ZOO[name].astype("float64")
    A.data = rng.integers(-4, 5, A.nnz).astype("float64")
    B, D = A.T.tocsr(), matrix(rng, A.shape)
    a, b, d = map(SparseMatrix, (A, B, D))
    for left, right, x, y in ((a, b, A, B), (b, a, B, A)):
        check(left @ right, *product_of(x, y))
    check(a + d, stored(A) | stored(D), A.toarray() + D.toarray())
    check(a - d, stored(A) | stored(D), A.toarray() - D.toarray())
    check(a * d, stored(A) & stored(D), A.toarray() * D.toarray())


@st.composite
def matrices(draw: Any) -> tuple[Any, ...]:
    """Two factors, and two or eight of one shape; of any density."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = [draw(st.sampled_from([1, 2, 7, 64, 65, 130])) for _ in range(3)]
    densities = [draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])) for _ in range(2)]
    factors = [
        matrix(rng, shape, density)
        for shape, density in zip((sizes[:2], sizes[1:]), densities, strict=True)
    ]
    count = draw(st.sampled_from([2, 8]))
    terms = [matrix(rng, sizes[:2], rng.choice([0, 0.1, 0.5])) for _ in range(count)]
    return factors, terms


def check_all(given_: tuple[Any, ...]) -> None:
    (A, B), terms = given_
    exact = sp.csr_array(sp.kron(A, B[:9, :70]))
    check(SparseMatrix(A).kron(sp.csr_array(B[:9, :70])), stored(exact), exact.toarray())
    check(SparseMatrix(A) @ SparseMatrix(B), *product_of(A, B))
    known = [SparseMatrix(x) for x in terms]
    anywhere = np.logical_or.reduce([stored(x) for x in terms])
    everywhere = np.logical_and.reduce([stored(x) for x in terms])
    for name, how in IN_ROWS.items():
        mask = everywhere if name == "multiply" else anywhere
        check(getattr(known[0], name)(*known[1:]), mask, how.reduce([x.toarray() for x in terms]))


test_random_matrices = examples(4, 4000, given_=matrices())(check_all)


@st.composite
def rows(draw: Any) -> tuple[Any, ...]:
    """Two matrices of as many columns, of rows of any lengths, long ones beside short ones among
    them; and pairs of rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    m, p = (draw(st.sampled_from([1, 3, 40])) for _ in range(2))
    n = draw(st.sampled_from([1, 7, 200, 3000]))
    densities = [0.0, 0.002, 0.05, 0.9]
    A, B = (
        sp.csr_array(sp.vstack([matrix(rng, (1, n), rng.choice(densities)) for _ in range(k)]))
        for k in (m, p)
    )
    return A, B, matrix(rng, (m, p), rng.choice([0.0, 0.02, 0.4, 1.0]))


def check_inner(drawn: tuple[Any, ...]) -> None:
    A, B, M = drawn
    a, b, m = map(SparseMatrix, drawn)
    mask, dense = product_of(A, B.T.tocsr())
    check(a.inner(b), mask, dense)
    for result in (a.inner(b, mask=m), a.matmul(b.T, mask=m)):
        check(result, stored(M), dense)
    if A.shape == B.shape:
        check(a * b, stored(A) & stored(B), A.toarray() * B.toarray())
        planned = plan("mul", a, b)
        for _ in range(2):
            check(planned(), stored(A) & stored(B), A.toarray() * B.toarray())
        np.testing.assert_array_equal(a.vecdot(b), A.multiply(B).sum(axis=1))


test_random_inner_products = examples(4, 3000, drawn=rows())(check_inner)


TERMS = {
    "plus_times": (np.multiply, np.add, 0.0),
    "min_plus": (np.add, np.minimum, np.inf),
    "max_plus": (np.add, np.maximum, -np.inf),
    "max_times": (np.multiply, np.maximum, -np.inf),
    "or_and": (np.logical_and, np.maximum, 0.0),
}


BY_ELEMENT = {"add": np.add, "sub": np.subtract, "mul": np.multiply, **{
    x: getattr(np, x) for x in ("maximum", "minimum")}}  # fmt: skip
KINDS = ("csr", "csc", "coo", "int64", "matrix")
CONFIGS = (None, Assembled(kept=False), Assembled(listed=True), Assembled(parallel=False))


@st.composite
def calls(draw: Any) -> tuple[Any, ...]:
    """An operator with its options, two matrices as any kind of input, and how it is planned."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    op = draw(st.sampled_from(["spgemm", "inner", "kron", *BY_ELEMENT]))
    semiring = draw(st.sampled_from([*TERMS])) if op in ("spgemm", "inner") else "plus_times"
    dtype = draw(st.sampled_from(["float32", "float64", "int32", "bool"]))
    if dtype == "bool" and op == "sub":
        dtype = "int8"
    m, n, p = (draw(st.sampled_from([0, 1, 3, 9, 70])) for _ in range(3))
    second = {"spgemm": (n, p), "inner": (p, n), "kron": (p % 8, 4)}.get(op, (m, n))
    each = []
    for shape in ((m, n), second):
        x = matrix(rng, shape, rng.choice([0.0, 0.05, 0.4, 1.0])).astype("int8").astype(dtype)
        if "float" in dtype and draw(st.booleans()):
            # What a maximum makes of NaN is not said, as of 0 * inf and inf - inf.
            odd = [np.inf] if op == "sub" or semiring != "plus_times" or "imum" in op else [np.nan]
            hit = rng.random(x.nnz) < 0.1
            x.data[hit] = odd[0] if semiring in ("plus_times", "min_plus", "max_plus") else 3
        each.append(x)
    mask = None
    if op in ("spgemm", "inner", "add", "mul") and draw(st.booleans()):
        last = {"spgemm": 1, "inner": 0}.get(op, 1)
        mask = matrix(rng, (m, second[last]), rng.choice([0.0, 0.1, 0.6]))
    return op, semiring, each, mask, draw(st.sampled_from(KINDS)), draw(st.sampled_from(CONFIGS))


def expected_of(op: str, semiring: str, A: Any, B: Any) -> dict[tuple[int, int], float]:
    """The elements of a result, by what is stored alone."""
    left, right = ({(int(i), int(j)): x.data[q] for q, (i, j) in enumerate(zip(*ij, strict=True))}
                   for x, ij in ((y, (y.row, y.col)) for y in (A.tocoo(), B.tocoo())))  # fmt: skip
    if op == "kron":
        p, q = B.shape
        pairs = ((i, j) for i in left.items() for j in right.items())
        return {(a * p + c, b * q + d): x * y for ((a, b), x), ((c, d), y) in pairs}
    if op in BY_ELEMENT:
        where = left.keys() & right.keys() if op == "mul" else left.keys() | right.keys()
        of = A.dtype.type
        return {x: BY_ELEMENT[op](left.get(x, of(0)), right.get(x, of(0))) for x in where}
    make, add, first = TERMS[semiring]
    right = {(j, i): x for (i, j), x in right.items()} if op == "inner" else right
    rows: dict[int, list[Any]] = {}
    for (j, k), y in right.items():
        rows.setdefault(j, []).append((k, y))
    elements: dict[tuple[int, int], float] = {}
    for (i, j), x in left.items():
        for k, y in rows.get(j, ()):
            elements[i, k] = add(elements.get((i, k), first), np.float64(make(x, y)))
    return elements


@np.errstate(all="ignore")
def check_call(drawn: tuple[Any, ...]) -> None:
    """The results of a plan, twice, and of the method; in the matrices' dtype."""
    op, semiring, (A, B), mask, kind, config = drawn
    if A.dtype == np.bool_:
        exact = expected_of(op, "or_and" if semiring == "plus_times" else semiring, A, B)
    else:
        exact = expected_of(op, semiring, A, B)
    terms = [x.asformat(kind) if kind in ("csr", "csc", "coo") else SparseMatrix(x) for x in (A, B)]
    if kind == "int64":
        far = [x.indptr.astype("int64") for x in (A, B)]
        terms = [sp.csr_array((x.data, x.indices.astype("int64"), y), shape=x.shape)
                 for x, y in zip((A, B), far, strict=True)]  # fmt: skip
    options = {"mask": mask} if mask is not None else {}
    options |= {"semiring": semiring} if op in ("spgemm", "inner") else {}
    fits = config is None or not config.listed or op in ("spgemm", "inner")
    run = plan(op, *terms, threads=2, config=config if fits else None, **options)
    results = [run(), run()]
    if op in ("spgemm", "inner", "kron"):
        method = {"spgemm": "matmul"}.get(op, op)
        results.append(getattr(SparseMatrix(A), method)(terms[1], **options))
    for x in results:
        assert x.dtype == A.dtype
        first = TERMS[semiring][2] if op in ("spgemm", "inner") else 0.0
        rows, columns = (y.tolist() for y in x.pattern.coords)
        places = set(exact) if mask is None else set(zip(*mask.tocoo().coords, strict=True))
        assert x.nnz == len(places) and set(zip(rows, columns, strict=True)) == places
        wanted = [exact.get(place, first) for place in zip(rows, columns, strict=True)]
        finite = np.isfinite(np.array(wanted, "float64")) | np.array("float" in str(A.dtype))
        values, wanted = np.float64(x.values), np.array(wanted, "float64")
        np.testing.assert_array_equal(values[finite], wanted[finite])


test_random_calls = examples(3, 3000, drawn=calls())(check_call)


@pytest.mark.parametrize("semiring", TERMS)
def test_semirings_and_masks(semiring: str) -> None:
    """Values of what is stored, and of a mask, where the rest is the semiring's zero."""
    rng = np.random.default_rng(3)
    A, B, M = matrix(rng, (13, 9)), matrix(rng, (9, 11)), matrix(rng, (13, 11))
    make, add, first = TERMS[semiring]
    expected = np.full((13, 11), first)
    for i, j in np.argwhere(stored(A)):
        for k in np.flatnonzero(stored(B)[j]):
            expected[i, k] = add(expected[i, k], make(A[i, j], B[j, k]))
    mask, _ = product_of(A, B)
    a, b = SparseMatrix(A), SparseMatrix(B)
    result = a.matmul(b, semiring=semiring)
    np.testing.assert_array_equal(result.values, expected[mask])
    np.testing.assert_array_equal(stored(result), mask)
    np.testing.assert_array_equal(
        a.matmul(b, semiring=semiring, mask=M).values, expected[stored(M)]
    )


def test_bools() -> None:
    rng = np.random.default_rng(5)
    A, B = (abs(matrix(rng, (9, 9))) for _ in range(2))
    a, b = (SparseMatrix(x).astype("bool") for x in (A, B))
    left, right = (x.toarray() > 0 for x in (A, B))
    for result, dense in ((a @ b, left @ right), (a + b, left | right), (a * b, left & right)):
        assert result.dtype == np.bool_
        np.testing.assert_array_equal(result.to_scipy().toarray(), dense)
    with pytest.raises(TypeError, match="subtract: expected numbers, got matrices of bool"):
        a - b


def test_int64_indices() -> None:
    """Columns beyond int32, for which no dense row fits."""
    far = 2**31 + 5
    a = SparseMatrix(([0, 2], [1, 0]), shape=(3, 2))
    b = SparseMatrix(([0, 0, 1], [3, far - 1, 1]), shape=(2, far))
    inner = SparseMatrix(([0, 1], [far - 1, 3]), shape=(2, far)).inner(b)
    assert inner.values.tolist() == [1, 1] and inner.pattern.columns.tolist() == [0, 0]
    result = a @ b
    assert result.shape == (3, far) and result.pattern.columns.dtype == np.int64
    np.testing.assert_array_equal(result.pattern.columns, [1, 3, far - 1])
    np.testing.assert_array_equal(result.pattern.indptr, [0, 1, 1, 3])
    mask = SparseMatrix(([0, 2, 2], [1, 7, far - 1]), shape=(3, far))
    np.testing.assert_array_equal(a.matmul(b, mask=mask).values, [1, 0, 1])
    blocks = a.kron(b)
    assert blocks.shape == (6, 2 * far) and blocks.pattern.columns.dtype == np.int64
    np.testing.assert_array_equal(blocks.pattern.columns[:3], [far + 3, 2 * far - 1, far + 1])
    assert (b + b).nnz == 3 and ((b + b).values == 2).all()


def test_infinities_and_nan_stay_where_they_are() -> None:
    """0 x inf is NaN where both are stored, and nothing elsewhere."""
    a = SparseMatrix(([0, 0, 1], [0, 1, 1]), values=np.array([0.0, 1.0, 2.0]), shape=(3, 2))
    b = SparseMatrix(([0, 1], [0, 1]), values=np.array([np.inf, np.nan]), shape=(2, 3))
    result = a @ b
    np.testing.assert_array_equal(result.values, [np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(result.pattern.columns, [0, 1, 1])
    pairs = a.inner(b.T, mask=SparseMatrix.from_dense(np.ones((3, 3))))
    np.testing.assert_array_equal(pairs.values, [np.nan, np.nan, 0, 0, np.nan, 0, 0, 0, 0])
    np.testing.assert_array_equal(a.vecdot(b.T), [np.nan, np.nan, 0])
    for semiring in ("min_plus", "max_times"):
        assert np.isnan(a.matmul(b, semiring=semiring).values[1])


def test_numbers_and_signs() -> None:
    a = SparseMatrix.from_dense(np.array([[1.0, 0.0], [2.0, 3.0]]))
    for result in (a * 2, 2 * a, -(a * -2)):
        np.testing.assert_array_equal(result.values, [2, 4, 6])
    halves = a.astype("int32") * 0.5  # as in NumPy, no integers
    np.testing.assert_array_equal(halves.values, [0.5, 1, 1.5])
    assert (a.astype("float16") * 2.5).dtype == np.float16


def test_matrices_of_others() -> None:
    rng = np.random.default_rng(6)
    A, B = matrix(rng, (5, 6)), matrix(rng, (6, 4))
    a = SparseMatrix(A)
    expected = (A @ B).toarray()
    for other in (B, B.tocoo(), SparseMatrix(B).to_torch("csr"), SparseMatrix(B)):
        np.testing.assert_array_equal((a @ other).to_scipy().toarray(), expected)
    np.testing.assert_array_equal((a + A.tocsc()).to_scipy().toarray(), 2 * A.toarray())


def test_results_do_not_share_memory() -> None:
    """Results share no memory, except read-only arrays of a mask's pattern."""
    a = SparseMatrix.from_dense(np.eye(3))
    result = a @ a
    assert not np.shares_memory(result.values, a.values)
    assert not np.shares_memory(a.matmul(a, mask=result).values, result.values)


A, B = SparseMatrix.from_dense(np.ones((2, 3))), SparseMatrix.from_dense(np.ones((3, 4)))
test_refusals = refusals(
    """
A @ A  # ValueError: argument 'other': expected 3 rows, .. got shape (2, 3
A + B  # ValueError: argument 'other': expected shape (2, 3), got (3, 4
A.matmul(B, semiring="x")  # ValueError: 'semiring': expected one of [
A.matmul(B, mask=A)  # ValueError: 'mask': expected shape (2, 4), got
A.inner(B)  # ValueError: argument 'other': expected 3 columns, .. got shape (3, 4
A.vecdot(B)  # ValueError: SparseMatrix.vecdot: argument 'other': expected shape (2, 3), got
A.add(*[A] * 8)  # ValueError: expected at most 8 matrices, got 9
A + 3  # TypeError: unsupported operand
A * "x"  # TypeError: type
A.kron(3)  # TypeError: SparseMatrix.kron: argument 'other'
A.add(3)  # TypeError: SparseMatrix.add: argument 'other'
""",
    globals(),
)


def test_patterns_are_checked() -> None:
    """Memory that its owner wrote to is refused, not followed."""
    indices = np.array([0, 1, 2, 0], "int32")
    a = SparseMatrix.from_csr(np.array([0, 2, 3, 4], "int32"), indices, shape=(3, 3))
    indices[1] = 7
    assert np.shares_memory(a.pattern.columns, indices)
    with pytest.raises(StructureError, match="axis 1: expected coordinates in"):
        a @ a
    indices[:2] = 1, 0
    with pytest.raises(StructureError, match="expected columns to increase in each row"):
        a + a
    indices[:2] = 0, 1
    assert (a + a).pattern.checked and a.pattern.checked


def test_what_is_kept_with_a_matrix_is_of_its_own_values() -> None:
    rng = np.random.default_rng(0)
    A, B = (matrix(rng, (6, 6)) for _ in range(2))
    a, b = SparseMatrix(A), SparseMatrix(B)
    check(a + b, stored(A) | stored(B), A.toarray() + B.toarray())
    twice, narrow = a.with_values(2 * a.values), a.astype("float32")
    check(twice + b, stored(A) | stored(B), 2 * A.toarray() + B.toarray())
    check(a.T @ b, *product_of(A.T.tocsr(), B))
    assert (narrow + narrow).dtype == "float32"
    a.values[:] = 0  # as always, the change is noticed
    check(a + b, stored(A) | stored(B), B.toarray())


def test_bounds_of_small_results_are_not_written_to() -> None:
    x = sparse_results.csr(SparseMatrix(matrix(np.random.default_rng(0), (6, 6))))
    kernel = sparse_results.kernel_of(product_program, "plus_times", "float64", "float64", "int32")
    args = sparse_results.arguments("ab", (x, x), dict.fromkeys("mln", 6), "int32")
    bounds = kernel.bounds(args)
    assert bounds is kernel.bounds(args)  # as others have them
    with pytest.raises(ValueError, match="read-only"):
        bounds.ends[1] = 1 << 40
