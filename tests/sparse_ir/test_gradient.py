"""Derived gradients against differences and torch's autograd; what is refused."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
import tvm_ffi
from hypothesis import strategies as st
from tvm import tirx
from tvm.script import sparse_tir as T

import gradient_common as common
import sparsetir
from drawing import examples
from gradient_common import built, gated, mttkrp, over_edges, rgms, sddmm, spmm, spmv
from pairs import by_turns
from programs import PROGRAMS, copied
from refusals import refusals
from small import small
from sparsetir.schedules.operators import messages
from sparsetir.schedules.operators import spmm as spmm_programs
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.sparse_ir.gradient import gradient, transposed_axes
from sparsetir.sparse_ir.nodes import sparse_iterations
from sparsetir.sparse_ir.schedule.facts import assume


def distances(dtype="float64", pattern="mixed"):
    """The program of CONTRIBUTING.md."""
    return over_edges(lambda a, x, y, k: (x - y) * (x - y), dtype, pattern)


# What programs compute, on torch's tensors: values over the pattern's (i, j) by element.


def torch_spmm(ij, a, b):
    return torch.zeros(4, b.shape[1], dtype=b.dtype).index_add(0, ij[0], a[:, None] * b[ij[1]])


def torch_gates(ij, a, x, y):
    gates = torch.sigmoid(x[ij[0]] + y[ij[1]]) * torch.tanh(y[ij[1]]) * torch.exp(a)[:, None]
    return torch.zeros(4, 3, dtype=x.dtype).index_add(0, ij[0], gates)


def torch_rgms(rij, a, x, w):
    terms = a[:, None] * torch.einsum("ek,ekl->el", x[rij[2]], w[rij[0]])
    return torch.zeros(4, 2, dtype=x.dtype).index_add(0, rij[1], terms)


def torch_mttkrp(ijl, a, u, v):
    terms = a[:, None] * u[ijl[1]] * v[ijl[2]]
    return torch.zeros(2, 3, dtype=u.dtype).index_add(0, ijl[0], terms)


CASES = {
    "spmm": (spmm, torch_spmm),
    "sddmm": (sddmm, lambda ij, x, y: (x[ij[0]] * y[ij[1]]).sum(1)),
    "spmv": (spmv, lambda ij, a, b: torch_spmm(ij, a, b[:, None])[:, 0]),
    "distances": (distances, lambda ij, a, x, y: ((x[ij[0]] - y[ij[1]]) ** 2).sum(1)),
    "gates": (gated, torch_gates),
    "rgms": (rgms, torch_rgms),
    "mttkrp": (mttkrp, torch_mttkrp),
}
EACH = [
    (name, wrt) for name, (make, _) in CASES.items() for wrt in make().arrays
    if (name, wrt) != ("distances", "a")
]  # fmt: skip


def by_autograd(case, forward, wrt, weights):
    tensors = {k: torch.tensor(v, requires_grad=k == wrt) for k, v in case.arrays.items()}
    coords = torch.tensor(case.coords.T.copy())
    (forward(coords, **tensors) * torch.tensor(weights)).sum().backward()
    return tensors[wrt].grad.numpy()


def weights_of(case, seed=5):
    return np.random.default_rng(seed).standard_normal(case.out[1]).astype(case.dtype)


@pytest.mark.parametrize(("name", "wrt"), EACH)
@pytest.mark.default("spmv-b", "gates-a", "rgms-w")
def test_autograd(name, wrt):
    """Kernels are by the default schedule, which finds the parallel loops."""
    make, forward = CASES[name]
    case = make()
    weights = weights_of(case)
    exact = by_autograd(case, forward, wrt, weights)
    for transpose in (True, False):
        result = case.gradient(wrt, weights, transpose=transpose)
        np.testing.assert_allclose(result, exact, rtol=1e-12, atol=1e-14)
        if transpose or name in ("spmm", "rgms"):
            result = case.gradient(wrt, weights, built, transpose=transpose)
            np.testing.assert_allclose(result, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pattern", by_turns(sorted(set(common.PATTERNS) - {"mixed"}), 2))
@pytest.mark.parametrize("name", ["spmm", "sddmm", "gates"])
def test_patterns(name, pattern):
    make, forward = CASES[name]
    case = make(pattern=pattern)
    weights = weights_of(case)
    for wrt in case.arrays:
        exact = by_autograd(case, forward, wrt, weights)
        result = case.gradient(wrt, weights)
        np.testing.assert_allclose(result, exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("idtype", ["int32", "int64"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 1e-3)])
@pytest.mark.parametrize("name", ["spmm", "sddmm"])
def test_types(name, dtype, tolerance, idtype):
    """Sums of 16-bit types are in float32, and what is written is rounded once."""
    make, forward = CASES[name]
    case = make(dtype, idtype)
    weights = weights_of(case)
    wide = dataclasses.replace(case, arrays={k: v.astype("f8") for k, v in case.arrays.items()})
    for wrt in case.arrays:
        func = gradient(case.func, wrt)
        assert all(a.idtype == idtype for a in func.axes)
        assert str(func.buffer(f"GRAD_{wrt.upper()}").dtype) == dtype
        exact = by_autograd(wide, forward, wrt, weights.astype("f8"))
        result = case.gradient(wrt, weights)
        assert result.dtype == dtype
        np.testing.assert_allclose(result, exact, rtol=tolerance, atol=tolerance)
        kernel = case.gradient(wrt, weights, built)
        np.testing.assert_allclose(kernel, result, rtol=tolerance, atol=tolerance)


F64 = "float64"


def test_names_and_the_transposed_pattern():
    func = gradient(spmm_programs.program(Spmm()), "B")
    assert [str(p.name) for p in func.params] == [
        "a", "grad_out", "grad_b", "indptr", "indices", "m", "n", "nnz", "feat",
    ]  # fmt: skip
    assert func.name == "spmm_grad_b"
    assert transposed_axes(func) == [["J", "I"]]
    read = sparsetir.from_source(func.script())
    assert tvm_ffi.structural_equal(read, func) and transposed_axes(read) == [["J", "I"]]
    sampled = gradient(spmm_programs.program(Spmm()), "a")
    assert transposed_axes(sampled) == [] and "T.fuse(I, J)" in sampled.script()
    assert transposed_axes(gradient(spmm_programs.program(Spmm()), "b", transpose=False)) == []
    assert transposed_axes(gradient(rgms().func, "x")) == [["R", "J", "I"]]
    assert transposed_axes(gradient(mttkrp().func, "v")) == [["L", "I", "J"]]


# Expressions


def pointwise(function, values, dtype="float64"):
    """(a program OUT[i] = function(X[i]), its derivative at some values)."""

    @T.prim_func
    def point(x: T.handle, out: T.handle, n: T.int32):
        I = T.dense_fixed(n)
        X = T.match_sparse_buffer(x, (I,), dtype)
        OUT = T.match_sparse_buffer(out, (I,), dtype)
        with T.sp_iter([I], "S", "point") as [i]:
            OUT[i] = function(X[i])

    slopes = np.full(len(values), np.nan)
    func = gradient(point, "x")
    ones = np.ones(len(values))
    arguments = {"x": values, "grad_out": ones, "grad_x": slopes, "n": len(values)}
    sparsetir.interpret(func, {p.name: arguments[p.name] for p in func.params})
    return point, slopes


FUNCTIONS = {
    "exp": tirx.exp, "exp2": tirx.exp2, "exp10": tirx.exp10, "log": tirx.log, "log2": tirx.log2,
    "log10": tirx.log10, "log1p": tirx.log1p, "sqrt": tirx.sqrt, "rsqrt": tirx.rsqrt,
    "tanh": tirx.tanh, "sigmoid": tirx.sigmoid, "sin": tirx.sin, "cos": tirx.cos,
    "sinh": tirx.sinh, "cosh": tirx.cosh, "erf": tirx.erf, "abs": lambda x: tirx.abs(x - 1.0),
    "square": lambda x: tirx.pow(x, 2.0), "root": lambda x: tirx.pow(x, 0.3),
    "tan": tirx.tan, "exponent": lambda x: tirx.pow(1.5, x), "both": lambda x: tirx.pow(x, 2.0 * x),
    "power": lambda x: x * tirx.pow(x, -1.5), "first power": lambda x: tirx.pow(x, 1.0),
    "negative": lambda x: -x, "quotient": lambda x: (x + 2.0) / (x * x), "inverse": lambda x: 3 / x,
    "cube": lambda x: x * x * x - x, "max": lambda x: tirx.max(x, 1.1),
    "constant": lambda x: x + 1.0,
    "min": lambda x: tirx.min(x * x, 2.0 - x), "cast": lambda x: tirx.Cast("float64", x) * x,
    "select": lambda x: tirx.Select(x > 1.0, x * x, tirx.exp(x)),
    "choice": lambda x: tirx.if_then_else(x > 1.0, tirx.log(x), x / 3.0),
    "floor": lambda x: tirx.floor(x) * x, "nested": lambda x: tirx.tanh(tirx.exp(-x) / x),
}  # fmt: skip


@pytest.mark.parametrize("name", by_turns(FUNCTIONS, 2))
def test_functions(name):
    values = np.array([0.25, 0.6, 0.9, 1.3, 1.75])
    func, slopes = pointwise(FUNCTIONS[name], values)
    ends = []
    for step in (1e-6, -1e-6):
        ends.append(np.full(len(values), np.nan))
        sparsetir.interpret(func, [values + step, ends[-1], len(values)])
    np.testing.assert_allclose(slopes, (ends[0] - ends[1]) / 2e-6, rtol=1e-7, atol=1e-8)


def test_values_that_are_not_taken_play_no_part():
    """Differs from torch's NaN: the root of -1 has no derivative, and is not chosen."""
    values = np.array([-1.0, 0.0, 4.0])
    _, slopes = pointwise(lambda x: tirx.Select(x > 0.0, tirx.sqrt(x), x), values)
    np.testing.assert_array_equal(slopes, [1.0, 1.0, 0.25])
    _, slopes = pointwise(lambda x: tirx.max(tirx.log(x), -10.0), values)
    np.testing.assert_array_equal(slopes, [0.0, 0.0, 0.25])


