"""Printed functions parse back to equal ones."""

import math
from pathlib import Path

import pytest
import tvm
import tvm_ffi
from hypothesis import strategies as st
from tvm import tirx
from tvm.script import tirx as TIR

from drawing import examples
from programs import PROGRAMS
from sparsetir.sparse_ir import script as T
from sparsetir.sparse_ir.errors import IllFormedError
from sparsetir.sparse_ir.nodes import (
    Axis,
    SparseBuffer,
    SparseFunc,
    SparseIteration,
    buffer_var,
    make_func,
)
from sparsetir.sparse_ir.printer import module_script, script
from sparsetir.sparse_ir.script import from_source

GOLDEN = Path(__file__).parents[1] / "golden"


def round_trip(func: SparseFunc) -> str:
    """Print, parse, compare; the text of the parsed function is the same text."""
    text = script(func)
    parsed = from_source(text)
    assert tvm_ffi.structural_equal(func, parsed, map_free_vars=True), text
    assert tvm_ffi.structural_hash(func) == tvm_ffi.structural_hash(parsed)
    assert script(parsed) == text
    return text


def body_trip(body: str) -> str:
    """Round trip of a function with these body lines; returns the body as printed."""
    head = """@T.prim_func
def f(a: T.handle, b: T.handle, h: T.handle, w: T.handle, z: T.handle, q: T.handle,
      m: T.int32, n: T.int32, nnz: T.int32, big: T.int64, x: T.float32, y: T.float16):
    I = T.dense_fixed(m)
    J = T.dense_fixed(n)
    L = T.dense_fixed(big, idtype="int64")
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I,), "int32")
    H = T.match_sparse_buffer(h, (I, J), "float16")
    W = T.match_buffer(w, (m, 4), "float64")
    Z = T.match_sparse_buffer(z, (), "float32")
    Q = T.match_sparse_buffer(q, (L,), "int64")
    with T.sp_iter([I, J, L], "SSS", "it") as [i, j, l]:
        T.sp_iter_attr({"ordered": 1})
"""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    text = round_trip(from_source(head + lines))
    _, _, printed = text.partition('T.sp_iter_attr({"ordered": 1})\n')
    return "".join(f"{line[8:]}\n" for line in printed.splitlines()).rstrip()


SPMM = (GOLDEN / "spmm_stage1.txt").read_text()
spmm = from_source(SPMM)


def test_golden_spmm():
    assert str(spmm) == spmm.script() == script(spmm) == SPMM


def test_private_and_renamed():
    @T.prim_func(private=True)
    def f(a: T.handle, m: T.int32):
        I = T.dense_fixed(m)
        A = T.match_sparse_buffer(a, I, "float32")
        with T.sp_iter([I], "S", "it") as [i]:
            A[i] = 0.0

    assert "@T.prim_func(private=True)" in round_trip(f)
    g = make_func("not-a name", f.params, f.axes, f.buffers, f.body)
    text = round_trip(g)
    assert "def not_a_name(" in text and '"global_symbol": "not-a name"' in text


