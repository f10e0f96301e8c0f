"""Kernels whose result is a sparse matrix that nobody knows beforehand."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sparsetir.runtime import pool
from sparsetir.runtime.arrays import is_torch
from sparsetir.runtime.build import build
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.targets import resolve_target
from sparsetir.sparse_ir.assemble import WORD, assemble
from sparsetir.sparse_ir.nodes import SparseFunc

# Elements that a call has room for at once: memory that nothing is written to is not taken, but a
# system does not promise any amount of it.
ROOM = 1 << 30
WORK_OF_A_PART = 1 << 15  # elements, at most, that are not worth another thread


class CsrArrays(NamedTuple):
    """A result: indptr (rows + 1,), indices (nnz,) in increasing order in each row, values."""

    indptr: Any
    indices: Any
    values: Any


class AssembledKernel:
    """What :func:`build_assembled` gives: called with all parameters but the result.

    Parameters
    ----------
    func : SparseFunc
        Of stage I.
    result : str
        Its result, see :func:`sparsetir.sparse_ir.assemble.assemble`.
    target : optional
        A CPU, as of :func:`sparsetir.build`.

    Notes
    -----
    `bound`, :meth:`fill` and those of :attr:`masked` are its kernels, `params` what callers give. A
    call bounds the number of elements of each row, has room for as many, fills it on all threads,
    and gives back what was not needed: memory that was not written to was never taken.
    """

    def __init__(self, func: SparseFunc, result: str, target: Any = "llvm") -> None:
        target = resolve_target(target)
        if "cpu" not in target.keys:
            raise ValueError(
                f"build_assembled: argument 'target': expected a CPU, got {target.kind.name!r}"
            )
        self.programs, self.target = assemble(func, result), target
        self.name = func.name
        params = [str(p.name) for p in func.params]
        self.params = [n for n in params if n != self.programs.values]
        self.bound = build(self.programs.bound, target)
        self._fills: dict[Any, Kernel] = {}
        self._idtype, self._dtype = self.programs.idtype, self.programs.dtype
        self.most = int(np.iinfo(self._idtype).max)  # elements

    def fill(self, narrow: bool) -> Kernel:
        """What goes through the visits. What `bound` has checked is not checked once more.

        Parameters
        ----------
        narrow : bool
            For rows with an element in each 64 columns or so.

        Returns
        -------
        Kernel
        """
        program = self.programs.narrow_fill if narrow else self.programs.fill
        if program not in self._fills:
            self._fills[program] = build(program, self.target, check=False)
        return self._fills[program]

    @cached_property
    def masked(self) -> tuple[Kernel, Kernel]:
        """Of a given pattern: what bounds the visits, and checks it; what computes its values."""
        programs = self.programs
        bound = build(programs.masked_bound, self.target)
        return bound, build(programs.numeric, self.target, check=False)

    def __call__(self, *args: Any, **kwargs: Any) -> CsrArrays:
        """The result, of the kind of arrays that the operands are.

        Parameters
        ----------
        *args, **kwargs
            The program's parameters without the result's, in order or by name. NumPy arrays, or
            tensors of torch on the CPU.

        Returns
        -------
        CsrArrays

        Raises
        ------
        TypeError, ValueError
            As of :class:`sparsetir.Kernel`.
        OverflowError
            For more elements than the type of the indices can number.
        """
        given = self._given(args, kwargs)
        names, (ends, width) = self.programs, self._ends(self.bound, given)
        fill = self.fill(narrow=WORD * ends[-1] >= width * (len(ends) - 1))
        rows, made = len(ends) - 1, []
        first = 0
        while first < rows or not made:
            last = int(np.searchsorted(ends, ends[first] + ROOM, side="right")) - 1
            last = max(min(last, rows), min(first + 1, rows)) if names.parted else rows
            made.append(self._filled(fill, given, ends, first, last))
            first = last
        counts = np.concatenate([m[0] for m in made])
        indptr = np.zeros(rows + 1, np.int64)
        np.cumsum(counts, out=indptr[1:])
        if indptr[-1] > self.most:
            raise OverflowError(
                f"{self.name}: the result has {indptr[-1]} elements, more than {self._idtype} "
                "numbers; expected int64 indices"
            )
        indices, values = (
            made[0][n] if len(made) == 1 else np.concatenate([m[n] for m in made]) for n in (1, 2)
        )
        found = (indptr.astype(self._idtype), self._idtype), (indices, self._idtype)
        return CsrArrays(*(_like(given, *x) for x in (*found, (values, self._dtype))))

    def values_of(self, indptr: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        """The values at a pattern that is known, or asked for: the numeric phase alone.

        Parameters
        ----------
        indptr, indices
            Of the pattern, (rows + 1,) and (nnz,), with increasing columns in each row.
        *args, **kwargs
            As in a call.

        Returns
        -------
        array
            (nnz,) and the elements' dimensions: at what the pattern has and the program does not
            visit its first value, or 0; what the program visits elsewhere is left out.

        Raises
        ------
        TypeError, ValueError, StructureError
            As in a call.
        """
        names, (bound, numeric) = self.programs, self.masked
        given = self._given(args, kwargs)
        given |= {names.indptr: indptr, names.indices: indices}
        ends, _ = self._ends(bound, given)  # which checks the pattern
        given |= {names.nnz: len(indices), **self._in_parts(self._parts(ends, 0, len(ends) - 1))}
        values = np.empty(numeric.shape_of(names.values, given), self._dtype)
        numeric(**given, **{names.values: _like(given, values, self._dtype)})
        return _like(given, values, self._dtype)

    def __repr__(self) -> str:
        return f"AssembledKernel({self.name!r})"

    def _given(self, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        order = self.params
        if len(args) > len(order):
            raise TypeError(
                f"{self.name}: expected at most {len(order)} arguments "
                f"({', '.join(order)}), got {len(args)}"
            )
        given = dict(zip(order, args, strict=False))
        for name, value in kwargs.items():
            if name not in order or name in given:
                what = "is given twice" if name in given else f"is none of {', '.join(order)}"
                raise TypeError(f"{self.name}: argument '{name}' {what}")
            given[name] = value
        return given

    def _ends(self, bound: Kernel, given: dict[str, Any]) -> tuple[np.ndarray, int]:
        """(rows + 1,) where each row begins if all have as many elements as they can have; and the
        number of columns."""
        names, width = self.programs, np.zeros(1, np.int64)
        (rows,) = bound.shape_of(names.bounds, {**given, names.width: width})
        ends = np.zeros(rows + 1, np.int64)
        bound(**given, **{names.bounds: ends[1:], names.width: width})
        return np.cumsum(ends, out=ends), int(width[0])

    def _parts(self, ends: np.ndarray, first: int, last: int) -> np.ndarray:
        """Where the parts of some rows begin, and the last one ends."""
        total = int(ends[last] - ends[first])
        parts = 1 if not self.programs.parted else min(pool.count(), 1 + total // WORK_OF_A_PART)
        cuts = ends[first] + np.arange(1, parts) * (total / parts)
        inside = np.clip(np.searchsorted(ends, cuts), first, last)
        return np.array([first, *inside, last], self._idtype)

    def _in_parts(self, rows_ptr: np.ndarray) -> dict[str, Any]:
        """Arguments that say what rows the parts have."""
        names = self.programs
        found: dict[str, Any] = {names.parts: len(rows_ptr) - 1}
        return {**found, names.rows_ptr: rows_ptr} if names.parted else found

    def _filled(
        self, fill: Kernel, given: dict[str, Any], ends: np.ndarray, first: int, last: int
    ) -> tuple[Any, ...]:
        """Counts, indices and values of some rows."""
        names = self.programs
        rows_ptr = self._parts(ends, first, last)
        rooms = ends[rows_ptr] - ends[first]
        room = int(rooms[-1])
        counts = np.zeros(len(ends) - 1, self._idtype)
        indices = np.empty(room, self._idtype)
        made = {**self._in_parts(rows_ptr), names.room: room, names.rooms: rooms}
        made |= {names.counts: counts, names.indices: indices}
        values = np.empty(fill.shape_of(names.values, {**given, **made}), self._dtype)
        fill(**given, **made, **{names.values: _like(given, values, self._dtype)})
        sizes = [int(counts[a:b].sum(dtype=np.int64)) for a, b in pairwise(rows_ptr)]
        for array in (indices, values):
            _close(array, rooms, sizes)
        return counts[first:last], indices, values


def build_assembled(func: SparseFunc, result: str, target: Any = "llvm") -> AssembledKernel:
    """Compile a program to a kernel with a sparse result, whose pattern is what it visits.

    Parameters
    ----------
    func : SparseFunc
        Of stage I: one iteration, over rows, then over what is in a row; its result over dense rows
        and columns. A row's columns may be visited once and in order, as those of a union, or
        several times, as in a product of sparse matrices.
    result : str
        The name of the result, or of its parameter.
    target : optional
        A CPU, as of :func:`sparsetir.build`.

    Returns
    -------
    AssembledKernel
        Called without the result, it gives its `indptr`, `indices` and values.

    Raises
    ------
    ValueError
        For a program of another kind, and for a target that is no CPU.
    """
    return AssembledKernel(func, result, target)


def _close(array: np.ndarray, rooms: np.ndarray, sizes: list[int]) -> None:
    """Move what is in the rooms together, and give the rest of the memory back."""
    at, step, data = sizes[0], array.strides[0], array.ctypes.data
    for begin, size in zip(rooms.tolist()[1:-1], sizes[1:], strict=True):
        ctypes.memmove(data + at * step, data + begin * step, size * step)
        at += size
    array.resize((at, *array.shape[1:]), refcheck=False)


def _like(given: Mapping[str, Any], array: np.ndarray, dtype: str) -> Any:
    """The array, as torch's where arguments are; numpy's own types do not have all of torch's."""
    if not any(map(is_torch, given.values())):
        return array
    import torch

    plain = torch.from_numpy(array.view(f"int{8 * array.itemsize}"))
    return plain.view(getattr(torch, dtype))
