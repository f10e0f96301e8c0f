"""Tiles of matrix engines: a record of each instruction set, and products of blocks by them.

A product of a block is, with AMX for 32 rows and 32 features, four tiles of sums, two of the block
and two of the dense operand::

    tile 0 += tile 4 * tile 6      tile 1 += tile 4 * tile 7
    tile 2 += tile 5 * tile 6      tile 3 += tile 5 * tile 7

A tile of the dense operand holds groups of rows side by side, which is how
:func:`sparsetir.sparse_ir.schedule.tiles.tiles` lays it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import tvm
from tvm import ir, s_tir, tirx
from tvm.script import from_source


class TileISA(NamedTuple):
    """Instructions that multiply tiles of one type and keep the sums in registers.

    Each is an LLVM function. Its arguments are tile numbers, and for loads and stores the address
    of the first element and the bytes between rows.

    features : CPU features, by LLVM's names
    types : types of the factors, and of the sums, which have 4 bytes
    shape : rows and features of a tile of sums
    group : adjacent elements of a column of the right factor
    rows, widths, depths : rows, features and terms that a product supports; with `code` there is a
        product per group of terms, else one for all
    zero, load, product, store : `zero(tile)`, `load(tile, address, stride)`, `product(sums, left,
        right)`, `store(tile, address, stride)`
    left : the load of the left factor, if it is another one
    right : stride of the right factor, "sb" from group to group or "tb" from feature to feature
    begin, end : instructions at the start and the end of a thread; the first takes the address of a
        configuration. "" for none
    code : LLVM text of functions that take addresses of tiles instead of numbers, in memory that
        LLVM promotes to registers; "" for intrinsics
    """

    features: tuple[str, ...]
    types: tuple[str, str]
    shape: tuple[int, int]
    group: int
    rows: range
    widths: range
    depths: range
    zero: str
    load: str
    product: str
    store: str
    left: str = ""
    right: str = "sb"
    begin: str = ""
    end: str = ""
    code: str = ""


ROW_BYTES = 64  # of AMX, in up to 16 rows


def _amx(feature: str, product: str, types: tuple[str, str], group: int) -> TileISA:
    """Eight tiles of up to 16 rows of 64 bytes, in the shapes that a thread configures.

    Tiles of one row, or of one group of columns, would be slower than vectors.
    """
    depths = range(2 * group, ROW_BYTES * group // 4 + 1, group)
    names = [f"llvm.x86.{name}" for name in ("tilezero", "tileloadd64", product, "tilestored64")]
    return TileISA(
        ("amx-tile", feature), types, (16, 16), group, range(2, 33), range(16, 33, 16), depths,
        *names, begin="llvm.x86.ldtilecfg", end="llvm.x86.tilerelease",
    )  # fmt: skip


# TVM 0.27 has no vectors of bfloat16 to call intrinsics with.
NEON_CODE = """
declare <{sums}> @llvm.aarch64.neon.{product}(<{sums}>, <{factors}>, <{factors}>)

define void @{name}_zero(ptr %tile) {{
  store <{sums}> zeroinitializer, ptr %tile
  ret void
}}

define void @{name}_load(ptr %tile, ptr %from, i64 %stride) {{
  %below = getelementptr i8, ptr %from, i64 %stride
  %first = load i64, ptr %from, align 1
  %second = load i64, ptr %below, align 1
  %half = insertelement <2 x i64> poison, i64 %first, i32 0
  %both = insertelement <2 x i64> %half, i64 %second, i32 1
  store <2 x i64> %both, ptr %tile
  ret void
}}

define void @{name}_product(ptr %sums, ptr %left, ptr %right) {{
  %old = load <{sums}>, ptr %sums
  %a = load <{factors}>, ptr %left
  %b = load <{factors}>, ptr %right
  %new = call <{sums}> @llvm.aarch64.neon.{product}(<{sums}> %old, <{factors}> %a, <{factors}> %b)
  store <{sums}> %new, ptr %sums
  ret void
}}