STATEMENTS = [
    "A[i, j] = T.float32(0.0)",
    "A[i, j] = T.exp(A[i, j]) + T.log(x) * T.sqrt(T.tanh(x))",
    "A[i, j] = T.if_then_else(i < n, A[i, j], T.float32(0.0))",
    "A[i, j] = T.Select(i < n and j >= 2, A[i, j], x)",
    "A[i, j] = T.max(T.min(A[i, j], x), T.float32(1.5))",
    'A[i, j] = T.Cast("float32", H[i, j] * y)',
    'A[i, j] = T.float32("inf")',
    'A[i, j] = T.float32("-inf")',
    'A[i, j] = T.float32("nan")',
    "A[i, j] = A[i, j] / x - (x - A[i, j]) - x",
    "A[i, j] = x * (x + 2.0) * (x * x)",
    "A[i, j] = -1.0 * x",
    "A[i, j] = T.pow(x, T.float32(2.0)) + T.sigmoid(x) + T.fabs(x)",
    "A[i, j] = A[i // 2 * 2 + i % 2, T.truncdiv(j, 3)]",
    "A[i, j] = A[T.truncmod(i, 2), B[B[i]]]",
    "A[B[i], j] = Z[()]",
    "Z[()] = Z[()] + x",
    "B[i] = B[i] // T.int32(7)",
    "B[i] = (i + j) * m - (i - (j - n))",
    "B[i] = i << 2 | j & 3 ^ n",
    "B[i] = T.BitwiseNot(i) >> 1",
    "B[i] = T.int32(-2147483648)",
    "B[i] = T.int32(0)",
    'B[i] = T.Cast("int32", not (i < j or i == n and j != 2) or T.likely(i <= m))',
    "Q[l] = Q[l] + l * T.int64(2) - 1",
    "Q[l] = T.int64(9223372036854775807)",
    'Q[l] = Q[T.Cast("int64", i)]',
    'H[i, j] = T.max_value("float16") + y * T.float16(0.1)',
    "W[i, 3] = W[i, 0] * 2.0 + T.float64(0.1)",
    "T.evaluate(0)",
    'W[i, 0] = T.min_value("float64") + T.max_value("float64")',
    "Q[l] = T.int64(-9223372036854775808)",
    'T.evaluate(T.max_value("uint64"))',
    "T.evaluate(T.bool(True))",
    'T.evaluate(T.call_extern("float32", "atomicAdd", T.address_of(A[i, j]), x))',
    'A[i, j] = T.call_extern("float32", "f", i, T.int64(1), "text")',
    "A[i, j] = T.erf(x) + T.rsqrt(x) + T.floor(x) + T.round(x)",
    'A[i, j] = T.reinterpret("float32", i)',
    "B[i] = T.popcount(i) + T.clz(i)",
    'A[i, j] = T.Cast("float32", T.isnan(x)) + T.fma(x, x, x)',
    "if i < j:\n    A[i, j] = x\nelse:\n    if j < 3:\n        A[i, j] = Z[()]",
    "for s in range(n):\n    A[i, s] = x",
    "for s in range(2, 7):\n    A[i, s] = x",
    "for s in range(i, j):\n    A[i, s] = x",
    "for s in T.serial(0, n, step=2):\n    A[i, s] = x",
    "for s in T.parallel(4):\n    for t in T.vectorized(n):\n        A[s, t] = x",
    'for s in T.unroll(4, annotations={"a": 1, "b": ["x", 2]}):\n    A[i, s] = x',
    "for s in T.serial(T.int64(0), big):\n    Q[s] = s",
    "while A[i, j] < x:\n    A[i, j] = A[i, j] + 1.0\n    T.evaluate(T.break_loop())",
    "e: T.let[T.int32] = i * 2 + B[i]\nA[e, j] = x",
    's = T.alloc_buffer((1,), "float32", scope="local")\ns[0] = x\nA[i, j] = s[0]',
    'tmp = T.alloc_buffer((n, 4), "int64")\ntmp[j, 0] = l',
    'assert i < n, ("ValueError", ["too \\"long\\"", "here"])',
    "A[i, j] = x\nB[i] = i",
    "A[i, j] = T.Add(x, T.float32(0.0)) * T.Mul(T.float32(2.0), T.float32(3.0))",
    "B[i] = T.Add(T.int32(1), T.int32(2)) + T.FloorDiv(i, 1)",
    "B[i] = T.Max(T.int32(1), T.int32(2))",
    "A[i, T.Ramp(0, 1, 4)] = T.Broadcast(x, 4)",
]


@pytest.mark.parametrize("body", STATEMENTS)
def test_statements(body):
    body_trip(body)


@pytest.mark.parametrize(
    ("body", "printed"),
    [
        ("s = A[i, j] * 2.0\ns = s + 1.0", None),
        ("A[i, j] += 1", "A[i, j] = A[i, j] + 1.0"),
        ("B[i] = (i + j) + m", "B[i] = i + j + m"),
        ("B[i] = i + (j + m)", "B[i] = i + (j + m)"),
        ("B[i] = T.floormod(i, 3) + T.floordiv(i, m)", "B[i] = i % 3 + i // m"),
        ("A[i, j] = T.Add(x, T.float32(0))", "A[i, j] = T.Add(x, T.float32(0.0))"),
        ("for s in T.serial(n):\n    B[s] = s", "for s in range(n):\n    B[s] = s"),
    ],
)
def test_printed_form(body, printed):
    text = body_trip(body)
    assert printed is None or text == printed