def test_kinks():
    """The constant has it, else the first operand."""
    values = np.array([-1.0, 0.0, 1.0])
    for function in (lambda x: tirx.max(x, 0.0), lambda x: tirx.max(0.0, x)):
        np.testing.assert_array_equal(pointwise(function, values)[1], [0, 0, 1])
    for function in (lambda x: tirx.min(x, 0.0), lambda x: tirx.min(0.0, x)):
        np.testing.assert_array_equal(pointwise(function, values)[1], [1, 0, 0])
    np.testing.assert_array_equal(pointwise(tirx.abs, values)[1], [-1, 0, 1])
    zero_to = pointwise(lambda x: tirx.pow(0.0 * x, x + 1.0), values)[1]
    np.testing.assert_array_equal(zero_to[1:], [0, 0])
    _, slopes = pointwise(lambda x: tirx.max(2.0 * x, 3.0 * x), values)
    np.testing.assert_array_equal(slopes, [2, 2, 3])
    _, slopes = pointwise(lambda x: tirx.min(2.0 * x, 3.0 * x), values)
    np.testing.assert_array_equal(slopes, [3, 2, 2])


@pytest.mark.parametrize(
    ("term", "wrt", "text"),
    [
        (lambda a, x, y, k: (x - y) * (x - y), "x", "2.0 * GRAD_OUT[i, j] * (X[i, k] - Y[j, k])"),
        (lambda a, x, y, k: x * x * x, "x", "3.0 * GRAD_OUT[i, j] * X[i, k] * X[i, k]"),
        (lambda a, x, y, k: x + a, "x", "GRAD_OUT[i, j]"),
        (lambda a, x, y, k: a * 1.0 + y, "x", None),
        (lambda a, x, y, k: tirx.exp(x) / y, "x", "GRAD_OUT[i, j] / Y[j, k] * T.exp(X[i, k])"),
        (lambda a, x, y, k: tirx.max(x, 0.0), "x",
         "T.Select(X[i, k] > 0.0, GRAD_OUT[i, j], 0.0)"),
    ],
)  # fmt: skip
def test_terms_are_simple(term, wrt, text):
    case = over_edges(term, "float32")
    if text is None:
        with pytest.raises(ValueError, match="does not depend on the values of 'X'"):
            gradient(case.func, wrt)
        return
    script = re.sub(r"T\.float32\(([^()]*)\)", r"\1", gradient(case.func, wrt).script())
    assert script.rstrip().endswith(f"GRAD_X[i, k] = GRAD_X[i, k] + {text}")


