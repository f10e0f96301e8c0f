"""Tests of `ptx`, the interpreter: each instruction in PTX that is written by hand."""

# pyright: reportArgumentType=false

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ptx import Global, Module, PtxError
from ptx.order import order
from refusals import refusals

HEAD = """
.version 8.0
.target sm_80
.address_size 64
"""
REGISTERS = """
  .reg .pred %p<9>; .reg .b16 %h<16>; .reg .b32 %r<48>; .reg .f32 %f<24>; .reg .b64 %d<24>;
  .reg .f64 %g<8>; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mul.wide.u32 %d20, %r0, 4;
"""


def kernel(body: str, count: int, shared: str = "") -> str:
    """A kernel `k` of addresses in %d0, %d1, ..; %r0 is the thread, %d20 four times it."""
    params = ", ".join(f".param .u64 k_param_{n}" for n in range(count))
    loads = "\n".join(f"  ld.param.u64 %d{n}, [k_param_{n}];" for n in range(count))
    return (
        f"{HEAD}{shared}\n.visible .entry k({params})\n{{{REGISTERS}{loads}\n{body}\n  ret;\n}}\n"
    )


def launch(
    body: str, *arrays: np.ndarray, threads: int = 32, grid: int = 1, shared: str = "",
    read_only: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Run a body on arrays, which it changes."""
    memory = Global()
    values = [memory.add(f"arg{n}", array, read_only) for n, array in enumerate(arrays)]
    run = Module(kernel(body, len(arrays), shared))["k"]
    return run.launch((grid, 1, 1), (threads, 1, 1), values, memory, **options)


# Type of a load and register, by NumPy's type.
LOADS = {
    "int8": ("s8", "%h"), "uint8": ("u8", "%h"), "int16": ("s16", "%h"), "uint16": ("u16", "%h"),
    "int32": ("s32", "%r"), "uint32": ("u32", "%r"), "float32": ("f32", "%f"),
    "int64": ("s64", "%d"), "uint64": ("u64", "%d"), "float64": ("f64", "%g"),
    "float16": ("b16", "%h"), "bfloat16": ("b16", "%h"), "bool": ("pred", "%p"),
}  # fmt: skip


def apply(text: str, result: str, *operands: np.ndarray) -> np.ndarray:
    """Results of an instruction on operands, a thread each; `{o}`, `{0}`, `{1}` are registers."""
    count = len(operands[0])
    out = np.zeros(count, "uint8" if result == "bool" else np.dtype(result))
    lines, names = [], []
    for n, array in enumerate(operands):
        kind, letter = LOADS[array.dtype.name]
        name = {"%h": f"%h{n + 2}", "%r": f"%r{n + 2}", "%f": f"%f{n}", "%d": f"%d{n + 10}"}
        names.append(name.get(letter, f"%g{n}"))
        lines.append(f"mad.wide.u32 %d9, %r0, {array.itemsize}, %d{n + 1};")
        lines.append(f"ld.global.{kind} {names[-1]}, [%d9];")
    kind, letter = LOADS[result]
    target = {"%h": "%h1", "%r": "%r10", "%f": "%f10", "%d": "%d8", "%g": "%g7", "%p": "%p1"}[
        letter
    ]
    lines.append(text.format(*names, o=target))
    lines.append(f"mad.wide.u32 %d9, %r0, {out.itemsize}, %d0;")
    if result == "bool":
        lines.append("selp.u16 %h1, 1, 0, %p1;\nst.global.u8 [%d9], %h1;")
    else:
        lines.append(f"st.global.{kind} [%d9], {target};")
    inputs = [a.view("uint16") if a.dtype == ml_dtypes.bfloat16 else a for a in operands]
    launch("\n".join(lines), out.view("uint16") if result == "bfloat16" else out, *inputs,
           threads=count)  # fmt: skip
    return out.astype(bool) if result == "bool" else out


SIGNED = [0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 12345, -99999, 3]
PAIRS = np.array([*itertools.product(SIGNED, SIGNED)][:96]).T


def wrapped(values: Any, dtype: str) -> np.ndarray:
    """Python's integers in so many bits."""
    width = 8 * np.dtype(dtype).itemsize
    low = [int(v) & (1 << width) - 1 for v in values]
    return np.array(low, f"uint{width}").view(dtype)


# --- arithmetic ------------------------------------------------------------------------------


def truncated(x: int, y: int) -> int:
    return -1 if y == 0 else abs(x) // abs(y) * (-1 if (x < 0) != (y < 0) else 1)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_integers(dtype: str) -> None:
    """Against Python's integers."""
    kind, width = LOADS[dtype][0], 8 * np.dtype(dtype).itemsize
    a, b = (wrapped(row, dtype) for row in PAIRS)
    c = np.roll(a, 5)
    expected = {
        "add.{k}": lambda x, y, z: x + y, "sub.{k}": lambda x, y, z: x - y,
        "mul.lo.{k}": lambda x, y, z: x * y, "mul.hi.{k}": lambda x, y, z: x * y >> width,
        "div.{k}": lambda x, y, z: truncated(x, y), "min.{k}": lambda x, y, z: min(x, y),
        "rem.{k}": lambda x, y, z: x - truncated(x, y) * y, "max.{k}": lambda x, y, z: max(x, y),
        "and.b{w}": lambda x, y, z: x & y, "or.b{w}": lambda x, y, z: x | y,
        "xor.b{w}": lambda x, y, z: x ^ y, "mad.lo.{k}": lambda x, y, z: x * y + z,
    }  # fmt: skip
    for opcode, function in expected.items():
        some = (a, b, c) if opcode.startswith("mad") else (a, b)
        text = opcode.format(k=kind, w=width) + " {o}, {0}, {1}" + ", {2}" * (len(some) > 2) + ";"
        wanted = [function(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]
        np.testing.assert_array_equal(apply(text, dtype, *some), wrapped(wanted, dtype), opcode)
    np.testing.assert_array_equal(apply(f"not.b{width} {{o}}, {{0}};", dtype, a), ~a)
    if dtype.startswith("int"):
        np.testing.assert_array_equal(apply(f"neg.{kind} {{o}}, {{0}};", dtype, a), -a)
        np.testing.assert_array_equal(apply(f"abs.{kind} {{o}}, {{0}};", dtype, a), np.abs(a))


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_wide_products(dtype: str) -> None:
    kind, wide = LOADS[dtype][0], dtype.replace("32", "64")
    a, b = (wrapped(row, dtype) for row in PAIRS)
    c = wrapped(PAIRS[0] * 2**31, wide)
    wanted = [int(x) * int(y) for x, y in zip(a, b, strict=True)]
    result = apply(f"mul.wide.{kind} {{o}}, {{0}}, {{1}};", wide, a, b)
    np.testing.assert_array_equal(result, wrapped(wanted, wide))
    result = apply(f"mad.wide.{kind} {{o}}, {{0}}, {{1}}, {{2}};", wide, a, b, c)
    wanted = [x + int(y) for x, y in zip(wanted, c, strict=True)]
    np.testing.assert_array_equal(result, wrapped(wanted, wide))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_shifts(dtype: str) -> None:
    width = 8 * np.dtype(dtype).itemsize
    by = np.array([0, 1, 5, width - 1, width, 200], "uint32")
    a = wrapped([-99999] * 6, dtype)
    left = [-99999 << int(n) for n in by]
    np.testing.assert_array_equal(
        apply(f"shl.b{width} {{o}}, {{0}}, {{1}};", dtype, a, by), wrapped(left, dtype)
    )
    right = [int(x) >> int(n) for x, n in zip(a, by, strict=True)]
    np.testing.assert_array_equal(
        apply(f"shr.{LOADS[dtype][0]} {{o}}, {{0}}, {{1}};", dtype, a, by), wrapped(right, dtype)
    )


# Instruction, operands, result: as the manual's pseudocode gives by hand.
BITS = [
    ("prmt.b32", (0x03020100, 0x07060504, 0x7531), 0x07050301),
    ("prmt.b32", (0x000000F0, 0x44332211, 0x0408), 0xF011F0FF),
    ("bfi.b32", (0xFF, 0x12345678, 8, 8), 0x1234FF78),
    ("bfi.b32", (0xFF, 0x12345678, 28, 8), 0xF2345678), ("bfi.b32", (0xFF, 7, 40, 8), 7),
    ("bfi.b32", (0x12345678, 0, 0, 32), 0x12345678), ("bfi.b32", (0xFF, 7, 4, 0), 7),
    ("brev.b32", (0x00000003,), 0xC0000000), ("bfind.u32", (0x00010000,), 16),
    ("dp2a.lo.u32.u32", (0x00050003, 0x0B0A0907, 1), 1 + 3 * 7 + 5 * 9),
    ("dp2a.hi.u32.u32", (0x00050003, 0x0B0A0907, 1), 1 + 3 * 10 + 5 * 11),
    ("bfind.u32", (0,), 0xFFFFFFFF), ("bfind.shiftamt.u32", (0x00010000,), 15),
    ("bfind.shiftamt.u32", (0,), 0xFFFFFFFF),
]  # fmt: skip


@pytest.mark.parametrize(("opcode", "operands", "result"), BITS)
def test_bits(opcode: str, operands: tuple[int, ...], result: int) -> None:
    inputs = [np.array([x], "uint32") for x in operands]
    places = ", ".join(f"{{{n}}}" for n in range(len(inputs)))
    assert hex(apply(f"{opcode} {{o}}, {places};", "uint32", *inputs)[0]) == hex(result)


NAN = float("nan")
FLOATS = np.array([1.5, -2.25, 0.0, -0.0, np.inf, -np.inf, NAN, 3e38, 1e-42, 0.1])
OTHERS = np.array([*itertools.product(FLOATS, FLOATS)]).T


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floats(dtype: str) -> None:
    kind = LOADS[dtype][0]
    a, b = (row.astype(dtype) for row in OTHERS)
    c = np.roll(a, 3)
    with np.errstate(all="ignore"):
        exact = a.astype("longdouble") * b.astype("longdouble") + c
        wanted = {
            "add": a + b, "sub": a - b, "mul": a * b, "div.rn": a / b,
            "fma.rn": exact.astype(dtype),
            "min": np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.minimum(a, b))),
            "max": np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.maximum(a, b))),
        }  # fmt: skip
        one = {"neg": -a, "abs": abs(a), "sqrt.rn": np.sqrt(a), "rcp.rn": 1 / a}
    for opcode, result in wanted.items():
        some = (a, b, c) if opcode == "fma.rn" else (a, b)
        text = f"{opcode}.{kind} {{o}}, {{0}}, {{1}}{', {2}' * (len(some) > 2)};"
        np.testing.assert_array_equal(apply(text, dtype, *some), result, opcode)
    for opcode, result in one.items():
        np.testing.assert_array_equal(apply(f"{opcode}.{kind} {{o}}, {{0}};", dtype, a), result)


