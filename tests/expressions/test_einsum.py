"""`einsum` and `expression`: results beside NumPy's on adverse patterns, types, refusals."""

import ast
import re

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from reference import reference
from torch._dynamo.backends.debugging import aot_eager
from torch.autograd import gradcheck, gradgradcheck

import sparsetir
from pairs import by_turns
from refusals import refusals
from sparsetir import SparseMatrix, SparseTensor, einsum, ops
from sparsetir.expressions import traced
from sparsetir.expressions.assignments import assignments
from sparsetir.expressions.contraction import contracted, may_be_contracted
from sparsetir.expressions.einsum import einsum_program
from sparsetir.expressions.invariants import hoisted, may_be_hoisted
from sparsetir.expressions.notation import parse
from sparsetir.expressions.storage import Storage
from sparsetir.expressions.traced import einsum_op
from sparsetir.expressions.trees import Access, Affine, indices_of
from sparsetir.expressions.unit import MOST_CHANGES, Bound, Unit
from sparsetir.expressions.visits import Drivers
from sparsetir.runtime import pool
from sparsetir.runtime.assembled import AssembledKernel
from sparsetir.runtime.bound_arguments import bound_arguments
from sparsetir.runtime.kernel import Kernel
from sparsetir.schedules import row_orders

SIZES = {"i": 7, "j": 5, "k": 6, "l": 3, "n": 5}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
CASES = ("some", "empty", "one row", "one column")


def mask_of(case, shape, rng):
    """A pattern: with empty rows, empty, with one dense row, or a column alone."""
    mask = rng.random(shape) < 0.35
    if case == "empty":
        mask[:] = False
    if case == "some":
        mask[0] = mask[-1] = False
    if case == "one row":
        mask[:] = False
        mask[len(mask) // 2] = True
    if case == "one column":
        mask[..., 1:] = False
    return mask


def array(shape, case, rng, sparse, dtype="float64"):
    """A dense array, and the operand: it itself, or a tensor of its elements."""
    values = (
        rng.integers(-3, 4, shape) if np.dtype(dtype).kind in "iu" else rng.standard_normal(shape)
    )
    values = np.asarray(values, dtype)
    if not sparse:
        return values, values
    mask = mask_of(case, shape, rng)
    dense = np.where(mask, np.where(values == 0, 1, values), 0).astype(dtype)
    kind = SparseMatrix if len(shape) == 2 else SparseTensor
    return dense, kind.from_dense(dense) if mask.any() else kind.of_stored(_nothing(shape, dtype))


def _nothing(shape, dtype):
    from sparsetir.data.sources import Stored
    from sparsetir.formats.pattern import Pattern

    coords = [np.zeros(0, "int32")] * len(shape)
    return Stored(Pattern(coords, shape), np.zeros(0, dtype), None)


# Expressions; sparse operands, and sizes of operands where these do not follow from indices.
EXPRESSIONS = [line.split(";") for line in """
y[i] = A[i,j] * x[j]  ; A
y[j] = A[i,j] * x[i]  ; A
C[i,k] = A[i,j] * X[j,k]  ; A
C[k,i] = A[i,j] * X[j,k]  ; A
C[i,k] = A[i,j] * B[j,k]  ; A B
C[i,k] = A[i,j] * B[k,j]  ; A B
C[k,j] = A[i,j] * B[i,k]  ; A B
C[i,l] = A[i,j] * B[j,k] * D[k,l]  ; A B D
C[i,l] = A[i,j] * B[j,k] * X[k,l]  ; A B
C[i,k] = X[i,j] * A[j,k]  ; A
C[i,k] = X[i,j] * Y[j,k]  ;
z = X[i,j] * Y[i,j]  ;
z = A[i,j] * B[i,j]  ; A B
z = A[i,j]  ; A
y[i] = A[i,j] * B[i,j] * x[j]  ; A B
C[i,j] = A[i,j] * X[i,k] * Y[j,k]  ; A
C[i,j] = A[i,j] * x[i] / y[j]  ; A
C[i,j] = A[i,j] + B[i,j]  ; A B
C[i,j] = 2 * A[i,j] - B[i,j] / 3 + X[i,j]  ; A B
C[i,j] = -(A[i,j] - X[i,j])  ; A
C[i,k] = A[i,j] * X[j,k] + Y[i,k]  ; A
C[i,k] = A[i,j] * X[j,k] + B[i,l] * Y[l,k]  ; A B
C[i,k] = (A[i,j] + B[i,j]) * X[j,k]  ; A B
C[i,k] = (A[i,j] + x[i]) * X[j,k]  ; A
y[i] = b[i] - A[i,j] * x[j]  ; A
y[i] = (b[i] - sum(j, A[i,j] * x[j])) / d[i]  ; A
y[i] = sum(j, (b[i] - A[i,j] * x[j]) / d[i])  ; A
y[i] = alpha * A[i,j] * x[j] + beta * b[i]  ; A
C[i,j] = A[i,j] + B[j,i]  ; A B
C[i,j] = A[i,j] * B[j,i]  ; A B
C[i,j] = x[i] * y[j] + A[i,j]  ; A
C[i,j,k] = A[i,j] * B[i,k]  ; A B
C[i,k] = P[i,j,k] * x[j]  ; P
C[i,l] = P[i,j,k] * X[j,l] * Y[k,l]  ; P
C[j,l] = P[i,j,k] * X[i,l] * Y[k,l]  ; P
C[k,l] = P[i,j,k] * X[i,l] * Y[j,l]  ; P
C[i,j,l] = P[i,j,k] * X[k,l]  ; P
y[i] = P[i,j,k] * Q[i,j,k]  ; P Q
y[j] = P[i,j,k] * Q[k,j,i]  ; P Q
C[i,k] = P[i,j,k] * A[i,j]  ; P A
z = P[i,j,k] * x[i] * y[j] * w[k]  ; P
C[n,i,k] = A[i,j] * V[n,j,k]  ; A
C[n,i] = W[n,i,j,k] * X[j,k]  ; W
y[i] = W[n,i,j,k] * P[n,j,k]  ; W P
z = a[i] * b[i]  ; a b
y[i] = a[i] + x[i] * b[i]  ; a b
C[i,j] = a[i] * b[j]  ; a b
C[i,k] = relu(A[i,j] * X[j,k])  ; A
C[i,k] = relu(sum(j, A[i,j] * X[j,k]))  ; A
C[i,k] = A[i,j] * exp(X[j,k] - Y[i,k])  ; A
C[i,j] = exp(A[i,j]) * x[j]  ; A
C[i,j] = tanh(A[i,j]) + sigmoid(B[i,j])  ; A B
y[i] = sqrt(abs(A[i,j])) * x[j]  ; A
C[i,j] = maximum(A[i,j], B[i,j]) - minimum(A[i,j], X[i,j])  ; A B
C[i,j] = where(A[i,j] > 0, X[i,j], 0.5)  ; A
y[i] = where(A[i,j] != 0, x[j], 0)  ; A
y[i] = A[i,j] ** 2 * (i - 2 * j)  ; A
y[i] = (A[i,j] < 1) * x[j]  ; A
y[i] = A[i,j] * X[i,k] * sum(l, Y[j,l] * Z[k,l])  ; A
C[i,k] = A[i,j] * exp(sum(l, X[i,l] * Y[j,l])) * Z[j,k]  ; A
y[i] = A[i,j] * max(k, X[j,k]) - sum(k, Y[i,k])  ; A
y[i] = max(j, X[i,j]) * min(k, prod(l, Y[k,l]))  ;
y[i] = x[2*i+k] * w[k]  ; ; x=11 w=3
y[i] = x[i+k-1] * w[k] * b[i]  ; ; x=9 w=3 b=9
y[i] = A[i+1,j] * x[j]  ; A ; A=7x5
C[i,j] = X[i,j] * A[i,j-1]  ; A ; A=7x5 X=7x5
y[i] = A[i,i] * X[i,i]  ; A ; A=5x5 X=5x5
z = A[i,j] * A[j,k] * A[i,k]  ; A ; A=6x6
T[n] = tvm[n] * o * x[n]  ; tvm ; tvm=5
C[i,j] = A[i,j] * A[j,i]  ; A ; A=6x6
z = sum(i, 1 + a[i] * a[i]) ; a
y[i] = exp(sum(j, A[i,j] - b[i])) + sum(j, 2 - A[i,j]) ; A
y[i] = sum(j, k, (A[i,j] + a[i]) * (x[i] - B[i,k])) ; A a B
C[i,l] = sum(j, k, A[i,j] * B[j,k] * D[k,l] + a[i] * X[i,l]) ; A B D a
C[i,j] = sum(j, sum(j, tanh(A[i,j])) + A[i,j] * x[j]) ; A
y[i] += A[i,j] * x[j]  ; A
C[i,j] += X[i,k] * Y[j,k] * A[i,j] - x[j]  ; A
""".strip().splitlines()]  # fmt: skip


def inputs(text, sparse, shapes, case, dtype="float64", seed=0):
    """Dense arrays and operands by name."""
    rng = np.random.default_rng(seed)
    shape_of = dict(s.split("=") for s in shapes.split())
    dense, operands = {}, {}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Subscript):
            continue
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        name = node.value.id
        target = text.replace(" ", "").startswith(ast.unparse(node).replace(" ", ""))
        if name in dense or (target and "+=" not in text):
            continue
        shape = (
            tuple(map(int, shape_of[name].split("x")))
            if name in shape_of
            else tuple(SIZES[p.id] for p in parts)
        )
        dense[name], operands[name] = array(shape, case, rng, name in sparse.split(), dtype)
    for name in ("alpha", "beta", "o"):
        if re.search(rf"\b{name}\b", text):
            operands[name] = 0.5
            dense[name] = np.asarray(0.5)
    return dense, operands