# Other forms of programs


def check(func, arguments, results, wrt, **options):
    """The gradient of a program against differences, in the interpreter and as a kernel."""
    draw = np.random.default_rng(3)
    weights = {f"grad_{k}": draw.standard_normal(shape) for k, shape in results.items()}

    def loss(value):
        outs = {k: np.zeros(shape) for k, shape in results.items()}
        sparsetir.interpret(func, {**arguments, wrt: value, **outs})
        return sum((weights[f"grad_{k}"] * out).sum() for k, out in outs.items())

    point, exact = arguments[wrt], np.empty_like(arguments[wrt])
    for n in np.ndindex(point.shape):
        step = np.zeros_like(point)
        step[n] = 1e-6
        exact[n] = (loss(point + step) - loss(point - step)) / 2e-6
    assert exact.any()
    derived = gradient(func, wrt, **options)
    for run in (sparsetir.interpret, built):
        out = np.full_like(point, np.nan)
        named = {**arguments, **weights, f"grad_{wrt}": out}
        run(derived, {str(p.name): named[str(p.name)] for p in derived.params})
        np.testing.assert_allclose(out, exact, rtol=1e-7, atol=1e-8)
    return derived


def test_several_places_and_results():
    """Each place is an iteration; a place that no iteration reaches is zero."""

    @T.prim_func
    def stencil(x: T.handle, w: T.handle, y: T.handle, z: T.handle, n: T.int32):
        I = T.dense_fixed(n)
        X = T.match_sparse_buffer(x, (I,), "float64")
        W = T.match_buffer(w, (9,), "float64")
        Y = T.match_sparse_buffer(y, (I,), "float64")
        Z = T.match_sparse_buffer(z, (I,), "float64")
        with T.sp_iter([I], "S", "neighbours") as [i]:
            Y[i] = X[i] * W[i] + X[i + 1] * W[i + 2]
        with T.sp_iter([I], "S", "squares") as [i]:
            if X[i] > 0.0:
                Z[i] = X[i] * X[i]

    draw = np.random.default_rng(0)
    arrays = {"x": draw.standard_normal(6), "w": draw.standard_normal(9), "n": 6}
    derived = check(stencil, arrays, {"y": 6, "z": 6}, "x")
    assert [it.name for it in sparse_iterations(derived)] == [
        "neighbours_grad_x", "neighbours_grad_x_1", "squares_grad_x",
    ]  # fmt: skip
    derived = check(stencil, arrays, {"y": 6, "z": 6}, "w")
    assert sparse_iterations(derived)[0].name == "neighbours_grad_w_zero"
    assert "grad_z" not in [p.name for p in derived.params]
    assert [p.name for p in gradient(derived, "grad_y").params] == [
        "x", "grad_grad_w", "grad_grad_y", "n",
    ]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), [
    ("Y[i] = X[i + 1] * T.float64(2)", "T.float64(1)"),
    ("if X[i] > 0.0:\n        Y[i] = X[i] * X[i]", "T.float64(1)"),
    ("Y[i] = X[i] * X[i]", "X[i] * X[i]"),
])  # fmt: skip
def test_elements_that_nothing_is_added_to_are_zero(first, second):
    points = small("points", f"""
with T.sp_iter([I], "S", "first") as [i]:
    {first}
with T.sp_iter([I], "S", "second") as [i]:
    Z[i] = {second}
""", "I = T.dense_fixed(n)", F64, X="I", Y="I", Z="I")  # fmt: skip
    check(points, {"x": np.array([-1.0, 2.0, 0.5]), "n": 3}, {"y": 3, "z": 3}, "x")


