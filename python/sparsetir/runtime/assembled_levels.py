"""Kernels whose result is sparse, with any number of levels, and written in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from sparsetir.runtime.assembled import AssembledKernel, CsrArrays, Numeric, cpu_of, like
from sparsetir.runtime.build import build
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.signature import bound_by_name
from sparsetir.schedules.targets import TargetLike
from sparsetir.sparse_ir.assemble import NotByRowsError
from sparsetir.sparse_ir.assemble_levels import assemble_levels
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.open_axes import open_result

ROOM = 1 << 16  # coordinates that a first call reserves memory for


class CsfArrays(NamedTuple):
    """A result of several levels.

    levels : indptr (parents + 1,) and indices (elements,) of each, from the root down; indices
        increase under each parent
    values : (elements of the last level,) and dimensions of the elements
    """

    levels: list[tuple[Any, Any]]
    values: Any


class LevelsKernel:
    """A kernel with a sparse result of any levels, called with all parameters but the result.

    Parameters
    ----------
    func : SparseFunc
        A program of stage I, see :func:`sparsetir.sparse_ir.assemble_levels.assemble_levels`.
    target : optional
        A CPU, as for :func:`sparsetir.build`.

    Notes
    -----
    Runs on one thread. For a matrix of numbers, a call counts the program's writes to each row, and
    lists them in a second pass; if columns are unsorted or repeat, it combines them. For other
    results it lists the coordinates, sorts them, and computes the values at this pattern.
    """

    def __init__(self, func: SparseFunc, target: TargetLike = "llvm") -> None:
        self._target = cpu_of(target)
        programs = self.programs = assemble_levels(func)
        self.name = func.name
        absent = {programs.result, *(x for level in programs.levels for x in level)}
        self.params = [str(p.name) for p in func.params if str(p.name) not in absent]
        self.most = int(np.iinfo(programs.idtypes[-1]).max)  # elements
        self._room = ROOM
        self._by_rows = programs.rows is not None

    @cached_property
    def rows(self) -> tuple[Kernel, Kernel, AssembledKernel | None]:
        """The kernels that count and fill rows, and that combine entries of the same element."""
        rows = self.programs.rows
        assert rows is not None
        count, fill = build(rows.count, self._target), build(rows.fill, self._target, check=False)
        combine = rows.combine and AssembledKernel(rows.combine, None, self._target)
        return count, fill, combine

    @cached_property
    def entries(self) -> Kernel:
        """The kernel that lists coordinates, and checks the arguments."""
        return build(self.programs.entries, self._target)

    @cached_property
    def values(self) -> Kernel:
        """The kernel that computes the values at a pattern."""
        return build(self.programs.values, self._target, check=False)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Compute the result, in the operands' kind of arrays.

        Parameters
        ----------
        *args, **kwargs
            The program's parameters without the result's, in order or by name. NumPy arrays, or
            tensors of torch on the CPU.

        Returns
        -------
        CsrArrays or CsfArrays
            The former for one level.

        Raises
        ------
        TypeError, ValueError
            As in a call of :class:`sparsetir.Kernel`.
        OverflowError
            For more elements than the type of the indices can number.
        """
        arguments = bound_by_name(self.name, self.params, args, kwargs)
        parts = self.programs
        if self._by_rows and (matrix := self._filled(arguments)):
            return CsrArrays(*(like(arguments.values(), x) for x in matrix))
        coordinates, roots = self._coordinates(arguments)
        sorted_levels = _levels(coordinates, roots)
        count = len(sorted_levels[-1][1])
        if count > self.most:
            raise OverflowError(
                f"{self.name}: the result has {count} elements, more than "
                f"{parts.idtypes[-1]} indices can number; expected int64 indices"
            )
        levels = [
            (ptr.astype(idtype), idx.astype(idtype))
            for (ptr, idx), idtype in zip(sorted_levels, parts.idtypes[1:], strict=True)
        ]
        values = like(arguments.values(), self.at(levels, arguments)())
        levels = [(like([values], ptr), like([values], idx)) for ptr, idx in levels]
        return CsfArrays(levels, values) if len(levels) > 1 else CsrArrays(*levels[0], values)

    def at(
        self, levels: Sequence[tuple[np.ndarray, np.ndarray]], given: Mapping[str, object]
    ) -> Numeric:
        """The numeric phase at a pattern, for trusted arguments.

        Parameters
        ----------
        levels : sequence of pairs of ndarray
            `indptr` and `indices` of each assembled level, from the root down.
        given : mapping
            All parameters but the result's, by name.

        Returns
        -------
        Numeric
        """
        parts, named = self.programs, dict(given)
        for names, (ptr, idx) in zip(parts.levels, levels, strict=True):
            named |= dict(zip(names, (ptr, idx, len(idx)), strict=True))
        named = self.values.completed(named, parts.result)
        return Numeric(self.values, named, parts.result, parts.first)

    def _filled(self, arguments: Mapping[str, object]) -> CsrArrays | None:
        """The result filled by rows; None if it is too large, or if elements are written several
        times without a reduction."""
        names, (count, fill, combine) = self.programs.rows, self.rows
        assert names is not None
        rows = count.shape_of(names.ends, arguments)[0]
        ptr = np.zeros(rows + 1, np.int64)
        count(**arguments, **{names.ends: ptr[1:]})
        np.cumsum(ptr, out=ptr)
        if ptr[-1] > self.most:
            return None
        idtype, total = np.dtype(self.programs.idtypes[-1]), int(ptr[-1])
        indices, values = np.empty(total, idtype), np.empty(total, self.programs.dtype)
        indptr, ordered = ptr.astype(idtype), np.ones(total + 1, bool)
        outputs = {names.ends: indptr[:-1].copy(), names.room: total}
        fill(**arguments, **outputs, **{names.at: indices, names.found: values})
        np.greater(indices[1:], indices[:-1], out=ordered[1:-1])
        ordered[indptr] = True
        if ordered.all():
            return CsrArrays(indptr, indices, values)
        if combine is None:
            self._by_rows = False
            return None
        listed: dict[str, object] = {"v": values, "ptr": indptr, "idx": indices, "nnz": total}
        listed |= {"m": rows, "n": int(indices.max()) + 1}
        return combine.assembled(listed, combine.bounds(listed))

    def _coordinates(self, arguments: Mapping[str, object]) -> tuple[Sequence[np.ndarray], int]:
        """The sorted coordinates of all writes, by level; and the length of the root."""
        programs = self.programs
        counts = np.zeros(len(programs.coordinates) + 1, np.int64)
        while True:
            room = [np.empty(self._room, idtype) for idtype in programs.idtypes]
            sizes = {programs.room: self._room, programs.said: counts}
            self.entries(**arguments, **sizes, **dict(zip(programs.coordinates, room, strict=True)))
            count, *lengths = counts.tolist()
            if count <= self._room:
                break
            self._room = count
        coords = [x[:count] for x in room]
        if prod(lengths) >= 1 << 63:
            order = np.lexsort(coords[::-1])
            return [x[order] for x in coords], lengths[0]
        shape = [max(n, 1) for n in lengths]
        return np.unravel_index(np.sort(np.ravel_multi_index(coords, shape)), shape), lengths[0]

    def __repr__(self) -> str:
        return f"LevelsKernel({self.name!r})"