def test_functions_of_floats() -> None:
    x = np.array([0.5, 1, 3, 10], "float32")
    wanted = {"ex2.approx.ftz": 2**x, "lg2.approx": np.log2(x), "rsqrt.approx": x**-0.5}
    for opcode, result in (wanted).items():
        np.testing.assert_allclose(apply(f"{opcode}.f32 {{o}}, {{0}};", "float32", x), result, 1e-6)


def test_rounding_of_multiply_add() -> None:
    """1 + 2^-30 lies between 1 and the next float32."""
    one, small = (np.array([s * 1.0, s * 1.0], "float32") for s in (1, 2**-30))
    sign = np.array([1, -1], "float32")
    up = np.nextafter(np.float32(1), np.float32(2))
    for how, result in {"rn": [1, -1], "rz": [1, -1], "rm": [1, -up], "rp": [up, -1]}.items():
        value = apply(f"fma.{how}.f32 {{o}}, {{0}}, {{1}}, {{2}};", "float32", small, sign,
                      one * sign)  # fmt: skip
        np.testing.assert_array_equal(value, np.array(result, "float32"))


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_halves(half: str) -> None:
    """Numbers, one and two in a register, are rounded to nearest."""
    dtype = np.dtype(getattr(ml_dtypes, half) if half == "bfloat16" else half)
    kind = "bf16" if half == "bfloat16" else "f16"
    a, b, c = (np.random.default_rng(n).standard_normal(64).astype(dtype) for n in range(3))
    wide = [x.astype("float64") for x in (a, b, c)]
    wanted = (wide[0] * wide[1] + wide[2]).astype("float32").astype(dtype)
    text = f"fma.rn.{kind} {{o}}, {{0}}, {{1}}, {{2}};"
    np.testing.assert_array_equal(apply(text, half, a, b, c), wanted)
    text = text.replace(kind, f"{kind}x2")
    pairs = [x.view("uint32") for x in (a, b, c)]
    np.testing.assert_array_equal(apply(text, "uint32", *pairs), wanted.view("uint32"))