def check(text, sparse="", shapes="", case="some", dtype="float64", **tolerance):
    dense, operands = inputs(text, sparse, shapes, case, dtype)
    result = einsum(text, **operands)
    with np.errstate(all="ignore"):
        want = reference(text, dense)
    np.testing.assert_allclose(result, want, **(tolerance or CLOSE), err_msg=text)
    return result


@pytest.mark.parametrize("row", by_turns(EXPRESSIONS, 2), ids=[r[0].strip() for r in EXPRESSIONS])
def test_expressions_on_adverse_patterns(row):
    """One kernel for all patterns; numbers are NumPy's."""
    text, sparse, shapes = (x.strip() for x in [*row, "", ""][:3])
    for case in CASES:
        check(text, sparse, shapes, case)


SUBSCRIPTS = """
ij,jk->ik
ij,jk
ij,ij->
ij->ji
ii->i
ij,kj->ik
...j,jk->...k
i,j->ij
ijk,jl,kl->il
ij,j,ij->i
""".split()


@pytest.mark.parametrize("text", SUBSCRIPTS)
def test_subscripts_of_numpy(text):
    rng = np.random.default_rng(0)
    sizes = {"i": 6, "j": 6 if "ii" in text else 5, "k": 4, "l": 3}
    parts = text.split("->")[0].replace("...", "nm" if "..." in text else "").split(",")
    sizes |= {"n": 2, "m": 3}
    dense, operands = [], []
    for n, part in enumerate(parts):
        shape = tuple(sizes[c] for c in part)
        x, operand = array(shape, "some", rng, n == 0 and len(shape) > 1)
        dense.append(x)
        operands.append(operand)
    np.testing.assert_allclose(einsum(text, *operands), np.einsum(text, *dense), **CLOSE)


BROADCAST = [
    line.split("; ")
    for line in """
ij,ij->ij; 4 5; 1 5
ij,ij; 4 5; 1 5
ij,ij->ij; 4 1; 1 5
ij,ij->ij; 1 1; 1 1
ij,jk; 4 5; 1 3
...i,i->...i; 2 3 5; 1
i...,i->...; 1 3 5; 4
bi,...b->...i; 1 3; 2 2 4
""".strip().split("\n")
]


@pytest.mark.parametrize("row", BROADCAST, ids=[" ".join(r) for r in BROADCAST])
def test_dimensions_of_size_1_are_broadcast_as_by_numpy(row):
    rng = np.random.default_rng(0)
    operands = [rng.random([int(n) for n in shape.split()]) for shape in row[1:]]
    np.testing.assert_allclose(einsum(row[0], *operands), np.einsum(row[0], *operands), **CLOSE)


@pytest.mark.parametrize(
    ("dtype", "more", "want"),
    by_turns([
        ("float16", "float16", "float16"), ("float32", "float16", "float32"),
        ("float64", "float32", "float64"), ("int32", "int32", "int32"),
        ("int8", "int32", "int32"), ("int64", "float32", "float64"), ("bool", "bool", "int64"),
    ], 2),
)  # fmt: skip
def test_types_are_those_of_numpy(dtype, more, want):
    """Two types; sums of 16 bits are in float32, and bool counts."""
    rng = np.random.default_rng(0)
    A, sparse = array((6, 5), "some", rng, True, "float32")
    sparse = SparseMatrix.from_dense((A * 3).astype(dtype))
    X = (rng.standard_normal((5, 4)) * 3).astype(more)
    result = einsum("C[i,k] = 2 * A[i,j] * X[j,k]", A=sparse, X=X)
    assert result.dtype == want
    exact = 2 * (A * 3).astype(dtype).astype(float) @ X.astype(float)
    np.testing.assert_allclose(
        result, exact, **({"rtol": 5e-3, "atol": 5e-3} if want == "float16" else CLOSE32)
    )


CLOSE32 = {"rtol": 1e-5, "atol": 1e-5}
LARGE = SparseMatrix(([0, 1], [2**31 + 7, 3]), shape=(2, 2**31 + 8))


def test_long_dimensions_have_wide_indices():
    result = einsum("y[i] = A[i,j] * 2", A=LARGE)
    np.testing.assert_array_equal(result, [2, 2])


def test_what_is_not_stored_is_not_visited():
    """Infinities and NaN beside nothing do not show; beside a stored zero they do."""
    A = sp.csr_array((np.array([1.0, 0.0]), ([0, 2], [0, 1])), shape=(3, 2))
    X = np.array([[2.0, 3.0], [np.inf, np.nan]])
    result = einsum("C[i,k] = A[i,j] * X[j,k]", A=A, X=X)
    np.testing.assert_array_equal(result, [[2, 3], [0, 0], [np.nan, np.nan]])


def test_reductions_are_over_what_is_stored():
    dense, A = array((7, 5), "some", np.random.default_rng(0), True)
    stored = dense != 0
    x = np.random.default_rng(1).standard_normal(5)
    for op, empty in (("max", -np.inf), ("min", np.inf), ("prod", 1)):
        want = getattr(np, op)(np.where(stored, dense * x, empty), axis=1)
        np.testing.assert_allclose(einsum("ij,j->i", A, x, reduce=op), want)
        np.testing.assert_allclose(einsum(f"y[i] = {op}(j, A[i,j] * x[j])", A=A, x=x), want)
    B, factor = array((5, 4), "some", np.random.default_rng(2), True)
    both = stored[:, :, None] & (B != 0)[None]
    want = np.where(both, dense[:, :, None] + B[None], np.inf).min(axis=1)
    np.testing.assert_allclose(einsum("ij,jk->ik", A, factor, semiring="min_plus"), want)
    for kind in ("bool", "float64"):
        either = einsum("ij,jk->ik", *(x.astype(kind) for x in (A, factor)), semiring="or_and")
        np.testing.assert_array_equal(either, both.any(axis=1))
    B, factor = array((7, 5), "some", np.random.default_rng(3), True)
    D, more = array((7, 5), "some", np.random.default_rng(4), True)
    mask = stored & ((B != 0) | (D != 0))
    want = np.where(mask, dense * (B + D), -np.inf).max(axis=1)
    text = "y[i] = max(j, A[i,j] * (B[i,j] + D[i,j]))"
    np.testing.assert_allclose(einsum(text, A=A, B=factor, D=more), want)


SPARSE = [[x.strip() for x in line.split(";")] for line in """
C[i,k] = A[i,j] * B[j,k]          ; A B   ; csr
C[k,i] = A[i,j] * B[j,k]          ; A B   ; csr
C[i,k] = A[i,j] * B[k,j]          ; A B   ; csr
C[i,j] = A[i,j] - 2 * B[i,j]      ; A B   ; csr
C[i,j] = A[i,j] * B[i,j]          ; A B   ; csr
C[j,i] = A[i,j]                   ; A     ; csc
C[i,j] = x[i] * A[i,j]            ; A     ; csr
C[i,j] = relu(A[i,j] - B[i,j])    ; A B   ; csr
C[i,k] = A[i,j] * B[j,k] + D[i,k] ; A B D ; csr
C[i,l] = A[i,j] * B[j,k] * D[k,l] ; A B D ; csr
C[i,j] = A[i,j] + B[j,i]          ; A B   ; csr
C[i,j] = a[i] * b[j]              ; a b   ; csr
C[i,j] = maximum(A[i,j] * B[i,j], D[i,j]); A B D; csr
C[i,j] = maximum(A[i,j], -B[i,j] * D[i,j]); A B D; dcsr
C[i,k] = D[i,k] - A[i,j] * B[j,k] ; A B D ; dcsc
y[j] = A[i,j]                     ; A     ; csf
y[i] = a[i] + b[i]                ; a b   ; coo
C[j,k] = P[i,j,k]                 ; P     ; coo
C[k,i,j] = P[i,j,k] + Q[j,k,i]    ; P Q   ; dcsf
C[i,j,l] = P[i,j,k] * B[k,l]      ; P B   ; csf
C[i,j,k] = P[i,j,k] + A[i,j] * B[j,k]; P A B; coo
C[i,k,j,l] = A[i,j] * B[k,l]      ; A B   ; csf
""".strip().splitlines()]  # fmt: skip


