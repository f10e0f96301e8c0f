"""Index inference: `indptr`, `indices`, values and mask of a format, from its rule and coordinates.

(The paper leaves this to the user; section 3.2.1.) The rule's `idx_map` maps the stored
coordinates to the new ones; the new axes are then filled level by level: an element's position on
an axis is found among those that share its parent's position. Time and memory are linear in the
number of elements and of slots, fastest for coordinates in the order of CSR.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import ir, tirx
from tvm.sym import Analyzer

from sparsetir.formats.format_part import FormatPart
from sparsetir.formats.pattern import group
from sparsetir.formats.rule import FormatRewriteRule
from sparsetir.sparse_ir.errors import StructureError
from sparsetir.sparse_ir.index_arrays import check_range, index_type, starts
from sparsetir.sparse_ir.nodes import Axis, substitute, walk


def infer_format(
    rule: FormatRewriteRule,
    coords: Sequence[np.ndarray],
    shape: Sequence[int],
    sizes: Mapping[str, int] | None = None,
) -> FormatPart:
    """Fill the axes of a rule's description with the coordinates that the rule takes.

    Parameters
    ----------
    rule : FormatRewriteRule
        The rule.
    coords : sequence of (nnz,) integer ndarray
        One per axis before, in any order; each tuple at most once.
    shape : sequence of int
        Lengths of the axes before.
    sizes : mapping of str to int, optional
        Scalars of the description by name; missing ones get the smallest value that
        holds every coordinate of `shape` (lengths) or of `coords` (nnz, nnz_cols).

    Returns
    -------
    FormatPart

    Raises
    ------
    ValueError
        For arguments that do not fit the rule.
    StructureError
        If the rule does not map a coordinate to a slot of its own and back, or if an axis has no
        slot for it; names the first one.
    """
    arrays = [np.asarray(c) for c in coords]
    return _Inference(rule, arrays, [operator.index(s) for s in shape], dict(sizes or {})).run()


class _Inference:
    def __init__(
        self,
        rule: FormatRewriteRule,
        coords: list[np.ndarray],
        shape: list[int],
        sizes: dict[str, int],
    ) -> None:
        self.rule, self.coords, self.shape, self.sizes = rule, coords, shape, sizes
        self.axes = [rule.axis(n) for n in rule.axes_after_rewrite]
        self.count = len(coords[0]) if coords and coords[0].ndim else 0
        self.arguments: dict[str, Any] = {}
        self._check_input()
        # The least and the largest coordinate of each new axis that `shape` allows.
        self.bounds: dict[str, tuple[int, int]] = {}
        self.new = self._mapped()
        self._default_lengths()
        # Offset of each element on an axis counted over all parents, and their number.
        self.offset: dict[str, np.ndarray] = {}
        self.total: dict[str, int] = {}

    def run(self) -> FormatPart:
        rule = self.rule
        for axis in self.axes:
            self._fill(axis)
        size = 1
        for leaf in rule.leaves:
            size *= self.total[leaf.name]
        places = np.zeros(self.count, index_type(size))
        for leaf in rule.leaves:
            places *= places.dtype.type(self.total[leaf.name])
            places += self.offset[leaf.name].astype(places.dtype, copy=False)
        places = places.astype(np.intp, copy=False)
        mask = np.zeros(size, np.int8)
        mask[places] = 1
        if np.count_nonzero(mask) != self.count:
            self._refuse_shared(places)
        known = {str(p.name) for p in rule.new_format_desc.params}
        named = {n: v for n, v in {**self.arguments, **self.sizes}.items() if n in known}
        indices = {rule.renamed(n): v for n, v in named.items()}
        shape = (*(self.total[leaf.name] for leaf in rule.leaves),)
        out = FormatPart(rule, indices, shape, self.count, places)
        out.stored = self.count
        if rule.masked:
            out.mask = mask.reshape(out.shape)
        return out

    def _check_input(self) -> None:
        rule, prefix = self.rule, f"infer_format: rule '{self.rule.name}'"
        if len(self.coords) != len(rule.axes_before_rewrite) or len(self.shape) != len(self.coords):
            raise ValueError(
                f"{prefix}: expected coordinates and lengths for the axes "
                f"{list(rule.axes_before_rewrite)}, got {len(self.coords)} and {len(self.shape)}"
            )
        scalars = [
            p.name for p in rule.new_format_desc.params if not isinstance(p.ty, ir.PointerType)
        ]
        for name in self.sizes:
            if name not in scalars:
                raise ValueError(
                    f"{prefix}: argument 'sizes': expected some of the scalars {scalars} of the "
                    f"description, got '{name}'"
                )
        for name, c, length in zip(rule.axes_before_rewrite, self.coords, self.shape, strict=True):
            if c.shape != (self.count,):
                raise ValueError(
                    f"{prefix}: axis '{name}': expected ({self.count},) coordinates, got shape "
                    f"{c.shape}"
                )
            if not self.count:
                continue
            if c.dtype.kind not in "iu":
                raise ValueError(f"{prefix}: axis '{name}': expected integers, got {c.dtype}")
            check_range(f"{prefix}: axis '{name}'", c, length)

    def _mapped(self) -> dict[str, np.ndarray]:
        """New coordinates by axis; refuses a rule whose maps are not inverse to each other."""
        before, after, back = self.rule.maps
        analyzer = Analyzer()
        for var, length in zip(before, self.shape, strict=True):
            analyzer.bind(
                var, ir.Range(tirx.IntImm("int64", 0), tirx.IntImm("int64", max(1, length)))
            )
        largest = max(self.shape, default=0)
        for name, expr in zip(self.rule.axes_after_rewrite, after, strict=True):
            self.bounds[name] = _bounds(analyzer, expr)
            largest = max(largest, *(abs(b) for e in _parts(expr) for b in _bounds(analyzer, e)))
        dtype = index_type(largest)
        self.coords = [c.astype(dtype, copy=False) for c in self.coords]
        new = [
            np.broadcast_to(np.asarray(c, dtype), (self.count,))
            for c in self.rule.to_new(self.coords)
        ]
        proven = all(_is_zero(analyzer.simplify(b - v)) for b, v in zip(back, before, strict=True))
        if not proven and self.count:
            self._check_inverse(new)
        return dict(zip(self.rule.axes_after_rewrite, new, strict=True))

    def _check_inverse(self, new: list[np.ndarray]) -> None:
        wrong = np.zeros(self.count, bool)
        back = self.rule.to_old([c.astype(np.int64) for c in new])
        for have, want in zip(back, self.coords, strict=True):
            wrong |= np.asarray(have) != want
        if wrong.any():
            raise StructureError(
                f"infer_format: rule '{self.rule.name}': inv_idx_map does not undo idx_map at "
                f"coordinate {self._coordinate(int(wrong.argmax()))}"
            )

    def _prefix(self, axis: Axis) -> str:
        return f"infer_format: rule '{self.rule.name}': axis '{axis.name}'"

    def _coordinate(self, at: int) -> tuple[int, ...]:
        return tuple(int(c[at]) for c in self.coords)

    def _default_lengths(self) -> None:
        """Set missing lengths so that they fit every coordinate of the shape."""
        source = {n: b for b, ns in self.rule.axis_map.items() for n in ns}
        sizes, at = set(self.sizes), self.rule.axes_before_rewrite.index
        for axis in self.axes:
            if isinstance(axis.length, ir.Var) and axis.length.name not in sizes:
                empty = self.shape[at(source[axis.name])] == 0
                need = 0 if empty else self.bounds[axis.name][1] + 1
                name = str(axis.length.name)
                self.sizes[name] = max(self.sizes.get(name, 0), need)

    def _size(self, axis: Axis, what: str, value: int = 0) -> int:
        """The value of a size; a parameter without one gets `value`."""
        expr = getattr(axis, what)
        if isinstance(expr, ir.Var):
            size = int(self.sizes.setdefault(str(expr.name), int(value)))
        else:
            params = {str(p.name): p for p in self.rule.new_format_desc.params}
            known = {
                params[n]: tirx.IntImm(str(params[n].ty.dtype), v) for n, v in self.sizes.items()
            }
            expr = Analyzer().simplify(substitute(expr, known))
            if not isinstance(expr, tirx.IntImm):
                raise ValueError(
                    f"{self._prefix(axis)}: {what} = {getattr(axis, what)} needs sizes that are "
                    "not given"
                )
            size = int(expr)
        self._check_fits(axis, size, what)
        return size

    def _check_fits(self, axis: Axis, number: int, what: str) -> None:
        if not 0 <= number <= np.iinfo(axis.idtype).max:
            raise StructureError(
                f"{self._prefix(axis)}: {what} = {number} does not fit {axis.idtype}"
            )

    def _refuse_overflow(self, axis: Axis, bad: np.ndarray, room: str) -> None:
        raise StructureError(
            f"{self._prefix(axis)} has {room}, none for coordinate "
            f"{self._coordinate(int(bad.argmax()))}"
        )

    def _fill(self, axis: Axis) -> None:
        coord, (low, high) = self.new[axis.name], self.bounds[axis.name]
        length = self._size(axis, "length")
        if self.count and not (low >= 0 and high < length):
            if coord.min() < 0 or coord.max() >= length:
                bad = (coord < 0) | (coord >= length)
                self._refuse_overflow(axis, bad, f"coordinates in [0, {length})")
        if axis.kind == "dense_fixed":
            self.offset[axis.name], self.total[axis.name] = coord, length
            return
        parent, parents = self.offset[axis.parent.name], self.total[axis.parent.name]
        if axis.kind == "dense_variable":
            ends = np.zeros(parents, np.int64)
            np.maximum.at(ends, parent, coord + 1)
            start = starts(ends)
            self._set_indptr(axis, start)
            self.offset[axis.name], self.total[axis.name] = start[parent] + coord, int(start[-1])
            return
        row, indices, place = group(parent, parents, coord, length, self._prefix(axis))
        if not axis.unique:
            row, indices, place = self._repeated(axis, row, indices, place)
        counts = np.bincount(row, minlength=parents)
        start = starts(counts)
        if axis.kind == "sparse_variable":
            self._set_indptr(axis, start)
            self.arguments[str(axis.indices.name)] = indices.astype(axis.idtype, copy=False)
            self.offset[axis.name], self.total[axis.name] = place, len(indices)
            return
        cols = self._size(axis, "nnz_cols", int(counts.max(initial=0)))
        self._check_fits(axis, parents * cols, "parents * nnz_cols")
        slot = np.arange(len(indices)) - start[row]
        if (slot >= cols).any():
            self._refuse_overflow(axis, slot[place] >= cols, f"{cols} slots in each row")
        slots = np.full(parents * cols, -1, axis.idtype)
        at = row.astype(np.int64) * cols + slot
        slots[at] = indices
        self.arguments[str(axis.indices.name)] = slots
        self.offset[axis.name], self.total[axis.name] = at[place], parents * cols

    def _repeated(
        self, axis: Axis, row: np.ndarray, indices: np.ndarray, place: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Groups of an axis that is not unique; groups with more elements than slots are split."""
        below = [a for a in self.axes if a.parent is not None and a.parent.same_as(axis)]
        if len(below) != 1 or below[0].kind != "sparse_fixed":
            raise ValueError(
                f"{self._prefix(axis)} is not unique; expected one sparse_fixed axis below it, "
                "whose slots say when a coordinate is repeated"
            )
        slots = self._size(below[0], "nnz_cols", 1)
        if not slots:
            return row, indices, place
        length = self._size(below[0], "length")
        coord = self.new[below[0].name]
        key, _, slot = group(place, len(row), coord, length, self._prefix(below[0]))
        counts = np.bincount(key, minlength=len(row))
        pieces = -(-counts // slots)
        nth = (np.arange(len(key)) - starts(counts)[key]) // slots
        number = starts(pieces)[key] + nth
        return np.repeat(row, pieces), np.repeat(indices, pieces), number[slot]

    def _set_indptr(self, axis: Axis, start: np.ndarray) -> None:
        stored = int(start[-1])
        self._check_fits(axis, stored, "nnz")
        nnz = self._size(axis, "nnz", stored)
        if nnz != stored:
            raise StructureError(f"{self._prefix(axis)}: expected nnz {stored}, got {nnz}")
        self.arguments[str(axis.indptr.name)] = start.astype(axis.idtype, copy=False)

    def _refuse_shared(self, places: np.ndarray) -> None:
        order = np.argsort(places, kind="stable")
        same = places[order][1:] == places[order][:-1]
        self._refuse_duplicates(int(order[1:][same].min()))

    def _refuse_duplicates(self, at: int) -> None:
        raise StructureError(
            f"infer_format: coordinate {self._coordinate(at)} is stored twice, or rule "
            f"'{self.rule.name}' takes two coordinates to one place"
        )


def _parts(expr: Any) -> list[Any]:
    """An integer expression and its parts."""
    nodes: list[Any] = []
    walk(expr, lambda n: nodes.append(n) if ir.is_prim_expr(n) else None)
    return nodes


def _is_zero(expr: Any) -> bool:
    return isinstance(expr, tirx.IntImm) and int(expr) == 0


def _bounds(analyzer: Analyzer, expr: Any) -> tuple[int, int]:
    bound = analyzer.const_int_bound(expr)
    return int(bound.min_value), int(bound.max_value)
