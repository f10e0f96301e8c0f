"""Methods of sparse tensors that scipy's arrays have, beside scipy's and NumPy's."""

from __future__ import annotations

import operator
import weakref

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import csr_zoo
from data.sparse_tensor_common import dense, same
from refusals import refusals
from sparsetir import SparseMatrix, SparseTensor
from sparsetir.formats import CSR
from sparsetir.sparse_ir.errors import StructureError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse .*:UserWarning", "ignore:.* encountered in:RuntimeWarning"
)


def repeated() -> sp.csr_array:
    """Columns out of order and twice, int64 indices, and zeros that are stored."""
    columns, indptr = np.array([4, 0, 4, 3, 1, 3, 0]), np.array([0, 3, 3, 7])
    values = np.array([1, -2, 3, 0.5, -3, -0.5, 0])
    return sp.csr_array((values, columns, indptr), shape=(3, 5))


def special() -> sp.csr_array:
    """NaN and infinities, alone in a row and beside others; a row without places for zeros."""
    inf, nan = np.inf, np.nan
    rows = [[nan, 0, 1], [inf, 0, -inf], [-1, -2, -3], [0, 0, 0], [-inf, 0, -1]]
    return sp.csr_array(np.array(rows, "float32"))


ZOO = {
    **csr_zoo.ZOO,
    "negative": -csr_zoo.random(9, 7, 0.6).astype("float64"),
    "integers": sp.csr_array(dense(dtype="int64") - 3 * dense(dtype="int64", seed=1)),
    "small integers": sp.csr_array(dense(dtype="uint8")),
    "bools": sp.csr_array(dense(dtype="bool")),
    "repeated": repeated(),
    "special": special(),
}
FUNCTIONS = (
    "sign sqrt conj expm1 log1p sin arcsin sinh arcsinh tan arctan tanh arctanh rint floor ceil "
    "trunc deg2rad rad2deg"
).split()
REDUCTIONS = ("sum", "mean", "max", "min")
COO_OF_THREE = pytest.mark.skipif(
    not hasattr(sp.coo_array, "__getitem__"), reason="before scipy 1.17"
)


def dense_of(result):
    return result.toarray() if hasattr(result, "toarray") else np.asarray(result)


def check(ours, wanted, close=0.0):
    """Equal numbers, type and shape; ours are canonical and keep what no zeros are."""
    ours, wanted = dense_of(ours), dense_of(wanted)
    assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(ours, wanted, rtol=close, atol=close)


def rows_of(a, seed=0):
    m = a.shape[0]
    return np.random.default_rng(seed).integers(-m, m, m and 7)


