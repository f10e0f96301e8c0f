"""The interpreter: every test program against its oracle, and what language and plain TIR mean."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from pairs import by_turns
from programs import PROGRAMS, tolerance
from sparsetir.sparse_ir import script as T
from sparsetir.sparse_ir.interpret import interpret
from sparsetir.sparse_ir.script import from_source

TYPES = [("float32", "int32"), ("float64", "int64"), ("float16", "int32")]
# Each program in each type, by turns.
EACH = by_turns(
    [(name, *TYPES[(turn + n) % 3]) for turn, name in enumerate(PROGRAMS) for n in range(3)], 3
)


@pytest.mark.parametrize(("name", "dtype", "idtype"), EACH)
def test_program_equals_its_oracle(name, dtype, idtype):
    program = PROGRAMS[name]
    func = program.make(dtype, idtype)
    for case in program.cases:
        rng = np.random.default_rng(zlib.crc32(f"{name} {case}".encode()))
        args = program.inputs(rng, case, dtype, idtype)
        with np.errstate(all="ignore"):
            expected = program.oracle(args)
        unchanged = {k: np.copy(v) for k, v in args.items() if k not in program.outputs}
        interpret(func, args)
        for output in program.outputs:
            np.testing.assert_allclose(
                args[output].astype(np.float64),
                expected[output],
                **tolerance(dtype),
                err_msg=f"{name}: {case}: {output}",
            )
        for key, before in unchanged.items():
            np.testing.assert_array_equal(args[key], before, err_msg=f"{name}: {case}: {key}")


def csr_args(**more):
    """A 3 x 4 matrix with an empty row: [[0, 1, 0, 2], [], [3, 0, 0, 0]]."""
    return {
        "a": np.array([1, 2, 3], "float32"),
        "indptr": np.array([0, 2, 2, 3], "int32"),
        "indices": np.array([1, 3, 0], "int32"),
        "m": 3,
        "n": 4,
        "nnz": 3,
        **more,
    }


def given(more="", check_well_formed=True, **arrays):
    """An interpreter of statements over A, a matrix in I and J; returns the arguments."""
    args = csr_args(**arrays)
    kinds = {n: "handle" if isinstance(v, np.ndarray) else "int32" for n, v in args.items()}

    def run(body):
        lines = [*more.splitlines(), *body.strip().splitlines()]
        text = f"""
@T.prim_func(check_well_formed={check_well_formed})
def f({", ".join(f"{name}: T.{kind}" for name, kind in kinds.items())}):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    A = T.match_sparse_buffer(a, (I, J))
"""
        interpret(from_source(text + "".join(f"    {line}\n" for line in lines)), args)
        return args

    return run


B = "K = T.dense_fixed({})\nB = T.match_sparse_buffer(b, ({}), '{}')\n"


def nans(*shape):
    return np.full(shape, np.nan, "float32")


def test_absent_reads_give_zero():
    args = given(B.format(6, "I, K", "float32"), b=nans(3, 6))("""
with T.sp_iter([I, K], "SS", "copy") as [i, k]:
    B[i, k] = A[i, k - 1]
""")
    expected = [[0, 0, 1, 0, 2, 0], [0] * 6, [0, 3, 0, 0, 0, 0]]
    np.testing.assert_array_equal(args["b"], expected)


def test_absent_writes_are_discarded():
    args = given(B.format("n + 3", "K,", "float32"), b=np.arange(7, dtype="float32"))("""
with T.sp_iter([I, K], "SS", "spread") as [i, k]:
    A[i - 1, k - 2] = B[k]
""")
    np.testing.assert_array_equal(args["a"], [3, 5, 3])  # row 2 is never written


def test_beyond_the_end_of_a_ragged_row():
    x, p = np.array([1, 2, 3], "float32"), np.array([0, 2, 2, 3], "int32")
    args = given(b=nans(3, 2), x=x, p=p)("""
