"""Gradients of sequences of iterations, against torch's autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradient_common as common
import sparsetir
from gradient_common import Case, built, drawn, rows_of
from refusals import refusals
from small import small
from sparsetir.schedules.operators import edge_attention
from sparsetir.sparse_ir.gradient import gradient
from sparsetir.sparse_ir.nodes import sparse_iterations
from sparsetir.sparse_ir.sequences import sequence_of

SOFTMAX = """
with T.sp_iter([I, J], "SR", "top") as [i, j]:
    with T.init():
        TOP[i] = T.min_value("float64")
    TOP[i] = T.max(TOP[i], {score})
with T.sp_iter([I, J], "SS", "powers") as [i, j]:
    P[i, j] = T.exp({score} - TOP[i])
with T.sp_iter([I, J], "SR", "total") as [i, j]:
    with T.init():
        TOTAL[i] = T.float64(0)
    TOTAL[i] = TOTAL[i] + P[i, j]
"""
LOCALS = """TOP = T.alloc_sparse_buffer((I,), "float64")
P = T.alloc_sparse_buffer((I, J), "float64")
TOTAL = T.alloc_sparse_buffer((I,), "float64")
"""


def softmax(pattern="mixed", kept=False):
    """Y[i, j] = exp(X[i, j] - max) / sum, over the elements of row i."""
    body = (
        SOFTMAX.format(score="X[i, j]")
        + """
with T.sp_iter([I, J], "SS", "divide") as [i, j]:
    Y[i, j] = P[i, j] / TOTAL[i]
"""
    )
    of = {"X": "I J", "Y": "I J"} | ({"P": "I J", "TOTAL": "I", "TOP": "I"} if kept else {})
    func = small("softmax", body if kept else LOCALS + body, dtype="float64", **of)
    coords = rows_of(pattern)
    return Case(func, drawn(0, x=len(coords)), ("y", (len(coords),)), coords, ("x", "y"))


def torch_softmax(ij, x):
    top = torch.full((4,), -torch.inf, dtype=x.dtype).scatter_reduce(0, ij[0], x, "amax")
    powers = (x - top[ij[0]]).exp()
    return powers / torch.zeros(4, dtype=x.dtype).index_add(0, ij[0], powers)[ij[0]]


def attention(pattern="mixed"):
    """OUT[i] = sum of softmax(A[i, j] * Q[i] . U[j]) * V[j] over the elements (i, j) of row i."""
    body = (
        """
S = T.alloc_sparse_buffer((I, J), "float64")
"""
        + LOCALS
        + """
with T.sp_iter([I, J, K], "SSR", "scores") as [i, j, k]:
    with T.init():
        S[i, j] = T.float64(0)
    S[i, j] = S[i, j] + A[i, j] * Q[i, k] * U[j, k]
"""
        + SOFTMAX.format(score="S[i, j]")
        + """
with T.sp_iter([I, J, K], "SRS", "weigh") as [i, j, k]:
    with T.init():
        OUT[i, k] = T.float64(0)
    OUT[i, k] = OUT[i, k] + P[i, j] / TOTAL[i] * V[j, k]
