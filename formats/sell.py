"""Sliced ELLPACK of rows sorted by length: SELL-C-sigma."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsetir.formats.direct import Level, check_fits, direct
from sparsetir.formats.format import Format, register, set_positive
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, fixed, make_rule, ragged
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.index_arrays import starts
from sparsetir.sparse_ir.recipes.slices import order_in_windows


@dataclass(frozen=True)
class SELL(Format):
    """Slices of rows of similar length, one element of each of them side by side.

    When to use: rows of a few elements, times a vector, on processors with wide vectors. Rows that
    differ much in length need a `sigma` of many slices, which scatters the writes of neighbours.

    Parameters
    ----------
    c : int
        Rows per slice, as many as a vector has lanes.
    sigma : int
        Rows that are sorted by length together, longest first; a multiple of `c`, or 1 for rows in
        the order of the matrix.

    Notes
    -----
    A slice has as many steps as its longest row has elements. Step t of slice s holds the t-th
    element of each of its rows; steps are numbered over all slices, from `indptr_<j>w[s]`:

    - axis `S`: ceil(rows / c) slices, dense
    - axis `<j>W`, `indptr_<j>w`: (slices + 1,) offsets of the steps of each slice
    - axis `<i>R`, `indices_<i>r`: (steps * c,) the row of each lane, the same in all steps of a
      slice; -1 for lanes of the last slice without a row
    - axis `<j>C`, `indices_<j>c`: (steps * c,) the column of each lane; -1 past the end of the row
    - values: (steps * c,); a kernel reads these and the columns sequentially, `c` at a time

    So a kernel can keep the sums of a slice in a vector, for the rows of its first step. A slice
    whose rows are all empty has no step. The paper stores only the permutation of the rows; here
    each step has it, since an axis stores its coordinates under every parent.

    The rule does not determine which rows go together: arrays come from `convert`, and inference
    from the rule alone has room for a single step.

    SELL-C-sigma: Kreutzer, Hager, Wellein, Fehske and Bishop, "A unified sparse matrix data format
    for efficient general sparse matrix-vector multiplication on modern processors with wide SIMD
    units", SIAM Journal on Scientific Computing 36(5), 2014.
    """

    c: int
    sigma: int = 1

    def __post_init__(self) -> None:
        set_positive(self, "c", "sigma")
        if self.sigma != 1 and self.sigma % self.c:
            raise ValueError(
                f"SELL: argument 'sigma': expected 1 or a multiple of c = {self.c}, got "
                f"{self.sigma}"
            )

    @property
    def name(self) -> str:
        return f"sell_{self.c}_{self.sigma}"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        i, j = operand.axes
        # Rows are repeated in the steps of a slice, so that elements cannot be looked up by row.
        rows = fixed(f"{i}R", f"{j}W", slots=self.c, unique=False)
        return [
            make_rule(
                self.name, operand,
                [dense("S"), ragged(f"{j}W", "S"), rows, fixed(f"{j}C", f"{i}R", slots=1)],
                {i: ["S", f"{i}R"], j: [f"{j}W", f"{j}C"]},
                lambda i, j: (0, 0, i, j), lambda s, w, i, j: (i, j),
            )
        ]  # fmt: skip

    def places(self, pattern: Pattern) -> int:
        _, widths = sliced_rows(np.diff(pattern.indptr), self.c, self.sigma)
        return int(widths.sum(dtype=np.int64)) * self.c

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        (rule,) = rules
        lengths, c = np.diff(pattern.indptr), self.c
        order, widths = sliced_rows(lengths, c, self.sigma)
        slots = int(widths.sum(dtype=np.int64)) * c
        check_fits(rule, pattern, slots)
        idtype = rule.axis(rule.axes_after_rewrite[0]).idtype
        step_ptr = starts(widths)
        # The slot of each row's first element; the next is one step, `c` slots, further.
        at = np.arange(len(order))
        first = np.empty_like(order)
        first[order] = step_ptr[at // c] * c + at % c
        places = np.arange(pattern.nnz) * c
        places += np.repeat(first - pattern.indptr[:-1].astype(np.int64) * c, lengths)
        columns = np.full(slots, -1, idtype)
        columns[places] = pattern.coords[1]
        rows = np.full(len(widths) * c if slots else 0, -1, idtype)
        rows[: len(order)] = order[: len(rows)]
        lanes = rows.reshape(-1, c).repeat(widths[: len(rows) // c], axis=0)
        levels = [Level(), Level(step_ptr), Level(None, lanes.reshape(-1)), Level(None, columns)]
        sizes = (len(widths), int(widths.max(initial=0)), *pattern.shape)
        return [direct(rule, pattern, levels, (slots,), places=places, lengths=sizes)]


def sliced_rows(lengths: np.ndarray, c: int, sigma: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows in the order of the slices, `c` to each, and the longest length of each slice.

    lengths : (rows,) elements of each row
    c, sigma : see :class:`SELL`

    Rows of equal length stay in order. Linear in the rows.
    """
    order = np.arange(len(lengths))
    if not len(lengths):
        return order, lengths
    if sigma > 1:
        order = order_in_windows(lengths, order // sigma, True)
    return order, np.maximum.reduceat(lengths[order], np.arange(0, len(order), c))


register(SELL, SELL(4, 24), library=lambda _: [SELL(16, 4096)], search=lambda _: [])
