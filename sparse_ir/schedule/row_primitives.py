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

        More: `help("sparsetir.sparse_ir.schedule.ranges")`.

        Parameters
        ----------
        loop : SpIter
            Over a sparse axis under a root axis.
        parts : int or str
            Ranges of equal work, or a name, by which their number can be chosen without compiling
            again.
        tile : int
            Rows of a tile, of which the last of a range may hold fewer.
        cost : int
            Of a row, in elements.
        default : int or dict
            How many there are by a name until somebody says another number; or a recipe.

        Returns
        -------
        list of SpIter
            Ranges, tiles, the rows of one.
        """
        return self._apply(ranges, loop, parts, tile, cost=cost, default=default)

    def aggregate(
        self, buffer: str, at: SpIter, rows: SpIter, columns: Sequence[SpIter], *,
        dtype: str | None = None,
    ) -> list[SparseIterationRef]:  # fmt: skip
        """Sum what the rows of a tile gather, then multiply the tile of sums as a whole.

        More: `help("sparsetir.sparse_ir.schedule.aggregate")`.

        Parameters
        ----------
        buffer : str
            Name of the result, a sum of products.
        at : SpIter
            The innermost of the loops whose visits have a tile each.
        rows : SpIter
            Inside of it, the rows of a tile, as after `ranges`.
        columns : sequence of SpIter
            Reductions inside of it, which some of the factors vary over.
        dtype : str, optional
            That sums are in.

        Returns
        -------
        list of SparseIterationRef
            Start, sums, product, write.
        """
        return self._apply(aggregate, buffer, at, rows, listed(columns), dtype=dtype)

    def slices(
        self, rows: SpIter, columns: SpIter, lanes: int, *, longest: int | str = 256,
        window: int | str = 4096, filled: int | str = 90,
    ) -> list[SpIter]:  # fmt: skip
        """Lay rows of about the same length side by side, one element of each at a time.

        More: `help("sparsetir.sparse_ir.schedule.slices")`.

        Parameters
        ----------
        rows : SpIter
            Over a dense axis.
        columns : SpIter
            Over the sparse axis under it, a reduction.
        lanes : int
            Rows of a slice, and elements of a vector of a long row.
        longest, window, filled : int or str
            Elements of a long row, rows sorted together, percent of a slice's slots that long rows
            must fill; numbers, or names by which they can be chosen later.

        Returns
        -------
        list of SpIter
            Slices, steps, lanes; long rows, vectors, their lanes; other rows, elements.
        """
        return self._apply(
            slices, rows, columns, lanes, longest=longest, window=window, filled=filled
        )

    def by_length(self, rows: SpIter, columns: SpIter, window: int = 4096) -> list[SpIter]:
        """Go through rows in the order of their lengths, as one loop ends like the one before.

        More: `help("sparsetir.sparse_ir.schedule.by_length")`.

        Parameters
        ----------
        rows : SpIter
            Over a dense axis.
        columns : SpIter
            Over the sparse axis under it, a reduction.
        window : int
            Rows that are sorted together.

        Returns
        -------
        list of SpIter
            Rows, elements.
        """
        return self._apply(by_length, rows, columns, window)

    def patterns(
        self, rows: SpIter, columns: SpIter, size: int, *, by: str = "pattern"
    ) -> list[SpIter]:
        """Go through panels of rows, in each the columns that hold the same of its rows together.

        More: `help("sparsetir.sparse_ir.schedule.patterns")`.

        Parameters
        ----------
        rows : SpIter
            Over a dense axis.
        columns : SpIter
            Over the sparse axis under it, a reduction.
        size : int
            Rows of a panel, 2 to 8.
        by : {"pattern", "count"}
            What code differs by; "count" is the number of a pattern's rows.

        Returns
        -------
        list of SpIter
            Panels, patterns, entries, rows of a panel.
        """
        return self._apply(patterns, rows, columns, size, by=by)

    def steps(self, columns: SpIter, lanes: int) -> list[SpIter]:
        """Go through what each row stores in steps of so many elements side by side.

        More: `help("sparsetir.sparse_ir.schedule.steps")`.

        Parameters
        ----------
        columns : SpIter
            Over the sparse axis under a dense one, a reduction.
        lanes : int
            Elements of a step.

        Returns
        -------
        list of SpIter
            Steps, lanes.
        """
        return self._apply(steps, columns, lanes)

    def runs(
        self, loop: SpIter, *, dtype: str | None = None, name: str | None = None
    ) -> list[SparseIterationRef]:
        """Let visits of a loop add up elements of one row, and write where the row changes.

        More: `help("sparsetir.sparse_ir.schedule.runs")`.

        Parameters
        ----------
        loop : SpIter
            Over positions, whose rows a table gives, as after `positions`.
        dtype : str, optional
            Of the sums.
        name : str, optional
            Of their workspace.

        Returns
        -------
        list of SparseIterationRef
            Start, reduce, write, again.
        """
        return self._apply(runs, loop, dtype=dtype, name=name)