def test_dense_axes_as_long_as_columns():
    """N stays where a fact or a buffer over the pattern needs it beside J."""

    gathered = small("gathered", """
with T.sp_iter([I, J], "SR", "gathered") as [i, j]:
    with T.init():
        C[i] = 0.0
    C[i] = C[i] + A[i, j, 0] * B[j] * E[TYPE[i, j]]
""", A="I J N", B="N", E="N", TYPE="I J int32", C="I")  # fmt: skip
    bounded, _ = assume(gathered, "coordinates", buffer="TYPE", axis="N")
    for func in (gathered, bounded):
        derived = gradient(func, "b")
        assert [a.name for a in derived.buffer("A").axes] == ["J", "I", "N"]
        sparsetir.lower(derived)
    plain = gradient(spmm().func, "b")
    assert [a.name for a in plain.buffer("GRAD_B").axes] == ["J", "K"]


def test_a_pattern_in_both_orders_is_taken_as_it_is():
    ends = small("ends", """
with T.sp_iter([I, J], "SR", "ends") as [i, j]:
    with T.init():
        OUT[i] = 0.0
    OUT[i] = OUT[i] + X[i] * X[j]
""", "J = T.sparse_variable(I, (m, nnz), (indptr, indices))", F64, X="I", OUT="I")  # fmt: skip
    with pytest.raises(ValueError, match=r"in the orders \['I', 'J'\] and \['J', 'I'\]"):
        gradient(ends, "x")
    arrays = {
        "x": np.arange(1.0, 5.0), "indptr": np.array([0, 2, 2, 3, 5], "int32"),
        "indices": np.array([0, 3, 3, 1, 2], "int32"), "m": 4, "nnz": 5,
    }  # fmt: skip
    check(ends, arrays, {"out": 4}, "x", transpose=False)


