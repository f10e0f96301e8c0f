"""Tiles of x86's matrix engine (Intel AMX): instructions, and products of blocks by them.

A CPU with AMX has eight tiles of up to 16 rows of 64 bytes. A product of a block with 32 rows
and 32 features uses four tiles of sums, two of the block and two of the dense operand::

    tile 0 += tile 4 * tile 6      tile 1 += tile 4 * tile 7
    tile 2 += tile 5 * tile 6      tile 3 += tile 5 * tile 7

A tile of the dense operand interleaves groups of rows, as many as fill 4 bytes, which is the layout
of :func:`sparsetir.sparse_ir.schedule.tiles.tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import tvm
from tvm import s_tir, tirx
from tvm.script import from_source

TILE = 16  # rows, and 4-byte elements per row
ROW_BYTES = 64
LEFT, RIGHT = (4, 5), (6, 7)  # tiles of factors


class Product(NamedTuple):
    """An instruction that multiplies tiles.

    features : the CPU features that it needs, named as in LLVM
    sums : the type of the sums
    group : consecutive elements of a column of the right factor that are adjacent
    """

    features: tuple[str, ...]
    name: str
    sums: str
    group: int


# Keyed by the type of both factors.
PRODUCTS = {
    "bfloat16": Product(("amx-tile", "amx-bf16"), "tdpbf16ps", "float32", 2),
    "float16": Product(("amx-tile", "amx-fp16"), "tdpfp16ps", "float32", 2),
    "int8": Product(("amx-tile", "amx-int8"), "tdpbssd", "int32", 4),
}


def has_product(target: Any, dtype: str) -> bool:
    """Whether a CPU target has products of tiles of a type."""
    has = tvm.get_global_func("target.target_has_feature")
    multiplies = target.kind.name == "llvm" and dtype in PRODUCTS
    return multiplies and all(has(name, target) for name in PRODUCTS[dtype].features)


@dataclass(frozen=True)
class TileShape:
    """A product of tiles: (rows, depth) times (depth, features), in up to two by two tiles.

    rows : 1 to 32
    features : 16 or 32
    depth : a multiple of the product's group, a row of at most 64 bytes
    dtype : the type of both factors
    """

    rows: int
    features: int
    depth: int
    dtype: str

    @property
    def product(self) -> Product:
        """The instruction."""
        return PRODUCTS[self.dtype]

    @property
    def row_tiles(self) -> list[tuple[int, int]]:
        """First row, and number of rows, of each row of tiles."""
        return [(first, min(TILE, self.rows - first)) for first in range(0, self.rows, TILE)]

    @property
    def column_tiles(self) -> list[int]:
        """First feature of each column of tiles."""
        return list(range(0, self.features, TILE))

    @property
    def sums(self) -> dict[tuple[int, int], int]:
        """The tile of the sums that start at a row and a feature."""
        rows, columns = self.row_tiles, self.column_tiles
        return {(r, c): 2 * i + j for i, (r, _) in enumerate(rows) for j, c in enumerate(columns)}

    @property
    def config(self) -> bytes:
        """The 64-byte configuration: bytes per row, and rows, of each tile in use."""
        width = self.depth * ROW_BYTES // (TILE * self.product.group)
        used: dict[int, tuple[int, int]] = {}
        for i, (_, count) in enumerate(self.row_tiles):
            used[LEFT[i]] = count, width
            for j, _ in enumerate(self.column_tiles):
                used[2 * i + j] = count, ROW_BYTES
        for j, _ in enumerate(self.column_tiles):
            used[RIGHT[j]] = self.depth // self.product.group, ROW_BYTES
        rows, columns = bytearray(16), bytearray(32)
        for tile, (count, row_bytes) in used.items():
            rows[tile] = count
            columns[2 * tile : 2 * tile + 2] = row_bytes.to_bytes(2, "little")
        return bytes([1, *[0] * 15]) + bytes(columns) + bytes(rows)


def load_config(shape: TileShape, memory: Any) -> list[tirx.Stmt]:
    """Configure the tiles of the current thread, and zero them.

    memory : a buffer of 8 uint64
    """
    words = [int.from_bytes(shape.config[start : start + 8], "little") for start in range(0, 64, 8)]
    stores = [
        tirx.BufferStore(memory, tirx.IntImm("uint64", word), [tirx.IntImm("int32", index)])
        for index, word in enumerate(words)
    ]
    first = tirx.BufferLoad(memory, [tirx.IntImm("int32", 0)])
    return [*stores, _instruction("ldtilecfg", tirx.address_of(first))]


def release() -> tirx.Stmt:
    """Release the tiles, so that the system need not save them."""
    return _instruction("tilerelease")


def store(tile: int, element: Any, stride: Any) -> tirx.Stmt:
    """Store a tile of sums.

    element : a load of its first element
    stride : the distance of rows in bytes
    """
    register = tirx.IntImm("int8", tile)
    stride = tirx.Cast("int64", stride)
    return _instruction("tilestored64", register, tirx.address_of(element), stride)


def _instruction(name: str, *operands: Any) -> tirx.Stmt:
    return tirx.Evaluate(tirx.call_llvm_intrin("void", f"llvm.x86.{name}", *operands))


ZERO = """
@T.prim_func(s_tir=True)
def zero(c: T.handle) -> None:
    C = T.match_buffer(c, ({rows}, {features}), "{sums}", offset_factor=1, scope="local")
    with T.sblock("root"):
        T.reads()
        T.writes(C[0:{rows}, 0:{features}])
        {body}
