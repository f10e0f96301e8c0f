"""Statements and operations of bodies: kernels do what the interpreter does, or both refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsetir
from pairs import by_default
from refusals import refuse
from small import small, text_of

# Bodies of a loop over q: TVM vectorises some of them not at all, or wrongly.
LANES = """
C[i, q] = B[i, q] + B[i, q + 1]

n = T.alloc_buffer((1,), "int32")
n[0] = 0
while n[0] < q:
    n[0] = n[0] + 1
C[i, q] = T.cast(n[0], "float32")

if A[q] > 1:
    C[i, q] = A[i]
else:
    C[i, q] = 2.0

v: T.let[T.float32] = A[q] * A[q]
C[i, q] = v * v

for u in T.vectorized(4):
    D[i, q, u] = A[q]

for u in range(q):
    C[i, q] = C[i, q] + A[u]
"""


def in_rows(body: str) -> str:
    return 'with T.sp_iter([I], "S", "f") as [i]:\n    ' + body.strip().replace("\n", "\n    ")


def in_loop(kind: str, body: str) -> str:
    return in_rows(f"for q in T.{kind}:\n    " + body.strip().replace("\n", "\n    "))


@pytest.mark.parametrize("lanes", ["4", "m"])
@pytest.mark.parametrize("body", LANES.strip().split("\n\n"))
def test_loops_of_lanes(body: str, lanes: str) -> None:
    func = small("f", in_loop(f"vectorized({lanes})", body), A="I", B="I J", C="I N", D="I N K")
    outs = []
    for run in (sparsetir.interpret, lambda f, args: sparsetir.build(f)(**args)):
        c, d = np.zeros((4, 9), "float32"), np.zeros((4, 9, 9), "float32")
        run(func, {
            "a": np.arange(4, dtype="float32"), "b": np.arange(1, 6, dtype="float32"), "c": c,
            "d": d, "indptr": np.array([0, 2, 2, 4, 5], "int32"),
            "indices": np.array([0, 2, 1, 3, 0], "int32"), "m": 4, "n": 9, "nnz": 5,
            "feat": 9,
        })  # fmt: skip
        outs.append((c, d))
    for result, wanted in zip(*outs, strict=True):
        np.testing.assert_array_equal(result, wanted)


def test_parallel_loops_are_proven() -> None:
    """Or refused, or the author's word is taken."""
    proven = {"C[i, q] = A[i]", "C[i, 3 - q * 2] = A[i]", "C[i, q + i] = C[i, q + i] + A[i]"}
    for kind in ("parallel", "vectorized"):
        for body in proven:
            small("f", in_loop(f"{kind}(4)", body), A="I", C="I N")
        for body in ("A[i] = A[i] + 1.0", "C[i, q] = C[i, q - 1]", "C[i, q // 2] = A[i]"):
            refuse(
                f"small('f', in_loop('{kind}(4)', '{body}'), A='I', C='I N')  # ParseError: in "
                "function 'f': loop 'q' is not proven free of races (scatter: .. ): expected visits"
                ' that each write elements of their own .. annotations={"race": "ignore"}',
                globals(),
            )
            loop = f'{kind}(4, annotations={{"race": "ignore"}})'
            func = small("f", in_loop(loop, body), A="I", C="I N")
            assert sparsetir.from_source(func.script()).script() == func.script()
    one = small("f", in_loop("parallel(1)", "A[i] = A[i] + 1.0"), A="I")
    assert "T.parallel(1)" in one.script()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (', "positive"', AssertionError, "f: positive"),
        ("", AssertionError, r"f: expected A\[i\] > 0"),
        (', ("ValueError", ["pos", "itive"])', ValueError, "f: positive"),
    ],
)
def test_asserts(text: str, error: Any, message: str) -> None:
    """Assertions raise on a CPU; a GPU raises nothing."""
    func = small("f", in_rows(f"assert A[i] > 0{text}\nY[i] = A[i]"), A="I", Y="I")
    kernel = sparsetir.build(func)
    a, y = np.ones(5, "float32"), np.zeros(5, "float32")
    kernel(a, y)
    np.testing.assert_array_equal(y, a)
    a[3] = -1
    for _ in range(20):
        with pytest.raises(error, match=message):
            kernel(a, y)
    with pytest.raises(error, match=message):
        sparsetir.interpret(func, {"a": a, "y": y, "m": 5})
    with pytest.raises(sparsetir.ScheduleError, match="'f' asserts in loops over threads"):
        sparsetir.build(func, target={"kind": "cuda", "arch": "sm_80"})


