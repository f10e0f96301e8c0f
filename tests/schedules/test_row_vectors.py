"""Rows in vectors by default: reductions to one number, pointwise values, and what fills none."""

import numpy as np
import pytest

import sparsetir
from pairs import by_turns
from small import small
from sparsetir.schedules.operators import spmm
from sparsetir.schedules.operators.problems import Spmm

LENGTHS = [0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, 0]
M, N, NNZ = len(LENGTHS), 120, sum(LENGTHS)
INDPTR = np.cumsum([0, *LENGTHS]).astype("int32")
INDICES = np.concatenate([np.sort((np.arange(n) * 7 + n) % N) for n in LENGTHS]).astype("int32")


def ran(body, out, dtype, **inputs):
    """The results of a program on a row's values `A`, its divisor `D` and the columns' `X`."""
    over = {"A": "I J", "D": "I", "X": "N", "OUT": out}
    program = small("rows", body, dtype=dtype, **over)
    arguments = {"indptr": INDPTR, "indices": INDICES, "m": M, "n": N, "nnz": NNZ, **inputs}
    shape = (NNZ,) if "J" in out else (M,)
    kernel, expected = sparsetir.build(program), np.full(shape, 7, dtype)
    sparsetir.interpret(program, {**arguments, "out": expected})
    result = np.full(shape, 7, dtype)
    kernel(**arguments, out=result)
    return result, expected


def operands(dtype, seed=0):
    rng = np.random.default_rng(seed)
    whole = dtype.startswith("int")
    draw = (lambda n: rng.integers(1, 9, n)) if whole else rng.standard_normal
    return {"a": draw(NNZ).astype(dtype), "d": draw(M).astype(dtype), "x": draw(N).astype(dtype)}


ITERATION = 'with T.sp_iter([I, J], "SR", "rows") as [i, j]:'
BETTER = "T.Select(T.Or({x} > OUT[i], T.isnan({x})), {x}, OUT[i])"
TERMS = {"stored": "A[i, j]", "divided": "A[i, j] / D[i]", "gathered": "A[i, j] * X[j]"}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_sums(dtype, term):
    if dtype.startswith("int") and term == "divided":
        pytest.skip("a division of integers is not this one")
    body = f"""
    {ITERATION}
        with T.init():
            OUT[i] = T.{dtype}(3)
        OUT[i] = OUT[i] + {TERMS[term]}
    """
    result, expected = ran(body, "I", dtype, **operands(dtype))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("nan_at", [None, 0, 5, -1])
@pytest.mark.parametrize("term", TERMS)
def test_extrema_keep_nan(term, nan_at):
    inputs = operands("float32")
    if nan_at is not None:
        inputs["a"][INDPTR[:-1][np.diff(INDPTR) > 7] + (nan_at % 8)] = np.nan
    body = f"""
    {ITERATION}
        with T.init():
            OUT[i] = T.float32("-inf")
        OUT[i] = {BETTER.format(x=f"({TERMS[term]})")}
    """
    result, expected = ran(body, "I", "float32", **inputs)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert np.isnan(result).any() == (nan_at is not None)


@pytest.mark.parametrize("nan_at", [None, 0, 5, -1])
@pytest.mark.parametrize("operator", ["max", "min"])
def test_extrema_after_a_nan_are_those_of_what_follows(operator, nan_at):
    """Rows in vectors, and in order where one sees a NaN; infinities are none."""
    inputs = operands("float32")
    inputs["a"][INDPTR[:-1][np.diff(INDPTR) > 8] + 6] = np.inf if operator == "max" else -np.inf
    if nan_at is not None:
        inputs["a"][INDPTR[:-1][np.diff(INDPTR) > 7] + (nan_at % 8)] = np.nan
    body = f"""
    {ITERATION}
        with T.init():
            OUT[i] = T.float32(0)
        OUT[i] = T.{operator}(OUT[i], A[i, j] * X[j])
    """
    result, expected = ran(body, "I", "float32", **inputs)
    np.testing.assert_array_equal(result, expected)