@pytest.mark.parametrize("row", by_turns(SPARSE, 2), ids=[r[0].strip() for r in SPARSE])
@pytest.mark.default(3)
def test_sparse_results(row):
    """Results have the numbers of dense ones, and store nothing but visited elements."""
    text, sparse, format = row
    for case in CASES:
        dense, operands = inputs(text, sparse, "", case)
        result = einsum(text, format=format, **operands)
        assert type(result) is (SparseMatrix if len(result.shape) == 2 else SparseTensor)
        values = np.zeros(result.shape)
        values[tuple(result.pattern.coords)] = result.values
        np.testing.assert_allclose(values, reference(text, dense), **CLOSE)
        ones = {n: (x != 0).astype(float) for n, x in dense.items()}
        again = sparsetir.plan(text, format=format, **operands)
        for by in (1, 2, -3):  # the first call computes the pattern
            changed = {
                n: by * (x.values if isinstance(x, SparseTensor) else x)
                for n, x in operands.items()
            }
            result = again(**changed)
            values[tuple(result.pattern.coords)] = result.values
            want = reference(text, {n: by * x for n, x in dense.items()})
            np.testing.assert_allclose(values, want, **CLOSE)
        assert again().pattern is result.pattern
        added = (
            text.replace("-", "+").replace("relu", "abs").replace("(+", "(").replace(", +", ", ")
        )
        assert result.nnz == np.count_nonzero(reference(added, ones))


@pytest.mark.parametrize("threads", [1, 2])
def test_plans_of_sparse_results_with_many_elements(monkeypatch, threads):
    """Bounds of all rows together, and of each, serve the values at the pattern, too."""
    monkeypatch.setattr(pool, "count", lambda: threads)
    rng = np.random.default_rng(0)
    a, b = (sp.random_array((3000, 40), density=0.3, format="csr", rng=rng) for _ in "ab")
    run = sparsetir.plan("C[i,j] = A[i,j] + B[i,j]", A=a, B=b, format="csr")
    for _ in range(2):
        assert abs(run().to_scipy() - (a + b)).max() < 1e-12


def test_rows_that_are_not_stored_are_rows_of_the_result():
    """Operands in DCSR, whose rows end where the previous ones do."""
    dense, A = array((7, 5), "some", np.random.default_rng(0), True)
    x = np.random.default_rng(1).standard_normal(5)
    result = einsum("C[i,j] = A[i,j] * x[j]", A=A, x=x, format="csr", formats={"A": "dcsr"})
    np.testing.assert_array_equal(result.pattern.indptr, A.pattern.indptr)
    np.testing.assert_allclose(result.to_scipy().toarray(), dense * x, **CLOSE)


LAYOUTS = """
C[i,k] = A[i,j] * B[j,k]           ; A B ; csr  ; csr
C[k,i] = A[i,j] * B[j,k]           ; A B ; csc  ; csc
C[i,j] = A[i,j] - 2 * B[i,j]       ; A B ; dcsr ; coo
C[i,j,l] = P[i,j,k] * B[k,l]       ; P B ; csf  ; coo
y[j] = A[i,j]                      ; A   ; coo  ; coo
""".strip().splitlines()


@pytest.mark.parametrize("row", LAYOUTS)
@pytest.mark.default(2)
def test_sparse_results_of_torch(row):
    """Tensors of the requested layout, or in COO, with gradients for values."""
    text, sparse, format, layout = (x.strip() for x in row.split(";"))
    dense, operands = inputs(text, sparse, "", "some")
    leaves = {n: torch.from_numpy(x).requires_grad_() for n, x in dense.items()}
    results = {}
    for graded in (False, True):
        coos = {n: x.to_torch("coo") for n, x in operands.items()}
        for n, x in coos.items() if graded else ():
            ix = x.indices()
            coos[n] = torch.sparse_coo_tensor(ix, leaves[n][tuple(ix)], x.shape, is_coalesced=True)
        results[graded] = einsum(text, format=format, **coos)
        assert results[graded].layout == getattr(torch, f"sparse_{layout}")
        result = results[graded].detach().to_dense()
        np.testing.assert_allclose(result, reference(text, dense), **CLOSE)
    weights = torch.rand(results[True].shape, dtype=torch.float64)
    total = (results[True].to_dense() * weights).sum()
    grads = torch.autograd.grad(total, [*leaves.values()])
    for (n, x), grad in zip(dense.items(), grads):
        step = np.where(x != 0, np.random.default_rng(1).standard_normal(x.shape), 0) * 1e-6
        more, less = (reference(text, {**dense, n: x + s * step}) for s in (1, -1))
        want = ((more - less) * weights.numpy()).sum() / 2
        np.testing.assert_allclose((grad.numpy() * step).sum(), want, rtol=1e-6, atol=1e-14)


ASSEMBLED = [
    ("C[i,k] = A[i,j] * B[j,k]", "csr", lambda A, B, x: A @ B),
    ("C[k,i] = A[i,j] * B[j,k] - 2 * B[k,i]", "csc", lambda A, B, x: (A @ B).T - 2 * B),
    ("C[i,j] = A[i,j] * B[i,j] * x[j]", "csr", lambda A, B, x: A * B * x),
    (
        "C[i,k] = A[i,j] * exp(B[j,k]) + sum(j, A[i,j]) * B[i,k]", "csr",
        lambda A, B, x: A @ B.exp() + A.sum(1, keepdim=True) * B,
    ),
    ("C[i,k] = A[i,j] * B[k,j]", "dcsr", lambda A, B, x: A @ B.T),
]  # fmt: skip


@pytest.mark.parametrize(("text", "format", "of_dense"), ASSEMBLED)
@pytest.mark.default(2)
def test_sparse_results_with_gradients_are_those_without(text, format, of_dense, monkeypatch):
    """The same numbers by the same kernels; others, derived once, only in backward passes.

    Operands have a new pattern in the second call, and are the same tensor twice.
    """
    derived, runs = [], []
    derive, run = Unit._gradient, Bound.__call__
    monkeypatch.setattr(Unit, "_gradient", lambda *args: derived.append(args) or derive(*args))
    monkeypatch.setattr(Bound, "__call__", lambda *args: runs.append(args) or run(*args))
    x = torch.rand(6, dtype=torch.float64, requires_grad=True)
    others = {"x": x} if "x[" in text else {}
    for seed, twice in ((0, False), (1, True), (2, True)):
        rng = np.random.default_rng(seed)
        matrices = [array((6, 6), "some", rng, True)[1] for _ in "AB"]
        leaves = [torch.rand(x.nnz, dtype=torch.float64, requires_grad=True) for x in matrices]
        if twice:
            matrices[1], leaves[1] = matrices[0], leaves[0]
        pairs = [*zip(matrices, leaves)]
        operands = {n: _torch_operand(*pair) for n, pair in zip("AB", pairs)} | others
        plan = sparsetir.plan(text, **operands, format=format)
        want = of_dense(*(_dense(*pair) for pair in pairs), x)
        new = dict(zip("AB", leaves))
        for call in (lambda: einsum(text, **operands, format=format), plan, lambda: plan(**new)):
            with torch.no_grad():
                plain = call()
            runs.clear()
            result = call()
            assert not runs
            torch.testing.assert_close(result.detach().to_dense(), plain.to_dense())
            torch.testing.assert_close(result.to_dense(), want)
            weights = torch.rand(6, 6, dtype=torch.float64)
            grads = [
                torch.autograd.grad(
                    (y.to_dense() * weights).sum(), [*leaves, x], allow_unused=True,
                    retain_graph=True,
                ) for y in (result, want)
            ]  # fmt: skip
            torch.testing.assert_close(*grads)
    assert len(derived) == len({(id(unit), param) for unit, param in derived})


def _dense(A, values):
    """The dense matrix of a pattern and a tensor of values."""
    at = tuple(torch.from_numpy(np.stack(A.pattern.coords).astype("int64")))
    return torch.zeros(A.shape, dtype=values.dtype).index_put(at, values)


def _torch_operand(A, values):
    """A matrix with the values of a tensor, through which torch computes no gradients."""
    index = (torch.from_numpy(x) for x in (A.pattern.indptr, A.pattern.columns))
    return ops.Operand(*index, *A.shape, values)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
@pytest.mark.default(1)
def test_gradients_of_sparse_results_of_first_and_second_order(check):
    _, A = array((5, 5), "some", np.random.default_rng(0), True)
    _, B = array((5, 5), "some", np.random.default_rng(1), True)
    leaves = [torch.rand(x.nnz, dtype=torch.float64, requires_grad=True) for x in (A, B)]

    def product(a, b):
        text = "C[i,k] = A[i,j] * B[j,k] * B[j,k] - A[i,k]"
        return einsum(text, A=_torch_operand(A, a), B=_torch_operand(B, b), format="coo").values()

    assert check(product, leaves, fast_mode=True)


def test_sparse_results_of_bfloat16():
    _, A = array((5, 5), "some", np.random.default_rng(0), True)
    values = torch.rand(A.nnz).bfloat16()
    result = einsum("C[i,j] = 2 * A[i,j]", A=_torch_operand(A, values), format="csr")
    assert torch.equal(result.values(), 2 * values)


