"""The primitives of a schedule that go through rows in another way: methods of `Schedule`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparsetir.sparse_ir.schedule.aggregate import aggregate
from sparsetir.sparse_ir.schedule.arguments import listed
from sparsetir.sparse_ir.schedule.by_length import by_length
from sparsetir.sparse_ir.schedule.handles import SparseIterationRef, SpIter
from sparsetir.sparse_ir.schedule.patterns import patterns
from sparsetir.sparse_ir.schedule.ranges import ranges
from sparsetir.sparse_ir.schedule.runs import runs
from sparsetir.sparse_ir.schedule.slices import slices
from sparsetir.sparse_ir.schedule.steps import steps

__all__ = ["RowPrimitives"]


class RowPrimitives:
    """What :class:`sparsetir.sparse_ir.schedule.Schedule` has of them."""

    _apply: Callable[..., Any]

    def ranges(
        self, loop: SpIter, parts: int | str, tile: int, *, cost: int = 8,
        default: int | dict[str, Any] = 1,
    ) -> list[SpIter]:  # fmt: skip
        """Go through rows under several parents by ranges that are the same for all, in tiles.

        loop : over a sparse axis under a root axis
        parts : ranges of equal work, or a name, by which their number can be chosen without
            compiling again
        tile : rows of a tile, of which the last of a range may hold fewer
        cost : of a row, in elements
        default : how many there are by a name until somebody says another number; or a recipe

        Handles: ranges, tiles, the rows of one. More:
        `help("sparsetir.sparse_ir.schedule.ranges")`.
        """
        return self._apply(ranges, loop, parts, tile, cost=cost, default=default)

    def aggregate(
        self, buffer: str, at: SpIter, rows: SpIter, columns: Sequence[SpIter], *,
        dtype: str | None = None,
    ) -> list[SparseIterationRef]:  # fmt: skip
        """Sum what the rows of a tile gather, then multiply the tile of sums as a whole.

        buffer : name of the result, a sum of products
        at : the innermost of the loops whose visits have a tile each
        rows : inside of it, the rows of a tile, as after `ranges`
        columns : reductions inside of it, which some of the factors vary over
        dtype : that sums are in

        Handles: start, sums, product, write. More:
        `help("sparsetir.sparse_ir.schedule.aggregate")`.
        """
        return self._apply(aggregate, buffer, at, rows, listed(columns), dtype=dtype)

    def slices(
        self, rows: SpIter, columns: SpIter, lanes: int, *, longest: int | str = 256,
        window: int | str = 4096, filled: int | str = 90,
    ) -> list[SpIter]:  # fmt: skip
        """Lay rows of about the same length side by side, one element of each at a time.

        rows, columns : over a dense axis, and the sparse axis under it, a reduction
        lanes : rows of a slice, and elements of a vector of a long row
        longest, window, filled : elements of a long row, rows sorted together, percent of a slice's
            slots that long rows must fill; numbers, or names by which they can be chosen later

        Handles: slices, steps, lanes; long rows, vectors, their lanes; other rows, elements. More:
        `help("sparsetir.sparse_ir.schedule.slices")`.
        """
        return self._apply(
            slices, rows, columns, lanes, longest=longest, window=window, filled=filled
        )

    def by_length(self, rows: SpIter, columns: SpIter, window: int = 4096) -> list[SpIter]:
        """Go through rows in the order of their lengths, as one loop ends like the one before.

        rows, columns : over a dense axis, and the sparse axis under it, a reduction
        window : rows that are sorted together

        Handles: rows, elements. More: `help("sparsetir.sparse_ir.schedule.by_length")`.
        """
        return self._apply(by_length, rows, columns, window)

    def patterns(
        self, rows: SpIter, columns: SpIter, size: int, *, by: str = "pattern"
    ) -> list[SpIter]:
        """Go through panels of rows, in each the columns that hold the same of its rows together.

        rows, columns : over a dense axis, and the sparse axis under it, a reduction
        size : rows of a panel, 2 to 8
        by : what code differs by, "pattern" or "count", the number of a pattern's rows

        Handles: panels, patterns, entries, rows of a panel. More:
        `help("sparsetir.sparse_ir.schedule.patterns")`.
        """
        return self._apply(patterns, rows, columns, size, by=by)

    def steps(self, columns: SpIter, lanes: int) -> list[SpIter]:
        """Go through what each row stores in steps of so many elements side by side.

        columns : over the sparse axis under a dense one, a reduction
        lanes : elements of a step

        Handles: steps, lanes. More: `help("sparsetir.sparse_ir.schedule.steps")`.
        """
        return self._apply(steps, columns, lanes)

    def runs(
        self, loop: SpIter, *, dtype: str | None = None, name: str | None = None
    ) -> list[SparseIterationRef]:
        """Let visits of a loop add up elements of one row, and write where the row changes.

        loop : over positions, whose rows a table gives, as after `positions`
        dtype : of the sums; name : of their workspace

        Handles: start, reduce, write, again. More: `help("sparsetir.sparse_ir.schedule.runs")`.
        """
        return self._apply(runs, loop, dtype=dtype, name=name)