"""
ZERO_LOOPS = """for i, j in T.grid({rows}, {features}):
            with T.sblock("zero"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = T.{sums}(0)
"""
PRODUCT = """
@T.prim_func(s_tir=True)
def product(a: T.handle, b: T.handle, c: T.handle) -> None:
    sa, sb, tb, sc = T.int32(), T.int32(), T.int32(), T.int32()
    A = T.match_buffer(a, ({rows}, {depth}), "{dtype}", {a_strides}offset_factor=1)
    B = T.match_buffer(b, ({groups}, {features}, {group}), "{dtype}", {b_strides}offset_factor=1)
    C = T.match_buffer(c, ({rows}, {features}), "{sums}", offset_factor=1, scope="local")
    with T.sblock("root"):
        T.reads(
            C[0:{rows}, 0:{features}], A[0:{rows}, 0:{depth}],
            B[0:{groups}, 0:{features}, 0:{group}],
        )
        T.writes(C[0:{rows}, 0:{features}])
        {body}
"""
PRODUCT_LOOPS = """for i, j, p, q in T.grid({rows}, {features}, {groups}, {group}):
            with T.sblock("product"):
                vi, vj, vp, vq = T.axis.remap("SSRR", [i, j, p, q])
                C[vi, vj] = C[vi, vj] + T.Cast("{sums}", A[vi, vp * {group} + vq]) * T.Cast(
                    "{sums}", B[vp, vj, vq]
                )
"""


@cache
def intrinsics(shape: TileShape) -> tuple[str, str]:
    """The names of two tensor intrinsics: zero sums, and add a product to them.

    They are described as loops over a workspace of scope "local"; their instructions do not access
    the workspace, and keep the sums in tiles.
    """
    product_of, size = shape.product, shape.product.group
    names = {
        "rows": shape.rows, "features": shape.features, "depth": shape.depth, "dtype": shape.dtype,
        "groups": shape.depth // size, "group": size, "sums": product_of.sums,
    }  # fmt: skip
    zeros = [_text("tilezero", tile) for tile in shape.sums.values()]
    width = 4 // size  # elements per 4 bytes
    steps = [
        _text("tileloadd64", RIGHT[j], f"T.address_of(B[0, {c}, 0])", f"sb * {width}")
        for j, c in enumerate(shape.column_tiles)
    ]
    for i, (r, _) in enumerate(shape.row_tiles):
        steps.append(_text("tileloadd64", LEFT[i], f"T.address_of(A[{r}, 0])", f"sa * {width}"))
        for j, c in enumerate(shape.column_tiles):
            steps.append(_text(product_of.name, shape.sums[r, c], LEFT[i], RIGHT[j]))
    keys: list[str] = []
    for label, text, loops, code, strides in (
        ("zero", ZERO, ZERO_LOOPS, zeros, ("", "")),
        ("product", PRODUCT, PRODUCT_LOOPS, steps, ("strides=[sa, 1], ", "strides=[sb, tb, 1], ")),
    ):
        desc = text.format(body=loops.format(**names), a_strides="", b_strides="", **names)
        body = "\n        ".join(code)
        done = text.format(body=body, a_strides=strides[0], b_strides=strides[1], **names)
        keys.append(
            f"sparsetir.amx.{label}_{shape.dtype}_{shape.rows}_{shape.features}_{shape.depth}"
        )
        s_tir.TensorIntrin.register(keys[-1], from_source(desc), from_source(done), override=True)
    zero, product = keys
    return zero, product


def _text(name: str, *operands: Any) -> str:
    """An instruction as TVMScript; operands are tiles, an address, and a stride in elements."""
    words = [f"T.int8({x})" if isinstance(x, int) else x for x in operands]
    if name == "tileloadd64":
        words[-1] = f'T.Cast("int64", {words[-1]})'
    return f'T.evaluate(T.call_llvm_intrin("void", "llvm.x86.{name}", {", ".join(words)}))'