@pytest.mark.parametrize("use", [
    lambda C: C.to_dense() ** 2, lambda C: torch.sparse.sum(C), lambda C: C.values() ** 2,
    lambda C: torch.sparse.mm(C.t(), C).to_dense(), lambda C: (C + C.t()).to_dense(),
])  # fmt: skip
def test_results_in_coo_take_gradients_at_any_coordinates(use):
    A = torch.rand(5, 5, dtype=torch.float64) * (torch.rand(5, 5) > 0.5)
    grads = []
    for ours in (True, False):
        x = torch.arange(1.0, 6, dtype=torch.float64).requires_grad_()
        C = (x[:, None] * A).to_sparse()
        if ours:
            C = einsum("C[i,j] = x[i] * A[i,j]", A=A.to_sparse(), x=x, format="coo")
        grads.append(torch.autograd.grad(use(C).sum(), x)[0])
    torch.testing.assert_close(*grads)


def test_gradients_of_sparse_results_refuse_values_that_changed():
    _, A = array((5, 5), "some", np.random.default_rng(0), True)
    a = torch.rand(A.nnz, dtype=torch.float64, requires_grad=True)
    values = a * 1
    result = einsum("C[i,k] = A[i,j] * A[j,k]", A=_torch_operand(A, values), format="csr")
    values.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.values().sum().backward()