define void @{name}_store(ptr %tile, ptr %to, i64 %stride) {{
  %below = getelementptr i8, ptr %to, i64 %stride
  %both = load <2 x i64>, ptr %tile
  %first = extractelement <2 x i64> %both, i32 0
  %second = extractelement <2 x i64> %both, i32 1
  store i64 %first, ptr %to, align 4
  store i64 %second, ptr %below, align 4
  ret void
}}
"""


def _neon(
    feature: str, product: str, types: tuple[str, str], group: int, factors: str, sums: str
) -> TileISA:
    """Vectors of 2 x 2 sums, and of two rows or features of a factor; 24 of 32 for 8 x 8 sums."""
    name, depths = product.partition(".")[0], range(2 * group, 4 * group + 1, 2 * group)
    code = NEON_CODE.format(name=name, product=product, factors=factors, sums=sums)
    return TileISA(
        (feature,), types, (2, 2), group, range(2, 9, 2), range(8, 9), depths,
        *(f"{name}_{step}" for step in ("zero", "load", "product", "store")),
        right="tb", code=code,
    )  # fmt: skip


# AMX-like sums of pairs: 16 features of one row, times the same pair of the left factor.
AVX512_CODE = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)

define void @dpbf16ps_zero(ptr %tile) {
  store <16 x float> zeroinitializer, ptr %tile
  ret void
}

define void @dpbf16ps_left(ptr %tile, ptr %from, i64 %stride) {
  %pair = load i32, ptr %from, align 1
  %first = insertelement <16 x i32> poison, i32 %pair, i32 0
  %all = shufflevector <16 x i32> %first, <16 x i32> poison, <16 x i32> zeroinitializer
  store <16 x i32> %all, ptr %tile
  ret void
}

define void @dpbf16ps_load(ptr %tile, ptr %from, i64 %stride) {
  %row = load <16 x i32>, ptr %from, align 1
  store <16 x i32> %row, ptr %tile
  ret void
}

define void @dpbf16ps_product(ptr %sums, ptr %left, ptr %right) {
  %old = load <16 x float>, ptr %sums
  %a = load <32 x bfloat>, ptr %left
  %b = load <32 x bfloat>, ptr %right
  %new = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(
    <16 x float> %old, <32 x bfloat> %a, <32 x bfloat> %b)
  store <16 x float> %new, ptr %sums
  ret void
}

define void @dpbf16ps_store(ptr %tile, ptr %to, i64 %stride) {
  %row = load <16 x float>, ptr %tile
  store <16 x float> %row, ptr %to, align 4
  ret void
}
"""


def _avx512() -> TileISA:
    """Vectors of a row's sums for 16 features; 16 of 32 for 8 rows and 32 features."""
    steps = (f"dpbf16ps_{step}" for step in ("zero", "load", "product", "store", "left"))
    sizes = (1, 16), 2, range(1, 9), range(16, 33, 16), range(2, 17, 2)
    return TileISA(("avx512f", "avx512bf16"), BFLOAT, *sizes, *steps, code=AVX512_CODE)


BFLOAT, HALF, INT = ("bfloat16", "float32"), ("float16", "float32"), ("int8", "int32")
# By name, and by the type of both factors.
TILE_ISAS = {
    "amx": {
        "bfloat16": _amx("amx-bf16", "tdpbf16ps", BFLOAT, 2),
        "float16": _amx("amx-fp16", "tdpfp16ps", HALF, 2),
        "int8": _amx("amx-int8", "tdpbssd", INT, 4),
    },
    "avx512": {"bfloat16": _avx512()},
    "neon": {
        "bfloat16": _neon("bf16", "bfmmla", BFLOAT, 4, "8 x bfloat", "4 x float"),
        "int8": _neon("i8mm", "smmla.v4i32.v16i8", INT, 8, "16 x i8", "4 x i32"),
    },
}


def isa_of(target: Any, dtype: str) -> str | None:
    """The name of the instruction set by which a target multiplies tiles of a type, or None."""
    has = tvm.get_global_func("target.target_has_feature")
    for name, isas in TILE_ISAS.items():
        if target.kind.name == "llvm" and dtype in isas:
            if all(has(feature, target) for feature in isas[dtype].features):
                return name
    return None


