"""Kernels whose result is a sparse matrix of unknown pattern."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import tvm_ffi
from tvm.target import Target

from sparsetir.runtime import buffer_pool, pool
from sparsetir.runtime.arrays import is_torch
from sparsetir.runtime.build import build
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.refusals import wrong
from sparsetir.runtime.signature import bound_by_name
from sparsetir.schedules.targets import TargetLike, resolve_target
from sparsetir.sparse_ir.assemble import SHORT, WORD, Assembly, assemble
from sparsetir.sparse_ir.nodes import SparseFunc, flat_axes, sparse_iterations
from sparsetir.sparse_ir.schedule import Schedule

# Elements that a call reserves at once: memory is not committed before it is written, but systems
# limit reservations.
ROOM = 1 << 30
COPIED = 1 << 20  # bytes below which a result is copied rather than keep its larger buffer
SMALL = 1 << 12  # bytes up to which copying a buffer is faster than shrinking it
MOSTLY = 2 / 3  # least share of short rows for which bitmaps are left out
FEW = 4  # groups of a row per element, from which groups get a level of their own
LONGER = 32  # ratio of two rows' elements, from which the longer one is searched
WORK_OF_A_PART = 1 << 15  # elements up to which another thread does not pay


class CsrArrays(NamedTuple):
    """A result: indptr (rows + 1,), indices (nnz,) in increasing order in each row, values."""

    indptr: Any
    indices: Any
    values: Any


class Bounds(NamedTuple):
    """Upper bounds on the number of a result's elements.

    Parameters
    ----------
    ends : ndarray
        (rows + 1,) of int64, the starts of rows if all reach their bounds; or (2,) for all rows
        together, if these are so few that they are one part.
    rows, columns : int
        The shape of the result.
    step : int
        Number of consecutive rows that stay in one part.
    part : optional
        The part of all rows, if these are so few.
    """

    ends: np.ndarray
    rows: int
    columns: int
    step: int = 1
    part: _Parts | None = None

    @property
    def levels(self) -> int:
        """Levels of a row's bitmap: with many elements all words are scanned, with few elements
        empty groups are skipped; 0 if most rows are so short that they need no bitmap."""
        words = self.columns * self.rows / WORD
        if len(self.ends) <= self.rows or self.ends[-1] >= words:
            return 1
        if np.count_nonzero(np.diff(self.ends) <= SHORT) >= MOSTLY * self.rows:
            return 0
        return 2 if words <= WORD * FEW * self.ends[-1] else 3


class Numeric:
    """The numeric phase: computes the values of a result at one pattern, for any operands.

    Parameters
    ----------
    kernel : Kernel
        The kernel that computes them.
    named : mapping
        All of its arguments by name, except the result's values; they are trusted.
    values : str
        The name of its parameter for the values.
    first : int or float, optional
        The initial value, if the kernel does not write all values.
    """

    def __init__(
        self, kernel: Kernel, named: Mapping[str, object], values: str, first: float | None = None
    ) -> None:
        signature, self.first = kernel.signature, first
        self.kernel, self._place = kernel, signature.position
        self._args = [named.get(name) for name in signature.names]
        self._out = self._place[values]
        self.dtype = np.dtype(signature.dtypes[self._out])
        self.shape = tuple(signature.expected_shape(self._out, self._args))

    def __call__(
        self, changed: Mapping[str, object] = {}, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute the values.

        Parameters
        ----------
        changed : mapping
            Arguments by name that replace the initial ones.
        out : ndarray, optional
            The array to write to; by default a new one.

        Returns
        -------
        ndarray
        """
        out = buffer_pool.array(self.shape, self.dtype) if out is None else out
        if self.first is not None:
            out.fill(self.first)
        if out.size:
            args = self._args.copy()
            for name, value in changed.items():
                args[self._place[name]] = value
            args[self._out] = out
            self.kernel.run(args)
        return out