R = T.dense_variable(I, (2, nnz), p)
K = T.dense_fixed(2)
X = T.match_sparse_buffer(x, (I, R))
B = T.match_sparse_buffer(b, (I, K))
with T.sp_iter([I, K], "SS", "pad") as [i, k]:
    B[i, k] = X[i, k]
""")
    np.testing.assert_array_equal(args["b"], [[1, 2], [0, 0], [3, 0]])


def test_init_runs_for_coordinates_that_are_not_stored():
    args = given(B.format("n", "K,", "int64"), b=np.full(4, -1, "int64"))("""
with T.sp_iter([I, J], "RS", "count") as [i, j]:
    with T.init():
        B[j] = T.int64(10)
    B[j] = B[j] + T.int64(1)
""")
    np.testing.assert_array_equal(args["b"], [11, 11, 10, 11])


def test_init_runs_each_time_a_nested_iteration_is_reached():
    args = given(y=nans(3))("""
Y = T.match_sparse_buffer(y, (I,))
with T.sp_iter([I], "S", "rows") as [i]:
    x = T.float32(0)
    with T.sp_iter([J], "R", "total") as [j]:
        with T.init():
            x = T.float32(0)
        x = x + A[i, j]
    Y[i] = x
""")
    np.testing.assert_array_equal(args["y"], [3, 0, 3])


def test_refused():
    for body, message in [
        ("""
Y = T.match_sparse_buffer(y, (I,))
with T.sp_iter([I], "R", "sum") as [i]:
    with T.init():
        Y[i] = 0.0
    Y[i] = Y[i] + T.float32(1)
""", "f: sp_iter 'sum': the init uses 'i' of reduction axis"),
        ("""
with T.sp_iter([J], "S", "alone") as [j]:
    A[0, j] = T.float32(1)
""", "f: sp_iter 'alone': axis 'J' is visited outside"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            given(check_well_formed=False, y=nans(3))(body)


def test_allocated_buffers_start_as_garbage():
    args = given(x=np.zeros(3, "float16"), y=np.zeros(3, "int32"), z=np.zeros(3, "float32"))("""
X = T.match_sparse_buffer(x, (I,), "float16")
Y = T.match_sparse_buffer(y, (I,), "int32")
Z = T.match_sparse_buffer(z, (I,), "float32")
P = T.alloc_sparse_buffer((I,), "float16")
Q = T.alloc_sparse_buffer((I,), "int32")
R = T.alloc_buffer((2,), "float32")
with T.sp_iter([I], "S", "copy") as [i]:
    X[i] = P[i]
    Y[i] = Q[i]
    Z[i] = R[1]
""")
    assert (
        np.isnan(args["x"]).all() and (args["y"] == 2**31 - 1).all() and np.isnan(args["z"]).all()
    )


def test_padded_slots_are_not_visited():
    indices = np.array([4, -1, 0, -1, -1, -7, -1, -1, -1], "int32")
    stored = np.where(indices < 0, np.float32("nan"), np.arange(1, 10, dtype="float32"))
    args = given(e=stored, at=indices, y=nans(3), count=np.zeros(3, "int32"))("""
S = T.sparse_fixed(I, (5, 3), at)
E = T.match_sparse_buffer(e, (I, S))
Y = T.match_sparse_buffer(y, (I,))
N = T.match_sparse_buffer(count, (I,), "int32")
with T.sp_iter([I, S], "SR", "sum") as [i, j]:
    with T.init():
        Y[i] = 0.0
        N[i] = 0
    Y[i] = Y[i] + E[i, j]
    N[i] = N[i] + 1
