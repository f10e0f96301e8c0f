"""Which statements of a program of tiles are done in parts, as their tiles would take too much.

Tiles that a loop over blocks makes and uses again in each visit, as weights and their gradients,
are as wide as a block. Where they leave too few registers, all statements of the loop are done for
some of the columns, then for the next. Before, and after with two parts of 32 of 64 columns::

    for jo in range(...):                       for jo in range(...):
        ...  # copies                               ...  # copies
        for ii, ji, f in T.grid(64, 64, 128):       for part in range(2):
            W[ii, ji] += Q[.., ii, f] * K[ji, f]        for ii, ji, f in T.grid(32, 64, 128):
        for w, ji, ii in T.grid(128, 64, 64):               W[ii, ji] += Q[.., part * 32 + ii, f] ..
            V[w, ji] += G[.., ii, w] * W[ii, ji]        for w, ji, ii in T.grid(128, 64, 32):
                                                            V[w, ji] += G[.., part * 32 + ii, w] ..
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tvm import tirx

from sparsetir.schedules.gpu.passes.tile_parts import Loop, Nest, Parts, RegisterTile
from sparsetir.sparse_ir.expressions import dtype_of
from sparsetir.sparse_ir.nodes import loads_of

__all__ = ["find_parts"]

REGISTERS = 160  # of a thread, for tiles


def find_parts(
    loop: Loop, elsewhere: Iterable[Nest], tiles: dict[Any, RegisterTile], least: int
) -> tuple[list[RegisterTile], Parts | None]:
    """The tiles of which a loop's statements make and use a part at a time, and the parts.

    The fewest with which all tiles fit in the registers that they may take; no parts where all fit,
    and where statements go from one column to another. `cut` of these statements is set.

    loop : around nests alone
    elsewhere : the nests of the program outside of it
    least : columns of a part; its columns are a multiple of this
    """
    outside = list(elsewhere)
    cut = [t for t in tiles.values() if t.columns and not _touched(t.buffer, outside)]
    widths = {t.columns for t in cut}
    whole = sum(int(t.registers.ty.shape[0]) for t in tiles.values())
    nests: list[Any] = loop.body
    if whole <= REGISTERS or len(widths) != 1 or any(isinstance(s, Loop) for s in nests):
        return [], None
    found = [_columns(nest, cut, tiles) for nest in nests]
    if None in found:
        return [], None
    (width,) = widths
    some = sum(int(t.registers.ty.shape[0]) for t in cut)
    counts = [n for n in range(2, width // least + 1) if width % (n * least) == 0]
    fitting = [n for n in counts if whole - some + some // n <= REGISTERS]
    if not counts:
        return [], None
    count = next(iter(fitting), counts[-1])
    parts = Parts(tirx.Var("part", dtype_of(found[0])), count, width // count)
    for nest, var in zip(nests, found, strict=True):
        nest.cut = var, parts
    return cut, parts


def _columns(nest: Nest, cut: list[RegisterTile], tiles: dict[Any, RegisterTile]) -> Any:
    """The variable of the columns of these tiles in a nest; None for one that has no parts.

    It has if each of its terms or elements needs one column, and no other tile changes than by sums
    of such terms, which other statements of the loop would see unfinished.
    """
    places = [
        (t, x.indices[1 - t.owner])
        for t in cut
        for _, store in nest.stores
        for x in ([store] if store.buffer.same_as(t.buffer) else []) + loads_of(store, t.buffer)
    ]
    if not places or any(not at.same_as(places[0][1]) for _, at in places):
        return None
    var, made = places[0][1], {t.buffer for t in cut}
    for _, store in nest.stores:
        others = [b for b in tiles if b not in made and loads_of(store, b)]
        if store.buffer in made:
            if others or any(v.same_as(var) for v in nest.reduced):
                return None
        elif not _adds(nest, store, var, others):
            return None
    return var


def _adds(nest: Nest, store: Any, var: Any, others: list[Any]) -> bool:
    """Whether a statement adds terms of a coordinate to a tile, and needs no other."""
    return (
        nest.init is None
        and [v for v in nest.reduced if v.same_as(var)] == nest.reduced
        and isinstance(store.value, tirx.Add)
        and others == [store.buffer]
        and not loads_of(store.value.b, store.buffer)
    )


def _touched(buffer: Any, nests: list[Nest]) -> bool:
    return any(s.buffer.same_as(buffer) or loads_of(s, buffer) for n in nests for _, s in n.stores)