"""
    )
    func = small("attention", body, dtype="float64", A="I J", Q="I K", U="N K", V="N K", OUT="I K")
    coords = rows_of(pattern)
    arrays = drawn(1, a=len(coords), q=(4, 3), u=(5, 3), v=(5, 3))
    return Case(func, arrays, ("out", (4, 3)), coords, ("a",))


def torch_attention(ij, a, q, u, v):
    weights = torch_softmax(ij, a * (q[ij[0]] * u[ij[1]]).sum(1))
    return torch.zeros(4, 3, dtype=q.dtype).index_add(0, ij[0], weights[:, None] * v[ij[1]])


CASES = {"softmax": (softmax, torch_softmax), "attention": (attention, torch_attention)}


@pytest.mark.parametrize("pattern", sorted(common.PATTERNS))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.default("softmax-mixed", "softmax-empty", "attention-mixed")
def test_autograd(name, pattern):
    make, forward = CASES[name]
    case = make(pattern)
    weights = np.random.default_rng(5).standard_normal(case.out[1])
    tensors = {k: torch.tensor(v, requires_grad=True) for k, v in case.arrays.items()}
    result = forward(torch.tensor(case.coords.T.copy()), **tensors)
    np.testing.assert_allclose(case.forward(), result.detach(), rtol=1e-12, atol=1e-14)
    (result * torch.tensor(weights)).sum().backward()
    for wrt, x in tensors.items():
        # Scores are of rows: the gradients of columns are scattered.
        transpose = wrt not in ("u", "v")
        for run in (sparsetir.interpret, built) if wrt in "xqu" else (sparsetir.interpret,):
            got = case.gradient(wrt, weights, run, transpose=transpose)
            np.testing.assert_allclose(got, x.grad, rtol=1e-10, atol=1e-12)


def test_the_programs_of_operators():
    """Rows with steps in them, whose scores become powers in place."""
    ij, heads = rows_of("mixed").T, 2
    arrays = drawn(4, q=(4, heads, 3), k=(5, heads, 3), v=(5, heads, 2), grad_out=(4, heads, 2))
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}
    q, k, v, g = tensors.values()
    scores = (q[ij[0]] * k[ij[1]]).sum(2) * 0.5
    weights = [torch_softmax(torch.tensor(ij), scores[:, h]) for h in range(heads)]
    values = torch.stack(weights, 1)[:, :, None] * v[ij[1]]
    out = torch.zeros_like(g).index_add(0, torch.tensor(ij[0]), values)
    exact = torch.autograd.grad(out, (q, k, v), g)
    sizes = {"m": 4, "n": 5, "nnz": 6, "heads": heads, "feat": 3, "width": 2, "scale": 0.5}
    pattern = {"indptr": np.array([0, 2, 2, 5, 6], "int32"), "indices": ij[1].astype("int32")}
    func = edge_attention.program(edge_attention.EdgeAttention(dtype="float64"))
    for wrt, right in zip("qk", exact[:2], strict=True):  # of rows, and of columns
        derived = gradient(func, wrt, transpose=False)
        named = {**arrays, **sizes, **pattern, f"grad_{wrt}": np.full(right.shape, np.nan)}
        built(derived, {str(p.name): named[str(p.name)] for p in derived.params})
        np.testing.assert_allclose(named[f"grad_{wrt}"], right, rtol=1e-12, atol=1e-14)


def test_nests_of_all_levels():
    """Values of a visit of rows, and of one of heads in it, which are nested in each other."""
    body = """
with T.sp_iter([I], "S", "rows") as [i]:
    SCALE[()] = X[i] * X[i]
    with T.sp_iter([K], "S", "heads") as [k]:
        with T.sp_iter([J], "R", "total") as [j]:
            with T.init():
                TOTAL[()] = T.float64(0)
            TOTAL[()] = TOTAL[()] + A[i, j] * U[j, k]
        SQUARE[()] = TOTAL[()] * TOTAL[()] * SCALE[()]
        with T.sp_iter([J], "S", "weigh") as [j]:
            W[i, j, k] = A[i, j] * SQUARE[()]
"""
    names = "SCALE", "TOTAL", "SQUARE"
    local = [f'{x} = T.alloc_sparse_buffer((), "float64", "local")\n' for x in names]
    func = small(
        "nested", "".join(local) + body, dtype="float64", A="I J", U="N K", X="I", W="I J K"
    )
    assert [str(x.name) for x in sparse_iterations(sequence_of(func))] == [
        "rows_step", "total", "heads_step", "weigh"
    ]  # fmt: skip
    coords = rows_of("mixed")
    arrays = drawn(6, a=len(coords), u=(5, 3), x=4)
    case = Case(func, arrays, ("w", (len(coords), 3)), coords, ("a", "w"))
    weights = np.random.default_rng(5).standard_normal(case.out[1])
    a, u, x = (torch.tensor(v, requires_grad=True) for v in arrays.values())
    ij = torch.tensor(coords.T.copy())
    total = torch.zeros(4, 3, dtype=a.dtype).index_add(0, ij[0], a[:, None] * u[ij[1]])
    result = a[:, None] * (total * total * x[:, None] ** 2)[ij[0]]
    np.testing.assert_allclose(case.forward(), result.detach(), rtol=1e-12, atol=1e-14)
    exact = torch.autograd.grad(result, (a, u, x), torch.tensor(weights))
    for wrt, right in zip("aux", exact, strict=True):
        for run in (sparsetir.interpret, built) if wrt != "a" else (sparsetir.interpret,):
            got = case.gradient(wrt, weights, run, transpose=wrt != "u")
            np.testing.assert_allclose(got, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("update", ["Y[i] * Y[i]", "T.max(Y[i], T.float64(0))", "Y[i] + Y[i]"])
def test_updates_in_place(update):
    func = small("updated", f"""