def test_comparisons() -> None:
    a, b = (row.astype("float32") for row in OTHERS)
    nan = np.isnan(a) | np.isnan(b)
    signed = wrapped(PAIRS[0], "int32"), wrapped(PAIRS[1], "int32")
    for how, of in {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                    "ge": np.greater_equal, "ne": np.not_equal}.items():  # fmt: skip
        text = "setp.{}.{} {{o}}, {{0}}, {{1}};"
        np.testing.assert_array_equal(apply(text.format(how, "f32"), "bool", a, b), of(a, b) & ~nan)
        result = apply(text.format(f"{how}u", "f32"), "bool", a, b)
        np.testing.assert_array_equal(result, of(a, b) | nan)
        result = apply(text.format(how, "s32"), "bool", *signed)
        np.testing.assert_array_equal(result, of(*signed))
        unsigned = [x.view("uint32") for x in signed]
        result = apply(text.format(how, "u32"), "bool", *unsigned)
        np.testing.assert_array_equal(result, of(*unsigned))
    np.testing.assert_array_equal(apply("setp.nan.f32 {o}, {0}, {1};", "bool", a, b), nan)
    joined = "setp.lt.f32 %p2, {0}, 0f00000000;\n setp.lt.and.f32 {o}, {0}, {1}, !%p2;"
    np.testing.assert_array_equal(apply(joined, "bool", a, b), (a < b) & ~nan & ~(a < 0))
    both = "setp.lt.f32 %p2|{o}, {0}, {1};"
    np.testing.assert_array_equal(apply(both, "bool", a, b), ~(a < b))
    chosen = apply("setp.lt.f32 %p2, {0}, {1};\n selp.f32 {o}, {0}, {1}, %p2;", "float32", a, b)
    np.testing.assert_array_equal(chosen, np.where((a < b) & ~nan, a, b))


# Instruction, NumPy's types of source and result, numbers and what they become.
CONVERSIONS = [
    ("cvt.rni.s32.f32", "float32", "int32", [0.5, 1.5, -2.5, 3e9, -3e9, NAN],
     [0, 2, -2, 2**31 - 1, -(2**31), 0]),
    ("cvt.rzi.s32.f32", "float32", "int32", [1.9, -1.9], [1, -1]),
    ("cvt.rmi.s32.f32", "float32", "int32", [1.9, -1.1], [1, -2]),
    ("cvt.rpi.s32.f32", "float32", "int32", [1.1, -1.9], [2, -1]),
    ("cvt.rzi.u32.f32", "float32", "uint32", [-5, 5e9, 7], [0, 2**32 - 1, 7]),
    ("cvt.rn.f32.s32", "int32", "float32", [-5, 2**24 + 1], [-5, 2**24]),
    ("cvt.rn.f32.u32", "uint32", "float32", [2**32 - 1], [2**32]),
    ("cvt.s64.s32", "int32", "int64", [-5, 7], [-5, 7]),
    ("cvt.u64.u32", "uint32", "uint64", [2**32 - 1], [2**32 - 1]),
    ("cvt.u32.u64", "uint64", "uint32", [2**32 + 5], [5]),
    ("cvt.s32.s8", "int8", "int32", [-5, 127], [-5, 127]),
    ("cvt.f64.f32", "float32", "float64", [0.1], [float(np.float32(0.1))]),
    ("cvt.rn.f32.f64", "float64", "float32", [0.1], [np.float32(0.1)]),
    ("cvt.sat.f32.f32", "float32", "float32", [-1, 0.5, 7, NAN], [0, 0.5, 1, 0]),
    ("cvt.rn.f16.f32", "float32", "float16", [1 + 2**-11, 1e6], [1, np.inf]),
    ("cvt.f32.f16", "float16", "float32", [0.1], [float(np.float16(0.1))]),
    ("cvt.rn.bf16.f32", "float32", "bfloat16", [1 + 2**-8, 1 + 3 * 2**-8], [1, 1 + 2**-6]),
    ("cvt.f32.bf16", "bfloat16", "float32", [3.140625], [3.140625]),
]  # fmt: skip


@pytest.mark.parametrize(("opcode", "of", "to", "values", "wanted"), CONVERSIONS)
def test_conversions(opcode: str, of: str, to: str, values: list[Any], wanted: list[Any]) -> None:
    source, result = (np.dtype(getattr(ml_dtypes, t, t)) for t in (of, to))
    value = apply(f"{opcode} {{o}}, {{0}};", to, np.array(values).astype(source))
    np.testing.assert_array_equal(value, np.array(wanted).astype(result))


def test_pairs_of_halves_are_converted() -> None:
    """The first operand becomes the upper half."""
    a, b = np.array([1.5], "float32"), np.array([-2], "float32")
    for kind, dtype in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16)):
        result = apply(f"cvt.rn.{kind}x2.f32 {{o}}, {{0}}, {{1}};", "uint32", a, b)
        assert list(result.view(dtype)) == [-2, 1.5]


# --- registers and memory --------------------------------------------------------------------


def test_registers_are_packed_and_unpacked() -> None:
    x = np.array([0x1122334455667788], "uint64")
    text = "mov.b64 {{%r20, %r21}}, {0};\n mov.b64 {o}, {{%r21, %r20}};"
    assert hex(apply(text, "uint64", x)[0]) == "0x5566778811223344"
    text = "mov.b32 {{%h3, %h4}}, {0};\n mov.b32 {o}, {{%h4, %h3}};"
    assert hex(apply(text, "uint32", np.array([0x11223344], "uint32"))[0]) == "0x33441122"