FUNCTIONS = (
    "abs fabs exp exp2 exp10 erf tanh sigmoid log log2 log10 log1p tan cos cosh acos acosh sin "
    "asin sinh asinh atan atanh sqrt rsqrt floor ceil trunc round nearbyint bitwise_not popcount "
    "clz Not isnan isinf isfinite likely isnullptr"
).split()
OF_TWO = (
    "truncdiv truncmod floordiv floormod ceildiv min max pow fmod atan2 hypot copysign nextafter "
    "And Or Div Mod FloorDiv FloorMod Add Sub Mul bitwise_and bitwise_or bitwise_xor"
).split()
OPERATIONS = (
    *(f"T.{name}(A[i])" for name in FUNCTIONS),
    *(f"T.{name}(A[i], B[i])" for name in OF_TWO),
    *(f"A[i] {sign} B[i]" for sign in "+ - * / // % & | ^ == != < <= > >=".split()),
    *("-A[i]", "~A[i]", "A[i] << S[i]", "A[i] >> S[i]", "T.ldexp(A[i], E[i])"),
    *("T.Select(A[i] < B[i], A[i], B[i])", "T.if_then_else(A[i] == B[i], A[i], B[i])"),
    *("T.fma(A[i], B[i], A[i])", "T.q_multiply_shift(A[i], B[i], 31, 1)"),
    *("T.dp4a(A[i], B[i], A[i])", "T.infinity(dtype)", "T.max_value(dtype)", "T.min_value(dtype)"),
)
TYPES = "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool"
FLOATS = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-11}


@pytest.mark.parametrize(
    "dtype", by_default(TYPES.split(), "bfloat16", "float32", "int32", "uint8")
)
@pytest.mark.default("bfloat16", "float32", "uint8")
def test_operations(dtype: str) -> None:
    """Kernels compute what the interpreter does, or the verifier refuses; TVM has no say."""
    shifts = dtype if "int" in dtype else "int32"
    buffers = {"A": f"I {dtype}", "B": f"I {dtype}", "S": f"I {shifts}", "E": "I int32"}
    outs: dict[str, list[str]] = {}
    for text in OPERATIONS:
        values: list[Any] = []
        body = in_rows(f"T.evaluate(note({text.replace('dtype', repr(dtype))}))")
        source = text_of("f", body, **buffers)
        try:
            sparsetir.from_source(source, {"note": lambda x, kept=values: kept.append(x) or x})
        except ValueError:
            assert dtype not in ("float32", "float64") or "A[i]" in text
            continue
        kind = str(values[0].ty.dtype)
        outs.setdefault(kind, []).append(text.replace("dtype", repr(dtype)))
    stores = [f"Y{k}[{n}, i] = {x}" for k, xs in outs.items() for n, x in enumerate(xs)]
    axes = "\n".join(f"R{k} = T.dense_fixed({len(xs)})" for k, xs in outs.items())
    buffers |= {f"Y{k}": f"R{k} I {k}" for k in outs}
    func = small("f", in_rows("\n".join(stores)), axes, **buffers)
    a, b = operands(dtype)
    args = {"a": a, "b": b, "s": (np.arange(len(a)) % 3).astype(shifts)}
    args["e"] = (np.arange(len(a)) % 3).astype("int32")
    both = []
    for run in (sparsetir.interpret, lambda f, args: sparsetir.build(f)(**args)):
        y = {f"y{k}": np.zeros((len(xs), len(a)), k) for k, xs in outs.items()}
        run(func, {**args, **y, "m": len(a)})
        both.append(y)
    for k, xs in outs.items():
        for n, text in enumerate(xs):
            wanted, result = (y[f"y{k}"][n].astype("float64" if k in FLOATS else k) for y in both)
            near = FLOATS.get(k, 0)
            np.testing.assert_allclose(result, wanted, near, near, err_msg=text)