def test_loops_over_rows_alone_stay_beside_a_transposed_pattern():
    diagonal = small("diagonal", """
with T.sp_iter([I, J], "SR", "sums") as [i, j]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + X[j]
with T.sp_iter([I], "S", "more") as [i]:
    Y[i] = Y[i] + X[i] * X[i]
""", "J = T.sparse_variable(I, (m, nnz), (indptr, indices))\nN = T.dense_fixed(m)", F64,
        X="N", Y="I")  # fmt: skip
    # By columns and by rows, of a pattern that is symmetric.
    arrays = {
        "x": np.arange(1.0, 5.0), "indptr": np.array([0, 2, 3, 4, 5], "int32"),
        "indices": np.array([0, 1, 0, 2, 3], "int32"), "m": 4, "nnz": 5,
    }  # fmt: skip
    derived = check(diagonal, arrays, {"y": 4}, "x")
    assert [[a.name for a in it.axes] for it in sparse_iterations(derived)] == [["J", "I"], ["I_"]]


def test_reductions_come_last():
    dense = small("dense", """
with T.sp_iter([I, K, L], "SRS", "dense") as [i, k, l]:
    with T.init():
        Y[i, l] = 0.0
    Y[i, l] = Y[i, l] + X[i, k] * W[k, l]
""", "I = T.dense_fixed(n)\nK = T.dense_fixed(4)\nL = T.dense_fixed(5)", F64,
        X="I K", W="K L", Y="I L")  # fmt: skip
    draw = np.random.default_rng(0)
    arrays = {"x": draw.standard_normal((3, 4)), "w": draw.standard_normal((4, 5)), "n": 3}
    derived = check(dense, arrays, {"y": (3, 5)}, "w")
    assert "T.sp_iter([K, L, I]" in derived.script()
    check(dense, arrays, {"y": (3, 5)}, "x")


