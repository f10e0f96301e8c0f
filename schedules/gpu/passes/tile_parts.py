"""The parts of programs of tiles: nests, loops, tiles and factors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tvm import ir, tirx

from sparsetir.schedules.gpu.passes.cooperative_copy import COMPUTED
from sparsetir.schedules.passes.nests import guarded
from sparsetir.sparse_ir.nodes import loads_of, nodes_of
from sparsetir.sparse_ir.tir import as_dtype, dtype_of, free_vars

VECTOR = 8  # 16-bit numbers in 16 bytes
PANEL = 64  # columns of 16-bit numbers whose rows of 128 bytes are swizzled, 8 at a time
# Registers per thread for tiles: those that leave some for factors, and the most.
REGISTERS = (120, 150)


@dataclass(eq=False)
class Parts:
    """Parts in which the statements of a loop are executed, one after the other.

    var : index of the part; count : number of parts; size : coordinates per part
    """

    var: Any
    count: int
    size: int


@dataclass(eq=False)
class Nest:
    """Loops of constant extents around stores.

    loops : (variable, extent), outermost first
    reduced : those of the variables that are reduced over
    init : initial value of the result
    stores : (condition or None, store)
    cut : the variable that is visited in parts, and the parts, or None
    """

    name: str
    loops: list[tuple[Any, int]]
    reduced: list[Any]
    init: Any
    stores: list[tuple[Any, Any]]
    cut: tuple[Any, Parts] | None = None

    @property
    def extents(self) -> dict[Any, int]:
        """The extents of the loops, in one part."""
        sizes = dict(self.loops)
        if self.cut is not None:
            sizes[self.cut[0]] = self.cut[1].size
        return sizes

    def first(self, var: Any) -> Any:
        """The first value of a loop's variable in this part."""
        if self.cut is None or not self.cut[0].same_as(var):
            return 0
        return self.cut[1].var * self.cut[1].size


@dataclass(eq=False)
class Loop:
    """A loop of any extent around statements.

    name : name of the block in it; parts : the parts in which the statements are executed, or None
    """

    name: str
    var: Any
    extent: Any
    body: list[Any]
    parts: Parts | None = None


@dataclass(eq=False)
class RegisterTile:
    """A buffer that is kept in registers.

    owner : the dimension divided among warps; columns : extent of the other, 0 if there is none
    """

    buffer: Any
    owner: int
    columns: int
    registers: Any