with T.sp_iter([I], "S", "first") as [i]:
    Y[i] = X[i] * X[i] - T.float64(1)
with T.sp_iter([I], "S", "second") as [i]:
    Y[i] = {update}
""", dtype="float64", X="I", Y="I")  # fmt: skip
    x, weights = np.array([-2.0, 0.5, 3.0]), np.array([1.0, 2.0, -1.0])
    y = x * x - 1
    slopes = {"*": 2 * y, "m": y > 0, "+": np.full(3, 2.0)}
    named = {"x": x, "grad_y": weights, "grad_x": np.full(3, np.nan), "m": 3}
    sparsetir.interpret(gradient(func, "x"), named)
    slope = slopes[next(sign for sign in "*m+" if sign in update)]
    np.testing.assert_allclose(named["grad_x"], weights * slope * 2 * x, rtol=1e-12)


@pytest.mark.parametrize("kept", [(), ("TOP",), ("P", "total"), ("TOP", "P", "TOTAL")])
def test_intermediates_are_recomputed_or_kept(kept):
    case = softmax(kept=True)
    rng = np.random.default_rng(2)
    inner = {"p": np.empty(6), "total": np.empty(4), "top": np.empty(4)}
    case.arrays |= inner
    y = case.forward()
    inner = case.arrays
    weights = rng.standard_normal(6)
    derived = gradient(case.func, "x", keep=kept)
    names = [str(p.name) for p in derived.params]
    assert {n for n in ("p", "total", "top") if n in names} == {k.lower() for k in kept}
    recomputed = {"top", "powers", "total"} & {str(it.name) for it in sparse_iterations(derived)}
    by = {"TOP": "top", "P": "powers", "TOTAL": "total", "total": "total"}
    assert recomputed == {*by.values()} - {by[k] for k in kept}
    arguments = case.arguments(derived, {"grad_y": weights, "grad_x": np.full(6, np.nan)})
    sparsetir.interpret(derived, arguments)
    rows = case.coords[:, 0]
    sums = np.bincount(rows, y * weights, 4)[rows]
    np.testing.assert_allclose(arguments["grad_x"], y * (weights - sums), rtol=1e-12, atol=1e-14)


def test_a_kept_value_serves_its_derivative():
    """The derivative of a function that the program stores is that of the stored value."""
    body = """
with T.sp_iter([I], "S", "squash") as [i]:
    Y[i] = T.tanh(X[i] * W[i])
with T.sp_iter([I], "S", "scale") as [i]:
    Z[i] = Y[i] * T.float32(2)
"""
    func = small("squashed", body, X="I", W="I", Y="I", Z="I")
    assert [str(p.name) for p in gradient(func, "x", keep=["y"]).params] == [
        "w", "y", "grad_z", "grad_x", "m",
    ]  # fmt: skip
    assert [str(p.name) for p in gradient(func, "x").params] == ["x", "w", "grad_z", "grad_x", "m"]
    assert "T.tanh" not in gradient(func, "x", keep=["y"]).script()


@pytest.mark.parametrize("wrt", ["x", "grad_y"])
def test_second_order(wrt):
    """The gradient of a softmax's gradient, in a direction."""
    first = gradient(softmax().func, "x")
    coords, rng = rows_of("mixed"), np.random.default_rng(3)
    x, g, w = (rng.standard_normal(6) for _ in range(3))
    twice = Case(first, {"x": x, "grad_y": g}, ("grad_x", (6,)), coords, ("x", "grad_y", "grad_x"))
    tensors = {"x": torch.tensor(x, requires_grad=True), "grad_y": torch.tensor(g)}
    tensors["grad_y"].requires_grad_()
    y = torch_softmax(torch.tensor(coords.T.copy()), tensors["x"])
    (grad,) = torch.autograd.grad(y, tensors["x"], tensors["grad_y"], create_graph=True)
    (exact,) = torch.autograd.grad(grad, tensors[wrt], torch.tensor(w))
    for run in (sparsetir.interpret, built):
        np.testing.assert_allclose(twice.gradient(wrt, w, run), exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("reduce", "init", "shares"), [
    ("max", "T.min_value('float64')", [0.5, 0, 0.5, 1]),
    ("max", "T.float64(3)", [0, 0, 0, 1]),
    ("max", "T.float64(9)", [0, 0, 0, 0]),
    ("min", "T.max_value('float64')", [0, 1, 0, 1]),
])  # fmt: skip
def test_extrema(reduce, init, shares):
    """Terms that attain one share its gradient; the constant of an init takes all of it."""
    func = small("extrema", f"""
with T.sp_iter([I, J], "SR", "best") as [i, j]:
    with T.init():
        Y[i] = {init}
    Y[i] = T.{reduce}(Y[i], X[i, j])
with T.sp_iter([I], "S", "doubled") as [i]:
    Z[i] = Y[i] * T.float64(2)
""", dtype="float64", X="I J", Y="I", Z="I")  # fmt: skip
    x = np.array([3.0, 1.0, 3.0, 4.0])
    indptr, indices = np.array([0, 3, 3, 4], "int32"), np.array([0, 1, 4, 2], "int32")
    weights, out = np.array([1.0, 7.0, -2.0]), np.full(4, np.nan)
    derived = gradient(func, "x")
    named = {"x": x, "grad_z": weights, "grad_x": out, "indptr": indptr, "indices": indices}
    named |= {"m": 3, "n": 5, "nnz": 4}
    sparsetir.interpret(derived, {str(p.name): named[str(p.name)] for p in derived.params})
    np.testing.assert_array_equal(out, 2 * np.array(shares) * np.array([1.0, 1.0, 1.0, -2.0]))