def test_attributes_that_still_hold_stay():
    mean = spmm_programs.program(Spmm(reduce="mean"))
    assert dict(gradient(mean, "a").attrs)["computed"].keys() == {"row"}
    transposed = gradient(mean, "b")  # of the other pattern it would be another mean
    assert "computed" not in transposed.attrs and transposed.params[-1].name == "row"
    ordered = messages.program(messages.Messages(u="hf", e="h", ordered=True))
    assert ordered.attrs["assumed"][0] == gradient(ordered, "e").attrs["assumed"][0]
    sch = sparsetir.Schedule(spmm_programs.program(Spmm()))
    sch.bound(sch.get_sp_iters(sch.get_sparse_iteration("spmm"))[2], 64, "multiple")
    assert gradient(sch.func, "a").attrs["promises"][0]["param"] == "feat"
    private = spmm().func.without_attr("global_symbol")
    assert "global_symbol" not in gradient(private, "a").attrs


# Programs that other tests have


@pytest.mark.parametrize("name", by_turns(PROGRAMS, 2))
def test_programs(name):
    """Along a random direction; over patterns in their own order, others are lowered alone."""
    program = PROGRAMS[name]
    func, draw = program.make("float64", "int32"), np.random.default_rng(1)
    case = "small" if "small" in program.cases else program.cases[0]
    arguments = program.inputs(draw, case, "float64", "int32")
    weights = {f"grad_{o}": draw.standard_normal(arguments[o].shape) for o in program.outputs}
    floats = [b for b in func.buffers if b.dtype == "float64" and b.handle is not None]

    def loss(wrt, change):
        values = copied({**arguments, wrt: arguments[wrt] + change})
        for out in program.outputs:
            values[out][...] = 0.0
        sparsetir.interpret(func, values)
        # Maxima of empty rows are the least number, beside which nothing else is seen.
        results = {o: np.where(values[o] < -1e300, 0.0, values[o]) for o in program.outputs}
        return sum((weights[f"grad_{o}"] * x).sum() for o, x in results.items())

    for wrt in sorted({str(b.handle.name) for b in floats} - set(program.outputs)):
        try:
            transposed = gradient(func, wrt)
        except ValueError as error:
            assert "expected" in str(error) and "transpose=False" in str(error)
        else:
            sparsetir.lower(transposed)
        step = draw.standard_normal(arguments[wrt].shape)
        slope = (loss(wrt, 1e-5 * step) - loss(wrt, -1e-5 * step)) / 2e-5
        result = np.zeros_like(arguments[wrt])  # nothing is written to padded slots
        named = {**arguments, **weights, f"grad_{wrt}": result}
        derived = gradient(func, wrt, transpose=False)
        sparsetir.interpret(derived, {str(p.name): named[str(p.name)] for p in derived.params})
        np.testing.assert_allclose((result * step).sum(), slope, rtol=1e-6, atol=1e-7)


# What is refused


