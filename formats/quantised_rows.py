"""Rows of numbers of 4 or 8 bits, with a scale for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsetir.formats.csr import CSR
from sparsetir.formats.direct import Level, check_fits, direct
from sparsetir.formats.format import Format, register
from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.make_rules import Operand, dense, fixed, make_rule, ragged, sparse
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.index_arrays import starts


@dataclass(frozen=True)
class QuantisedRows(Format):
    """CSR with values of 4 or 8 bits: integers times a float32 scale for each row.

    When to use: weights of a trained model, to save memory, not time. With int32 columns, an
    element takes 4.5 or 5 bytes, not 8. Conversion is lossy, so that searches do not try it.

    Parameters
    ----------
    bits : {4, 8}
        Bits per value.

    Notes
    -----
    The scale of a row is its largest absolute value over 7 or 127, and at least the smallest normal
    float32. A value becomes the nearest multiple of it: the absolute error is at most scale / 2, in
    units of the values, plus the rounding of the product to float32 and to the type of the values.
    Values must be finite, and at most 2^127 in absolute value.

    - 8 bits: axes `<i>R`, `<j>C` as in CSR, values int8.
    - 4 bits: axis `<j>P`, the bytes of a row, `indptr_<j>p`: (rows + 1,); axis `<j>C`, the two
      numbers of a byte, low bits first, `indices_<j>c`: (2 * bytes,) column * 2, plus 1 for the
      high bits, or -1 past the end of the row. A byte holds numbers plus 8.
    """

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"QuantisedRows: argument 'bits': expected 4 or 8, got {self.bits!r}")

    @property
    def name(self) -> str:
        return f"quantised_rows_{self.bits}"

    def rules(self, operand: Operand) -> list[FormatRewriteRule]:
        (i, j), dtype = operand.axes, operand.buffers[0][1]
        row, byte, col = f"{i}R", f"{j}P", f"{j}C"
        scale = {"SCALE": ("float32", [row])}

        def value(number: Any, scale: Any) -> Any:
            return (number.astype("float32") * scale).astype(dtype)

        def half(q: Any, scale: Any, i: Any, p: Any, c: Any) -> Any:
            bits = q[i, p].astype("int32") >> (c % 2 * 4).astype("int32")
            return value((bits & 15) - 8, scale[i])

        if self.bits == 8:
            rule = make_rule(
                self.name, operand, [dense(row), sparse(col, row)], {i: [row], j: [col]},
                lambda i, j: (i, j), lambda i, j: (i, j), {"Q": ("int8", [row, col])} | scale,
                lambda q, scale, i, j: value(q[i, j], scale[i]), self._encode,
            )  # fmt: skip
        else:
            rule = make_rule(
                self.name, operand, [dense(row), ragged(byte, row), fixed(col, byte, slots=2)],
                {i: [row], j: [byte, col]}, lambda i, j: (i, 0, j * 2), lambda i, p, c: (i, c // 2),
                {"Q": ("uint8", [row, byte])} | scale, half, self._encode,
            )  # fmt: skip
        return [rule]

    def _encode(self, part: FormatPart, values: np.ndarray) -> dict[str, np.ndarray]:
        """The integers, two to a byte if they have 4 bits, and the scale of each row."""
        most, values = 2 ** (self.bits - 1) - 1, values.astype("float64")
        axis = next(a for a in part.rule.new_format_desc.axes if a.is_variable)
        lengths = np.diff(part.indices[part.rule.renamed(str(axis.indptr.name))])
        rows = np.arange(len(lengths)).repeat(lengths * (8 // self.bits))
        wrong = values[~(np.abs(values) <= 2.0**127)]
        if len(wrong):
            raise ValueError(
                f"QuantisedRows: expected finite values of at most 2^127 in size, got {wrong[0]:g}"
            )
        scale = np.zeros(len(lengths))
        np.maximum.at(scale, rows, np.abs(values))
        scale = np.maximum(scale / most, np.finfo("float32").tiny).astype("float32")
        number = np.rint(values / scale[rows]).astype("int8")
        if self.bits == 4:
            low, high = (number + 8).astype("uint8").reshape(-1, 2).T
            number = low | high << 4
        return {"Q": number, "SCALE": scale}

    def places(self, pattern: Pattern) -> int:
        numbers = 8 // self.bits  # of a byte
        return int((-(-np.diff(pattern.indptr) // numbers)).sum()) * numbers

    def infer(self, pattern: Pattern, rules: list[FormatRewriteRule]) -> list[FormatPart]:
        if self.bits == 8:
            return CSR().infer(pattern, rules)
        (m, n), lengths = pattern.shape, np.diff(pattern.indptr)
        indptr = starts(-(-lengths // 2))
        check_fits(rules[0], pattern, int(indptr[-1]) * 2)
        places = np.arange(pattern.nnz) + (indptr[:-1] * 2 - pattern.indptr[:-1]).repeat(lengths)
        slots = np.full(int(indptr[-1]) * 2, -1, np.int64)
        slots[places] = pattern.coords[1].astype(np.int64) * 2 + places % 2
        levels = [Level(), Level(indptr), Level(indices=slots)]
        sizes = m, int(np.diff(indptr).max(initial=0)), n * 2
        return [direct(rules[0], pattern, levels, slots.shape, places=places, lengths=sizes)]


register(QuantisedRows)