# Calls that mean the same of a dense array; they get the array, or ours.
SAME = {
    "toarray": lambda a: dense_of(a),
    "todense": lambda a: a.todense() if isinstance(a, SparseTensor) else a,
    "copy": lambda a: a.copy(),
    "abs": abs,
    "times a number": lambda a: a * 3,
    "a number times": lambda a: np.float64(0.5) * a,
    "by a number": lambda a: a / 3,
    "square": lambda a: a**2,
    "root": lambda a: a**0.5,
    "transpose": lambda a: a.transpose(),
    "transposed axes": lambda a: a.transpose((1, 0)),
    "no axes transposed": lambda a: a.transpose((0, 1)),
    "reshape": lambda a: a.reshape(a.shape[::-1]),
    "flat": lambda a: a.reshape(a.shape[0] * a.shape[1]),
    "three axes": lambda a: a.reshape(a.shape[0], 1, a.shape[1]),
    "rows": lambda a: a[2:10],
    "every other row": lambda a: a[1::2],
    "rows from behind": lambda a: a[::-3],
    "no row": lambda a: a[3:1],
    "columns": lambda a: a[:, 1:3],
    "columns from behind": lambda a: a[..., ::-2],
    "a block": lambda a: a[-4:, :2],
    "listed rows": lambda a: a[rows_of(a)],
    "a list of rows": lambda a: a[rows_of(a).tolist()],
    "listed columns": lambda a: a[:, rows_of(a.T)],
    "listed in a block": lambda a: a[1:5, rows_of(a.T)],
    "bools": lambda a: a[np.arange(a.shape[0]) % 3 == 1],
    "bools of columns": lambda a: a[:, np.arange(a.shape[1]) % 3 == 1],
    "none listed": lambda a: a[[]],
    "places": lambda a: a[rows_of(a)[:3], rows_of(a.T)[:3]] if 0 not in a.shape else a,
    "places of a row": lambda a: a[0, rows_of(a.T)] if a.shape[0] else a,
    "more": lambda a: a > 0,
    "more than a number": lambda a: a > 1,
    "at least": lambda a: a >= 2,
    "less": lambda a: a < 0,
    "not zero": lambda a: a != 0,
    "equal to a number": lambda a: a == 1,
    "less than another": lambda a: a < a[::-1],
    "more than another": lambda a: a > a[::-1],
    "another": lambda a: a != a[::-1],
    "nonzero": lambda a: np.stack(a.nonzero()).astype("int64"),
    "stacked": lambda a: stacked(a, [a, a[:3], a]),
    "side by side": lambda a: stacked(a, [a[:, :2], a], "hstack"),
    "times a column": lambda a: a * weights(a)[:, :1],
    "a row times": lambda a: weights(a)[:1] * a,
    "a vector times": lambda a: weights(a)[0] * a if a.shape[0] else a,
    "times dense": lambda a: a * weights(a),
    "by dense": lambda a: a / weights(a),
    "diagonal": lambda a: diagonal(a, 0),
    "diagonal on the right": lambda a: diagonal(a, 2),
    "diagonal on the left": lambda a: diagonal(a, -4),
}


def weights(a):
    return np.random.default_rng(0).random(a.shape) + 1


def stacked(a, parts, name="vstack"):
    return getattr(type(a) if isinstance(a, SparseTensor) else np, name)(parts)


def diagonal(a, k):
    m, n = a.shape
    if isinstance(a, SparseTensor) or -m <= k <= n:
        return a.diagonal(k)
    return np.zeros(0, a.dtype)


@pytest.mark.parametrize("matrix", ZOO)
@pytest.mark.parametrize("call", SAME)
def test_as_of_a_dense_array(call, matrix):
    a, make = SparseMatrix(ZOO[matrix]), SAME[call]
    want = ZOO[matrix].toarray()
    if call in ("square", "root") and want.dtype == bool:
        assert make(a).dtype == make(want).dtype
    check(make(a), make(want))


@pytest.mark.parametrize("matrix", ZOO)
def test_functions(matrix):
    a, want = SparseMatrix(ZOO[matrix]), ZOO[matrix].toarray()
    a.to(CSR())
    for name in FUNCTIONS:
        if want.dtype == bool and name in ("sign", "conj", "rad2deg", "deg2rad"):
            continue
        result = getattr(a, name)()
        assert result.cached is not a.cached and result.pattern is a.pattern
        check(result, getattr(np, name)(want), close=1e-6)
    if want.dtype != bool:
        check(-a, -want)


@pytest.mark.parametrize("matrix", ZOO)
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 1)])
def test_reductions(matrix, axis):
    a, want = SparseMatrix(ZOO[matrix]), ZOO[matrix]
    axes = {None: (0, 1), (0, 1): (0, 1)}.get(axis, (axis,))
    for name in REDUCTIONS:
        if name != "sum" and any(want.shape[n] == 0 for n in axes):
            with pytest.raises(ValueError, match=f"SparseMatrix.{name}: "):
                getattr(a, name)(axis)
            continue
        result = getattr(a, name)(axis)
        method = getattr(np, name)
        wide = want.toarray() if want.dtype != np.float32 else want.toarray().astype("float64")
        expected = method(wide, axis=axis)
        if wide.dtype != want.dtype:
            expected = expected.astype(want.dtype)
        if want.dtype.kind == "u" and name == "sum":
            expected = expected.astype("uint64")
        check(result, expected, close=1e-6)
        kept = getattr(a, name)(axis, keepdims=True)
        check(kept, method(wide, axis=axis, keepdims=True).astype(dense_of(result).dtype), 1e-6)
        assert isinstance(result, SparseTensor) == (name in ("max", "min") and len(axes) < 2)