def program(value, idtype="int32", dtype="float32"):
    """An iteration over a matrix that stores a value of C[i], A[i, j], B, D[i] and j."""
    size = getattr(T, idtype)

    @T.prim_func
    def refused(
        a: T.handle, b: T.handle, c: T.handle, d: T.handle, t: T.handle, indptr: T.handle,
        indices: T.handle, m: T.int32, n: size, nnz: size,
    ):  # fmt: skip
        I = T.dense_fixed(m)
        J = T.sparse_variable(I, (n, nnz), (indptr, indices), idtype)
        N = T.dense_fixed(n, idtype)
        A = T.match_sparse_buffer(a, (I, J), "float32")
        B = T.match_sparse_buffer(b, (N,), "float32")
        C = T.match_sparse_buffer(c, (I,), dtype)
        D = T.match_sparse_buffer(d, (I,), dtype)
        TYPE = T.match_sparse_buffer(t, (I, J), "int32")
        with T.sp_iter([I, J], "SR", "sums") as [i, j]:
            with T.init():
                C[i] = D[i]
            C[i] = value(C[i], A[i, j], B, D[i], j)

    return refused


SUM = program(lambda c, a, b, d, j: c + a * b[j])


# Two iterations; the second sets again what the first one writes.
AGAIN = small(
    "twice",
    """
with T.sp_iter([I], "S", "first") as [i]:
    Y[i] = X[i] * T.float32(2)
with T.sp_iter([I], "S", "second") as [i]:
    Y[i] = X[i]
""",
    X="I",
    Y="I",
)


def scheduled():
    sch = sparsetir.Schedule(SUM)
    sch.parallelize(sch.get_sp_iters(sch.get_sparse_iteration("sums"))[0])
    return sch.func


NESTED = small("rows", """
with T.sp_iter([I], "S", "outer") as [i]:
    with T.sp_iter([K], "S", "inner") as [k]:
        Y[k] = X[i, k]
""", "K = T.dense_fixed(4)", X="I K", Y="K")  # fmt: skip
FUSED = small("fused", """
with T.sp_iter([T.fuse(I, J)], "SS", "squares") as [i, j]:
    P[i, j] = A[i, j] * A[i, j]
with T.sp_iter([I, J], "SR", "sums") as [i, j]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + P[i, j] * X[j]
""", A="I J", P="I J", X="N", Y="I")  # fmt: skip
# A ragged pattern, which its columns have no pattern like.
BANDS = small("ragged", """
with T.sp_iter([I, J], "SR", "ragged") as [i, j]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + X[j]
""", "J = T.dense_variable(I, (n, nnz), p)", X="N", Y="I")  # fmt: skip
# Values over the first two of three levels, the last of which is to come first.
ROWS_OF_A_TENSOR = small("tensor", """
with T.sp_iter([I, J, L], "SRR", "tensor") as [i, j, l]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + A[i, j] * X[l]
""", "L = T.sparse_variable(J, (n, nnz_l), (s, t))", A="I J", X="N", Y="I")  # fmt: skip
COO = PROGRAMS["spmm_coo"].make("float32", "int32")


def of(value, wrt, **types):
    """The gradient of a program that stores a value of c, a, b, d and j."""
    gradient(program(eval(f"lambda c, a, b, d, j: {value}"), **types), wrt)


