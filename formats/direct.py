"""Parts whose arrays follow from the pattern's order, without grouping its elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tvm import ir

from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.pattern import Pattern
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.errors import StructureError


class Level(NamedTuple):
    """The arrays that an axis of a rule stores; None for those that its kind lacks.

    indptr : (parents + 1,) integers
    indices : (nnz,) or (parents * cols,) integers
    cols : slots per parent
    """

    indptr: np.ndarray | None = None
    indices: np.ndarray | None = None
    cols: int | None = None


def check_fits(rule: FormatRewriteRule, pattern: Pattern, places: int = 0) -> None:
    """Refuse, with StructureError, sizes that the index type of a rule's axes cannot count.

    places : number of slots
    """
    idtype = rule.axis(rule.axes_after_rewrite[0]).idtype
    numbers = [
        *((f"length of axis '{n}'", s)
          for n, s in zip(rule.axes_before_rewrite, pattern.shape, strict=True)),
        ("nnz", pattern.nnz),
        ("number of places", places),
    ]  # fmt: skip
    for what, number in numbers:
        _check_fits(rule, what, number, idtype)


def _check_fits(rule: FormatRewriteRule, what: str, number: int, idtype: str) -> None:
    if number > np.iinfo(idtype).max:
        raise StructureError(f"rule '{rule.name}': {what} = {number} does not fit {idtype}")


def direct(
    rule: FormatRewriteRule,
    pattern: Pattern,
    levels: Sequence[Level],
    shape: tuple[int, ...],
    places: np.ndarray | None = None,
    elements: np.ndarray | None = None,
    lengths: Sequence[int] | None = None,
    stored: int | None = None,
) -> FormatPart:
    """The part of a pattern's elements that a rule stores, constructed from its levels.

    levels : one per axis after rewriting, in order
    shape, places, elements : see :class:`FormatPart`
    lengths : length of each axis after; by default that of the axis before that it comes from
    stored : number of elements that the format takes; all by default

    Equal to the result of :func:`infer_format`; the levels are not checked, but StructureError is
    raised for sizes that the index type cannot count.
    """
    if lengths is None:
        before = dict(zip(rule.axes_before_rewrite, pattern.shape, strict=True))
        length_of = {n: before[b] for b, names in rule.axis_map.items() for n in names}
        lengths = [length_of[n] for n in rule.axes_after_rewrite]
    converted: dict[str, Any] = {}
    for name, length, level in zip(rule.axes_after_rewrite, lengths, levels, strict=True):
        axis = rule.axis(name)
        numbers = [("length", axis.length, length), ("cols", axis.nnz_cols, level.cols)]
        arrays = [(axis.indptr, level.indptr), (axis.indices, level.indices)]
        if level.indptr is not None:
            numbers.append(("nnz", axis.nnz, int(level.indptr[-1])))
        if level.indices is not None:
            numbers.append(("number of places", None, len(level.indices)))
        for what, param, number in numbers:
            if number is not None:
                _check_fits(rule, f"{what} of axis '{name}'", number, axis.idtype)
            if isinstance(param, ir.Var):
                converted[rule.renamed(str(param.name))] = number
        for param, array in arrays:
            if array is not None:
                converted[rule.renamed(str(param.name))] = array.astype(axis.idtype, copy=False)
    out = FormatPart(rule, converted, shape, pattern.nnz, places, elements)
    out.stored = pattern.nnz if stored is None else stored
    return out