""")
    np.testing.assert_array_equal(args["y"], [1 + 3, 0, 0])
    np.testing.assert_array_equal(args["count"], [2, 0, 0])


def test_duplicates_have_positions_of_their_own():
    """An index that is not the iteration's variable itself is searched: the first match."""
    arrays = {"e": np.array([1, 2, 3], "float32"), "x": nans(3), "y": nans(3)}
    arrays |= {"p": np.array([0, 3], "int32"), "rows": np.array([2, 2, 3], "int32")}
    args = given(**arrays)("""
O = T.dense_fixed(1)
R = T.sparse_variable(O, (4, 3), (p, rows), unique=False)
E = T.match_sparse_buffer(e, (O, R))
X = T.match_sparse_buffer(x, (O, R))
Y = T.match_sparse_buffer(y, (O, R))
with T.sp_iter([O, R], "SS", "double") as [o, i]:
    with T.init():
        Y[o, i] = T.float32(0)
    X[o, i] = E[o, i] + E[o, i]
    Y[o, i] = Y[o, i] + E[o, i + 0]
""")
    np.testing.assert_array_equal(args["x"], [2, 4, 6])
    np.testing.assert_array_equal(args["y"], [1, 2, 3])


def test_an_own_coordinate_under_another_parent_is_searched():
    args = given(indices=np.array([0, 3, 0], "int32"), y=nans(3))("""
Y = T.match_sparse_buffer(y, (I, J))
with T.sp_iter([I, J], "SS", "above") as [i, j]:
    Y[i, j] = A[i - 2, j] + A[i + 2, j]
""")
    np.testing.assert_array_equal(args["y"], [3, 0, 1])


def test_init_does_not_see_the_positions_of_an_earlier_run():
    args = given()("""
for t in range(2):
    with T.sp_iter([I, J], "SS", "count") as [i, j]:
        with T.init():
            A[i, j] = T.Cast("float32", t * 10)
        A[i, j] = A[i, j] + T.float32(1)
""")
    np.testing.assert_array_equal(args["a"], [11, 11, 11])


def test_an_inner_iteration_over_an_axis_gives_the_outer_one_back():
    """The verifier refuses it; the interpreter need not."""
    args = given(check_well_formed=False, y=nans(3))("""
Y = T.match_sparse_buffer(y, (I,))
with T.sp_iter([I], "S", "outer") as [i]:
    with T.sp_iter([I], "R", "inner") as [r]:
        with T.init():
            Y[i] = T.float32(0)
        Y[i] = Y[i] + T.float32(100)
    with T.sp_iter([J], "R", "row") as [j]:
        Y[i] = Y[i] + A[i, j]
""")
    np.testing.assert_array_equal(args["y"], [303, 300, 303])


def test_storage_of_heads_before_a_sparse_matrix():
    args = given(y=nans(6, 3))("""
H = T.dense_fixed(2)
F = T.dense_fixed(3)
Y = T.match_sparse_buffer(y, (H, I, J, F))
with T.sp_iter([H, I, J, F], "SSSS", "spread") as [h, i, j, f]:
    Y[h, i, j, f] = A[i, j] * T.float32(100) + T.Cast("float32", h * 10 + f)
""")
    expected = np.array([1, 2, 3])[:, None] * 100 + np.arange(3)
    np.testing.assert_array_equal(args["y"], [*expected, *(expected + 10)])