def operands(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Operands that define all operations: no divisor is zero, and no result overflows."""
    if dtype == "bool":
        return np.array([0, 0, 1, 1], dtype), np.array([0, 1, 0, 1], dtype)
    if dtype in FLOATS:
        a, b = (
            (-2.5, -1, -0.5, 0, 0.25, 0.5, 1, 1.5, 2, 3.5),
            (2, -3, 1, 2, -1, 0.5, 2, 1.5, -2, 0.75),
        )
    elif dtype.startswith("u"):
        a, b = (0, 1, 2, 3, 5, 7, 9, 20, 31), (1, 2, 2, 1, 3, 3, 2, 3, 7)
    else:
        a, b = (-7, 7, -8, 8, 0, 1, -1, 9, 9, -9), (2, -2, 3, -3, 1, 1, 1, 3, -3, 3)
    return np.array(a).astype(dtype), np.array(b).astype(dtype)


def test_c_functions() -> None:
    """The interpreter calls those that the process has, too."""
    body = in_rows('Y[i] = T.call_pure_extern("float32", "cbrtf", A[i])')
    func = small("f", body, A="I", Y="I")
    for run in (sparsetir.interpret, lambda f, args: sparsetir.build(f)(**args)):
        a, y = np.array([8, -27], "float32"), np.zeros(2, "float32")
        run(func, {"a": a, "y": y, "m": 2})
        np.testing.assert_allclose(y, [2, -3], 1e-6)
    for name in ("nosuch", "memcpy"):
        text = in_rows(f'Y[i] = T.call_extern("float32", "{name}", T.address_of(A[i]))')
        with pytest.raises(
            NotImplementedError, match=f"f: cannot interpret the C function '{name}'"
        ):
            sparsetir.interpret(small("f", text, A="I", Y="I"), {"a": a, "y": y, "m": 2})


SPMM = """with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:
    with T.init():
        C[i, k] = 0.0
    C[i, k] = C[i, k] + A[i, j] * B[j, k]"""


def test_sizes_follow_from_shapes() -> None:
    """The interpreter and kernels infer sizes; a message says which array a size is from."""
    args = {
        "a": np.ones(3, "float32"), "b": np.ones((20, 8), "float32"),
        "c": np.zeros((3, 8), "float32"), "indptr": np.array([0, 1, 2, 3], "int32"),
        "indices": np.array([0, 1, 2], "int32"),
    }  # fmt: skip
    func = small("f", SPMM, A="I J", B="N K", C="I K")
    for passed in (args, [*args.values()]):
        args["c"][:] = np.nan
        sparsetir.interpret(func, passed)
        np.testing.assert_array_equal(args["c"], np.ones((3, 8)))
    turned = small("f", SPMM, A="I J", B="K N", C="I K")
    assert turned is not func
    refuse("""
sparsetir.interpret(func, {**args, "b": args["b"].ravel()})  # TypeError: f: argument 'n' is missing
sparsetir.interpret(func, [args["a"]])  # TypeError: f: argument 'b' is missing
sparsetir.build(turned)(**args)  # ValueError: f: argument 'c': expected shape (3, 20), got (3, 8); 'feat' is 20 by argument 'b'
""", locals())  # fmt: skip # noqa: E501