def test_narrow_numbers_keep_their_sign_in_registers() -> None:
    x = np.arange(-128, 128).astype("int8")
    np.testing.assert_array_equal(apply("cvt.s32.s16 {o}, {0};", "int32", x), x)
    np.testing.assert_array_equal(
        apply("cvt.s32.s16 {o}, {0};", "int32", x.view("uint8")), x.view("uint8")
    )


SHARED = ".shared .align 16 .b8 S[1024];\n.extern .shared .align 16 .b8 D[];"
SWAP = """
  mov.u32 %r2, {array}; shl.b32 %r3, %r0, 2; add.s32 %r4, %r2, %r3;
  add.s64 %d3, %d0, %d20; ld.global.u32 %r5, [%d3];
  st.shared.u32 [%r4], %r5; {barrier}
  xor.b32 %r3, %r3, {other}; add.s32 %r4, %r2, %r3; ld.shared.u32 %r5, [%r4];
  st.global.u32 [%d3], %r5;"""


@pytest.mark.parametrize("array", ["S", "D"])
def test_shared_memory(array: str) -> None:
    x = np.arange(64, dtype="uint32")
    body = SWAP.format(array=array, barrier="bar.sync 0;", other=4 * 63)
    launch(body, x, threads=64, shared=SHARED, dynamic=256)
    np.testing.assert_array_equal(x, np.arange(64)[::-1])
    counted = launch(body, x, threads=64, shared=SHARED, dynamic=256)
    assert counted["barriers"] == 1


def test_generic_addresses_and_local_memory() -> None:
    x = np.arange(32, dtype="uint32")
    body = """
      .local .align 8 .b8 L[16];
      mov.u64 %d1, L; cvta.local.u64 %d2, %d1; st.u32 [%d2+4], %r0; ld.local.u32 %r2, [%d1+4];
      mov.u64 %d3, S; cvta.shared.u64 %d4, %d3; add.s64 %d4, %d4, %d20; st.u32 [%d4], %r2;
      add.s64 %d6, %d3, %d20; ld.shared.u32 %r3, [%d6]; shl.b32 %r3, %r3, 1;
      cvta.to.shared.u64 %d7, %d4; cvt.u32.u64 %r4, %d7; ld.shared.u32 %r5, [%r4];
      add.s32 %r3, %r3, %r5; add.s64 %d5, %d0, %d20; st.u32 [%d5], %r3;"""
    launch(body, x, shared=SHARED)
    np.testing.assert_array_equal(x, 3 * np.arange(32))


@pytest.mark.parametrize("size", [4, 8, 16])
def test_asynchronous_copies(size: int) -> None:
    """Groups arrive in order; lanes whose size is zero get zeros, and read nothing."""
    count = size // 4
    x, y = np.arange(1, 32 * count + 1, dtype="uint32"), np.zeros(64 * count, "uint32")
    body = f"""
      mad.wide.u32 %d3, %r0, {size}, %d0; mov.u32 %r2, S; mad.lo.u32 %r3, %r0, {size}, %r2;
      cp.async.ca.shared.global [%r3], [%d3], {size}; cp.async.commit_group;
      setp.lt.u32 %p1, %r0, 30; selp.u32 %r4, {size}, 0, %p1;
      cp.async.ca.shared.global [%r3+512], [%d3], {size}, %r4; cp.async.commit_group;
      cp.async.wait_group {{}}; bar.sync 0;
      mad.lo.u32 %r3, %r0, {size}, %r2; mad.wide.u32 %d5, %r0, {size}, %d1;
      """
    for n in range(count):
        for offset in (0, 512):
            body += f"ld.shared.u32 %r6, [%r3+{offset + 4 * n}];\n"
            body += f"st.global.u32 [%d5+{offset // 512 * 32 * size + 4 * n}], %r6;\n"
    launch(body.format(0), x, y, shared=SHARED)
    np.testing.assert_array_equal(y[: 32 * count], x)
    np.testing.assert_array_equal(y[32 * count : 62 * count], x[: 30 * count])
    assert (y[62 * count :] == 0).all()
    with pytest.raises(PtxError, match="asynchronous copy is on its way, not waited for"):
        launch(body.format(1), x, y, shared=SHARED)


@pytest.mark.parametrize("how", ["add", "min", "max", "and", "or", "xor"])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(how: str, space: str) -> None:
    function = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
                "or": np.bitwise_or, "xor": np.bitwise_xor}[how]  # fmt: skip
    kind = "b32" if how in ("and", "or", "xor") else "s32"
    x, place = np.array([77], "int32"), "%d0" if space == "global" else "S"
    body = f"""
      setp.eq.u32 %p1, %r0, 0; ld.global.u32 %r7, [%d1]; @%p1 st.shared.u32 [S], %r7; bar.sync 0;
      sub.s32 %r2, %r0, 9; atom.{space}.{how}.{kind} %r3, [{place}], %r2;
      add.s64 %d3, %d2, %d20; st.global.u32 [%d3], %r3;
      bar.sync 0; ld.shared.u32 %r4, [S]; @%p1 st.global.u32 [%d2+256], %r4;"""
    out = np.zeros(65, "int32")
    launch(body, x, np.array([77], "int32"), out, threads=64, shared=SHARED)
    operands = np.arange(64, dtype="int32") - 9
    wanted = function.reduce([np.int32(77), *operands])
    assert wanted == (x[0] if space == "global" else out[64])
    if how == "add":  # each old value is that before some other addition
        assert sorted(out[:64]) != sorted(out[:64] * 0) and len({*out[:64]} | {77}) > 32