def build_assembled(
    func: SparseFunc, result: str | None = None, target: TargetLike = "llvm"
) -> Any:
    """Compile a program to a kernel with a sparse result, which stores the written elements.

    Parameters
    ----------
    func : SparseFunc
        A program of stage I. Its result is over axes whose nnz is None, each under the one before
        it, the first under a dense one. Iterations write it in any order, if they do not depend on
        its contents; it begins with zero, or with the constant in the `init` of the first one. Or
        it is over dense axes of rows and columns, see
        :func:`sparsetir.sparse_ir.assemble.assemble`.
    result : str, optional
        The name of the result, or of its parameter; by default the only one.
    target : optional
        A CPU, as for :func:`sparsetir.build`.

    Returns
    -------
    AssembledKernel or LevelsKernel
        Called without the result, it returns the result's arrays. The former for matrices in CSR
        that the program visits row by row, on all threads; the latter for all others.

    Raises
    ------
    ValueError
        For a program of another kind, and for a target that is not a CPU.
    """
    try:
        return AssembledKernel(func, result, target)
    except NotByRowsError:
        over = open_result(func)
        if over is None or result not in (None, over.name, str(over.handle.name)):
            raise
    return LevelsKernel(func, target)


def _levels(coordinates: Sequence[np.ndarray], roots: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return `indptr` and `indices` of each level below the root, from sorted coordinates."""
    (parents, *rest), count, arrays = coordinates, roots, []
    begins = np.zeros(len(parents), bool)  # whether a new element of the level begins
    begins[:1] = True
    begins[1:] = parents[1:] != parents[:-1]
    for level in rest:
        begins[1:] |= level[1:] != level[:-1]
        firsts = np.flatnonzero(begins)
        counts = np.bincount(parents[firsts], minlength=count)
        arrays.append((np.concatenate([[0], np.cumsum(counts)]), level[firsts]))
        parents, count = np.cumsum(begins) - 1, len(firsts)
    return arrays