def test_every_unary_intrinsic():
    names = "exp exp2 exp10 log log2 log10 log1p sqrt rsqrt sin cos tan tanh sigmoid erf floor ceil"
    for name in f"{names} trunc round nearbyint asin acos atan sinh cosh asinh acosh atanh".split():
        assert f"T.{name}(x)" in body_trip(f"A[i, j] = T.{name}(x)")


# Names


def test_awkward_names():
    lam, size = tirx.Var("lambda", "int32"), tirx.Var("max", "int32")
    handle = tirx.Var("T", T.handle().ty)
    axes = [
        Axis(name="class", kind="dense_fixed", length=lam),
        Axis(name="I", kind="dense_fixed", length=size),
        Axis(name="2d", kind="dense_fixed", length=size),
    ]
    var = buffer_var([a.length for a in axes], "float32", "I")
    coords = [tirx.Var(n, "int32") for n in ("range", "a.b", "TIR")]
    body = SparseIteration(
        span=None,
        axes=axes,
        kinds="SSS",
        name='an "it"\n',
        vars=coords,
        init=None,
        body=tirx.BufferStore(var, T.max(T.float32(1.5), var[tuple(coords)]), coords),
        annotations={"class": "é\n", "n": None, "x": math.inf},
    )
    func = make_func(
        "def",
        [handle, lam, size],
        axes,
        [SparseBuffer(var=var, axes=axes, handle=handle)],
        body,
        {"a": {"b": [1, 2.5, True]}},
    )
    text = round_trip(func)
    assert "def def_1(T_1: T.handle, lambda_1: T.int32, max: T.int32):" in text
    assert "class_1 = T.dense_fixed(lambda_1" in text
    assert 'I_1 = T.match_sparse_buffer(T_1, (class_1, I, v2d), "float32")' in text
    assert "as [range, a_b, TIR_1]:" in text


# Modules

SOFTMAX = PROGRAMS["row_softmax"].make("float32", "int32")


@TIR.prim_func
def flat(a: TIR.handle, m: TIR.int32, b: TIR.handle):
    n = TIR.int64()
    A = TIR.match_buffer(a, (n,), "float32")
    B = TIR.match_buffer(b, (m, 4), "float32", offset_factor=1)
    for i in range(m):
        A[i] = TIR.exp(A[i]) + B[i, 0]


@TIR.prim_func(s_tir=True, private=True)
def blocks(a: TIR.handle, b: TIR.handle, m: TIR.int32):
    TIR.func_attr({"tirx.noalias": True})
    A = TIR.match_buffer(a, (m,), "float32")
    B = TIR.match_buffer(b, (m, 10), "float32")
    for i, j in TIR.grid(m, 10):
        with TIR.sblock("sum"):
            vi, vj = TIR.axis.remap("SR", [i, j])
            with TIR.init():
                A[vi] = 0.0
            A[vi] = A[vi] + B[vi, vj]


@pytest.mark.parametrize(
    "functions",
    [
        {"spmm": spmm, "flat": flat, "blocks": blocks, "row_softmax": SOFTMAX},
        {"renamed": spmm, "ell": PROGRAMS["spmm_ell"].make("float64", "int64")},
        {"flat": flat},
        {"spmm": spmm, "flat": flat},
        {},
    ],
    ids=["mixed", "ours", "theirs", "two", "empty"],
)
def test_modules(functions):
    mod = tvm.IRModule(functions)
    text = module_script(mod)
    parsed = from_source(text)
    assert tvm_ffi.structural_equal(mod, parsed, map_free_vars=True), text
    assert {g.name_hint for g in parsed.functions} == set(functions)
    assert all(isinstance(parsed[n], type(f)) for n, f in functions.items())