test_refusals = refusals(
    """
gradient(SUM, "E")
    # ValueError: gradient: argument 'wrt': expected one of ['a', 'A', 'b', 'B', 'd', 'D'], got 'E'
gradient(SUM, "c")  # ValueError: gradient: argument 'wrt': expected one of .. , got 'c'
gradient(SUM, "a", dtype="int32")
    # ValueError: gradient: argument 'dtype': expected 'float32', got 'int32'
gradient(SUM, "TYPE")  # ValueError: gradient: argument 'wrt': expected one of .. , got 'TYPE'
gradient(SUM, "d")
    # ValueError: gradient: function 'refused': the init of 'sums' reads 'D'; expected zero
of("c * a", "a")  # ValueError: 'sums' reduces by product; expected X[..] = X[..] + term
of("c - a", "a")  # ValueError: 'sums' updates 'C' by no sum; expected X[..] = X[..] + term
of("b[0]", "b")  # ValueError: 'sums' sets 'C' in visits of a reduction; expected X[..] = X[..] +
of("c + a", "b")
    # ValueError: function 'refused': its result does not depend on the values of 'B'
of("c + T.floor(a)", "a")  # ValueError: function 'refused': its result does not depend on
of("c + T.atan2(a, d)", "a")
    # ValueError: 'sums': expected an expression with a rule for its gradient, got atan2, in
gradient(scheduled(), "a")  # ValueError: it has been scheduled; take the gradient of
gradient(NESTED, "x")
    # ValueError: function 'rows': 'outer' has a SparseIteration in its body; expected X[..] = X[..]
gradient(BANDS, "x")
    # ValueError: ['I', 'J'] in the order ['J', 'I'], but 'J' is dense_variable; expected a
        dense_fixed axis with sparse_variable ones in a chain under it, or transpose=False
gradient(FUSED, "x")  # ValueError: but 'squares' visits them in another way
gradient(COO, "b")  # ValueError: 'I' may store a coordinate twice
of("c + a * b[j]", "b", idtype="int64")  # ValueError: 'J' is of int64, 'I' of int32
of("c + T.Cast('int32', a)", "a", dtype="int32")  # ValueError: its result does not depend on
gradient(ROWS_OF_A_TENSOR, "x")
    # ValueError: 'A' has values over the levels ['I', 'J'] of the pattern .. in the order ['L',
        'I', 'J']; expected values over all of them or over 'I' alone
gradient(AGAIN, "x")  # ValueError: 'second' sets 'Y' after 'first'
gradient(sparsetir.Schedule(SUM), "a")
    # TypeError: argument 'func': expected a stage-I function, got Sch
""",
    globals(),
)

LEAVES = ["a", "x", "y", "k"]


def expressions():
    """Polynomials of the loads and of coordinates, as functions of them."""
    leaf = st.sampled_from(LEAVES).map(lambda n: ("leaf", n)) | st.sampled_from(
        [("constant", c) for c in (-1.5, 0.5, 2.0)]
    )
    operators = st.sampled_from(["+", "-", "*"])
    return st.recursive(leaf, lambda part: st.tuples(operators, part, part), max_leaves=7)


def value(tree, leaves):
    kind, *parts = tree
    if kind == "constant":
        return parts[0]
    if kind == "leaf":
        return leaves[parts[0]]
    a, b = (value(p, leaves) for p in parts)
    return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b}[kind]()


def leaves_in(tree):
    return {tree[1]} if tree[0] == "leaf" else set().union(*map(leaves_in, tree[1:])) \
        if tree[0] != "constant" else set()  # fmt: skip


@examples(
    20, 500, tree=expressions(), wrt=st.sampled_from(["a", "x", "y"]), seed=st.integers(0, 99),
    transpose=st.booleans(),
)  # fmt: skip
def test_polynomials(tree, wrt, seed, transpose):
    tree = ("+", tree, ("*", ("leaf", wrt), ("leaf", "y")))  # so that there is something to derive

    def term(a, x, y, k):
        leaves = {"a": a, "x": x, "y": y, "k": tirx.Cast("float64", k)}
        return value(tree, leaves)

    case = over_edges(term, seed=seed)
    weights = weights_of(case, seed)
    i, j = torch.tensor(case.coords.T.copy())

    def forward(_, a, x, y):
        shape = a[:, None].expand(-1, 3)
        return value(tree, {"a": shape, "x": x[i], "y": y[j], "k": torch.arange(3.0)}).sum(1)

    exact = by_autograd(case, forward, wrt, weights)
    result = case.gradient(wrt, weights, transpose=transpose)
    np.testing.assert_allclose(result, exact, rtol=1e-9, atol=1e-9)
    direction = np.random.default_rng(seed).standard_normal(result.shape)
    ends = [case.forward(**{wrt: case.arrays[wrt] + s * 1e-6 * direction}) for s in (1, -1)]
    slope = (weights * (ends[0] - ends[1])).sum() / 2e-6
    scale = max(1.0, np.abs(result).max(initial=0))
    np.testing.assert_allclose((result * direction).sum(), slope, rtol=1e-5, atol=1e-5 * scale)