@dataclass(frozen=True)
class TileShape:
    """A product of tiles: (rows, depth) times (depth, features), each in a range of the ISA."""

    isa: TileISA
    rows: int
    features: int
    depth: int

    @property
    def row_tiles(self) -> list[tuple[int, int]]:
        """First row, and number of rows, of the tiles above each other."""
        most = self.isa.shape[0]
        return [(first, min(most, self.rows - first)) for first in range(0, self.rows, most)]

    @property
    def column_tiles(self) -> list[int]:
        """First feature of the tiles side by side."""
        return list(range(0, self.features, self.isa.shape[1]))

    @property
    def sums(self) -> dict[tuple[int, int], int]:
        """The tile of the sums from a row and a feature on."""
        places = product([r for r, _ in self.row_tiles], self.column_tiles)
        return {place: tile for tile, place in enumerate(places)}

    @property
    def factors(self) -> tuple[range, range]:
        """Tiles of the left factor, by rows, and of the right one, by features."""
        first, up, across = len(self.sums), len(self.row_tiles), len(self.column_tiles)
        return range(first, first + up), range(first + up, first + up + across)

    @property
    def memory(self) -> tuple[int, str]:
        """Number and type of the elements of a thread's configuration, or of its tiles.

        An element is a whole tile, as TVM only allocates as many elements as are indexed.
        """
        whole = f"uint64x{math.prod(self.isa.shape) // 2}"  # sums have 4 bytes
        return (self.factors[1].stop, whole) if self.isa.code else (8, "uint64")

    @property
    def config(self) -> bytes:
        """The 64 bytes of AMX's configuration: bytes of a row, and rows, of each tile in use."""
        counts, (left, right) = dict(self.row_tiles), self.factors
        width = self.depth * ROW_BYTES // (self.isa.shape[1] * self.isa.group)
        used = {tile: (counts[r], ROW_BYTES) for (r, _), tile in self.sums.items()}
        used |= {tile: (n, width) for tile, n in zip(left, counts.values(), strict=True)}
        used |= dict.fromkeys(right, (self.depth // self.isa.group, ROW_BYTES))
        rows, columns = bytearray(16), bytearray(32)
        for tile, (count, row_bytes) in used.items():
            rows[tile] = count
            columns[2 * tile : 2 * tile + 2] = row_bytes.to_bytes(2, "little")
        return bytes([1, *[0] * 15]) + bytes(columns) + bytes(rows)


def begin(shape: TileShape, memory: Any) -> list[tirx.Stmt]:
    """Configure the tiles of the thread that runs this, and make them zero.

    memory : a buffer of the elements of `shape.memory`
    """
    if not shape.isa.begin:
        return []
    words = [int.from_bytes(shape.config[start : start + 8], "little") for start in range(0, 64, 8)]
    stores = [
        tirx.BufferStore(memory, tirx.IntImm("uint64", word), [tirx.IntImm("int32", index)])
        for index, word in enumerate(words)
    ]
    return [*stores, _instruction(shape.isa.begin, _place(memory, 0))]


def end(shape: TileShape) -> list[tirx.Stmt]:
    """Release the tiles, so that the system need not save them."""
    return [_instruction(shape.isa.end)] if shape.isa.end else []


def store(shape: TileShape, tile: int, element: Any, stride: Any) -> tirx.Stmt:
    """Store a tile of sums.

    element : a load of its first element
    stride : bytes between rows
    """
    register = tirx.IntImm("int8", tile)
    stride = tirx.Cast("int64", stride)
    return _instruction(shape.isa.store, register, tirx.address_of(element), stride)


def with_tiles(shape: TileShape, memory: Any, call: ir.Call) -> ir.Call:
    """A call of a function of `code`, with addresses of tiles instead of their numbers."""
    if call.op.name != "tirx.call_extern" or call.args[0].value not in shape.isa:
        return call
    name, *operands = call.args
    tiles = [x for x in operands if isinstance(x, tirx.IntImm) and str(x.ty.dtype) == "int8"]
    places = [_place(memory, int(x)) for x in tiles]
    return tirx.call_extern("void", name.value, *places, *operands[len(tiles) :])


def _place(memory: Any, element: int) -> Any:
    return tirx.address_of(tirx.BufferLoad(memory, [tirx.IntImm("int32", element)]))


def _instruction(name: str, *operands: Any) -> tirx.Stmt:
    make = tirx.call_llvm_intrin if name.startswith("llvm.") else tirx.call_extern
    return tirx.Evaluate(make("void", name, *operands))


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
    """The names of two tensor intrinsics: sums that begin with zero, and sums of a product.

    They match loops over a workspace of scope "local". Their instructions leave the workspace
    unchanged and keep the sums in tiles.
    """
    isa, (dtype, sums), (left, right) = shape.isa, shape.isa.types, shape.factors
    names: dict[str, Any] = {
        "rows": shape.rows, "features": shape.features, "depth": shape.depth, "dtype": dtype,
        "groups": shape.depth // isa.group, "group": isa.group, "sums": sums,
    }  # fmt: skip
    zeros = [_text(isa.zero, tile) for tile in shape.sums.values()]
    width = tvm.DataType(dtype).bits // 8
    steps: list[str] = []
    groups = names["groups"]
    for p in range(0, groups, 1 if isa.code else groups):
        for j, c in enumerate(shape.column_tiles):
            first = f"T.address_of(B[{p}, {c}, 0])"
            steps.append(_text(isa.load, right[j], first, f"{isa.right} * {width}"))
        for i, (r, _) in enumerate(shape.row_tiles):
            first = f"T.address_of(A[{r}, {p * isa.group}])"
            steps.append(_text(isa.left or isa.load, left[i], first, f"sa * {width}"))
            for j, c in enumerate(shape.column_tiles):
                steps.append(_text(isa.product, shape.sums[r, c], left[i], right[j]))
    keys: list[str] = []
    for label, text, loops, code, strides in (
        ("zero", ZERO, ZERO_LOOPS, zeros, ("", "")),
        ("product", PRODUCT, PRODUCT_LOOPS, steps, ("strides=[sa, 1], ", "strides=[sb, tb, 1], ")),
    ):
        desc = text.format(body=loops.format(**names), a_strides="", b_strides="", **names)
        body = "\n        ".join(code)
        done = text.format(body=body, a_strides=strides[0], b_strides=strides[1], **names)
        keys.append(f"sparsetir.{isa.product}_{label}_{shape.rows}_{shape.features}_{shape.depth}")
        s_tir.TensorIntrin.register(keys[-1], from_source(desc), from_source(done), override=True)
    zero, reduce = keys
    return zero, reduce


def _text(name: str, *operands: Any) -> str:
    """An instruction as TVMScript; operands are tiles, an address, and a stride."""
    words = [f"T.int8({x})" if isinstance(x, int) else x for x in operands]
    if isinstance(operands[-1], str):
        words[-1] = f'T.Cast("int64", {words[-1]})'
    call = "call_llvm_intrin" if name.startswith("llvm.") else "call_extern"
    return f'T.evaluate(T.{call}("void", "{name}", {", ".join(words)}))'
