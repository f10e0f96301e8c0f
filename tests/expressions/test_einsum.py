"""`einsum` and `expression`: results beside NumPy's on adverse patterns, types, refusals."""

import numpy as np
import pytest
from reference import reference

from sparsetir import SparseMatrix, SparseTensor, einsum

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
C[i,j] = A[i,j] * A[j,i]  ; A ; A=6x6
y[i] += A[i,j] * x[j]  ; A
C[i,j] += X[i,k] * Y[j,k] * A[i,j] - x[j]  ; A
""".strip().splitlines()]  # fmt: skip


def inputs(text, sparse, shapes, case, dtype="float64", seed=0):
    """Dense arrays and operands by name."""
    import ast

    rng = np.random.default_rng(seed)
    given = dict(s.split("=") for s in shapes.split())
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
            tuple(map(int, given[name].split("x")))
            if name in given
            else tuple(SIZES[p.id] for p in parts)
        )
        dense[name], operands[name] = array(shape, case, rng, name in sparse.split(), dtype)
    for name in ("alpha", "beta"):
        if name in text:
            operands[name] = 0.5
            dense[name] = np.asarray(0.5)
    return dense, operands


def check(text, sparse="", shapes="", case="some", dtype="float64", **tolerance):
    dense, operands = inputs(text, sparse, shapes, case, dtype)
    got = einsum(text, **operands)
    with np.errstate(all="ignore"):
        want = reference(text, dense)
    np.testing.assert_allclose(got, want, **(tolerance or CLOSE), err_msg=text)
    return got


@pytest.mark.parametrize("row", EXPRESSIONS, ids=[r[0].strip() for r in EXPRESSIONS])
def test_expressions_on_adverse_patterns(row):
    """One kernel for all patterns; numbers are NumPy's."""
    text, sparse, shapes = (x.strip() for x in [*row, "", ""][:3])
    for case in CASES:
        check(text, sparse, shapes, case)
