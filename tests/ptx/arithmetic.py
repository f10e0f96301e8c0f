"""Types of PTX: what bits of registers mean, and integer and floating-point functions on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = Any  # of NumPy


class Kind(NamedTuple):
    """A type of PTX.

    bits : the NumPy type that registers have for it, unsigned
    decode : numbers of bits; of a pair of halves numbers have a second axis
    encode : bits of numbers
    number : the NumPy type of numbers
    """

    bits: Any
    decode: Callable[[Array], Array]
    encode: Callable[[Array], Array]
    number: Any


BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def from_bfloat16(bits: Array) -> Array:
    """float32 of the upper halves of its bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(x: Array) -> Array:
    """The nearest bfloat16, ties to even, as bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.where(np.isnan(x), 0x7FFF, rounded >> np.uint32(16)).astype(np.uint16)


def _plain(number: Any) -> Kind:
    bits = BITS[np.dtype(number).itemsize]
    return Kind(
        bits, lambda a: a.view(number), lambda x: np.ascontiguousarray(x, number).view(bits), number
    )


def _pairs(half: Kind) -> Kind:
    def decode(a: Array) -> Array:
        return half.decode(np.ascontiguousarray(a).view(np.uint16)).reshape(len(a), 2)

    def encode(x: Array) -> Array:
        return np.ascontiguousarray(half.encode(x)).view(np.uint32).reshape(len(x))

    return Kind(np.uint32, decode, encode, half.number)


KINDS = {
    f"{letter}{8 * size}": _plain(np.dtype(f"{ {'b': 'u', 's': 'i'}.get(letter, letter) }{size}"))
    for letter in "bus"
    for size in (1, 2, 4, 8)
}
KINDS |= {f"f{8 * size}": _plain(np.dtype(f"f{size}")) for size in (2, 4, 8)}
KINDS["bf16"] = Kind(np.uint16, from_bfloat16, to_bfloat16, np.float32)
KINDS |= {f"{half}x2": _pairs(KINDS[half]) for half in ("f16", "bf16")}
KINDS["pred"] = Kind(np.bool_, lambda a: a, lambda x: x, np.bool_)


def extended(bits: Array, kind: Kind, register: Any) -> Array:
    """Bits of a type in a register that may be wider: with the sign of signed integers."""
    if bits.dtype == register:
        return bits
    if np.dtype(kind.number).kind == "i":
        signed = np.dtype(f"i{np.dtype(register).itemsize}")
        return bits.view(kind.number).astype(signed).view(register)
    return bits.astype(register)


def immediate(text: str, kind: Kind) -> Array:
    """A constant, as an array of one number; `0f` and `0d` begin the bits of floats."""
    if text[:2] in ("0f", "0F"):
        value: Any = np.array([int(text[2:], 16)], np.uint32).view(np.float32)
    elif text[:2] in ("0d", "0D"):
        value = np.array([int(text[2:], 16)], np.uint64).view(np.float64)
    else:
        number = int(text.rstrip("U"), 0)
        if kind.number is np.bool_:
            return np.array([bool(number)])
        if np.dtype(kind.number).kind == "f":
            value = np.array([number], kind.number)
        else:
            width = 8 * np.dtype(kind.bits).itemsize
            return kind.decode(np.array([number & (1 << width) - 1], kind.bits))
    if np.dtype(kind.number).kind in "iu":  # the bits of a float in an untyped register
        return kind.decode(value.view(BITS[value.itemsize]).astype(kind.bits))
    return value.astype(kind.number)


# --- integers --------------------------------------------------------------------------------


def divide(a: Array, b: Array) -> Array:
    """Quotients towards zero; all ones for a divisor of zero, as GPUs give."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((a - quotient * safe != 0) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, ~a.dtype.type(0), quotient).astype(a.dtype)