def test_small_numbers_are_not_lost():
    values = np.array([2**24, *[1] * 8], "float32")
    a = SparseMatrix((np.zeros(9, int), np.arange(9)), None, values)
    assert a.sum() == a.sum(1)[0] == 2**24 + 8


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits(dtype):
    want = dense(dtype=dtype) - dense(dtype=dtype, seed=1)
    a = SparseMatrix.from_dense(want)
    wide = want.astype("float32")
    for call in SAME:
        if call in ("by dense", "times dense", "times a column", "a row times", "a vector times"):
            continue
        ours, wanted = dense_of(SAME[call](a)), np.asarray(SAME[call](wide))
        kept = (want.dtype, np.dtype("bool"), np.dtype("int64"), np.dtype("int32"))
        number = call in ("a number times", "by a number", "root")  # NumPy's types
        assert number or ours.dtype in kept, call
        np.testing.assert_allclose(ours.astype("float64"), wanted, rtol=1e-2, err_msg=call)
    for name in FUNCTIONS:
        result = getattr(a, name)()
        assert result.dtype == want.dtype
        wanted = getattr(np, name)(wide)
        np.testing.assert_allclose(dense_of(result).astype("float32"), wanted, rtol=1e-2)
    for name in REDUCTIONS:
        for axis in (None, 0, 1):
            result, wanted = getattr(a, name)(axis), getattr(wide, name)(axis)
            assert dense_of(result).dtype == want.dtype
            np.testing.assert_array_equal(dense_of(result), wanted.astype(want.dtype))
    assert (a != a.copy()).nnz == 0 and (a > a.copy()).dtype == bool
    assert a.trace().dtype == want.dtype and a[1, 5] == want[1, 5]
    many = SparseMatrix((np.zeros(4096, int), np.arange(4096)), None, np.ones(4096, want.dtype))
    assert many.sum() == 4096


@pytest.mark.parametrize("matrix", ZOO)
def test_each_element(matrix):
    a, want = SparseMatrix(ZOO[matrix]), ZOO[matrix].toarray()
    for i in range(-want.shape[0], want.shape[0], 5):
        for j in range(-want.shape[1], want.shape[1], 3):
            assert a[i, j].dtype == want.dtype
            np.testing.assert_array_equal(a[i, j], want[i, j])
        check(a[i], want[i])
        assert type(a[i]) is SparseTensor
    assert len(list(a)) == a.shape[0]


def test_stored_zeros_and_duplicates():
    a = SparseMatrix(repeated())
    assert a.nnz == 5
    assert a[2].nnz == 3 and a[:, [0, 3]].nnz == 3 and a.reshape(5, 3).nnz == 5
    assert SparseMatrix.vstack([a, a]).nnz == 10
    without = a.eliminate_zeros()
    assert without.nnz == 3 and a.nnz == 5 and type(without) is SparseMatrix
    check(without, repeated())
    assert a.nonzero()[1].tolist() == [0, 4, 1]
    assert a[2].places is None  # what was given has no order here


def test_classes_and_transposes():
    a = SparseMatrix(ZOO["random"])
    assert a.transpose() is a.T and a.T.transpose() is a
    beside = SparseMatrix.hstack([a, ZOO["random"]])
    for matrix in (
        a[2:4],
        a[[3, 1]],
        a > 0,
        a.reshape(47, 61),
        SparseMatrix.hstack([a, ZOO["random"]]),
    ):
        assert type(matrix) is SparseMatrix
    for tensor in (a[0], a[:, 2], a.reshape(-1), a.reshape((1, 61, -1)), a.max(0)):
        assert type(tensor) is SparseTensor
    assert type(a.max(0, keepdims=True)) is SparseMatrix and a.ndim == 2
    row, want = a[7], ZOO["random"].toarray()[7]
    check(row.sum(), want.sum(), 1e-6)
    check(row.T * 2, want * 2)
    check(a[torch.tensor([3, 1]), 2:9], ZOO["random"][[3, 1], 2:9])
    check(a[torch.arange(61) > 50], ZOO["random"][np.arange(61) > 50])
    check(row.max(), want.max())
    check(row > 0.5, want > 0.5)
    table = {a: 1}
    assert table[a] == 1 and a in [a] and a != None and not a == "a"  # noqa: E711