@dataclass(eq=False)
class Factor:
    """A tile of numbers in shared memory.

    value : the number as an expression of `row` and `column`
    step : the loop in which it is copied; None for one that stays
    shared : the buffer; copy : name of the block that fills it
    swizzled : whether the elements are in panels as `wgmma` reads them, else in padded rows
    """

    row: Any
    column: Any
    rows: int
    columns: int
    value: Any
    step: Any
    shared: Any
    copy: str
    swizzled: bool = False

    def at(self, row: Any, column: Any) -> list[Any]:
        """The flat index of an element; with two indices, TVM would drop rows that look unused."""
        row, column = as_dtype(row, "int32"), as_dtype(column, "int32")
        if not self.swizzled:
            return [row * stride_of(self.columns) + column]
        chunk = tirx.bitwise_xor(column % PANEL // VECTOR, row % VECTOR)
        panel = column // PANEL * self.rows + row
        return [panel * PANEL + chunk * VECTOR + column % VECTOR]

    def vector(self) -> int:
        """Neighbours in a row that are copied at once: 16 bytes, or four that are computed."""
        condition, source = guarded(self.value)
        loads = [x for x in nodes_of(ir.TensorLoad, self.value) if self.column in free_vars(x)]
        if len(loads) != 1 or self.columns % VECTOR:
            return 1
        *outer, last = loads[0].indices
        others = [*outer] if condition is None else [*outer, condition]
        length = loads[0].source.ty.shape[-1]
        constant = isinstance(length, tirx.IntImm) and int(length) % VECTOR == 0
        alone = not any(self.column in free_vars(x) for x in others) and last.same_as(self.column)
        if not constant or not alone:
            return 1
        return VECTOR if source.same_as(loads[0]) else COMPUTED if condition is None else 1


class Side(NamedTuple):
    """A factor of one product; along : whether its rows run along the sum."""

    factor: Factor
    along: bool


def stride_of(columns: int) -> int:
    """The distance of rows: an odd number of 16 bytes, so that 8 rows begin in different banks."""
    return columns if columns // VECTOR % 2 else columns + VECTOR


def find_parts(
    loop: Loop, elsewhere: Iterable[Nest], tiles: dict[Any, RegisterTile], least: int
) -> tuple[list[RegisterTile], Parts | None]:
    """Tiles that a loop's statements set and use part by part, and the parts.

    Tiles that a loop over blocks sets and uses in each visit, such as weights and their gradients,
    are as wide as a block. If they leave too few registers, all statements of the loop are executed
    for some of the columns, then for the next. Before, and after with two parts
    of 32 of 64 columns::

        for jo in range(...):
            ...  # copies
            for ii, ji, f in T.grid(64, 64, 128): W[ii, ji] += Q[.., ii, f] * K[ji, f]
            for w, ji, ii in T.grid(128, 64, 64): V[w, ji] += G[.., ii, w] * W[ii, ji]

        for jo in range(...):
            ...  # copies
            for part in range(2):
                for ii, ji, f in T.grid(32, 64, 128): W[ii, ji] += Q[.., part * 32 + ii, f] * ..
                for w, ji, ii in T.grid(128, 64, 32): V[w, ji] += G[.., part * 32 + ii, w] * ..

    The least number with which all tiles leave registers for factors, or else fit; no parts if that
    is one, or if statements depend on other columns. Sets `cut` of these statements.

    loop : a loop that only contains nests
    elsewhere : the nests of the program outside it
    least : the divisor of the columns per part
    """
    outside = list(elsewhere)
    cut = [t for t in tiles.values() if t.columns and not _is_accessed(t.buffer, outside)]
    widths = {t.columns for t in cut}
    whole = sum(int(t.registers.ty.shape[0]) for t in tiles.values())
    nests: list[Any] = loop.body
    if whole <= min(REGISTERS) or len(widths) != 1 or any(isinstance(s, Loop) for s in nests):
        return [], None
    columns = [_columns(nest, cut, tiles) for nest in nests]
    if None in columns:
        return [], None
    (width,) = widths
    some = sum(int(t.registers.ty.shape[0]) for t in cut)
    counts = [n for n in range(1, width // least + 1) if width % (n * least) == 0]
    sizes = [whole - some + some // n for n in counts]
    fitting = [
        n for most in REGISTERS for n, size in zip(counts, sizes, strict=True) if size <= most
    ]
    count = next(iter(fitting), counts[-1])
    if count == 1:
        return [], None
    parts = Parts(tirx.Var("part", dtype_of(columns[0])), count, width // count)
    for nest, var in zip(nests, columns, strict=True):
        nest.cut = var, parts
    return cut, parts


def _columns(nest: Nest, cut: list[RegisterTile], tiles: dict[Any, RegisterTile]) -> Any:
    """The variable of these tiles' columns in a nest; None if the nest cannot be divided.

    It can if each of its terms or elements needs one column, and other tiles are only updated by
    sums of such terms, since other statements of the loop would see them unfinished.
    """
    places = [
        (t, x.indices[1 - t.owner])
        for t in cut
        for _, store in nest.stores
        for x in ([store] if store.buffer.same_as(t.buffer) else []) + loads_of(store, t.buffer)
    ]
    if not places or any(not index.same_as(places[0][1]) for _, index in places):
        return None
    var, cut_vars = places[0][1], {t.buffer for t in cut}
    for _, store in nest.stores:
        others = [b for b in tiles if b not in cut_vars and loads_of(store, b)]
        if store.buffer in cut_vars:
            if others or any(v.same_as(var) for v in nest.reduced):
                return None
        elif not _adds(nest, store, var, others):
            return None
    return var


def _adds(nest: Nest, store: Any, var: Any, others: list[Any]) -> bool:
    """Whether a statement adds terms of a coordinate to a tile, and needs no other coordinate."""
    return (
        nest.init is None
        and [v for v in nest.reduced if v.same_as(var)] == nest.reduced
        and isinstance(store.value, tirx.Add)
        and others == [store.buffer]
        and not loads_of(store.value.b, store.buffer)
    )


def _is_accessed(buffer: Any, nests: list[Nest]) -> bool:
    return any(s.buffer.same_as(buffer) or loads_of(s, buffer) for n in nests for _, s in n.stores)