def high_product(a: Array, b: Array) -> Array:
    """The upper halves of products."""
    width = 8 * a.dtype.itemsize
    if width < 64:
        wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
        return (a.astype(wide) * b.astype(wide) >> wide.type(width)).astype(a.dtype)
    a, b = np.broadcast_arrays(a, b)
    products = [int(x) * int(y) >> 64 & (1 << 64) - 1 for x, y in zip(a, b, strict=True)]
    return np.array(products, np.uint64).view(a.dtype)


def wide_product(a: Array, b: Array) -> Array:
    """Products in twice the width."""
    wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
    return a.astype(wide) * b.astype(wide)


def shift_left(a: Array, by: Array) -> Array:
    """Zeros where all bits are shifted out."""
    width = 8 * a.dtype.itemsize
    return np.where(by >= width, 0, a << np.minimum(by, width - 1).astype(a.dtype)).astype(a.dtype)


def shift_right(a: Array, by: Array) -> Array:
    """The type with the sign of signed integers."""
    width = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(by, width - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by >= width, 0, shifted).astype(a.dtype)


def bits_of(a: Array) -> Array:
    """Bits of unsigned integers, the lowest first, along a new axis."""
    width = 8 * a.dtype.itemsize
    return (a[..., None] >> np.arange(width, dtype=a.dtype)) & a.dtype.type(1)


def from_bits(bits: Array, dtype: Any) -> Array:
    """The inverse of :func:`bits_of`."""
    places = np.arange(bits.shape[-1], dtype=np.uint64)
    return (bits.astype(np.uint64) << places).sum(-1).astype(dtype)


def highest_bit(a: Array) -> Array:
    """The place of the highest bit of unsigned integers, -1 for zero."""
    bits = bits_of(a)
    return np.where(a == 0, -1, bits.shape[-1] - 1 - bits[..., ::-1].argmax(-1)).astype(np.int32)


# --- floats ----------------------------------------------------------------------------------

COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip


def comparison(how: str, floats: bool) -> Callable[[Array, Array], Array]:
    """A comparison of two numbers; of NaN `ltu` and the like hold, `lt` and the like do not."""
    if not floats:
        return COMPARISONS[how]

    def unordered(a: Array, b: Array) -> Array:
        return np.isnan(a) | np.isnan(b)

    if how in ("num", "nan"):
        return unordered if how == "nan" else lambda a, b: ~unordered(a, b)
    if how in COMPARISONS:
        return lambda a, b: COMPARISONS[how](a, b) & ~unordered(a, b)
    return lambda a, b: COMPARISONS[how[:-1]](a, b) | unordered(a, b)


def multiply_add(how: str) -> Callable[[Array, Array, Array], Array]:
    """Rounded once: `rn` to nearest, `rz` to zero, `rm` down, `rp` up."""

    def fused(a: Array, b: Array, c: Array) -> Array:
        wide = np.longdouble if a.dtype == np.float64 else np.float64
        exact = a.astype(wide) * b.astype(wide) + c.astype(wide)
        near, less, more = exact.astype(a.dtype), a.dtype.type(-np.inf), a.dtype.type(np.inf)
        if how == "rm" or how == "rz":
            down = (near > exact) & ((how == "rm") | (exact > 0))
            near = np.where(down, np.nextafter(near, less), near)
        if how == "rp" or how == "rz":
            up = (near < exact) & ((how == "rp") | (exact < 0))
            near = np.where(up, np.nextafter(near, more), near)
        return near.astype(a.dtype)

    return fused


WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def converted(x: Array, to: Kind, modifiers: list[str]) -> Array:
    """Numbers as another type: floats to integers are rounded as said and kept in range."""
    for modifier in modifiers:
        if modifier in WHOLE:
            x = WHOLE[modifier](x)
    target = np.dtype(to.number)
    if x.dtype.kind == "f" and target.kind in "iu":
        low, high = int(np.iinfo(target).min), int(np.iinfo(target).max)
        inside = (x > low) & (x < float(high))
        whole = np.where(inside, x, 0).astype(target)
        whole = np.where(x >= float(high), target.type(high), whole)
        return np.where(x <= low, target.type(low), whole)
    if "sat" in modifiers and target.kind == "f":
        x = np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(x.dtype)
    return x.astype(target)