@pytest.mark.parametrize("matrix", ["random", "empty", "no rows", "no columns", "one dense row"])
def test_products_from_the_left(matrix):
    s = ZOO[matrix]
    a, rng = SparseMatrix(s), np.random.default_rng(0)
    x = rng.standard_normal((5, s.shape[0])).astype("float32")
    for left in (x, x[0], np.asfortranarray(x), x[:, ::-1], x.astype("float64")):
        result, wanted = left @ a, left @ s.toarray()
        assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)
    for kind in (sp.csr_array, sp.csc_matrix, sp.coo_array):
        left = kind(rng.integers(-2, 2, (5, s.shape[0])).astype("float32"))
        result = left @ a
        assert type(result) is SparseMatrix
        np.testing.assert_allclose(result.toarray(), (left @ s).toarray(), rtol=1e-4, atol=1e-4)
    tensor = torch.from_numpy(x).to_sparse()
    np.testing.assert_allclose((tensor @ a).toarray(), x @ s.toarray(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_from_the_left_with_gradients(dtype):
    s = ZOO["random"]
    a, kind = SparseMatrix(s).astype(dtype), getattr(torch, dtype)
    for shape in ((3, 61), (61,)):
        x = torch.rand(shape, dtype=kind, requires_grad=True)
        out = x @ a
        wanted = x.detach().float() @ torch.from_numpy(s.toarray())
        assert out.dtype == kind
        torch.testing.assert_close(out.detach().float(), wanted, rtol=2e-2, atol=2e-2)
        out.sum().backward()
        rows = torch.from_numpy(s.sum(1)).expand(shape)
        torch.testing.assert_close(x.grad.float(), rows, rtol=2e-2, atol=2e-2)


def test_sums_from_the_left():
    s, r = ZOO["random"], csr_zoo.random(61, 47, 0.3)
    a = SparseMatrix(s)
    check(r + a, r + s)
    check(r - a, r - s)
    for op in (operator.ne, operator.gt, operator.lt):
        check(op(r, a), op(r, s))
        check(op(a, r), op(s, r))
    check(np.float32(0.5) < a, s > 0.5)
    assert (torch.full((61, 47), 2.0) * a).values.tolist() == (2 * a).values.tolist()
    check(a / torch.full((61, 1), 2.0), s.toarray() / np.float32(2))


def test_functions_of_numpy():
    s, r = ZOO["random"], csr_zoo.random(61, 47, 0.3)
    a, b, x = SparseMatrix(s), SparseMatrix(r), s.toarray()
    for name in ("sin", "sqrt", "abs", "floor", "square", "isnan", "cbrt"):
        check(getattr(np, name)(a), getattr(np, name)(x))
    for name in ("add", "subtract", "multiply", "maximum", "minimum", "not_equal", "less"):
        check(getattr(np, name)(a, b), getattr(np, name)(x, r.toarray()))
    check(np.multiply(x, a), x * x)
    check(np.multiply(np.float64(2), a), np.float64(2) * x)
    check(np.divide(a, 2), x / np.float32(2))
    check(np.power(a, 2), x**2)
    check(np.less(0.5, b), r.toarray() > 0.5)
    assert np.allclose(np.matmul(x.T, a), x.T @ x, rtol=1e-5)
    for name in ("sum", "mean"):
        check(getattr(np, name)(a, axis=0), getattr(x, name)(axis=0), 1e-5)
        assert getattr(np, name)(a, dtype="float64").dtype == "float64"
    check(np.max(a, axis=1), x.max(1))


@pytest.mark.parametrize("dtypes", [("int64", "int32"), ("bool", "bool"), ("uint8", "bool")])
def test_products_of_integers(dtypes):
    s = ZOO["random"]
    a = sp.csr_array((np.ceil(s.data * 3).astype(dtypes[0]), s.indices, s.indptr), shape=s.shape)
    x = np.arange(s.shape[1] * 3).reshape(-1, 3).astype(dtypes[1])
    converted = SparseMatrix(a)
    for operand in (x, x[:, 1], x + x, x[:, 1].copy()):
        result, want = converted @ operand, a.toarray() @ operand
        assert result.dtype == want.dtype
        assert np.array_equal(result, want)
    held = weakref.ref(operand)
    del operand
    assert held() is None  # though its plan is kept


@pytest.fixture(scope="module")
def tensor():
    return dense((5, 4, 6), "float64", 3) - dense((5, 4, 6), "float64", 4)


@COO_OF_THREE
def test_tensors_of_three_axes(tensor):
    sparse = SparseTensor.from_dense(tensor)
    for axes in ((2, 0, 1), (0, 2, 1), (2, 1, 0), (-1, 0, 1)):
        check(sparse.transpose(axes), tensor.transpose(axes))
    check(sparse.T, tensor.T)
    for axis in (None, 0, 1, 2, (0, 1), (0, 2), (2, 1), (0, 1, 2)):
        for name in REDUCTIONS:
            for keepdims in (False, True):
                want = getattr(tensor, name)(axis=axis, keepdims=keepdims)
                check(getattr(sparse, name)(axis, keepdims), want, 1e-12)
    check(sparse.reshape(20, 6), tensor.reshape(20, 6))
    check(sparse > 0, tensor > 0)
    check(sparse != sparse.with_values(np.sqrt(abs(sparse.values))), tensor != np.sqrt(abs(tensor)))
    check(sparse * tensor[0], tensor * tensor[0])
    check(sparse.sin() / 2, np.sin(tensor) / 2)
    same(sparse.eliminate_zeros(), tensor)


@COO_OF_THREE
def test_elements_of_three_axes(tensor):
    sparse = SparseTensor.from_dense(tensor).astype("bfloat16")
    tensor = tensor.astype(sparse.dtype)
    for key in (
        3, (slice(None), 2), (..., 4), (1, slice(1, 3)), (1, 2), (slice(None), 2, [0, 5]),
        (slice(None, None, -1), ..., slice(4, None, -3)), ([4, 0, 4], slice(None), 1),
        np.array([True, False] * 2 + [True]), ([0, 3, -1], [1, 1, -2], 5),
    ):  # fmt: skip
        result = dense_of(sparse[key])
        assert result.dtype == tensor.dtype
        np.testing.assert_array_equal(result.astype(float), tensor[key].astype(float))
    assert sparse[1, 2, 3] == tensor[1, 2, 3]


@COO_OF_THREE
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "float16"])
def test_operators_of_rows_and_tensors(dtype):
    """Results are scipy's for tensors of any order, and NumPy's for a matrix with a row."""
    D = (np.random.default_rng(0).integers(-3, 4, (6, 6)) * np.tri(6)).astype(dtype)
    A = SparseMatrix(sp.csr_array(D.astype("float64"))).astype(dtype)
    for got, exact in (
        (A[3] + A[4], D[3] + D[4]), (A[3] - A[4], D[3] - D[4]), (A[3] * A[4], D[3] * D[4]),
        (A * A[3], D * D[3]), (A * A[3:4], D * D[3:4]), (A * A[:, [1]], D * D[:, [1]]),
        (A @ A[3], D @ D[3]), (A[3] @ A, D[3] @ D),
    ):  # fmt: skip
        assert got.dtype == D.dtype
        same(got, exact, zeros=True)
    assert A[3] @ A[4] == D[3] @ D[4] and isinstance(A * A[3], SparseMatrix)
    T = SparseTensor.from_dense(D.reshape(2, 3, 6))
    same(T + T * 2 - T * T, 3 * D.reshape(2, 3, 6) - D.reshape(2, 3, 6) ** 2, zeros=True)