def test_a_sum_without_terms_is_not_multiplied():
    """Rows without nonzeros are 0, whatever factors would be multiplied to their sums."""
    body = """
    with T.sp_iter([I, J, K], "SRS", "rows") as [i, j, k]:
        with T.init():
            OUT[i, k] = T.float32(0)
        OUT[i, k] = OUT[i, k] + Y[i, k] * X[j, k]
    """
    program = small("rows", body, Y="I K", X="N K", OUT="I K")
    kernel = sparsetir.build(program)
    scheduled = sparsetir.Schedule(program)
    i, _, k = scheduled.get_sp_iters(scheduled.get_sparse_iteration("rows"))
    scheduled.precompute("OUT", i, [k], scope="global", hoist=True)
    for run in (kernel, sparsetir.build(scheduled)):
        for feat in (1, 7, 16, 40, 130):
            y, x = np.ones((M, feat), "float32"), np.ones((N, feat), "float32")
            y[0], y[-1], out = np.nan, np.inf, np.full((M, feat), 7, "float32")
            run(y=y, x=x, out=out, indptr=INDPTR, indices=INDICES, m=M, n=N, nnz=NNZ, feat=feat)
            np.testing.assert_array_equal(out, np.tile(np.float32(LENGTHS)[:, None], feat))


def test_what_is_finite_needs_no_look_for_terms():
    """A mean's factors are: its sums are multiplied as they are."""
    sch = sparsetir.Schedule(spmm.program(Spmm(reduce="mean")))
    i, _, k = sch.get_sp_iters(sch.get_sparse_iteration("spmm"))
    sch.precompute("C", i, [k], scope="global", hoist=True)
    assert "C_ws[k] * ROW[i]" in sch.func.script() and "_any" not in sch.func.script()


KK, KINDS = 5, 3
SLOTS = np.stack([np.sort((np.arange(KK) * 11 + i) % N) for i in range(M)]).astype("int32")
SLOTS[1, 2:], SLOTS[4] = -1, -1  # padding
FIBERS = np.cumsum([0, *(np.arange(NNZ) % 4)]).astype("int32")  # every fourth is empty
ELL = "E = T.sparse_fixed(I, (n, kk), slots)"
CSF = "L = T.sparse_variable(J, (n, fibers), (l_ptr, l_idx))"
MAP = """
R = T.dense_fixed(kinds)
O = T.sparse_variable(R, (m, pairs), (o_ptr, o_idx))
E = T.sparse_fixed(O, (n, 1), slots)
C = T.dense_fixed(cin)
"""
INNERMOST = {
    "elements of ELL": (ELL, {"X": "I K", "Y": "N K", "OUT": "I E"}, """
    with T.sp_iter([I, E, K], "SSR", "dots") as [i, e, k]:
        with T.init():
            OUT[i, e] = 1.0
        OUT[i, e] = OUT[i, e] + (X[i, k] - Y[e, k]) * X[i, k]
    """),
    "elements in nested rows": ("", {"X": "I K", "Y": "N K", "OUT": "I J"}, """
    S = T.alloc_sparse_buffer((I, J), "float32")
    TOP = T.alloc_sparse_buffer((I,), "float32")
    with T.sp_iter([I], "S", "rows") as [i]:
        with T.sp_iter([J, K], "SR", "dots") as [j, k]:
            with T.init():
                S[i, j] = 0.0
            S[i, j] = S[i, j] + X[i, k] * Y[j, k]
        with T.sp_iter([J], "R", "top") as [j]:
            with T.init():
                TOP[i] = T.min_value("float32")
            TOP[i] = T.max(TOP[i], S[i, j])
        with T.sp_iter([J], "S", "apart") as [j]:
            OUT[i, j] = S[i, j] - TOP[i]
    """),
    "two sums, the inner one dense": ("", {"A": "I J", "X": "I K", "Y": "N K", "OUT": "I"}, """
    with T.sp_iter([I, J, K], "SRR", "both") as [i, j, k]:
        with T.init():
            OUT[i] = 2.0
        OUT[i] = OUT[i] + A[i, j] * X[i, k] * Y[j, k]
    """),
    "a scatter of sums": (MAP, {"X": "N C", "W": "R C K", "OUT": "I K"}, """
    with T.sp_iter([R, O, E, C, K], "RSRRS", "conv") as [r, o, e, c, k]:
        with T.init():
            OUT[o, k] = 0.0
        OUT[o, k] = OUT[o, k] + X[e, c] * W[r, c, k]
    """),
    "sums over fibers": (CSF, {"A": "I J L", "X": "N K", "Y": "N K", "OUT": "I K"}, """
    with T.sp_iter([I, J, L, K], "SRRS", "mttkrp") as [i, j, l, k]:
        OUT[i, k] = OUT[i, k] + A[i, j, l] * X[j, k] * Y[l, k]
    """),
    "an update under a condition": ("", {"A": "I J", "X": "N K", "OUT": "I K"}, """
    with T.sp_iter([I, J, K], "SRS", "some") as [i, j, k]:
        if A[i, j] > 0.0:
            OUT[i, k] = OUT[i, k] + A[i, j] * X[j, k]
    """),
    "sums over the slots of ELL": (ELL, {"Y": "N K", "OUT": "I K"}, """
    with T.sp_iter([I, E, K], "SRS", "slots") as [i, e, k]:
        OUT[i, k] = OUT[i, k] + Y[e, k]
    """),
    "sums over slots, from an init": (ELL, {"X": "I K", "Y": "N K", "OUT": "I K"}, """
    with T.sp_iter([I, E, K], "SRS", "slots") as [i, e, k]:
        with T.init():
            OUT[i, k] = 1.0
        OUT[i, k] = OUT[i, k] + X[i, k] * Y[e, k]
    """),
    "a transposed result": ("", {"A": "I J", "X": "N K", "OUT": "K I"}, """
    with T.sp_iter([I, J, K], "SRS", "across") as [i, j, k]:
        with T.init():
            OUT[k, i] = 1.0
        OUT[k, i] = OUT[k, i] + A[i, j] * X[j, k]
    """),
    "a transposed result under a condition": ("", {"A": "I J", "X": "N K", "OUT": "K I"}, """
    with T.sp_iter([I, J, K], "SRS", "across") as [i, j, k]:
        if A[i, j] > 0.0:
            OUT[k, i] = OUT[k, i] + A[i, j] * X[j, k]
    """),
}  # fmt: skip