def test_arithmetic_is_that_of_the_type():
    @T.prim_func
    def arithmetic(f: T.handle, n: T.handle, x: T.float16, y: T.int32, z: T.int32):
        I = T.dense_fixed(8)
        F = T.match_buffer(f, (3,), "float16")
        N = T.match_sparse_buffer(n, (I,), "int32")
        F[0] = x + T.float16(1)
        F[1] = x * x
        F[2] = T.if_then_else(y > 0, x, F[y])
        N[0] = y * 65536
        N[1] = -7 // y
        N[2] = T.truncdiv(0 - y, 2)
        N[3] = T.floormod(0 - y, 4)
        N[4] = T.truncmod(0 - y, 4)
        N[5] = T.Select(y > 0, 1, y // z)
        N[6] = T.Cast("int32", T.float32(-2.7))
        N[7] = T.max(y, 5) + T.min(y, 5) + T.shift_left(y, 2)

    f, n = np.zeros(3, "float16"), np.zeros(8, "int32")
    interpret(arithmetic, {"f": f, "n": n, "x": 2048.0, "y": 65537, "z": 0})
    np.testing.assert_array_equal(f, [2048, np.inf, 2048])
    np.testing.assert_array_equal(n[:7], [65536, -1, -32768, 3, -1, 1, -2])
    assert n[7] == 65537 + 5 + 4 * 65537


def test_statements():
    @T.prim_func
    def statements(y: T.handle, m: T.int32):
        I = T.dense_fixed(m)
        Y = T.match_sparse_buffer(y, (I,), "int32")
        for i in range(1, m, 2):
            Y[i] = i
        n = T.int32(0)
        while n < 5:
            n = n + 1
            if n == 3:
                continue
            if n == 5:
                break
            Y[0] = Y[0] + n
        if Y[0] > 100:
            Y[2] = 1
        else:
            Y[2] = 2
        z: T.let[T.int32] = Y[2] + 1
        assert z == 3, "z is three"
        Y[4] = z

    y = np.zeros(5, "int32")
    interpret(statements, [y, 5])
    np.testing.assert_array_equal(y, [7, 1, 2, 3, 3])


def test_assertions_raise():
    @T.prim_func
    def refuse(m: T.int32):
        assert m > 3, "m is small"
        T.evaluate(0)

    interpret(refuse, [4])
    with pytest.raises(AssertionError, match="refuse: m is small"):
        interpret(refuse, [3])


INTRINSICS = dict.fromkeys(["exp", "exp2", "log", "sqrt", "tanh", "abs", "floor", "ceil"])
INTRINSICS |= {"rsqrt": lambda x: x**-0.5, "sigmoid": lambda x: 1 / (1 + np.exp(-x))}


@pytest.mark.parametrize("name", INTRINSICS)
def test_intrinsics(name):
    call, expected = getattr(T, name), INTRINSICS[name] or getattr(np, name)
    for dtype in ("float16", "float32", "float64", "bfloat16"):

        @T.prim_func
        def apply(x: T.handle, y: T.handle):
            I = T.dense_fixed(3)
            X = T.match_sparse_buffer(x, (I,), dtype)
            Y = T.match_sparse_buffer(y, (I,), dtype)
            with T.sp_iter([I], "S", "apply") as [i]:
                Y[i] = call(X[i])

        x = np.array([0.25, 0.75, 1.5]).astype(dtype)
        y = np.zeros_like(x)
        interpret(apply, [x, y])
        want = expected(x.astype("float64"))
        np.testing.assert_allclose(y.astype("float64"), want, **tolerance(dtype))


def spmm():
    return PROGRAMS["spmm"].make("float32", "int32")


def spmm_args():
    return PROGRAMS["spmm"].inputs(np.random.default_rng(0), "small", "float32", "int32")


TWISTED = np.zeros((7, 13), "float32").T
WRONG = [  # (argument, value, error, what is expected of it)
    ("b", None, TypeError, "expected a NumPy array, got NoneType"),
    ("a", np.zeros(3), TypeError, "buffer 'A': expected dtype float32, got float64"),
    ("a", np.zeros(3, "float32"), ValueError, r"'A': expected \d+ elements, got shape \(3,\)"),
    ("indptr", np.zeros(3, "int32"), ValueError, "axis 'J': expected 14 elements, got shape .3,"),
    ("c", TWISTED, ValueError, "buffer 'C': expected a C-contiguous array"),
    ("m", 13.0, TypeError, "expected a number of type int32, got 13.0"),
    ("m", 2**40, ValueError, "expected a number of type int32, got 10995"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG)
def test_wrong_arguments(name, value, error, message):
    with pytest.raises(error, match=f"spmm: argument '{name}': .*{message}"):
        interpret(spmm(), {**spmm_args(), name: value})


def test_wrong_names_and_numbers_of_arguments():
    args = spmm_args()
    with pytest.raises(TypeError, match="spmm: unknown argument 'q'"):
        interpret(spmm(), {**args, "q": 1})
    del args["b"]
    with pytest.raises(TypeError, match="spmm: argument 'b' is missing"):
        interpret(spmm(), args)
    with pytest.raises(TypeError, match="spmm: expected 9 arguments .*, got 1"):
        interpret(spmm(), [1])