def test_operands_of_torch_are_as_they_are_now():
    """Writes to values and indices are seen, those that torch does not notice, too."""
    _, M = array((6, 6), "some", np.random.default_rng(0), True)
    A, X = M.to_torch("csr"), torch.rand(6, 2, dtype=torch.float64)
    plan = sparsetir.plan("C[i,j] = A[i,j] + A[j,i]", A=A, format="csr")
    writes = (
        lambda: A.values().mul_(2), lambda: A.values().numpy().__setitem__(0, 5),
        lambda: A.col_indices().copy_((A.col_indices() + 1) // 2 * 2 % 6),
        lambda: A.col_indices().numpy().__setitem__(slice(None), M.pattern.columns),
        lambda: setattr(A, "data", (2 * M).to_torch("csr").data),
    )  # fmt: skip
    for write in (None, *writes):
        if write is not None:
            write()
        dense = _dense_of_csr(A)
        for _ in range(2):
            torch.testing.assert_close(einsum("C[i,k] = A[i,j]*X[j,k]", A=A, X=X), dense @ X)
            for format in ("csr", "coo"):
                result = einsum("C[i,j] = A[i,j] + A[j,i]", A=A, format=format).to_dense()
                torch.testing.assert_close(result, dense + dense.T)
    torch.testing.assert_close(plan(A=A).to_dense(), dense + dense.T)


def _dense_of_csr(A):
    """The sum of elements at each place; torch expects each once."""
    counts = A.crow_indices().diff()
    rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
    at = rows, A.col_indices().long()
    return torch.zeros(A.shape, dtype=A.dtype).index_put(at, A.values(), accumulate=True)


@pytest.mark.parametrize("format", [None, "csr"])
def test_values_of_another_number_are_refused(format):
    _, M = array((6, 6), "some", np.random.default_rng(0), True)
    A = _torch_operand(M, torch.ones(M.nnz + 1))
    expected = rf"argument 'A': expected a number for each of {M.nnz} elements, got values of shape"
    with pytest.raises(ValueError, match=expected):
        einsum("C[i,j] = 2 * A[i,j]", A=A, format=format)


def test_results_like_operands():
    """The pattern of an operand, or of another matrix; in its order of levels."""
    rng = np.random.default_rng(0)
    dense, A = array((7, 5), "some", rng, True)
    X, Y = rng.standard_normal((7, 3)), rng.standard_normal((5, 3))
    for text, options in (
        ("S[i,j] = A[i,j] * X[i,k] * Y[j,k]", {"like": "A"}),
        ("S[i,j] = A[i,j] * X[i,k] * Y[j,k] + X[i,k]", {"like": A}),
        ("S[i,j] = s * A[i,j] * X[i,k] * Y[j,k]", {"like": "A", "s": 0.5}),
    ):
        result = einsum(text, A=A, X=X, Y=Y, **options)
        known = {"A": dense, "X": X, "Y": Y, "s": np.asarray(0.5)}
        want = np.where(dense != 0, reference(text, known), 0)
        assert result.pattern is A.pattern
        np.testing.assert_allclose(result.to_scipy().toarray(), want, **CLOSE)
    for layout in ("csr", "csc", "coo"):
        result = einsum("ik,jk->ij", torch.from_numpy(X), Y, like=A.to_torch(layout))
        assert result.layout == getattr(torch, f"sparse_{layout}")
        np.testing.assert_allclose(result.to_dense(), np.where(dense, X @ Y.T, 0), **CLOSE)
    result = einsum("ik,jk->ij", X, Y, like=A.to_scipy())
    np.testing.assert_allclose(result.to_scipy().toarray(), np.where(dense, X @ Y.T, 0), **CLOSE)


@pytest.mark.parametrize("text", [
    "B[i,j] = d[i] * A[i,j] * e[j]", "B[i,j] = A[i,j] * sum(k, X[i,k] * Y[j,k])",
    "B[i,j] = relu(A[i,j] - 2 * A[i,j])", "B[i,j] = max(k, A[i,j] * X[i,k])",
])  # fmt: skip
@pytest.mark.parametrize("case", CASES)
def test_results_at_the_pattern_of_an_operand(text, case):
    """Where a sparse result stores the elements of an operand, none are assembled."""
    rng = np.random.default_rng(3)
    dense, A = array((7, 5), case, rng, True)
    known = {"A": dense, "X": rng.standard_normal((7, 3)), "Y": rng.standard_normal((5, 3)),
             "d": rng.standard_normal(7), "e": rng.standard_normal(5)}  # fmt: skip
    read = {n: A if n == "A" else x for n, x in known.items() if re.search(rf"\b{n}\[", text)}
    want = np.where(dense != 0, reference(text, known), 0)
    for format in ("csr", "csc", "coo", "dcsr"):
        plan = sparsetir.plan(text, format=format, **read)
        for result in (plan(), einsum(text, format=format, **read)):
            assert result.pattern is A.pattern
            np.testing.assert_allclose(result.to_scipy().toarray(), want, **CLOSE)
    tensors = {n: torch.from_numpy(x) for n, x in known.items() if n in read and n != "A"}
    for layout in ("csr", "csc", "coo"):
        at = A.to_torch(layout).requires_grad_()
        result = einsum(text, format=layout, A=at, **tensors)
        assert result.layout == getattr(torch, f"sparse_{layout}")
        np.testing.assert_allclose(result.detach().to_dense(), want, **CLOSE)


def test_changing_values_stay_in_their_order():
    """Values from scipy are not permuted at each call for a vector; those of a SparseMatrix are,
    once, and with features both."""
    rng = np.random.default_rng(5)
    dense, A = array((7, 5), "some", rng, True)
    for text, shape, moved in (
        ("y[j] = A[i,j] * x[i]", (7,), False),
        ("y[j,k] = A[i,j] * x[i,k]", (7, 4), True),
    ):
        x = rng.standard_normal(shape)
        for a, permuted in ((A.to_scipy(), moved), (A, True)):
            plan = sparsetir.plan(text, A=a, x=x)
            (program,) = plan.programs
            root = "J" if permuted else "I"
            assert f"T.sparse_variable({root}, " in program.script()
            np.testing.assert_allclose(plan(), dense.T @ x, **CLOSE)
            if not moved:
                a = a * 2 if permuted else sp.csr_array(a * 2)
                np.testing.assert_allclose(plan(A=a), 2 * dense.T @ x, **CLOSE)


def test_rows_of_assembled_matrices_come_first():
    dense, A = array((7, 5), "some", np.random.default_rng(8), True)
    plan = sparsetir.plan("C[j,i] = A[i,j]", format="csr", A=A.to_scipy())
    assert "T.sparse_variable(J, " in plan.programs[0].script()
    np.testing.assert_array_equal(plan().to_scipy().toarray(), dense.T)


def test_equal_reductions_are_computed_once():
    rng = np.random.default_rng(7)
    dense, A = array((7, 5), "some", rng, True)
    x = rng.standard_normal(5)
    text = "P[i,j] = A[i,j] * x[j] / (1 + sum(l, A[i,l] * x[l]) * sum(l, A[i,l] * x[l]))"
    plan = sparsetir.plan(text, format="csr", A=A, x=x)
    assert plan.programs[0].script().count("T.sp_iter(") == 2
    want = dense * x / (1 + (dense @ x)[:, None] ** 2)
    np.testing.assert_allclose(plan().to_scipy().toarray(), want, **CLOSE)


def test_intermediate_results_have_their_features_last():
    rng = np.random.default_rng(6)
    dense, A = array((50, 40), "some", rng, True)
    X, Y = rng.standard_normal((50, 3)), rng.standard_normal((40, 8))
    plan = sparsetir.plan("W[g,k] = X[i,g] * A[i,j] * Y[j,k]", X=X, A=A, Y=Y)
    assert "T.alloc_sparse_buffer((J, G)" in plan.programs[0].script()
    np.testing.assert_allclose(plan(), X.T @ dense @ Y, **CLOSE)


GRADED = [line.split(";") for line in """
C[i,k] = A[i,j] * X[j,k]                               ; A
C[k,i] = Y[i,k] - A[i,j] * X[j,k]                      ; A
C[j,k] = A[i,j] * X[i,k]                               ; A
C[i,k] = A[i,j] * exp(sum(l, X[i,l] * Y[j,l])) * Z[j,k]; A
z = A[i,j] * B[i,j]                                    ; A B
C[i,k] = A[i,j] * B[k,j]                               ; A B
y[i] = relu(sum(j, A[i,j] * x[j]) - 1) / sum(j, A[i,j] + 1); A
y[i] += A[i,j] * x[j]                                  ; A
y[i] = A[i,j] * exp(x[j] - max(j, (A[i,j] != 0) * x[j])); A
C[i,k] = min(j, A[i,j] * X[j,k] + Y[i,k])              ; A
z = A[i,j] * B[j,k] * D[i,k]                           ; A B D
C[i,l] = A[i,j] * B[j,k] * X[k,l]                      ; A B
""".strip().splitlines()]  # fmt: skip


# Of the second order some take long, for kernels of many programs.
QUICK = ("z = A[i,j] * B[i,j]", "y[i]")
ORDERS = [(row, check) for check in (gradcheck, gradgradcheck) for row in GRADED]


@pytest.mark.parametrize(("row", "check"), [
    pytest.param(
        row, check, id=f"{row[0].strip()}-{check.__name__}",
        marks=() if check is gradcheck or row[0].startswith(QUICK) else pytest.mark.slow,
    )
    for row, check in ORDERS
])  # fmt: skip
@pytest.mark.slow
def test_gradients_of_first_and_second_order(row, check):
    """Gradients for values of sparse operands, too."""
    _, operands = inputs(row[0], row[1], "", "some", seed=3)
    names, leaves = list(operands), []
    for x in operands.values():
        values = x.values if isinstance(x, SparseTensor) else x
        leaves.append(torch.from_numpy(values.copy()).requires_grad_())

    def run(*tensors):
        args = {}
        for name, t in zip(names, tensors):
            x = operands[name]
            if isinstance(x, SparseTensor):
                ptr, col = (torch.from_numpy(v) for v in (x.pattern.indptr, x.pattern.columns))
                t = ops.Operand(ptr, col, *x.shape, t)
            args[name] = t
        return einsum(row[0].strip(), **args)

    assert check(run, leaves, fast_mode=True)


@pytest.mark.parametrize(("name", "reduce"), [("max", torch.amax), ("min", torch.amin)])
def test_gradients_of_extrema_are_shared_by_the_terms_that_attain_them(name, reduce):
    """Gradients are torch's; empty rows have none."""
    dense = torch.tensor([[1.0, 2, 2, -1], [0, 0, 0, 0], [3, 1, 0, 3]], dtype=torch.float64)
    A = dense.to_sparse_csr().requires_grad_()
    grads = []
    for ours in (True, False):
        x = torch.ones(4, dtype=torch.float64).requires_grad_()
        if ours:
            y = einsum(f"y[i] = {name}(j, A[i,j] * x[j])", A=A, x=x)
            assert torch.isinf(y[1])
        else:
            absent = float("-inf" if name == "max" else "inf")
            y = reduce(torch.where(dense == 0, absent, dense * x), 1)
        (y[::2] * torch.tensor([1.0, 2], dtype=torch.float64)).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    assert A.grad.values().sum() == 3


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_repeated_calls_with_empty_operands_run_at_once(kind, monkeypatch):
    """TVM refuses the strides of empty arrays, and the kernel would run again each time."""
    texts = {"y[i] = A[i,j] * x[j]": {}, "C[i,k] = A[i,j] * A[k,j]": {"format": "csr"}}
    for shape in ((3, 4), (0, 4), (3, 0)):
        A = SparseMatrix(sp.csr_matrix(shape))
        x = np.ones(shape[1])
        operands = {"A": A, "x": torch.from_numpy(x) if kind == "torch" else x}
        for text, options in texts.items():
            given = {n: v for n, v in operands.items() if f"{n}[" in text}
            first = einsum(text, **given, **options)
            with monkeypatch.context() as patch:
                patch.delattr(Kernel, "run_refused")
                again = einsum(text, **given, **options)
            values = again.values if options else again
            assert first.shape == again.shape and not np.any(np.asarray(values))


def test_repeated_calls_read_their_operands_again():
    """Results kept by types and shapes depend on nothing else."""
    text = "C[i,k] = n * A[i,j] * X[j,k]"
    dense, operands = inputs("C[i,k] = A[i,j] * X[j,k]", "A", "", "some")
    A, X = operands["A"], dense["X"]
    want = dense["A"] @ X
    for n in (1.0, 2.0, 3):
        np.testing.assert_allclose(einsum(text, A=A, X=X, n=n), n * want)
    X[:] *= 2
    np.testing.assert_allclose(einsum(text, A=A, X=X, n=1.0), 2 * want)
    wide = np.repeat(X, 2, 1)
    np.testing.assert_allclose(einsum(text, A=A, X=wide[:, ::2], n=1.0), 2 * want)
    np.testing.assert_allclose(einsum(text, A=A, X=wide, n=1.0)[:, 1::2], 2 * want)
    np.testing.assert_allclose(
        einsum(text, A=A.with_values(A.values + A.values), X=X, n=1.0), 4 * want
    )
    assert einsum(text, A=A, X=X.astype("float32"), n=1.0).dtype == "float64"
    out = np.empty_like(want)
    assert einsum(text, A=A, X=X, n=1.0, out=out) is out
    np.testing.assert_allclose(out, 2 * want)
    for wrong in (out[:-1], out.astype("float32"), torch.from_numpy(out)):
        with pytest.raises(ValueError, match="argument 'out': expected a ndarray to write to"):
            einsum(text, A=A, X=X, n=1.0, out=wrong)
    with pytest.raises(ValueError, match="'j'"):
        einsum(text, A=A, X=X[:-1], n=1.0)
    text = "C[i,j] = d[i] * A[i,j]"
    for d in (want[:, 0], want[:, 1]):
        result = einsum(text, A=A, d=d, like="A")
        assert result.pattern is A.pattern
        np.testing.assert_allclose(result.toarray(), d[:, None] * dense["A"])


@pytest.mark.parametrize("format", ["csf", "dcsf"])
def test_gradients_that_visit_levels_in_another_order(format):
    """Also those below a compressed root, which is below an axis of length 1."""
    dense, operands = inputs("C[i] = A[k,j] * P[k,i,j]", "P", "", "some")
    P, A = operands["P"].to_torch("coo"), torch.from_numpy(dense["A"]).requires_grad_()
    result = einsum("C[i] = A[k,j] * P[k,i,j]", A=A, P=P, formats={"P": format})
    (grad,) = torch.autograd.grad(result.sum(), A)
    np.testing.assert_allclose(grad, dense["P"].sum(1))


def test_gradients_beside_a_sparse_vector():
    """The axis that a merged one is attached to stays around it."""
    _, operands = inputs("C[i,l] = P[i,l,j] * a[j]", "P a", "", "some")
    sparse = [x.to_torch("coo").requires_grad_() for x in operands.values()]
    dense = [x.detach().to_dense().requires_grad_() for x in sparse]
    einsum("ilj,j->il", *sparse).sin().sum().backward()
    torch.einsum("ilj,j->il", *dense).sin().sum().backward()
    for x, want in zip(sparse, dense):
        at = tuple(x.detach().indices())
        torch.testing.assert_close(x.grad.to_dense()[at], want.grad[at])


@pytest.mark.parametrize("format", ["csr", "csc", "coo", "ell", "dcsr", "dcsc", "csf_1_0"])
def test_formats_of_operands(format):
    dense, A = array((7, 5), "some", np.random.default_rng(0), True)
    X = np.random.default_rng(1).standard_normal((5, 4))
    np.testing.assert_allclose(
        einsum("ij,jk->ik", A, X, formats={"A0": format}), dense @ X, **CLOSE
    )


def test_terms_that_share_an_operand_have_one_order_of_its_levels():
    """The first one searches it, beside coordinates that repeat; the second one visits it."""
    sizes = {"A": (3, 4), "B": (3,), "D": (3, 3, 4, 2)}
    rng = np.random.default_rng(0)
    arrays = {n: array(shape, "some", rng, True) for n, shape in sizes.items()}
    dense, operands = ({n: x[k] for n, x in arrays.items()} for k in (0, 1))
    text = "C[l,k] = (abs(A[k,l]) - B[j]) * D[k,j,l,i]"
    result = einsum(text, formats={"A": "coo"}, **operands)
    np.testing.assert_allclose(result, reference(text, dense), **CLOSE)


COMPILED = """
C[i,k] = A[i,j] * X[j,k] ; edges
C[j,k] = s * A[i,j] * X[i,k] ; matrix
ij,jk->ki ; matrix
C[i,k] = A[i,j] * exp(sum(l, X[i,l] * Y[j,l])) * Y[j,k] ; matrix
C[i,l] = P[i,j,k] * X[j,l] * Y[k,l] ; tensor
ij,ij->ij ; broadcast
C[i,k] = A[i,j] * X[j,k] + Y[i,k] ; coo
S[i,j] = A[i,j] * X[i,k] * Y[j,k] ; like
C[i,k] = A[i,j] * X[j,k] ; csr
""".strip().splitlines()  # fmt: skip
BROKEN = ("coo", "like", "csr")


@pytest.mark.parametrize("row", by_turns(COMPILED, 3))
@pytest.mark.default("C[i,k] = A[i,j] * X[j,k] + Y[i,k] ; coo")
def test_compiled_functions_have_one_graph_or_break_it_once(row):
    """Results and gradients are those of eager calls; of sparse results graphs break, once."""
    text, kind = row.split(" ; ")
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    rng = np.random.default_rng(0)
    dense = np.where(mask_of("some", (6, 6), rng), rng.random((6, 6)), 0)
    edges = torch.from_numpy(np.stack(dense.T.nonzero()))  # columns first
    operand = ops.resolve((edges, 6))
    shapes = (6, 6), (6, 6), len(edges[0])
    X, Y, values = (torch.from_numpy(rng.random(s)).requires_grad_() for s in shapes)
    sparse = {"A": SparseMatrix.from_dense(dense)}
    options = {"like": {"like": "A"}, "csr": {"format": "csr"}}.get(kind, {})
    tensor = array((6, 6, 6), "some", rng, True)[1]

    def function(X, Y, values, edges):
        if "->" in text:
            pair = (X, Y[:1]) if kind == "broadcast" else (sparse["A"], 2 * X)
            return einsum(text, *pair).sin()
        args = {"P": tensor} if kind == "tensor" else dict(sparse)
        if "s *" in text:
            args["s"] = 0.5
        if kind == "edges":
            args["A"] = ops.Operand(operand.rowptr, edges, 6, 6, 2 * values)
        if kind == "coo":
            args["A"] = torch.sparse_coo_tensor(edges.flip(0), 2 * values, (6, 6)).coalesce()
        args |= {n: x * 2 for n, x in (("X", X), ("Y", Y)) if n in text}
        out = einsum(text, **args, **options)
        return (out if out.layout is torch.strided else out.values()).relu().sin()

    results, whole = [], kind not in BROKEN
    for call in (torch.compile(function, backend=backend, fullgraph=whole), function):
        out = call(X, Y, values, edges)
        grads = torch.autograd.grad(out.sum(), (X, Y, values), allow_unused=True)
        results.append([out, *(g for g in grads if g is not None and g.any())])
    # At sparse tensors torch breaks graphs itself; nothing of what einsum calls is in one.
    assert len(graphs) == 1 if whole else len(graphs) <= 3, len(graphs)
    assert len(results[0]) == len(results[1]) > 1
    for result, want in zip(*results):
        torch.testing.assert_close(result, want)


def test_compiled_functions_keep_formats(monkeypatch):
    """Shapes are inferred for each call, and leave its options as they are."""
    taken = []

    def evaluated(*args, **options):
        taken.append(options["formats"])
        return einsum_of_arrays(*args, **options)

    einsum_of_arrays = traced.evaluated
    monkeypatch.setattr(traced, "evaluated", evaluated)
    _, A = array((7, 6), "some", np.random.default_rng(0), True)
    call = torch.compile(
        lambda A, X: einsum("ij,jk->ik", A, X, formats={"A0": "csc"}), backend="eager"
    )
    call(A, torch.rand(6, 4, dtype=torch.float64))
    assert taken == [{"A0": "csc"}]


@pytest.mark.slow
def test_operator_of_compiled_functions():
    """Inputs as torch's tests want them; other matrices and sizes use the same graph."""
    X, Y = (torch.rand(n, 4, dtype=torch.float64, requires_grad=True) for n in (6, 5))
    options = {"reduce": "sum", "semiring": "plus_times", "formats": None, "optimize": True}
    call = repr(("ij,kj->ik", [("dense", 1), ("dense", 1)], [], options))
    torch.library.opcheck(einsum_op, (call, [X, Y], [], []))
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    product = torch.compile(lambda A, X: einsum("ij,jk->ik", A, X), backend=count, fullgraph=True)
    for case, columns in zip((*CASES[:1], *CASES), (4, 5, 6, 7, 8)):
        dense, A = array((7, 6), case, np.random.default_rng(columns), True)
        X = torch.rand(6, columns, dtype=torch.float64)
        np.testing.assert_allclose(product(A, X), dense @ X.numpy(), **CLOSE)
    assert count.frame_count <= 3
    function = torch.compile(
        lambda X, Y: einsum("C[i,j] = A[i,j] * tanh(X[i,k]) * Y[j,k]", A=A, X=X, Y=Y),
        backend="eager", fullgraph=True,
    )  # fmt: skip
    dense, A = array((6, 5), "some", np.random.default_rng(0), True)
    leaves = [torch.rand(n, 2, dtype=torch.float64, requires_grad=True) for n in (6, 5)]
    assert gradgradcheck(function, leaves, fast_mode=True)
    with pytest.raises(RuntimeError, match="aot_autograd does not currently support double back"):
        compiled = torch.compile(lambda X: einsum("ij,jk->ik", A, X), backend="aot_eager")
        (grad,) = torch.autograd.grad(compiled(leaves[1]).sin().sum(), leaves[1], create_graph=True)
        grad.sum().backward()
    with pytest.raises(Exception, match="expected dense operands of torch, numbers, and sparse"):
        torch.compile(lambda X: einsum("ij->ji", X, format="csr"), fullgraph=True)(X)


@pytest.mark.parametrize("format", by_turns([None, "csc", "coo", "ell", "dcsr"], 2))
@pytest.mark.default("coo")
def test_programs_have_their_arguments(format):
    """The operator that :func:`einsum` runs, and its parameters."""
    texts = ["y[i] = s * A[i,j] * x[j]", "C[i,k] += A[i,j] * X[j,k]", "z = A[i,j] * A[j,i]"]
    for text in texts[: 2 if format == "coo" else 3]:  # coordinates of COO cannot be searched
        shapes = "A=6x6" if text.startswith("z") else ""
        for case in CASES:
            _, operands = inputs(text, "A", shapes, case)
            operands |= {"s": 2.0} if "s *" in text else {}
            formats = {"A": format} if format else {}
            want = einsum(text, **operands, formats=formats)
            func, arguments = einsum_program(text, operands, formats=formats)
            every = bound_arguments(func, arguments)
            sparsetir.build(func)(**every)
            (result,) = [n for n in every if n not in arguments] or "c"
            np.testing.assert_allclose(every[result], want, **CLOSE, err_msg=text)


@pytest.mark.parametrize("text", [
    "y[i] = A[i,j] * x[j]", "y[j] = A[i,j] * w[i]", "y[i] += A[i,j] * x[j]",
    "y[i] = 2 * (A[i,j] != 0) * x[j] / w[i]",
])  # fmt: skip
def test_sums_of_many_rows_are_in_slices(text, monkeypatch):
    """Values that differ in each call do without slices."""
    monkeypatch.setattr(row_orders, "LEAST", 1)
    rng = np.random.default_rng(0)
    dense = np.where(rng.random((60, 50)) < 0.1, rng.random((60, 50)), 0)
    dense[7] = 1
    names = [n for n in "xyw" if n in text.partition("=")[2] or f"{n}[i] +=" in text]
    operands = {n: rng.random(50 if n == "x" else 60) + 1 for n in names}
    A = SparseMatrix.from_dense(dense)
    (bound,) = sparsetir.plan(text, A=A, **operands)._expression.bound({})
    assert bound.kernel.signature.of_values
    for _ in range(3 + MOST_CHANGES):
        result = einsum(text, A=A, **operands)
        np.testing.assert_allclose(result, reference(text, {"A": dense, **operands}), **CLOSE)
        A, dense = A.with_values(2 * A.values), 2 * dense
    assert not bound.kernel.signature.of_values


def test_slices_gather_values_that_change():
    dense = sp.random_array((9000, 9000), density=3e-4, format="csr", rng=0)
    A, x = SparseMatrix(dense), np.random.default_rng(0).random(9000)
    (bound,) = sparsetir.plan("y[i] = A[i,j] * x[j]", A=A, x=x)._expression.bound({})
    for _ in range(3 + MOST_CHANGES):
        np.testing.assert_allclose(einsum("y[i] = A[i,j] * x[j]", A=A, x=x), dense @ x, **CLOSE)
        A, dense = A.with_values(2 * A.values), 2 * dense
    assert not bound.kernel.signature.of_values
    assert any("_slots" in name for name in bound.kernel.signature.passed)


def test_kernels_have_the_first_numbers_of_features_compiled_in():
    dense, A = array((7, 5), "some", np.random.default_rng(0), True)
    programs = []
    for features in (2, 3, 4, 1, 6, 7, 2):
        X = np.random.default_rng(1).standard_normal((5, features))
        plan = sparsetir.plan("D[i,k] = A[i,j] * X[j,k]", A=A, X=X)
        np.testing.assert_allclose(plan(), dense @ X, **CLOSE)
        programs.append(plan.programs[0])
    assert programs[0].same_as(programs[-1]) and programs[4].same_as(programs[5])
    assert ["n_k" in {str(p.name) for p in x.params} for x in programs] == [0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(("format", "changes"), [
    ("csr", "data indices shape"), ("csc", "data indices"), ("coo", "data row shape"),
    ("bsr", "data indices"), ("lil", ""),
])  # fmt: skip
def test_operands_of_scipy_are_as_they_are_now(format, changes):
    A = sp.random_array((30, 20), density=0.2, format="csr", rng=0).asformat(format)
    x = np.arange(20.0)
    for change in ["", *changes.split()]:
        if change == "shape":
            A.resize(30, 19)
            x = x[:19]
        elif change:
            getattr(A, change)[:] = getattr(A, change)[::-1].copy()
        for _ in range(2):
            np.testing.assert_allclose(einsum("ij,j->i", A, x), A @ x, **CLOSE)


def test_edges_of_pyg_are_a_matrix():
    """An EdgeIndex, which is also a tensor of shape (2, E), has a row for each target."""
    edge_index = pytest.importorskip("torch_geometric").EdgeIndex
    edges = torch.tensor([[0, 0, 2, 1], [1, 1, 0, 2]])
    dense = torch.zeros(3, 4).index_put((edges[1], edges[0]), torch.ones(4), accumulate=True)
    x = torch.rand(4, 2, requires_grad=True)
    result = einsum("C[i,k] = A[i,j] * X[j,k]", A=edge_index(edges, sparse_size=(4, 3)), X=x)
    torch.testing.assert_close(result, dense @ x)
    torch.testing.assert_close(result, einsum("ij,jk->ik", (edges, (4, 3)), x))
    assert result.requires_grad


def test_plans_take_other_values():
    dense, A = array((7, 5), "some", np.random.default_rng(0), True)
    X = np.random.default_rng(1).standard_normal((5, 4))
    plan = sparsetir.plan("C[i,k] = A[i,j] * X[j,k]", A=A, X=X)
    for _ in range(3):
        np.testing.assert_allclose(plan(), dense @ X, **CLOSE)
        np.testing.assert_allclose(plan(X=2 * X, A=3 * A.values), 6 * dense @ X, **CLOSE)
    assert plan(X=torch.from_numpy(X)).dtype == torch.float64
    scaled = sparsetir.plan("y[i] = scale * x[i]", x=X[:, 0].copy(), scale=2.0)
    np.testing.assert_allclose(scaled(), 2 * X[:, 0], **CLOSE)
    for tensor in (A.with_values(5 * A.values), 5 * A.to_scipy().tocoo()):
        np.testing.assert_allclose(plan(A=tensor), 5 * dense @ X, **CLOSE)
    with pytest.raises(ValueError, match="argument 'X': expected .*float64, got"):
        plan(X=X.astype("float32"))
    other = SparseMatrix.from_dense(np.where(dense != 0, 0, 1.0))
    for wrong in (other, A.T, A.astype("float32"), np.ones(3), dense):
        with pytest.raises(ValueError, match="'A': .* or a tensor with the plan's pattern"):
            plan(A=wrong)
    vector = SparseTensor(([0, 1, 2],), np.ones(3), shape=(3,))
    doubled = sparsetir.plan("y[i] = 2 * a[i]", a=vector)
    np.testing.assert_array_equal(doubled(a=vector.with_values(np.arange(3.0))), [0, 2, 4])


def test_numbers_of_plans_are_not_cut():
    x = np.ones(3)
    for scale, others in ((2, (3, True)), (2.0, (0.5, 3)), (np.float32(2), (0.5, 3))):
        plan = sparsetir.plan("y[i] = s * x[i]", s=scale, x=x)
        for other in others:
            np.testing.assert_allclose(plan(s=other), other * x)
    with pytest.raises(ValueError, match="argument 's': expected .* int64, got .* float64"):
        sparsetir.plan("y[i] = s * x[i]", s=2, x=x)(s=0.5)


def test_plans_compute_patterns_of_results_once(monkeypatch):
    _, A = array((7, 5), "some", np.random.default_rng(0), True)
    plan = sparsetir.plan("C[i,k] = A[i,j] * A[k,j]", A=A, format="csr")
    first = plan()
    monkeypatch.setattr(AssembledKernel, "__call__", None)
    np.testing.assert_allclose(plan(A=-A.values).values, first.values, **CLOSE)
    leaf = torch.from_numpy(A.values).requires_grad_()
    with torch.no_grad():
        assert plan(A=leaf).layout == torch.sparse_csr
    plan(A=leaf).values().sum().backward()
    dense = torch.from_numpy(A.to_scipy().toarray()).requires_grad_()
    (dense @ dense.T).sum().backward()
    at = torch.from_numpy(np.stack(A.pattern.coords).astype("int64"))
    torch.testing.assert_close(leaf.grad, dense.grad[tuple(at)])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_dense_results_are_written_to_out(kind):
    """Into strided arrays, and into operands themselves, which are read first."""
    dense, A = array((6, 6), "some", np.random.default_rng(0), True)
    X = np.random.default_rng(1).standard_normal((6, 4))
    as_kind = torch.from_numpy if kind == "torch" else np.asarray
    wide = as_kind(np.full((6, 8), 7.0))
    for out in (as_kind(np.full((6, 4), 7.0)), wide[:, ::2], as_kind(X.copy())):
        given = out if out.shape == X.shape and (out == as_kind(X)).all() else as_kind(X)
        assert einsum("ij,jk->ik", A, given, out=out) is out
        np.testing.assert_allclose(out, dense @ X, **CLOSE)
    assert (wide[:, 1::2] == 7).all()
    C = as_kind(X.copy())
    plan = sparsetir.plan("C[i,k] += A[i,j] * X[j,k]", A=A, X=as_kind(X), C=C)
    assert plan(out=C) is C
    np.testing.assert_allclose(C, X + dense @ X, **CLOSE)


@pytest.mark.parametrize("optimize", [True, False, "greedy", "optimal"])
def test_orders_of_contractions(optimize):
    """Results are the same; one nest of loops for False."""
    text = "C[i,l] = X[i,j] * Y[j,k] * Z[k,l]"
    dense, operands = inputs(text, "", "", "some")
    plan = sparsetir.plan(text, **operands, optimize=optimize)
    np.testing.assert_allclose(plan(), reference(text, dense), **CLOSE)
    np.testing.assert_allclose(einsum(text, **operands, optimize=optimize), plan(), **CLOSE)
    assert ("T0" in plan.programs[0].script()) == (optimize is not False)


@pytest.mark.parametrize("text, split", [
    ("C[i] = A[i,j] * x[j]", False), ("C[i,k] = A[i,j] * X[j,k] + 2 * Y[i,k]", False),
    ("C[i] = A[i,i] * x[i]", False), ("C[i] = A[i,j] * X[i+j,i]", False),
    ("C[i,j] = x[i] * y[j]", False), ("C[i] = A[i,j] * X[k,j]", True),
    ("C[i] = A[i,j] * X[j,k] * Y[k,i]", True), ("C[i] = A[i,j] * exp(x[j])", True),
])  # fmt: skip
def test_expressions_whose_steps_depend_on_sizes(text, split):
    steps = assignments(parse(text), {"A": Storage("float32", 2, "dc")})
    assert (may_be_hoisted(steps) or may_be_contracted(steps)) == split
    names = {n for s in steps for t in s.terms for n in indices_of(t.value)}
    for size in () if split else (1, 3, 1000):
        sizes, stored = {**dict.fromkeys(names, size), ("X", 0): size}, {"A": 5}
        found = contracted(hoisted(steps, sizes, stored), sizes, stored, 6)
        assert [*found] == steps


def test_chains_of_sparse_operands_are_products_where_that_visits_less():
    """4 elements in a row: 16 visits against 8 and a stored row; one element: 1 against 2."""
    X = np.random.default_rng(0).standard_normal((60, 8))
    for each, steps in ((4, True), (1, False)):
        A = sp.diags([np.arange(60.0) + n for n in range(each)], range(each), (60, 60), "csr")
        plan = sparsetir.plan("C[i,l] = A[i,j] * A[j,k] * X[k,l]", A=A, X=X)
        assert ("T0" in plan.programs[0].script()) == steps
        np.testing.assert_allclose(plan(), A @ (A @ X), **CLOSE)


@pytest.mark.parametrize(
    "text, steps",
    {
        "C[j,m,k] = A[m,j] * X[k,l,i]": ["T0[k] ="],  # 16 * 30 * 25 numbers once, not per element
        "C[i] = A[i,j] * X[k,j,l] * Y[m]": ["T0[j] =", "T1[0] ="],
        "C[m] = -A[i,j] * B[k,m]": ["T0[0] ="],
        "C[i] = A[i,j] * Y[i]": [],  # nothing is saved
    }.items(),
)
def test_what_one_factor_alone_has_is_summed_before(text, steps):
    rng = np.random.default_rng(0)
    A, B = (sp.random_array((30, 25), density=0.2, format="csr", rng=rng) for _ in range(2))
    X = rng.random((16, 25, 30))
    operands = {"A": A, "B": B, "X": X, "Y": rng.random(30)}
    operands = {name: operand for name, operand in operands.items() if f"{name}[" in text}
    plan = sparsetir.plan(text, **operands)
    expected = einsum(text, **operands, optimize=False)
    np.testing.assert_allclose(plan(), expected, **CLOSE)
    program = plan.programs[0].script().replace("T0[()]", "T0[0]").replace("T1[()]", "T1[0]")
    assert [step for step in steps if step not in program] == []
    assert ("T0" in program) == bool(steps)


def test_subscripts_that_do_not_fit_are_marked():
    with pytest.raises(ValueError, match=r"\n    ij,kk->ik\n       \^\^$"):
        einsum("ij,kk->ik", np.ones((3, 3)), np.ones((3, 4)))


M, V = SparseMatrix(sp.eye(3, format="csr")), np.ones(3)


# Each names what does not fit; those of the text show where.
test_refusals = refusals("""
einsum("y[i] = A[i,j] * x[j", A=M, x=V)  # ValueError: einsum: .. was never closed .. ^
einsum("y[i] = A[i,j] * x[k]", A=M)  # TypeError: einsum: argument 'x': expected the operand
einsum("y[i] = A[i] * x[i]", A=M, x=V)  # ValueError: 'A' has 2 dimensions, got 1 .. ^
einsum("y[i] = A[i,j] * x[j]", A=M, x=np.ones(4))  # ValueError: 'j' has size 3 .. and 4 .. ^
einsum("y[k] = A[i,j]", A=M)  # ValueError: index 'k' of the result: expected it on the right .. ^
einsum("y(i) = A(i,j)", A=M)  # ValueError: expected a result such as C[i, k] .. ^
einsum("y[i] = A[i,j] / 0", A=M)  # ValueError: expected a divisor other than 0 .. ^
einsum("y[i] = A[i,j]", A=torch.ones(2, 2, 2).to_sparse_csr())  # TypeError: 'A': expected a COO
einsum("y[i] = x[i]", x=torch.nested.nested_tensor([torch.ones(1)]))  # TypeError: a nested one
einsum("ij->i", M, reduce=["sum"])  # TypeError: 'reduce': expected a str, got list
einsum("ij->i", M, format=["csr"])  # TypeError: 'format': expected a format or its name
einsum("ij->i", M, formats="csr")  # TypeError: 'formats': expected formats by name, got 'csr'
sparsetir.expression("y[i] = A[i,j]", dtype="x")  # ValueError: 'dtype': expected one of float16
sparsetir.expression("y[i] = A[i,j]", idtype="x")  # ValueError: 'idtype': .. int32, int64, got 'x'
sparsetir.expression("y[i] = A[i,j]", like=3)  # ValueError: 'like': expected the name of .. got 3
einsum("y[i] = foo(A[i,j])", A=M)  # ValueError: unknown function; expected one of exp
einsum("y[i] = max(A[i,j] * x[j], 0)", A=M, x=V)  # ValueError: expected max(j, .. maximum(a
einsum("y[i] = exp(A[i,j], 2)", A=M)  # ValueError: exp: expected 1 argument .. ^
einsum("y[i] = sum(k, A[i,j])", A=M)  # ValueError: index 'k': expected it inside of sum
einsum("y[i] = y[i] + A[i,j]", A=M, y=V)  # ValueError: 'y' is read .. or +=
einsum("y[i] = (x[i] - A[i,j] * x[j]) / x[i]", A=M, x=V)  # ValueError: index 'j' .. sum(j .. ^
einsum("y[i] = x[i] - 2 * -(1 + A[i,j])", A=M, x=V)  # ValueError: lacks index 'j'
einsum("y[i] = sum(j, A[i,j] * (x[i] + M[i,k]))", A=M, M=M, x=V)  # ValueError: lacks index 'k'
einsum("y[i+1] = A[i,j]", A=M)  # ValueError: expected a result at indices that differ
einsum("y[i] = A[i*j,j]", A=M)  # ValueError: expected an index, or a sum such as 2 * i + j - 1 .. ^
einsum("y[i] = A[i,j] and 1", A=M)  # ValueError: expected operands, numbers .. ^
einsum("A[i,j] * x[j]", A=M)  # ValueError: expected `result = expression`
einsum("y[i] = A[i,j] * x[j]", A=M, x=V, w=V)  # TypeError: argument 'w': expected one of A, x
einsum("ij,jk->ik", M)  # ValueError: expected 2 operands, got 1
einsum("ij,j->ik", M, V)  # ValueError: 'k': expected an index of an operand .. ^
einsum("i$,j->i", M, V)  # ValueError: expected subscripts such as .. ^
einsum("ij->i", M, reduce="mean")  # ValueError: argument 'reduce': expected one of
einsum("ij->i", M, semiring="no")  # ValueError: argument 'semiring': expected one of
einsum("ij->i", M, format="csr")  # ValueError: argument 'format': expected a format of 1 dim
einsum("ij->ij", M, format="bsr")  # ValueError: argument 'format': expected a format of 2 dim
einsum("ij->ij", M, format="ell")  # ValueError: argument 'format': expected .. compressed levels
einsum("ij->", M, format="coo")  # ValueError: argument 'format': expected .. a sparse result with
einsum("ij->ij", M, format="csr", like=M)  # ValueError: argument 'format': expected None with
sparsetir.expression("y[i] += A[i]", format="coo")  # ValueError: argument 'format': expected None
einsum("ij->ij", M, format="csr", out=np.ones((3, 3)))  # ValueError: 'out': expected None for
einsum("ij->i", M, out=np.ones(2))  # ValueError: 'out': expected a ndarray to write to, (3,) float
einsum("ij->i", M, out=V.astype("float32"))  # ValueError: 'out': .. (3,) float64, got (3,) float32
einsum("ij->i", M, out=np.broadcast_to(V, 3))  # ValueError: got (3,) float64, read-only
einsum("ij->i", M, out=[1, 2, 3])  # ValueError: 'out': expected a ndarray .. got list
einsum("ij->i", M, out=torch.ones(3))  # ValueError: 'out': expected a ndarray .. got torch.Size
einsum("ij->i", M, optimize="auto")  # ValueError: 'optimize': expected one of [True, False
einsum("ij->i", M, optimize=["einsum_path", (0, 1)])  # ValueError: 'optimize': .. a call for each
einsum("ij->ij", M, like=V)  # ValueError: argument 'like': expected a sparse tensor
einsum("ij->ij", V > 0)  # ValueError: 'ij': the operand has 1 dimensions .. ^
einsum("i->i", V * 1j)  # TypeError: expected one of float16 .. complex128
einsum("ij,jk->ik", M, M, formats={"A0": "bsr"})  # ValueError: expected a format of 2 dimensions
einsum(3, M)  # TypeError: argument 'text': expected a str
einsum("y[i] = max(j, A[i,j] * B[j,j] + C[i,j])", A=M, B=M, C=M * 2)
  # ValueError: 'max' of 'y': expected a term
einsum("C[i,j] = A[i,j] * B[i,j]", A=M, B=M.T, formats={"A": "coo", "B": "coo"})
  # ValueError: operand 'B': expected a format that can be searched
einsum("C[i,j] = exp(A[i,j])", A=M, formats={"A": "coo"})  # ValueError: that can be searched
sparsetir.expression("y[i] = A[i,j]", B="csr")  # TypeError: argument 'B': expected one of A
sparsetir.expression("y[i] = A[i,j]", A="csr", like="A")  # ValueError: a pattern of 1 dimensions
sparsetir.plan("spmm", M, 8, foo=1)  # TypeError: argument 'foo'
sparsetir.plan("i->i", V, target="cuda")  # TypeError: 'target'
sparsetir.plan("y[i] = A[i]", A=V, threads=2)  # TypeError: 'threads'
sparsetir.plan("spmm")  # TypeError: argument 'matrix': expected a sparse matrix
""", globals())  # fmt: skip


def test_programs_do_not_depend_on_the_seed_of_hashes():
    """Kernels are kept by their programs' texts, for which the order of operands counts."""
    where = frozenset(Access(f"A{n}", (Affine((("i", 1),)),)) for n in range(40))
    names = [x.name for x in Drivers((where,), True).accesses]
    assert names == sorted(names)


def test_maxima_in_16_bits_have_gradients():
    rng = torch.Generator().manual_seed(0)
    A = (torch.rand(6, 5, generator=rng) > 0.4).half() * torch.arange(1, 6).half()
    x = torch.tensor([1.0, 2.0, -1.0, 0.5, 3.0]).half().requires_grad_()
    y = sparsetir.einsum("y[i] = A[i,j]*x[j]", A=A.to_sparse_csr(), x=x, reduce="max")
    (grad,) = torch.autograd.grad(y.sum(), x)
    terms = torch.where(A != 0, A.float() * x.float(), -torch.inf)
    best = (terms == terms.amax(1, keepdim=True)) & (A != 0)
    right = (best / best.sum(1, keepdim=True).clamp(min=1) * A.float()).sum(0)
    torch.testing.assert_close(grad.float(), right)