@pytest.mark.parametrize("feat", [0, 1, 3, 8, 17, 40])
@pytest.mark.parametrize("kind", by_turns(INNERMOST, 2))
@pytest.mark.default(3)
def test_innermost_sums_in_other_nests(kind, feat):
    axes, over, body = INNERMOST[kind]
    program = small("rows", body, axes, **over)
    draw = np.random.default_rng(feat).standard_normal
    fibers = int(FIBERS[-1])
    pairs = np.array([0, 4, 4, 7], "int32")
    sizes = {"m": M, "n": N, "nnz": NNZ, "feat": feat, "kk": KK, "kinds": KINDS, "cin": 6}
    sizes |= {"pairs": 7, "fibers": fibers}
    inputs = {
        "indptr": INDPTR, "indices": INDICES, "o_ptr": pairs,
        "o_idx": np.int32([0, 2, 5, 14, 1, 2, 3]), "l_ptr": FIBERS,
        "l_idx": np.concatenate([np.arange(n) * 5 for n in np.diff(FIBERS)]).astype("int32"),
        "slots": np.int32([3, -1, 5, 7, 0, 9, 119]) if axes == MAP else SLOTS.reshape(-1),
        "w": draw((KINDS, 6, feat)).astype("float32"),
        "x": draw((M if "X" in over and over["X"][0] == "I" else N, feat)).astype("float32"),
        "y": draw((N, feat)).astype("float32"),
        "a": draw(fibers if axes == CSF else NNZ).astype("float32"), **sizes,
    }  # fmt: skip
    if axes == MAP:
        inputs["x"] = draw((N, 6)).astype("float32")
    shape = {"I E": (M * KK,), "I J": (NNZ,), "I": (M,), "I K": (M, feat), "K I": (feat, M)}[
        over["OUT"]
    ]
    kernel, names = sparsetir.build(program), {p.name for p in program.params}
    if any(word in kind for word in ("slots", "condition", "transposed")):
        assert "T.vectorized(" in kernel.stages["II scheduled"].script()
    args = {name: value for name, value in inputs.items() if name in names}
    expected, result = np.full(shape, 3, "float32"), np.full(shape, 3, "float32")
    sparsetir.interpret(program, {**args, "out": expected})
    kernel(**args, out=result)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("feat", [0, 1, 5, 8, 21, 64])
