"""The interpreter: every test program against its oracle, and what is refused."""

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


def nans(*shape):
    return np.full(shape, np.nan, "float32")


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


def test_assertions_raise():
    @T.prim_func
    def refuse(m: T.int32):
        assert m > 3, "m is small"
        T.evaluate(0)

    interpret(refuse, [4])
    with pytest.raises(AssertionError, match="refuse: m is small"):
        interpret(refuse, [3])


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
