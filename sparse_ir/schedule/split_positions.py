"""Cut a loop over stored elements into tiles of positions (Senanayake's thesis, chapter 5).

Before::

    with T.sp_iter([I, J, K], "SRS", "spmm") as [i, j, k]:

After `split(j, [None, 32])`, the elements of each row in tiles of 32; a row's last tile may
have fewer::

    J_tiles0 = T.dense_variable(I, (J_count0, J_count0), J_ptr0)
    J_part = T.dense_variable(J_tiles0, (n, nnz), J_starts)
    with T.sp_iter([I, J_tiles0, T.part(J, J_part), K], "SRRS", "spmm") as [i, j0, j, k]:

After `coord(j)`, tiles are ranges of 32 columns, without those in which a row has no element::

    J_tiles0 = T.sparse_variable(I, ((n + 31) // 32, J_count0), (J_ptr0, J_ids0))

The starts of tiles are computed parameters: kernels are called as before. A loop over fused axes,
or after `pos` one over a root axis, is cut into tiles as `divide` cuts it into parts. Coordinates
remain those of the axis, so the body and axes below it do not change.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from sparsetir.sparse_ir.nodes import Axis, FusedAxis, PartAxis, SparseFunc, SparseIteration
from sparsetir.sparse_ir.recipes.positions import (
    last_of,
    tile_count,
    tile_cuts,
    tile_ids,
    tile_ptr,
    tile_starts,
)
from sparsetir.sparse_ir.schedule.cut_space import space_of, without_choice
from sparsetir.sparse_ir.schedule.loops import Loop, SpIter
from sparsetir.sparse_ir.schedule.pieces import chunk_loops, has_rows_to_carry
from sparsetir.sparse_ir.schedule.visit_order import VisitOrder, is_path
from sparsetir.sparse_ir.tir import as_dtype

NAME = "split"
OF_POSITIONS = "legal after positions of it, which makes one loop over all elements"


def is_stored(node: Any) -> bool:
    """Whether a loop is over fused axes or a variable one, which split cuts by positions."""
    return isinstance(node, FusedAxis) or (isinstance(node, Axis) and node.is_variable)


def split_positions(
    func: SparseFunc, it: SparseIteration, loop: Loop, extents: list[int], first: int | None,
    tail: str,
) -> tuple[SparseFunc, list[SpIter]]:  # fmt: skip
    """The function with a loop over stored elements cut into nested tiles, and the handles.

    extents : those of all new loops but the outermost, which has as many as needed: `first` is None
    tail : "guard", since a row's last tile may be shorter
    """
    cut = _Tiles(NAME, func, it, loop)
    if first is not None:
        cut.refuse(
            "argument 'factors': expected None as the first, as rows store more or less than "
            f"others, got {first}; divide cuts each into as many parts"
        )
    if tail != "guard":
        also = f"; {OF_POSITIONS}" if has_rows_to_carry(loop) else ""
        cut.refuse(
            f"argument 'tail': expected \"guard\" for '{loop.name}', of which a row's last tile "
            f"holds what is left, got {tail!r}{also}"
        )
    if has_rows_to_carry(loop):
        loops = cut.across_rows(extents)
    elif is_path(loop.node):
        loops = cut.root_tiles(extents)
    else:
        loops = cut.row_tiles(extents)
    return cut.instead(loops, annotations=without_choice(it, loop))


class _Tiles(VisitOrder):
    def across_rows(self, extents: list[int]) -> list[Loop]:
        """Chunks of the elements of all rows; see :mod:`sparsetir.sparse_ir.schedule.pieces`."""
        size = self._one(extents)
        return chunk_loops(self, self._count(self.last.nnz, size), 0, size)

    def root_tiles(self, extents: list[int]) -> list[Loop]:
        """Tiles of the positions of a root axis, or of fused axes that start at a root."""
        size = self._one(extents)
        length = self.last.length if self.last.kind == "dense_fixed" else self.last.nnz
        tiles = self.dense("tiles", self._count(length, size))
        ptr = self.array("ptr", tile_cuts, length=length, size=size)
        part = self.part(tiles, length, length, ptr)
        kind = "S" if "S" in self.loop.kinds else "R"
        return [Loop(tiles, [self._var(0)], kind), self.within(part)]

    def row_tiles(self, extents: list[int]) -> list[Loop]:
        """Tiles of the elements that an axis stores under each parent."""
        axis = self.loop.node
        if isinstance(axis, PartAxis):
            self.refuse(
                f"'{self.loop.name}' is in parts already; tiles of tiles are made at once, as by "
                f"[None, 8, {extents[-1]}]"
            )
        if not isinstance(axis, Axis) or not axis.is_variable:
            self.refuse(
                f"expected a loop over a dense or a variable axis, or over axes fused from a root "
                f"on, got '{self.loop.name}'"
            )
        how: dict[str, Any] = {"indptr": axis.indptr}
        if space_of(self.it, self.loop) == "coordinates" and axis.is_sparse:
            how["indices"] = axis.indices
        loops: list[Loop] = []
        parent, within = axis.parent, 0
        for number in range(len(extents)):
            size = 1
            for extent in extents[number:]:
                size *= extent
            parent = self._level(parent, number, {**how, "size": size}, within)
            loops.append(Loop(parent, [self._var(number)], self.loop.kinds))
            within = size
        starts = self.array("starts", tile_starts, **how, size=extents[-1])
        return [*loops, self.within(self.part(parent, axis.length, axis.nnz, starts))]

    def _level(self, parent: Axis, number: int, how: dict[str, Any], within: int) -> Axis:
        """The axis of the tiles of one size, below those of size `within`."""
        size = how["size"]
        how = {**how, "within": within}
        ptr, count = f"ptr{number}", f"count{number}"
        if "indices" not in how:
            return self.ragged(f"tiles{number}", parent, tile_ptr, ptr=ptr, count=count, how=how)
        indptr = self.array(ptr, tile_ptr, **how)
        nnz = self.number(count, last_of, offsets=indptr)
        ids = self.array(f"ids{number}", tile_ids, **how)
        ranges: Any = as_dtype(within // size, self.idtype)
        if not within:
            more = as_dtype(self.last.length, self.idtype) + as_dtype(size - 1, self.idtype)
            ranges = tirx.floordiv(more, as_dtype(size, self.idtype))
        return self.axis(
            f"tiles{number}", kind="sparse_variable", length=ranges, parent=parent, nnz=nnz,
            indptr=indptr, indices=ids,
        )  # fmt: skip

    def _count(self, length: Any, size: int) -> Any:
        """The number of tiles of positions."""
        return self.number("count", tile_count, length=length, size=size)

    def _one(self, extents: list[int]) -> int:
        if len(extents) > 1:
            also = f"; {OF_POSITIONS}" if has_rows_to_carry(self.loop) else ""
            self.refuse(
                f"argument 'factors': expected two for '{self.loop.name}', as [None, {extents[-1]}]"
                f", whose tiles are not cut again{also}"
            )
        return extents[0]

    def _var(self, number: int) -> Any:
        return tirx.Var(f"{self.loop.vars[0].name}{number}", self.idtype)