def test_elements_are_added_to_rows_at_loaded_indices_in_vectors(feat):
    """Some indices are beyond the rows of the result or of the operand."""
    program = small("rows", """
    with T.sp_iter([E, K], "SS", "scatter") as [e, k]:
        OUT[ROW[e], k] = OUT[ROW[e], k] + A[e] * X[COL[e], k]
    """, "E = T.dense_fixed(count)", A="E", ROW="E int32", COL="E int32", X="N K", OUT="I K",
    )  # fmt: skip
    kernel, rng = sparsetir.build(program), np.random.default_rng(feat)
    assert "T.vectorized(" in kernel.stages["II scheduled"].script()
    args = {
        "a": rng.random(50, dtype="float32"), "x": rng.random((N, feat), dtype="float32"),
        "row": rng.integers(-1, M + 1, 50).astype("int32"),
        "col": rng.integers(-1, N + 1, 50).astype("int32"),
        "count": 50, "m": M, "n": N, "feat": feat,
    }  # fmt: skip
    result, expected = (np.full((M, feat), 3, "float32") for _ in range(2))
    kernel(**args, out=result)
    sparsetir.interpret(program, {**args, "out": expected})
    np.testing.assert_allclose(result, expected, rtol=1e-5)


SUMS = """
    with T.sp_iter([I, J], "SR", "sums") as [i, j]:
        with T.init():
            D[i] = T.float32(0)
        D[i] = D[i] + T.exp(A[i, j])
"""
FOLLOWS = {
    "a store of the row": (1, "I J", """
    with T.sp_iter([I, J], "SS", "after") as [i, j]:
        OUT[i, j] = T.exp(A[i, j]) / D[i]
    """),
    "an update of the row, then of its copy": (1, "I", """
    with T.sp_iter([I], "S", "after") as [i]:
        D[i] = D[i] * T.float32(2)
    with T.sp_iter([I], "S", "last") as [i]:
        OUT[i] = D[i]
    """),
    "another row": (2, "I", """
    with T.sp_iter([I], "S", "after") as [i]:
        OUT[i] = D[i + 1]
    """),
    "rows at loaded indices": (2, "I J", """
    with T.sp_iter([I, J], "SS", "after") as [i, j]:
        OUT[i, j] = D[j % 15] - A[i, j]
    """),
    "nothing in common but what is read": (2, "I J", """
    with T.sp_iter([I, J], "SS", "after") as [i, j]:
        OUT[i, j] = A[i, j] * X[j]
    """),
}  # fmt: skip


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("kind", FOLLOWS)
@pytest.mark.default("an update of the row, then of its copy-True", "another row-False")
def test_iterations_over_rows_of_their_own_share_visits(kind, scratch):
    loops, out, body = FOLLOWS[kind]
    over = {"A": "I J", "X": "N", "OUT": out} | ({} if scratch else {"D": "I"})
    allocated = '    D = T.alloc_sparse_buffer((I,), "float32")' if scratch else ""
    program = small("rows", f"{allocated}{SUMS}{body}", **over)
    kernel, shape = sparsetir.build(program), (NNZ,) if "J" in out else (M,)
    assert kernel.stages["III"].script().count("T.parallel(") == loops
    args = {"indptr": INDPTR, "indices": INDICES, "m": M, "n": N, "nnz": NNZ, **operands("float32")}
    args = {name: x for name, x in args.items() if name in {p.name for p in program.params}}
    expected, result = np.full(shape, 7, "float32"), np.full(shape, 7, "float32")
    sparsetir.interpret(program, {**args, "out": expected})
    kernel(**args, out=result)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_conditions_of_no_visits_are_not_evaluated():
    """Without features nothing asks for an element that the array does not have."""
    program = sparsetir.from_source("""
@T.prim_func
def f(p: T.handle, q: T.handle, x: T.handle, out: T.handle, m: T.int32, feat: T.int32):
    I = T.dense_fixed(m)
    K = T.dense_fixed(feat)
    P = T.match_buffer(p, (m,), "float32")
    Q = T.match_sparse_buffer(q, (I,), "int32")
    X = T.match_sparse_buffer(x, (I, K), "float32")
    OUT = T.match_sparse_buffer(out, (I,), "float32")
    with T.sp_iter([I, K], "SR", "f") as [i, k]:
        with T.init():
            OUT[i] = 2.0
        if P[Q[i]] > 0.0:
            OUT[i] = OUT[i] + X[i, k]
""")
    kernel, out = sparsetir.build(program), np.zeros(3, "float32")
    kernel(np.ones(3, "float32"), np.full(3, 2**30, "int32"), np.zeros((3, 0), "float32"), out)
    np.testing.assert_array_equal(out, 2)
    x = np.arange(60, dtype="float32").reshape(3, 20)
    kernel(np.float32([1, 0, 1]), np.int32([2, 1, 0]), x, out)
    np.testing.assert_array_equal(out, 2 + x.sum(1) * [1, 0, 1])