def test_gradients_do_not_end_in_operators():
    A = SparseMatrix(sp.csr_array(np.tri(4)))
    other = torch.from_numpy(np.tri(4)).to_sparse_csr().requires_grad_()
    for operate in (operator.add, operator.sub, operator.mul, operator.matmul, SparseMatrix.kron):
        with pytest.raises(TypeError, match="without a gradient"):
            operate(A, other)


def test_positions_are_computed_once_and_checked():
    arrays = sp.csr_array(np.tri(5, dtype=np.float32))
    matrix, other = SparseMatrix(arrays), SparseMatrix(arrays)
    assert matrix[4, 1] == 1 and matrix.T[1, 4] == 1
    kept = matrix._structure.positions
    assert matrix.with_values(np.arange(15.0))[4, 1] == 11 and matrix.sum() == 15
    assert matrix._structure.positions is kept
    assert np.shares_memory(kept.indices, matrix.pattern.columns)
    arrays.indices[0] = 99
    with pytest.raises(StructureError, match="axis 1"):
        other[0, 0]
    with pytest.raises(StructureError, match="axis 1"):
        matrix @ np.ones(5, np.float32)  # positions were computed before
    arrays.indices[0] = 0
    once = SparseMatrix(arrays)
    np.testing.assert_array_equal(once @ np.ones(5, np.float32), np.arange(1, 6))
    arrays.indices[0] = 99
    with pytest.raises(StructureError, match="axis 1"):
        once @ np.ones(5, np.float32)  # the first product made no plan, which has its own arrays


