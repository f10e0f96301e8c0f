"""Check the arrays that describe sparse structures, before a kernel trusts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import ir

from sparsetir.sparse_ir.errors import (
    StructureError,
    StructureIndexError,
    StructureTypeError,
    describe,
)
from sparsetir.sparse_ir.interpret_scalar import Evaluator
from sparsetir.sparse_ir.known import known
from sparsetir.sparse_ir.nodes import Axis, SparseFunc
from sparsetir.sparse_ir.tir import size_text
from sparsetir.sparse_ir.verify_sites import used_variables


def check_structure(func: SparseFunc, arguments: Mapping[str, Any]) -> None:
    """Check `indptr` and `indices` of every axis of `func`, in O(rows + nonzeros).

    `indptr` is (parents + 1,), starts at 0, is non-decreasing and ends at nnz; no row of a
    dense_variable axis is longer than the axis. `indices` is (nnz,) or (parents * nnz_cols,), in
    [0, length), or -1 for padding anywhere in a row of a sparse_fixed axis; strictly increasing
    under each parent if the axis is unique. All are one-dimensional, of the axis's idtype, and the
    number of positions fits that type.

    Parameters
    ----------
    func : SparseFunc
        Of stage I.
    arguments : mapping
        By parameter name, at least the arrays of the axes and the numbers in their sizes; others
        are ignored. Computed parameters are left out: recipes are trusted, and axes are checked as
        far as callers describe them.

    Raises
    ------
    StructureIndexError
        For indices out of range.
    StructureTypeError
        For missing arguments and wrong types.
    StructureError
        For the rest.
    """
    with np.errstate(all="ignore"):  # absurd sizes are refused, not warned about
        checker = _Checker(func, arguments)
        for axis in func.axes:
            checker.check(axis)


class _Checker:
    def __init__(self, func: SparseFunc, arguments: Mapping[str, Any]) -> None:
        self.func = func
        self.arguments = arguments
        self.evaluator = Evaluator(func.name)
        self.known = known(func)
        self.size: dict[str, int] = {}
        self.seen: set[Any] = set()
        for param in func.params:
            if not isinstance(param.ty, ir.PointerType) and str(param.name) in arguments:
                self._bind(param, arguments[str(param.name)])

    def _bind(self, param: Any, value: Any) -> None:
        dtype = np.dtype(str(param.ty.dtype))
        if dtype.kind not in "iu":
            return
        name = f"{self.func.name}: argument '{param.name}'"
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise StructureTypeError(f"{name}: expected an integer, got {describe(value)}")
        if not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            raise StructureError(f"{name}: expected a number of type {dtype}, got {value}")
        self.evaluator.variable(param).value = np.int64(value)

    def number(self, axis: Axis, what: str) -> int:
        """The value of an axis's length, nnz or nnz_cols."""
        node = getattr(axis, what)
        try:
            value = int(self.evaluator.expr(node)())
        except (TypeError, AttributeError, ZeroDivisionError) as error:
            raise StructureTypeError(
                f"{self.func.name}: axis '{axis.name}': {what} = {size_text(node)} cannot be "
                f"computed from the arguments {sorted(self.arguments)}"
            ) from error
        if not 0 <= value <= np.iinfo(axis.idtype).max:
            raise StructureError(
                f"{self.func.name}: axis '{axis.name}': expected {what} = {size_text(node)} "
                f"within 0 and the largest {axis.idtype}, got {value}"
            )
        return value

    def given(self, handle: Any) -> bool:
        """Whether the caller passes the array of a handle."""
        return handle is not None and str(handle.name) not in self.known.computed

    def elements(self, axis: Axis) -> int:
        """The number of positions of an axis."""
        if axis.name not in self.size:
            if axis.parent is None:
                size = self.number(axis, "length")
            elif axis.is_variable:
                size = self.number(axis, "nnz")
            else:
                parents, width = self.elements(axis.parent), self.number(axis, "nnz_cols")
                size = parents * width
                if size > np.iinfo(axis.idtype).max:
                    raise StructureError(
                        f"{self.func.name}: axis '{axis.name}': {parents} parents times {width} "
                        f"slots do not fit {axis.idtype}"
                    )
            self.size[axis.name] = size
        return self.size[axis.name]

    def check(self, axis: Axis) -> None:
        """Check one axis whose parent has been checked."""
        if axis.is_merged:
            return
        if axis.parent is None:
            if not any(str(v.name) in self.known.computed for v in used_variables(axis.length)):
                self.elements(axis)
            return
        indptr_given, indices_given = self.given(axis.indptr), self.given(axis.indices)
        if not indptr_given and not indices_given:
            return
        length, size = self.number(axis, "length"), self.elements(axis)
        parents = self.elements(axis.parent) if indptr_given else None
        width = size if axis.is_variable else self.number(axis, "nnz_cols")
        handles = tuple(None if h is None else hash(h) for h in (axis.indptr, axis.indices))
        key = (
            handles, axis.kind, axis.idtype, axis.unique, parents, length, size, width,
            axis.name in self.known.filled,
        )  # fmt: skip
        if key in self.seen:
            return
        self.seen.add(key)
        indptr = None
        if parents is not None:
            indptr = self.array(axis, axis.indptr, parents + 1, "parents + 1")
            self.check_indptr(axis, indptr, size, length)
        if indices_given:
            what = "nnz" if axis.is_variable else "parents * nnz_cols"
            indices = self.array(axis, axis.indices, size, what)
            self.check_range(axis, indices, length)
            if axis.unique and indptr is not None:
                self.check_order(axis, indices, indptr)
            elif axis.unique and not axis.is_variable and size:
                self.check_slots(axis, indices, width)

    def place(self, axis: Axis, handle: Any) -> str:
        """The prefix of a message."""
        return f"{self.func.name}: argument '{handle.name}': axis '{axis.name}'"

    def array(self, axis: Axis, handle: Any, size: int, what: str) -> np.ndarray:
        """The array of a handle, with type and shape checked."""
        place, name = self.place(axis, handle), str(handle.name)
        if name not in self.arguments:
            raise StructureTypeError(f"{place}: the argument is missing")
        value = self.arguments[name]
        if not isinstance(value, np.ndarray):
            raise StructureTypeError(f"{place}: expected a NumPy array, got {describe(value)}")
        if value.dtype != np.dtype(axis.idtype):
            raise StructureTypeError(f"{place}: expected dtype {axis.idtype}, got {value.dtype}")
        if value.shape != (size,):
            raise StructureError(
                f"{place}: expected shape ({size},) ({what}), got shape {value.shape}"
            )
        return value

    def check_indptr(self, axis: Axis, indptr: np.ndarray, nnz: int, length: int) -> None:
        """Check that `indptr` is non-decreasing from 0 to nnz."""
        place = self.place(axis, axis.indptr)
        if indptr[0] != 0:
            raise StructureError(f"{place}: expected it to start at 0, got {indptr[0]}")
        falls = indptr[1:] < indptr[:-1]
        if falls.any():
            row = int(falls.argmax())
            raise StructureError(
                f"{place}: expected non-decreasing offsets, got {indptr[row + 1]} after "
                f"{indptr[row]} at row {row}"
            )
        if indptr[-1] != nnz:
            raise StructureError(f"{place}: expected it to end at nnz = {nnz}, got {indptr[-1]}")
        if not axis.is_sparse and nnz > length:
            rows = np.diff(indptr)
            if rows.max() > length:
                row = int(rows.argmax())
                raise StructureError(
                    f"{place}: expected rows of at most {length}, got {rows[row]} in row {row}"
                )

    def check_range(self, axis: Axis, indices: np.ndarray, length: int) -> None:
        """Check that indices are coordinates of the axis, or padding."""
        lowest = 0 if axis.is_variable or axis.name in self.known.filled else -1
        if not indices.size or (indices.max() < length and indices.min() >= lowest):
            return
        at, size = int(((indices >= length) | (indices < lowest)).argmax()), size_text(axis.length)
        why = "" if size == str(length) else f"; {size} is {length}"
        raise StructureIndexError(
            f"{self.place(axis, axis.indices)}: expected indices in [{lowest}, {length}), "
            f"got {indices[at]} at position {at}{why}"
        )

    def check_order(self, axis: Axis, indices: np.ndarray, indptr: np.ndarray) -> None:
        """Check that indices are strictly increasing in each row."""
        falls = np.zeros(len(indices) + 1, bool)
        np.less_equal(indices[1:], indices[:-1], out=falls[1 : len(indices)])
        falls[indptr] = False  # a row may start anywhere
        if falls.any():
            at = int(falls.argmax())
            row = int(np.searchsorted(indptr, at, side="right")) - 1
            self.refuse_order(axis, row, at, indices[at], indices[at - 1])

    def check_slots(self, axis: Axis, indices: np.ndarray, width: int) -> None:
        """Check that indices are strictly increasing in each row of slots, except for padding."""
        falls = np.zeros(len(indices), bool)
        np.less_equal(indices[1:], indices[:-1], out=falls[1:])
        if indices.min() < 0:
            stored = indices >= 0
            falls &= stored
            resumes = stored[1:] & ~stored[:-1]
            resumes[width - 1 :: width] = False
            if resumes.any():  # padding inside a row: compare with the largest index before it
                rows = indices.reshape(-1, width)
                largest = np.maximum.accumulate(rows, axis=1)[:, :-1]
                falls.reshape(rows.shape)[:, 1:] = (rows[:, 1:] <= largest) & (rows[:, 1:] >= 0)
        falls[::width] = False  # a row may start anywhere
        if falls.any():
            at = int(falls.argmax())
            row = at // width
            self.refuse_order(axis, row, at, indices[at], indices[row * width : at].max())

    def refuse_order(self, axis: Axis, row: int, at: int, now: Any, before: Any) -> None:
        """Raise for two indices of a row that are out of order."""
        raise StructureError(
            f"{self.place(axis, axis.indices)}: expected strictly increasing indices in row {row}, "
            f"got {now} after {before} at position {at}"
        )