def test_module_attributes():
    mod = tvm.IRModule({"spmm": spmm}, attrs={"key": 3})
    parsed = from_source(module_script(mod))
    assert tvm_ffi.structural_equal(mod, parsed, map_free_vars=True)


# Refusals


def test_refused():
    n, handle, x = tirx.Var("n", "int32"), tirx.Var("a", T.handle().ty), tirx.Var("x", "int32")
    odd = tirx.decl_buffer((n,), "float32", name="A", strides=[n])
    buffers = [SparseBuffer(var=odd, axes=None, handle=handle)]
    for body, message in [
        (tirx.AttrStmt(tirx.const(0), "key", tirx.const(0), tirx.Evaluate(0)),
         "statement: cannot print a node of type .*AttrStmt"),
        (tirx.Evaluate(tvm.tirx.Let(x, tirx.const(1), x + 1)), "cannot print a node of type .*Let"),
        (tirx.Evaluate(x + 1), "variable 'x' is used but not defined"),
        (tirx.Evaluate(0), "buffer 'A' has a layout"),
    ]:  # fmt: skip
        last = "layout" in message
        func = make_func("f", [handle, n] if last else [], [], buffers if last else [], body)
        with pytest.raises(IllFormedError, match=message):
            script(func)


# Random expressions

INTS = st.sampled_from(["i", "j", "m", "B[i]", "1", "0", "7", "-3"])
FLOATS = st.sampled_from(["x", "A[i, j]", "Z[()]", "1.0", "0.0", "0.1", "-2.5", "1e-30"])


def _typed(leaf: str, dtype: str) -> str:
    return f"T.{dtype}({leaf})" if leaf[0] in "-0123456789" else leaf


def _ints(child):
    binary = st.sampled_from("Add Sub Mul FloorDiv FloorMod Div Mod Min Max BitwiseAnd".split())
    return st.one_of(
        st.tuples(binary, child, child).map(lambda t: f"T.{t[0]}({t[1]}, {t[2]})"),
        st.tuples(child, st.sampled_from("+-*"), child).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(CONDITIONS, child, child).map(lambda t: f"T.Select({t[0]}, {t[1]}, {t[2]})"),
        child.map(lambda c: f"B[{c}]"),
    )


def _floats(child):
    binary = st.sampled_from("Add Sub Mul Div Min Max".split())
    unary = st.sampled_from("exp log sqrt tanh fabs".split())
    return st.one_of(
        st.tuples(binary, child, child).map(lambda t: f"T.{t[0]}({t[1]}, {t[2]})"),
        st.tuples(child, st.sampled_from("+-*"), child).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(unary, child).map(lambda t: f"T.{t[0]}({t[1]})"),
        st.tuples(CONDITIONS, child, child).map(
            lambda t: f"T.if_then_else({t[0]}, {t[1]}, {t[2]})"
        ),
        child.map(lambda c: f'T.Cast("float32", T.Cast("float16", {c}))'),
    )


COMPARISONS = st.tuples(
    INTS.map(lambda v: _typed(v, "int32")),
    st.sampled_from(["LT", "LE", "GT", "GE", "EQ", "NE"]),
    INTS.map(lambda v: _typed(v, "int32")),
).map(lambda t: f"T.{t[1]}({t[0]}, {t[2]})")
CONDITIONS = st.recursive(
    COMPARISONS,
    lambda c: st.one_of(
        st.tuples(st.sampled_from(["And", "Or"]), c, c).map(lambda t: f"T.{t[0]}({t[1]}, {t[2]})"),
        c.map(lambda v: f"T.Not({v})"),
    ),
    max_leaves=4,
)
INT_EXPRS = st.recursive(INTS.map(lambda v: _typed(v, "int32")), _ints, max_leaves=8)
FLOAT_EXPRS = st.recursive(FLOATS.map(lambda v: _typed(v, "float32")), _floats, max_leaves=8)


@examples(20, 200, index=INT_EXPRS, value=FLOAT_EXPRS)
def test_random_expressions(index, value):
    try:
        body_trip(f"A[i, {index}] = {value}")
    except tvm.error.DiagnosticError as err:  # TVM refuses to fold a division by zero
        if "zero" not in str(err):
            raise