def test_swaps() -> None:
    """One thread wins; each exchange returns what another one left."""
    x, old = np.array([0, 100], "uint32"), np.zeros(64, "uint32")
    body = """
      add.s32 %r2, %r0, 1; atom.global.cas.b32 %r3, [%d0], 0, %r2;
      atom.global.exch.b32 %r4, [%d0+4], %r0; add.s64 %d3, %d1, %d20;
      st.global.u32 [%d3], %r3; st.global.u32 [%d3+128], %r4;"""
    launch(body, x, old, seed=1)
    assert (old[:32] == 0).sum() == 1 and set(old[:32]) == {0, x[0]}
    assert sorted([*old[32:], x[1]]) == [*range(32), 100]


def test_copies_write_from_where_they_begin() -> None:
    """A read before without a barrier races, though the copy arrives after one."""
    x = np.arange(64, dtype="uint32")
    body = """
      mov.u32 %r2, S; shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r2; st.shared.u32 [%r3], %r0;
      bar.sync 0; xor.b32 %r4, %r3, 128; ld.shared.u32 %r5, [%r4]; {}
      add.s64 %d3, %d0, %d20; cp.async.ca.shared.global [%r3], [%d3], 4; cp.async.commit_group;
      {} cp.async.wait_all; bar.sync 0; ld.shared.u32 %r6, [%r4]; add.s32 %r6, %r6, %r5;
      add.s64 %d3, %d1, %d20; st.global.u32 [%d3], %r6;"""
    out = np.zeros(64, "uint32")
    launch(body.format("bar.sync 0;", ""), x, out, threads=64, shared=SHARED)
    np.testing.assert_array_equal(out, 2 * (np.arange(64) ^ 32))
    with pytest.raises(PtxError, match=r"race: .* writes S\[byte .*, which .* read"):
        launch(body.format("", "bar.sync 0;"), x, out, threads=64, shared=SHARED)
    launch(body.format("bar.sync 0;", "").replace("wait_all", "wait_group 0"), x, out, threads=64,
           shared=SHARED)  # fmt: skip
    some = "setp.lt.u32 %p1, %r0, 16; @%p1 cp.async.wait_all"  # each lane waits for its own
    with pytest.raises(PtxError, match="on its way, not waited for"):
        launch(body.format("bar.sync 0;", "").replace("cp.async.wait_all", some), x, out,
               threads=64, shared=SHARED)  # fmt: skip
    with pytest.raises(PtxError, match="on its way, not waited for"):
        launch(body.format("bar.sync 0;", "ld.shared.u32 %r6, [%r3];"), x, out, threads=64,
               shared=SHARED)  # fmt: skip


def test_parameters_of_all_types() -> None:
    """Numbers of NumPy go by their bits; others by the type that is declared."""
    text = f"""{HEAD}
    .visible .entry k(.param .u64 k_param_0, .param .f32 k_param_1, .param .u32 k_param_2)
    {{
      .reg .b32 %r<3>; .reg .f32 %f<3>; .reg .b64 %d<3>;
      ld.param.u64 %d0, [k_param_0]; ld.param.f32 %f1, [k_param_1]; ld.param.b32 %r1, [k_param_2];
      setp.ne.u32 %p, %r1, 0; mov.b32 %f2, %r1; add.f32 %f1, %f1, %f2; st.global.f32 [%d0], %f1;
      ret;
    }}""".replace(".reg .b64", ".reg .pred %p; .reg .b64")
    x, run = np.zeros(1, "float32"), Module(text)["k"]
    for numbers in ((0.25, 0x3F800000), (np.float32(0.25), np.float32(1))):
        memory = Global()
        run.launch((1, 1, 1), (1, 1, 1), [memory.add("x", x), *numbers], memory)
        assert x[0] == 1.25
    with pytest.raises(PtxError, match="expected a parameter of 4 bytes, got "):
        run.launch((1, 1, 1), (1, 1, 1), [0, np.float64(0), 0], Global())
    with pytest.raises(PtxError, match="expected 3 values, got 1"):
        run.launch((1, 1, 1), (1, 1, 1), [0], Global())


# --- lanes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 8, 32])
def test_shuffles(width: int) -> None:
    """Against what the manual of CUDA says of `__shfl_sync` and its like."""
    by, out = 3, np.zeros((4, 2, 32), "uint32")
    bounds = (32 - width) << 8
    lines = ["mul.lo.u32 %r2, %r0, 10; add.s64 %d3, %d0, %d20;"]
    for n, mode in enumerate(("idx", "up", "down", "bfly")):
        clamp = bounds | (0 if mode == "up" else 31)
        lines += [
            f"shfl.sync.{mode}.b32 %r3|%p1, %r2, {by}, {clamp}, 0xffffffff;",
            f"selp.u32 %r4, 1, 0, %p1; st.global.u32 [%d3+{256 * n}], %r3;",
            f"st.global.u32 [%d3+{256 * n + 128}], %r4;",
        ]
    launch("\n".join(lines), out)
    for t in range(32):
        first, last = t // width * width, t // width * width + width - 1
        wanted = [first + by % width, t - by, t + by, t ^ by]
        for n, source in enumerate(wanted):
            inside = source <= last and (source >= first or n == 3)  # `bfly` reaches back
            assert out[n, 0, t] == 10 * (source if inside else t)
            assert out[n, 1, t] == (inside or n == 0)


def test_votes_and_lanes_that_came() -> None:
    out = np.zeros(32 * 4, "int32")
    body = """
      add.s64 %d3, %d0, %d20; rem.u32 %r2, %r0, 3; setp.eq.u32 %p1, %r2, 0;
      vote.sync.ballot.b32 %r3, %p1, 0xffffffff; st.global.u32 [%d3], %r3;
      vote.sync.any.pred %p2, %p1, 0xffffffff; selp.u32 %r3, 1, 0, %p2;
      st.global.u32 [%d3+128], %r3;
      vote.sync.all.pred %p2, %p1, 0xffffffff; selp.u32 %r3, 1, 0, %p2;
      st.global.u32 [%d3+256], %r3;
      setp.ge.u32 %p3, %r0, 12; @%p3 bra DONE;
      activemask.b32 %r3; st.global.u32 [%d3+384], %r3;
      DONE:"""
    launch(body, out)
    ballot, some, every, active = out.reshape(4, 32)
    assert set(ballot.view("uint32")) == {sum(1 << t for t in range(0, 32, 3))}
    assert set(some) == {1} and set(every) == {0}
    assert list(active) == [0xFFF] * 12 + [0] * 20