class AssembledKernel:
    """A kernel with a sparse result, called with all parameters but the result.

    Parameters
    ----------
    func : SparseFunc
        A program of stage I.
    result : str, optional
        Its result, see :func:`sparsetir.sparse_ir.assemble.assemble`.
    target : optional
        A CPU, as for :func:`sparsetir.build`.

    Notes
    -----
    `bound`, :meth:`fill`, :attr:`masked_bound` and :attr:`numeric` are its kernels, `params` the
    names of the caller's parameters. A call bounds the number of elements of each row, reserves
    memory for as many, fills it on all threads, and returns the rest: memory that was not written
    to was never committed.
    """

    def __init__(
        self, func: SparseFunc, result: str | None = None, target: TargetLike = "llvm"
    ) -> None:
        self.target = cpu_of(target)
        self.programs = assemble(func, result)
        self.name = func.name
        params = [str(p.name) for p in func.params]
        parts = self.programs
        self.params = [n for n in params if n not in (parts.values, parts.indptr, parts.indices)]
        # Rows that are only appended to need no bitmap: there is one program.
        self.has_levels = parts.fill is not parts.wide_fill
        self.bound = build(self.programs.bound, self.target)
        self._fills: dict[int, _Fill] = {}
        self._idtype, self._dtype = np.dtype(parts.idtype), np.dtype(parts.dtype)
        self.most = int(np.iinfo(self._idtype).max)  # elements

    def fill(self, levels: int) -> Kernel:
        """The kernel that visits the elements. It does not repeat the checks of `bound`.

        Parameters
        ----------
        levels : int
            Levels of the bitmap: 1 for rows with an element in each 64 columns or so, 3 for those
            with one in each 16,384 or less, else 2; 0 inserts the visits of rows with up to 16 in
            order, and uses three levels for others.

        Returns
        -------
        Kernel
        """
        return self._fill(levels).kernel

    def _fill(self, levels: int) -> _Fill:
        if levels not in self._fills:
            programs = self.programs
            kernels = programs.short_fill, programs.narrow_fill, programs.fill, programs.wide_fill
            first = kernels.index(kernels[levels])  # the first with the same program
            if first < levels:
                self._fills[levels] = self._fill(first)
            else:
                self._fills[levels] = _Fill.of(self._built(kernels[levels]), programs)
        return self._fills[levels]

    def _built(self, program: SparseFunc) -> Kernel:
        """Build a kernel that searches the longer one of two rows that intersect."""
        sch = Schedule(program)
        kinds = {a.name: [x.kind for x in flat_axes(a.of)] for a in program.axes
                 if a.kind == "intersect"}  # fmt: skip
        pairs = [name for name, of in kinds.items() if of == ["sparse_variable"] * 2]
        for it in sparse_iterations(program):
            for loop in sch.get_sp_iters(sch.get_sparse_iteration(it.name)):
                if loop.name in pairs:
                    sch.gallop(loop, LONGER)
        return build(sch, self.target, check=False)

    @cached_property
    def masked_bound(self) -> Kernel:
        """The kernel that bounds the visits and checks a given pattern."""
        return build(self.programs.masked_bound, self.target)

    @cached_property
    def numeric(self) -> Kernel:
        """The kernel that computes the values at a given pattern."""
        if self.programs.numeric is None:
            raise ValueError(
                f"{self.name}: expected a result whose rows one loop iterates over for values of a "
                "given pattern; its rows are those of several loops"
            )
        return self._built(self.programs.numeric)

    def __call__(self, *args: object, **kwargs: object) -> CsrArrays:
        """Compute the result, in the operands' kind of arrays.

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
            As in a call of :class:`sparsetir.Kernel`.
        OverflowError
            For more elements than the type of the indices can number.
        """
        named = self._given(args, kwargs)
        arrays = self.assembled(named, self.bounds(named, self.bound))
        return CsrArrays(*(like(named.values(), x) for x in arrays))

    def values_of(self, indptr: object, indices: Any, *args: object, **kwargs: object) -> Any:
        """Compute the values at a given pattern: the numeric phase alone.

        Parameters
        ----------
        indptr, indices
            The pattern, (rows + 1,) and (nnz,), with increasing columns in each row.
        *args, **kwargs
            As in a call.

        Returns
        -------
        array
            (nnz,) and the elements' dimensions: the initial value, or 0, at elements that the
            program does not visit; visits outside the pattern are ignored.

        Raises
        ------
        TypeError, ValueError, StructureError
            As in a call.
        """
        names, named, _ = self.programs, self._given(args, kwargs), self.numeric
        pattern = {names.indptr: indptr, names.indices: indices}
        bound = self.masked_bound
        named = bound.completed({**named, **pattern}, names.bounds, names.width)
        return like(named.values(), self.at(indptr, indices, named, self.bounds(named, bound))())

    def bounds(self, named: Mapping[str, Any], checked: Kernel | None = None) -> Bounds:
        """Bound the number of elements of each row.

        Parameters
        ----------
        named : mapping
            All parameters but the result's, by name.
        checked : Kernel, optional
            `bound`, or :attr:`masked_bound` if `named` includes a pattern, to check the arguments;
            by default they are trusted.

        Returns
        -------
        Bounds
        """
        kernel, names = checked or self.bound, self.programs
        if checked is None and names.shape:
            rows, columns = map(named.__getitem__, names.shape)
            most, alone = rows * columns, WORK_OF_A_PART
            if names.members:
                most = min(most, sum(map(named.__getitem__, names.members)))
                # There is one part anyway, so bounds per row are not needed.
                if most >= alone and pool.count() == 1 and not self.has_levels:
                    alone = ROOM
            if most < alone:
                return _joint_bounds(rows, columns, most, names.idtype)
        signature, width = kernel.signature, np.zeros(2, np.int64)
        args, at = [named.get(name) for name in signature.names], signature.position[names.bounds]
        (rows,) = signature.expected_shape(at, args)
        ends = np.zeros(rows + 1, np.int64)
        args[at], args[signature.position[names.width]] = ends[1:], width
        kernel.run(args) if checked is None else kernel(*args)
        columns, step = width.tolist()
        return Bounds(np.add.accumulate(ends, out=ends), rows, columns, max(step, 1))

    def assembled(
        self, arguments: Mapping[str, object], bounds: Bounds, levels: int | None = None,
        threads: int | None = None,
    ) -> CsrArrays:  # fmt: skip
        """Compute the result from trusted arguments.

        Parameters
        ----------
        arguments, bounds
            All parameters but the result's, by name, and their :meth:`bounds`.
        levels : int, optional
            See :meth:`fill`; by default chosen by the rows' numbers of elements.
        threads : int, optional
            Threads to divide the rows among; by default all.

        Returns
        -------
        CsrArrays
        """
        ends, rows, _, step, part = bounds
        if levels is None:
            levels = bounds.levels if self.has_levels else 0
        fill, indptr = self._fill(levels), np.zeros(rows + 1, np.int64)
        if part is not None:  # the fast path, which takes as long as a hundred elements
            indices, values = self._filled(fill, arguments, part, indptr, ends)
            nnz = indptr.item(-1)
            indices, values = _truncated(indices, nnz), _truncated(values, nnz)
            return CsrArrays(indptr.astype(self._idtype), indices, values)
        pieces, first = [], 0
        while first < rows or not pieces:
            last = rows
            if self.programs.parted:
                last = int(np.searchsorted(ends, ends[first] + ROOM, side="right")) - 1
                last = max(min(last // step * step, rows), min(first + step, rows))
            rows_ptr = self._parts(bounds, first, last, threads)
            begins = ends[rows_ptr] - ends[first]
            parts = _Parts(rows_ptr // step, begins, len(begins) - 1, int(begins[-1]))
            arrays = self._filled(fill, arguments, parts, indptr, ends)
            sizes = _sizes(indptr, rows_ptr.tolist())
            pieces.append([_compacted(x, begins, sizes) for x in arrays])
            first = last
        if indptr[-1] > self.most:
            raise OverflowError(
                f"{self.name}: the result has {indptr[-1]} elements, more than {self._idtype} "
                "indices can number; expected int64 indices"
            )
        (indices, values), *others = pieces
        if others:
            indices, values = map(np.concatenate, zip(*pieces, strict=True))
        return CsrArrays(indptr.astype(self._idtype), indices, values)

    def at(
        self, indptr: object, indices: Any, given: Mapping[str, object], bounds: Bounds,
        threads: int | None = None,
    ) -> Numeric:  # fmt: skip
        """The numeric phase at a pattern, for trusted arguments.

        Parameters
        ----------
        indptr, indices
            The same as for :meth:`values_of`.
        given, bounds, threads
            The same as for :meth:`assembled`.

        Returns
        -------
        Numeric
        """
        names, rows_ptr = self.programs, self._parts(bounds, 0, bounds.rows, threads)
        arguments = {
            **given, names.indptr: indptr, names.indices: indices, names.nnz: len(indices),
            names.parts: len(rows_ptr) - 1, names.rows_ptr: rows_ptr,
        }  # fmt: skip
        first = None if names.parted else names.first  # rows that are not stored are not visited
        return Numeric(self.numeric, arguments, names.values, first)

    def __repr__(self) -> str:
        return f"AssembledKernel({self.name!r})"

    def _given(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        arguments = bound_by_name(self.name, self.params, args, kwargs)
        return self.bound.completed(arguments, self.programs.bounds, self.programs.width)

    def _parts(self, bounds: Bounds, first: int, last: int, threads: int | None) -> np.ndarray:
        """The starts of the parts of rows from `first` to `last`, and the last part's end."""
        ends, step = bounds.ends, bounds.step
        if not self.programs.parted or bounds.part is not None or ends[-1] < WORK_OF_A_PART:
            return np.array([first, last], self._idtype)
        total = int(ends[last] - ends[first])
        parts = min(threads or pool.count(), 1 + total // WORK_OF_A_PART)
        cuts = ends[first] + np.arange(1, parts) * (total / parts)
        inside = np.clip(np.searchsorted(ends[::step], cuts) * step, first, last)
        return np.array([first, *inside, last], self._idtype)

    def _filled(
        self, fill: _Fill, arguments: Mapping[str, object], parts: _Parts, indptr: np.ndarray,
        ends: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Indices and values of some rows, each part in its slice of a buffer.

        indptr : that of the result; for these rows it receives counts within their part
        ends : that of the bounds
        """
        names, room = self.programs, parts.room
        indices = buffer_pool.array((room,), self._idtype)
        named = {
            **arguments, names.parts: parts.count, names.rows_ptr: parts.rows_ptr, names.room: room,
            names.starts: parts.begins, names.ends: indptr[1:], names.indices: indices,
        }  # fmt: skip
        if fill.bounded:
            named[names.bounds] = np.diff(ends)
        shape = (room,) if fill.shape is None else fill.shape(named)
        named[names.values] = values = buffer_pool.array(shape, self._dtype)
        if room:
            fill.kernel.run(fill.ordered(named))
        if not names.parted:  # rows without elements end where their predecessor does
            np.maximum.accumulate(indptr, out=indptr)
        return indices, values


class _Fill(NamedTuple):
    """A kernel that visits the elements.

    ordered : takes its arguments out of a dictionary
    shape : computes the shape of values from arguments; None if elements have no dimensions
    bounded : whether it takes the bounds of rows
    """

    kernel: Kernel
    ordered: Callable[[Mapping[str, object]], Sequence[object]]
    shape: Callable[[Mapping[str, object]], tuple[int, ...]] | None
    bounded: bool

    @staticmethod
    def of(kernel: Kernel, programs: Assembly) -> _Fill:
        signature = kernel.signature
        names, position = signature.names, signature.position[programs.values]

        def shape(named: Mapping[str, object]) -> tuple[int, ...]:
            return (*signature.expected_shape(position, [*map(named.get, names)]),)

        numbers, bounded = len(signature.shapes[position] or ()) == 1, programs.bounds in names
        return _Fill(kernel, itemgetter(*names), None if numbers else shape, bounded)


class _Parts(NamedTuple):
    """Starts of parts of rows and of their slices, each (count + 1,), and the buffer's size."""

    rows_ptr: object
    begins: Any
    count: int
    room: int


@lru_cache(512)
def _joint_bounds(rows: int, columns: int, most: int, idtype: str) -> Bounds:
    """Bounds of all rows together; cached, as converting arrays for TVM takes long."""
    rows_ptr, ends = np.array([0, rows], idtype), np.array([0, most])
    part = _Parts(tvm_ffi.from_dlpack(rows_ptr), tvm_ffi.from_dlpack(ends), 1, most)
    ends.flags.writeable = False  # it is shared by all calls
    return Bounds(ends, rows, columns, part=part)


def cpu_of(target: TargetLike) -> Target:
    """The resolved target; raises ValueError if it is not a CPU."""
    machine = resolve_target(target)
    if "cpu" not in machine.keys:
        raise wrong("build_assembled", "target", "a CPU", f"{machine.kind.name!r}")
    return machine


def _sizes(indptr: np.ndarray, rows: list[int]) -> list[int]:
    """The number of elements of each part; completes `indptr` for these rows.

    indptr : that of the result, complete up to these rows; for them it counts from the first
        element of their part, and is updated
    rows : the starts of the parts, and the last one's end
    """
    sizes, nnz = [], int(indptr[rows[0]])
    for begin, end in pairwise(rows):
        sizes.append(int(indptr[end]) if begin < end else 0)
        if nnz:
            indptr[begin + 1 : end + 1] += nnz
        nnz += sizes[-1]
    return sizes


def _compacted(array: np.ndarray, begins: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Compact the slices of an array; free the rest if the array owns its memory."""
    at, step, data = sizes[0], array.strides[0], array.ctypes.data
    for begin, size in zip(begins.tolist()[1:-1], sizes[1:], strict=True):
        ctypes.memmove(data + at * step, data + begin * step, size * step)
        at += size
    return _truncated(array, at)


def _truncated(array: np.ndarray, size: int) -> np.ndarray:
    """The first elements of an array; the rest is freed if the array owns its memory."""
    if array.base is None and array.nbytes > SMALL:
        if size < len(array):
            array.resize((size, *array.shape[1:]), refcheck=False)
        return array
    start = array[:size]
    return start.copy() if start.nbytes < COPIED else start


def like(arguments: Iterable[object], array: np.ndarray) -> Any:
    """A torch tensor of the array if any argument is one; by bits, as NumPy lacks some dtypes."""
    if not any(map(is_torch, arguments)):
        return array
    import torch

    plain = torch.from_numpy(array.view(f"int{8 * array.itemsize}"))
    return plain.view(getattr(torch, array.dtype.name))