@COO_OF_THREE  # older ones make dense arrays of as many rows
def test_far_coordinates():
    far = 2**40
    sparse = SparseTensor([[far - 1, 5, 5], [0, 2, far]], [1.0, 2, 4], (far, far + 1))
    assert sparse.T.pattern.coords[0].tolist() == [0, 2, far] and sparse.sum() == 7
    assert (sparse > 1).nnz == 2 and sparse.transpose((1, 0)).shape == (far + 1, far)
    wide = SparseMatrix(([0, 2, 2], [far, 5, far]), values=np.arange(3.0))
    assert wide[1:, 5:7].toarray().tolist() == [[0, 0], [1, 0]] and wide[2, far] == 2
    assert wide[2].pattern.coords[0].dtype == np.int64 and wide[:, :9].operand().idtype == "int32"


def test_pydata():
    sparse = pytest.importorskip("sparse")
    want = dense((4, 3, 5))
    sparse_ = SparseTensor.from_dense(want)
    np.testing.assert_array_equal(sparse_.to_pydata().todense(), want)
    coo = sparse.COO.from_numpy(want[0])
    for kind in ("coo", "gcxs", "dok"):
        same(SparseMatrix(coo.asformat(kind)), want[0])
    same(SparseTensor(sparse_.to_pydata()), want)
    a = SparseMatrix(coo)
    check(a @ coo.T, want[0] @ want[0].T)
    with pytest.raises(ValueError, match="'data': expected zeros where nothing is stored, got 1"):
        SparseMatrix(coo + 1)


A = SparseMatrix(ZOO["random"])
T = SparseTensor.from_dense(dense((3, 4, 5)))
NEEDS = torch.ones(47, requires_grad=True)
SPARSE = torch.ones(61, 47).to_sparse().requires_grad_()