# --- matrices --------------------------------------------------------------------------------


def manual_a(k: int, lane: int, i: int) -> tuple[int, int]:
    """Row and column of element a_i of a lane, as the manual says it for each shape."""
    group, place = lane >> 2, lane % 4
    if k == 8:  # .f16, .bf16: m16n8k8
        return (group if i < 2 else group + 8), place * 2 + (i & 1)
    if k == 16:  # .f16, .bf16: m16n8k16
        return (group if i < 2 or 4 <= i < 6 else group + 8), place * 2 + (i & 1) + 8 * (i >= 4)
    row = group if i < 4 or 8 <= i < 12 else group + 8  # .s8, .u8: m16n8k32
    return row, place * 4 + (i & 3) + 16 * (i >= 8)


def manual_b(k: int, lane: int, i: int) -> tuple[int, int]:
    """The same of b_i."""
    group, place = lane >> 2, lane % 4
    if k == 8:
        return place * 2 + i, group
    if k == 16:
        return place * 2 + (i & 1) + 8 * (i >= 2), group
    return place * 4 + (i & 3) + 16 * (i >= 4), group


def manual_c(lane: int, i: int) -> tuple[int, int]:
    """The same of c_i and d_i."""
    return (lane >> 2) + 8 * (i >= 2), (lane % 4) * 2 + (i & 1)


