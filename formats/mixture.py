"""Formats that divide a matrix or tensor among them, element by element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from sparsetir.formats.format import Format, positive
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand
from sparsetir.formats.pattern import Pattern, group
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.errors import StructureError

Chooser = Callable[[Pattern], np.ndarray]


@dataclass(frozen=True)
class Mixture(Format):
    """Several formats, each of which stores some of the elements.

    When to use: parts of a matrix differ in structure, such as a dense band and scattered
    elements around it. Each part is one more pass over the result.

    Parameters
    ----------
    label : str
        The name of the format, an identifier.
    formats : tuple of Format
        At least one, all for the same number of axes.
    choose : callable
        A function of a pattern that returns the index of each element's format, (nnz,) integers;
        `by_band`, `by_block_fill` and `by_row_length` return such functions.

    Notes
    -----
    Rules are those of the formats in order, with `_<index of the format>` appended to their names.
    Conversion raises StructureError, naming the first coordinate for which `choose` gives no
    format, and the errors of the formats. (Composable formats: SparseTIR, sections 2 and 3.2.1.)
    """

    label: str
    formats: tuple[Format, ...]
    choose: Chooser

    def __post_init__(self) -> None:
        if not isinstance(self.label, str) or not self.label.isidentifier():
            self._refuse("label", "an identifier", repr(self.label))
        object.__setattr__(self, "formats", tuple(self.formats))
        if not self.formats or not all(isinstance(f, Format) for f in self.formats):
            self._refuse("formats", "at least one format", repr(self.formats))
        orders = {f.order for f in self.formats} - {None}
        if len(orders) > 1:
            have = {f.name: f.order for f in self.formats}
            self._refuse("formats", "formats for the same number of axes", str(have))
        object.__setattr__(self, "order", next(iter(orders), None))
        if not callable(self.choose):
            self._refuse("choose", "a function of a pattern", repr(self.choose))

    @property
    def name(self) -> str:
        return self.label

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        return [
            rule
            for number, fmt in enumerate(self.formats)
            for rule in fmt.rules(replace(operand, tag=f"{operand.tag}_{number}"))
        ]

    def labels(self, operand: Operand) -> list[str]:
        return [
            label if label.startswith(fmt.name) else f"{fmt.name}, {label}"
            for fmt in self.formats
            for label in fmt.labels(operand)
        ]

    def split(self, pattern: Pattern) -> list[np.ndarray]:
        return [
            taken[of_rule]
            for fmt, taken in zip(self.formats, self._chosen(pattern), strict=True)
            for of_rule in fmt.split(pattern.take(taken))
        ]

    def places(self, pattern: Pattern) -> int:
        number = self.choose(pattern)
        parts = [pattern.take(np.flatnonzero(number == n)) for n in range(len(self.formats))]
        return sum(f.places(p) for f, p in zip(self.formats, parts, strict=True))

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        ends = np.cumsum([0, *(_number_of_rules(f, pattern.order) for f in self.formats)])
        out = []
        chosen = self._chosen(pattern)
        for fmt, taken, (start, stop) in zip(self.formats, chosen, pairwise(ends), strict=True):
            for part in fmt.infer(pattern.take(taken), rules[start:stop]):
                out.append(part.within(taken, pattern.nnz))
        return out

    def _chosen(self, pattern: Pattern) -> list[np.ndarray]:
        """The positions of each format's elements, increasing."""
        number = np.asarray(self.choose(pattern))
        if number.shape != (pattern.nnz,) or number.dtype.kind not in "iu":
            short = number.ndim == 1 and len(number) < pattern.nnz
            where = f", none{_coordinate(pattern, len(number))}" if short else ""
            raise StructureError(
                f"{self.name}: argument 'choose': expected ({pattern.nnz},) integers, got "
                f"{number.shape} {number.dtype}{where}"
            )
        wrong = (number < 0) | (number >= len(self.formats))
        if wrong.any():
            at = int(wrong.argmax())
            raise StructureError(
                f"{self.name}: argument 'choose': expected formats in [0, {len(self.formats)}), "
                f"got {number[at]}{_coordinate(pattern, at)}"
            )
        return [np.flatnonzero(number == n) for n in range(len(self.formats))]

    def _refuse(self, argument: str, expected: str, got: str) -> None:
        raise ValueError(f"Mixture: argument '{argument}': expected {expected}, got {got}")


def by_block_fill(rows: int, cols: int, least: float) -> Chooser:
    """Choose format 0 for the elements of filled blocks, format 1 for the others.

    Blocks at the edge include slots outside the matrix, which a format of blocks would pad.

    Parameters
    ----------
    rows, cols : int
        Rows and columns of a block.
    least : float
        The least share of a block's slots that hold an element.

    Returns
    -------
    callable
        For :class:`Mixture`.
    """
    rows = positive("by_block_fill", "rows", rows)
    cols = positive("by_block_fill", "cols", cols)

    def choose(pattern: Pattern) -> np.ndarray:
        row, col = pattern.coords
        height, width = (-(-s // b) for s, b in zip(pattern.shape, (rows, cols), strict=True))
        _, _, block = group(row // rows, height, col // cols, width, "by_block_fill")
        return (np.bincount(block) < least * rows * cols).astype(np.int8)[block]

    return choose


def by_row_length(longest: int) -> Chooser:
    """Choose format 0 for short rows, format 1 for longer ones.

    Parameters
    ----------
    longest : int
        The most elements of a short row.

    Returns
    -------
    callable
        For :class:`Mixture`.
    """

    def choose(pattern: Pattern) -> np.ndarray:
        return (np.diff(pattern.indptr) > longest).astype(np.int8)[pattern.coords[0]]

    return choose


def by_band(first: int, last: int) -> Chooser:
    """Choose format 0 for diagonals first <= column - row <= last, format 1 for the others.

    Parameters
    ----------
    first, last : int
        Diagonals.

    Returns
    -------
    callable
        For :class:`Mixture`.
    """

    def choose(pattern: Pattern) -> np.ndarray:
        row, col = pattern.coords
        diagonal = col - row
        return ((diagonal < first) | (diagonal > last)).astype(np.int8)

    return choose


@lru_cache(maxsize=256)
def _number_of_rules(fmt: Format, order: int) -> int:
    return len(fmt.rules(Operand.default(order)))


def _coordinate(pattern: Pattern, at: int) -> str:
    return f" for coordinate {tuple(int(c[at]) for c in pattern.coords)}"