test_refusals = refusals(
    """
    A == A            # TypeError: SparseMatrix.__eq__: expected a comparison .. (A != B).nnz
    A == 0            # TypeError: SparseMatrix.__eq__: expected a comparison .. where nothing
    A >= 0            # TypeError: SparseMatrix.__ge__: expected a comparison
    A < 1             # TypeError: SparseMatrix.__lt__: expected a comparison
    A != float("nan") # TypeError: SparseMatrix.__ne__: expected a comparison
    A > np.ones((61, 47))  # TypeError: SparseMatrix.__gt__: expected a comparison .. toarray()
    A > A.T           # ValueError: SparseMatrix.__gt__: argument 'other': expected shape (61, 47)
    A > "a"           # TypeError: not supported between
    A.indptr          # AttributeError: no attribute 'indptr'; A.to_scipy().indptr is SciPy's
    A.tocsc()         # AttributeError: no attribute 'tocsc'; A.to_scipy().tocsc is SciPy's
    A.nothing         # AttributeError: 'SparseMatrix' object has no attribute 'nothing'
    SparseMatrix((np.ones(1), ([0], [0])))  # TypeError: SparseMatrix: argument 'data'
    SparseMatrix((np.ones(1), (np.zeros(1, int), np.zeros(1, int))))
        # TypeError: expected a pair (rows, columns), got SciPy's
    bool(A)           # ValueError: neither true nor false; use nnz
    A / 0             # ZeroDivisionError: SparseMatrix.__truediv__: zeros that are not stored
    A / A             # TypeError: SparseMatrix.__truediv__: expected a number or a dense array
    T / T             # TypeError: SparseTensor.__truediv__: expected a number or a dense array
    A / "a"           # TypeError: unsupported operand
    1 / A             # TypeError: unsupported operand
    A / np.ones(3)    # ValueError: SparseMatrix.__truediv__: argument 'other': expected .. (61, 47)
    A * np.ones((2, 61, 47))  # ValueError: SparseMatrix.__mul__: argument 'other': expected a shape
    A * NEEDS         # TypeError: SparseMatrix.__mul__: expected a tensor without a gradient
    NEEDS * A         # TypeError: SparseMatrix.__mul__: expected a tensor without a gradient
    A / NEEDS         # TypeError: SparseMatrix.__truediv__: expected a tensor without a gradient
    SPARSE.t() @ A    # TypeError: SparseMatrix.__rmatmul__: expected a tensor without a gradient
    SPARSE + A        # TypeError: SparseMatrix.__radd__: expected a tensor without a gradient
    SPARSE - A        # TypeError: SparseMatrix.__rsub__: expected a tensor without a gradient
    SparseMatrix.vstack([A, SPARSE])  # TypeError: expected a tensor without a gradient
    A != SPARSE       # TypeError: SparseMatrix.__ne__: expected a tensor without a gradient
    A + np.ones((61, 47))  # TypeError: numpy.add: expected a function with a sparse result
    np.exp(A)         # TypeError: numpy.exp: expected a function with a sparse result
    np.power(2.0, A)  # TypeError: numpy.power: expected .. got it for builtins.float and sparse
    np.add.reduce(A)  # TypeError: numpy.add.reduce: expected a function with a sparse result
    np.sqrt(A, out=np.ones((61, 47)))  # TypeError: numpy.sqrt: expected .. without out=
    A.sum(out=np.ones(3))  # ValueError: SparseMatrix.sum: argument 'out': expected None
    A ** 0            # ValueError: SparseMatrix.__pow__: expected a positive exponent .. got 0
    A ** -1.0         # ValueError: SparseMatrix.__pow__: expected a positive exponent .. got -1.0
    A ** A            # TypeError: unsupported operand
    A[61]             # IndexError: SparseMatrix.__getitem__: index (61) out of range
    A[[0, -62]]       # IndexError: SparseMatrix.__getitem__: index (-62) out of range
    A[0, 1, 2]        # IndexError: SparseMatrix.__getitem__:
    A[[True, False]]  # IndexError: SparseMatrix.__getitem__: bool index 0 has shape (61,)
    A[1.5]            # IndexError: SparseMatrix.__getitem__:
    A[A > 0]          # IndexError: SparseMatrix.__getitem__: argument 'key': expected .. nonzero()
    A[0, 0] = 1       # TypeError: does not support item assignment
    A.reshape(3, -1)  # ValueError: SparseMatrix.reshape: cannot reshape array of size 2867
    A.reshape(0, -1)  # ValueError: SparseMatrix.reshape:
    A.reshape(())     # ValueError: SparseMatrix.reshape: cannot reshape
    A.transpose((0,)) # ValueError: SparseMatrix.transpose: axes don't match
    A.transpose((0, 0))  # ValueError: SparseMatrix.transpose: repeated axis
    A.sum(2)          # AxisError: SparseMatrix.sum: axis 2 is out of bounds
    SparseMatrix.vstack([])  # ValueError: SparseMatrix.vstack: argument 'tensors': expected some
    SparseMatrix.vstack([A, A.T])  # ValueError: SparseMatrix.vstack:
    SparseTensor.vstack([T])  # ValueError: SparseTensor.vstack:
    np.ones((2, 3)) @ A  # ValueError: __rmatmul__: argument 'x': expected shape (61,) or (batch
    [1, 2] @ A        # TypeError: unsupported operand
    """,
    globals(),
)