@pytest.mark.parametrize(
    ("k", "types", "factor", "total"),
    [
        (8, "f32.f16.f16.f32", "float16", "float32"),
        (16, "f32.f16.f16.f32", "float16", "float32"),
        (16, "f16.f16.f16.f16", "float16", "float16"),
        (8, "f32.bf16.bf16.f32", "bfloat16", "float32"),
        (16, "f32.bf16.bf16.f32", "bfloat16", "float32"),
        (32, "s32.s8.s8.s32", "int8", "int32"),
        (32, "s32.u8.s8.s32", "int8", "int32"),
    ],
)  # fmt: skip
def test_products_of_matrices(k: int, types: str, factor: str, total: str) -> None:
    rng = np.random.default_rng(0)
    dtype = np.dtype(getattr(ml_dtypes, factor, factor))
    a, b = rng.integers(-9, 9, (16, k)), rng.integers(-9, 9, (k, 8))
    first = dtype
    if ".u8." in types:
        a, first = np.abs(a), np.dtype("uint8")
    c = rng.integers(-9, 9, (16, 8))
    elements = [16 * k // 32, 8 * k // 32, 4]
    fa = [[a[manual_a(k, lane, i)] for i in range(elements[0])] for lane in range(32)]
    fb = [[b[manual_b(k, lane, i)] for i in range(elements[1])] for lane in range(32)]
    fc = [[c[manual_c(lane, i)] for i in range(4)] for lane in range(32)]
    inputs = [np.array(x).astype(t).view("uint32").reshape(32, -1) for x, t in
             ((fa, first), (fb, dtype), (fc, np.dtype(total)))]  # fmt: skip
    names, lines = [], []
    for n, fragment in enumerate(inputs):
        size = fragment.shape[1]
        names.append("{" + ", ".join(f"%r{8 * n + 2 + m}" for m in range(size)) + "}")
        lines.append(f"mad.wide.u32 %d9, %r0, {4 * size}, %d{n + 1};")
        lines += [f"ld.global.u32 %r{8 * n + 2 + m}, [%d9+{4 * m}];" for m in range(size)]
    size = inputs[2].shape[1]
    result = [f"%r{30 + m}" for m in range(size)]
    lines.append(f"mma.sync.aligned.m16n8k{k}.row.col.{types} {{{', '.join(result)}}}, "
                 f"{', '.join(names)};\nmad.wide.u32 %d9, %r0, {4 * size}, %d0;")  # fmt: skip
    lines += [f"st.global.u32 [%d9+{4 * m}], {register};" for m, register in enumerate(result)]
    out = np.zeros((32, size), "uint32")
    launch("\n".join(lines), out, *inputs)
    values, wanted = out.view(total), a @ b + c
    for lane, i in itertools.product(range(32), range(4)):
        assert values[lane, i] == wanted[manual_c(lane, i)], (lane, i)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_loaded(count: int, trans: str) -> None:
    """Lane l holds elements 2 (l % 4) and the next of row l / 4, or of that column."""
    x, out = np.arange(count * 64, dtype="uint16"), np.zeros((count, 32), "uint32")
    registers = ", ".join(f"%r{10 + n}" for n in range(count))
    body = f"""
      mov.u32 %r2, S; mad.lo.u32 %r3, %r0, 16, %r2; setp.ge.u32 %p1, %r0, {8 * count};
      @%p1 bra READ;
      mad.wide.u32 %d3, %r0, 16, %d1; ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d3];
      st.shared.v4.u32 [%r3], {{%r4, %r5, %r6, %r7}};
      READ: bar.sync 0;
      ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r3];
      add.s64 %d3, %d0, %d20;"""
    body += "".join(f"st.global.u32 [%d3+{128 * n}], %r{10 + n};" for n in range(count))
    launch(body, out, x, shared=SHARED)
    matrices = x.reshape(count, 8, 8)
    for n, lane, e in itertools.product(range(count), range(32), range(2)):
        row, column = lane // 4, 2 * (lane % 4) + e
        wanted = matrices[n, column, row] if trans else matrices[n, row, column]
        assert out.view("uint16").reshape(count, 32, 2)[n, lane, e] == wanted


# --- ways of threads -------------------------------------------------------------------------


def test_threads_meet_after_branches_and_loops() -> None:
    """Lanes take a loop t times, some leave it early, and all exchange what they have."""
    out = np.zeros(32, "uint32")
    body = """
      mov.u32 %r2, 0; mov.u32 %r3, 0;
      LOOP: setp.ge.u32 %p1, %r2, %r0; @%p1 bra MEET;
      add.s32 %r2, %r2, 1; setp.gt.u32 %p2, %r2, 20; @%p2 bra EARLY;
      rem.u32 %r4, %r2, 2; setp.eq.u32 %p3, %r4, 0; @%p3 bra EVEN;
      add.s32 %r3, %r3, 1; bra.uni LOOP;
      EVEN: add.s32 %r3, %r3, 100; bra.uni LOOP;
      EARLY: add.s32 %r3, %r3, 10000;
      MEET: shfl.sync.bfly.b32 %r5, %r3, 31, 31, 0xffffffff;
      add.s64 %d3, %d0, %d20; st.global.u32 [%d3], %r5;"""
    launch(body, out)
    turns = [min(t, 20) for t in range(32)]
    sums = [(n + 1) // 2 + 100 * (n // 2) + 10000 * (t > 20) for t, n in enumerate(turns)]
    assert list(out) == sums[::-1]


def test_order_of_blocks() -> None:
    """Values that leave a loop are right after it, also from its middle, and of inner loops."""
    assert order({0: [1, 2], 1: [3], 2: [3], 3: []}) == [0, 1, 2, 3]
    assert order({0: [3, 1], 1: [2], 2: [3], 3: []}) == [0, 1, 2, 3]
    assert order({0: [2], 1: [], 2: [3, 1], 3: [2]}) == [0, 2, 3, 1]
    nested = {0: [1], 1: [2, 9], 2: [4, 5], 3: [1], 4: [2], 5: [3], 9: []}
    assert order(nested) == [0, 1, 2, 4, 5, 3, 9]


# --- refusals --------------------------------------------------------------------------------


def wrong(body: str, **options: Any) -> None:
    x = np.zeros(64, "uint32")
    launch(f"add.s64 %d3, %d0, %d20; shl.b32 %r3, %r0, 2;\n{body}", x, shared=SHARED, **options)


ONE_LANE = "setp.eq.u32 %p1, %r0, 7; @%p1"
test_refusals = refusals(
    r"""
wrong("st.global.u32 [%d3+132], %r0;")
    # PtxError: out of bounds: block 0, thread (31, 0, 0) writes 4 bytes at +256 from the begin of
wrong("ld.global.u32 %r2, [%d3+-4];")
    # PtxError: block 0, thread (0, 0, 0) reads 4 bytes at -4 from the begin of arg0, in no buffer
wrong("st.global.u16 [%d3+1], %h1;")  # PtxError: misaligned: .. writes 2 bytes .. global memory
wrong("mov.u32 %r2, 1000000; st.shared.u32 [%r2], %r0;")
    # PtxError: out of bounds: .. writes 4 bytes at 1000000 of shared memory, in no array
wrong("mov.u32 %r2, S; st.shared.u32 [%r2+1024], %r0;")
    # PtxError: out of bounds: .. at 1024 of shared memory, in no array
wrong(".shared .b32 X[4]; .shared .b32 Y[4]; st.shared.u32 [X+16], %r0;")  # PtxError: in no array
wrong(".local .align 4 .b8 L[16]; mov.u64 %d4, L; st.local.u32 [%d4+16], %r0;")
    # PtxError: out of bounds: .. of local memory, in no array
wrong("red.global.add.u32 [%d3+256], 1;")  # PtxError: changes by an atomic 4 bytes
wrong("st.global.u32 [%d3], %r0;", read_only=True)  # PtxError: arg0 may only be read
wrong("ld.global.nc.u32 %r2, [%d3]; st.global.u32 [%d3], %r2;")
    # PtxError: arg0 is read by ld.global.nc, and written
wrong("st.global.u32 [%d0], 1;")  # PtxError: race: .. writes arg0[0], which .. wrote, with no
wrong("st.global.u32 [%d3], 1; ld.global.u32 %r2, [%d0];")
    # PtxError: race: block 0, thread (1, 0, 0) reads arg0[0], which block 0, thread (0, 0, 0) wrote
wrong("ld.global.u32 %r2, [%d0]; st.global.u32 [%d3], 1;")  # PtxError: race: .. which .. read
wrong("red.global.add.u32 [%d0], 1; st.global.u32 [%d3], 1;")
    # PtxError: race: .. writes arg0[0], which .. changed by an atomic
wrong("st.global.u32 [%d3], 1;", grid=2)  # PtxError: race: block .. which block .. wrote
wrong("ld.global.u32 %r2, [%d0]; bar.sync 0; st.global.u32 [%d3], 1;", grid=2)  # PtxError: race
wrong("ld.global.u32 %r2, [%d0]; bar.sync 0; setp.ne.u32 %p1, %r1, 1; @%p1 bra END;\n"
      "setp.eq.u32 %p2, %r0, 0; @%p2 st.global.u32 [%d0], 1; END:", grid=2)
    # PtxError: race: block 1, thread (0, 0, 0) writes arg0[0], which .. read
wrong("ld.global.u32 %r2, [%d0]; setp.eq.u32 %p1, %r0, 31; @%p1 st.global.u32 [%d0], 1;")
    # PtxError: race: .. thread (31, 0, 0) writes arg0[0], which .. read
wrong("ld.global.u32 %r2, [%d0]; bar.warp.sync 0xffffffff; setp.eq.u32 %p1, %r0, 63;\n"
      "@%p1 st.global.u32 [%d0], 1;", threads=64)
    # PtxError: race: .. thread (63, 0, 0) writes arg0[0], which .. read
wrong("ld.global.u32 %r2, [%d0]; red.global.add.u32 [%d3], 1;")
    # PtxError: race: .. changes by an atomic arg0[0], which .. read
wrong("st.shared.u32 [S], 1;")  # PtxError: race: .. writes S[byte 0], which .. wrote
wrong("st.shared.u32 [%r3], 1; ld.shared.u32 %r2, [S];")  # PtxError: race: .. reads S[byte 0]
wrong("ld.shared.u32 %r2, [%r3];")  # PtxError: reads what nobody has written
wrong(f"{ONE_LANE} bra GO; bar.sync 0; GO:")
    # PtxError: a barrier that block 0, thread (7, 0, 0) ended without
wrong(f"{ONE_LANE} bra GO; bar.sync 0; bra.uni END; GO: bar.sync 0; END:")
    # PtxError: a barrier while block 0, thread (7, 0, 0) is at another one
wrong(f"{ONE_LANE} bra GO; shfl.sync.bfly.b32 %r2, %r0, 1, 31, 0xffffffff; GO: bar.warp.sync 0x80;")
    # PtxError: shfl.sync.bfly.b32 of block 0, thread (0, 0, 0): lanes of its mask do not come
wrong("shfl.sync.bfly.b32 %r2, %r0, 1, 31, 0xffff;")  # PtxError: the mask does not name the lane
wrong("bar.warp.sync 2;")  # PtxError: the mask does not name the lane
wrong(f"{ONE_LANE} ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r2}}, [S];")
    # PtxError: ldmatrix: lanes of a warp do not come
wrong("madc.lo.u32 %r2, %r3, %r3, %r3;")  # PtxError: not known: madc.lo.u32
wrong("add.sat.s32 %r2, %r3, %r3;")  # PtxError: not known: add.sat.s32
wrong("setp.at.u32 %p1, %r2, %r2;")  # PtxError: not known: setp.at.u32
wrong("ld.param.u64 %d3, [k_param_7];")  # PtxError: not known: ld.param.u64
wrong("mov.u32 %r2, %clock;")  # PtxError: not known: register %clock
wrong(f"{ONE_LANE} trap;")  # PtxError: block 0, thread (7, 0, 0) is at a trap
wrong("", grid=0)  # PtxError: launched with a grid (0, 1, 1)
""",
    {"wrong": wrong, "PtxError": PtxError, "ONE_LANE": ONE_LANE},
)


def test_barriers_order_warps_and_blocks() -> None:
    """`bar.warp.sync` orders lanes of one, a shuffle none, `bar.sync` all, atomics too."""
    x = np.zeros(64, "uint32")
    body = """
      add.s64 %d3, %d0, %d20; st.global.u32 [%d3], %r0; {}
      xor.b32 %r2, %r0, {}; mad.wide.u32 %d4, %r2, 4, %d0; ld.global.u32 %r3, [%d4]; {}
      st.global.u32 [%d3], %r3;"""
    warps, block = "bar.warp.sync 0xffffffff;", "bar.sync 0;"
    launch(body.format(warps, 31, warps), x, threads=64)
    assert list(x[:32]) == list(range(32))[::-1]
    launch(body.format(block, 63, block), x, threads=64)
    assert list(x) == list(range(64))[::-1]
    shuffle = "shfl.sync.bfly.b32 %r4, %r0, 1, 31, 0xffffffff;"
    for barriers in ((warps, 63, block), (block, 63, warps), ("", 31, block), (shuffle, 31, block)):
        with pytest.raises(PtxError, match="race: "):
            launch(body.format(*barriers), x, threads=64)
    launch(body.format("", 31, ""), x, threads=64, races=False)
    total, out = np.zeros(1, "uint32"), np.zeros(64, "uint32")
    body = """red.global.add.u32 [%d0], 1; bar.sync 0; ld.global.u32 %r2, [%d0];
      add.s64 %d3, %d1, %d20; st.global.u32 [%d3], %r2;"""
    launch(body, total, out, threads=64)
    assert set(out) == {64}


def test_equal_values_may_be_allowed() -> None:
    x = np.zeros(1, "uint32")
    launch("st.global.u32 [%d0], 5;", x, grid=3, equal=True)
    with pytest.raises(PtxError, match="race"):
        launch("st.global.u32 [%d0], %r1;", x, grid=3, equal=True)
    with pytest.raises(PtxError, match="race: .*another value"):
        launch("st.global.u32 [%d0], %r0;", x, equal=True)


def test_all_blocks_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are at a time; races between parts are found."""
    monkeypatch.setattr("ptx.machine.MOST_THREADS", 64)
    x = np.zeros(640, "uint32")
    body = """
      mad.lo.u32 %r2, %r1, 64, %r0; mad.wide.u32 %d3, %r2, 4, %d0; st.global.u32 [%d3], %r2;"""
    launch(body, x, threads=64, grid=10, seed=3)
    np.testing.assert_array_equal(x, np.arange(640))
    with pytest.raises(PtxError, match="race: block 9.* which block 0"):
        launch("setp.eq.u32 %p1, %r0, 0;\n rem.u32 %r2, %r1, 9; mad.wide.u32 %d3, %r2, 4, %d0;\n"
               "@%p1 st.global.u32 [%d3], %r1;", x, threads=64, grid=10)  # fmt: skip


def test_the_cost_of_a_launch() -> None:
    """Warps' instructions with the lanes on, sectors by warp and by launch, passes over banks."""
    room, total = np.zeros(80, "uint32"), np.zeros(1, "uint32")
    x, shared = room[-room.ctypes.data % 32 // 4 :], ".shared .align 16 .b8 S[1024];"
    body = """
      add.s64 %d3, %d0, %d20; mov.u32 %r2, S; mad.lo.u32 %r3, %r0, 8, %r2; st.shared.u32 [%r3], %r0;
      ld.global.u32 %r4, [%d0]; st.global.u32 [%d3], %r0;
      setp.lt.u32 %p1, %r0, 40; @!%p1 bra END; red.global.add.u32 [%d1], 1; END:"""
    counts = launch(body, x, total, threads=64, shared=shared, races=False, cost=True)
    # Without `mov` and `ret`, and with one of REGISTERS.
    assert counts["instructions"] == 2 * 8 + 2 and counts["lanes"] == 64 * 8 + 40
    assert [counts[f"{kind} sectors"] for kind in ("load", "store", "atomic")] == [2, 2 * 4, 2]
    assert counts["memory sectors"] == 1 + 8 + 2
    assert counts["shared passes"] == 2 * counts["least passes"] == 4
    counts = launch("""
      mov.u32 %r2, S; mad.lo.u32 %r3, %r0, 16, %r2; st.shared.v4.u32 [%r3], {%r0, %r0, %r0, %r0};
      ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r2];""",
      shared=shared, races=False, cost=True,
    )  # fmt: skip
    assert counts["shared passes"] == counts["least passes"] == 4 + 4