def test_what_no_gradient_reaches_is_left_out():
    func = small("steps", """
with T.sp_iter([I], "S", "first") as [i]:
    Y[i] = X[i] * X[i]
with T.sp_iter([I], "S", "second") as [i]:
    S[i] = T.floor(Y[i])
with T.sp_iter([I], "S", "third") as [i]:
    Z[i] = S[i] * X[i] + W[i]
""", X="I", Y="I", S="I", W="I", Z="I")  # fmt: skip
    assert [str(it.name) for it in sparse_iterations(gradient(func, "x"))] == [
        "first", "second", "third_grad_x",
    ]  # fmt: skip
    assert [str(it.name) for it in sparse_iterations(gradient(func, "w"))] == ["third_grad_w"]


def steps(first, second, init=""):
    """A program of two iterations over the rows of a matrix."""
    return small(
        "steps",
        f"""
with T.sp_iter([I, J], "SR", "first") as [i, j]:{init}
    {first}
with T.sp_iter([I], "S", "second") as [i]:
    {second}
""",
        A="I J",
        X="I",
        Y="I",
        Z="I",
    )


MAX = "Y[i] = T.max(Y[i], A[i, j])"
INIT = "\n    with T.init():\n        Y[i] = "

test_refusals = refusals(
    """
gradient(steps("Y[i] = Y[i] + A[i, j]", "Z[i] = Y[i]"), "a", keep=["X"])
    # ValueError: gradient: argument 'keep': expected a collection of names among ['y', 'Y'], got
        ['X']
gradient(steps("Y[i] = Y[i] + A[i, j]", "Z[i] = Y[i]"), "a", keep="Y")
    # ValueError: argument 'keep': expected a collection of names among ['y', 'Y'], got 'Y'
gradient(steps("Y[i] = T.max(Y[i], T.exp(A[i, j]))", "Z[i] = Y[i]", INIT + "X[i]"), "a", keep=["Y"])
    # ValueError: argument 'keep': expected (), as nothing that 'steps' writes can be kept, got
gradient(steps("Y[i] = Y[i] + A[i, j] * Z[i]", "Z[i] = Y[i]"), "a")
    # ValueError: 'first' reads 'Z', which 'second' writes; expected iterations that read parameters
gradient(steps(MAX, "Z[i] = Y[i]"), "a")
    # ValueError: 'first' reduces by max into 'Y'; expected an init, and no other writes
gradient(steps(MAX, "Y[i] = Y[i] + X[i]", INIT + "T.float32(0)"), "a")
    # ValueError: 'first' reduces by max into 'Y'; expected an init, and no other writes
gradient(steps(MAX, "Z[i] = Y[i]", INIT + "X[i]"), "x")
    # ValueError: the init of 'first' reads 'X'; expected zero
gradient(steps("Y[i] = Y[i] * A[i, j]", "Z[i] = Y[i]"), "a")
    # ValueError: 'first' reduces by product; expected X[..] = X[..] + term
gradient(attention().func, "u")
    # ValueError: the gradient needs a pattern in the orders ['I', 'J'] and ['J', 'I']; expected
        transpose=False
""",
    globals(),
)
