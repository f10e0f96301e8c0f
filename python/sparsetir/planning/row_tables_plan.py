"""A plan of a product of sparse matrices by hash tables, whose pattern a GPU finds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsetir.formats.pattern import Pattern
from sparsetir.planning.compiled import compiled
from sparsetir.planning.request import Request
from sparsetir.planning.run_plan import Plan
from sparsetir.planning.sparse_results import INT32, Csr, arguments, csr, factors
from sparsetir.runtime.arrays import dtype_name, empty_like, to_numpy
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.pipeline import lower
from sparsetir.schedules.gpu.row_tables import BINS, Bin, RowTables, rows_program


class RowTablesPlan(Plan):
    """What :func:`plan` makes of a product of sparse matrices for a GPU with `RowTables`.

    The GPU counts, and fills: once for the pattern, and again for the values of each call. With a
    mask there is nothing to count.

    Parameters
    ----------
    wanted : request
        The operator and its matrices.
    config : RowTables
        Of the kernels.
    chosen_by : {"user"}
        As of :class:`Plan`.

    Attributes
    ----------
    pattern : Pattern
        Of the result.
    """

    def _settle(self, wanted: Request, config: Any, chosen_by: str) -> None:
        wanted.template(config)  # which refuses others
        self._set_device(wanted)
        self.op, self.problem, self.feat = wanted.name, wanted.problem, wanted.feat
        self.config, self.chosen_by = config, chosen_by
        self.needs_values, self.arranges_values, self.repeats = True, False, False
        self.compile_seconds = 0.0

    def _bind(self, wanted: Request) -> None:
        start, each = time.perf_counter(), [csr(x) for x in wanted.matrices.each]
        m, n = wanted.matrices.result_shape(wanted.name)
        asked = wanted.matrices.mask
        known = None if asked is None else csr(asked)
        (left, right, mask), columns, _ = factors(wanted.name, each, known, False)
        self._target, self._dtype = wanted.target, wanted.problem.dtype
        self._check_sizes(left, right)
        sizes = {"m": m, "l": left.shape[1]}
        given = arguments({"a": left, "b": right}, sizes, "int32")
        values = [given.pop(x) for x in "ab"]
        self._shapes = {"values[0]": values[0].shape, "values[1]": values[1].shape}
        self._given = {k: self._there(x) for k, x in given.items()}
        terms = _terms(left, right) if mask is None else np.diff(mask.indptr)
        self._bins = [
            (size, {"rows": self._there(rows), "count": len(rows), "ranges": r, "width": w})
            for size, rows, r, w in binned(terms, right.shape[1])
        ]
        self.launches = len(self._bins)
        if mask is None:
            counts = self._there(np.zeros(m, np.int32))
            self._launch(None, {"counts": counts}, ())
            indptr = np.concatenate([[0], np.cumsum(to_numpy(counts), dtype=np.int64)])
        else:
            indptr = mask.indptr
        self._nnz = nnz = int(indptr[-1])
        numbers = np.int64 if nnz > INT32 else np.int32
        self._how = wanted.problem.how, mask is not None, nnz > INT32
        inside = np.zeros(nnz, np.int32) if mask is None else mask.indices
        self._found = {
            "c_indptr": self._on_device(indptr.astype(numbers)), "c_nnz": nnz,
            "c_indices": self._there(inside),
        }  # fmt: skip
        if asked is None:
            a, b, c = (self._there(x.astype(self._dtype)) for x in (*values, np.zeros(nnz)))
            self._launch(self._dtype, {**self._found, "a": a, "b": b, "c": c}, self._how)
            found = to_numpy(self._found["c_indices"])
            found = found if columns is None else columns[found]
            self.pattern = Pattern.from_csr(indptr, found, (m, n), check=False)
        else:
            self.pattern = asked.pattern
            for size, _ in self._bins:
                self.kernel = self._kernel(size, self._dtype, *self._how)
        self.convert_seconds = time.perf_counter() - start - self.compile_seconds

    def _check_sizes(self, left: Csr, right: Csr) -> None:
        """Refuse operands that int32 does not number; the result may have more elements."""
        most = max(*left.shape, right.shape[1], len(left.indices), len(right.indices))
        if most > INT32:
            raise OverflowError(
                f"{self.op}: expected rows, columns and elements of the operands that int32 "
                f"numbers, got {most}; ElementThreads takes more"
            )

    def _there(self, array: Any) -> Any:
        """An argument where the kernels run."""
        if not isinstance(array, np.ndarray):
            return array
        whole = array.astype(np.int32, copy=False) if array.dtype.kind == "i" else array
        return self._on_device(whole)

    def _launch(self, dtype: str | None, more: Mapping[str, Any], how: tuple[Any, ...]) -> None:
        """Launch a kernel for each bin: of values, or what counts."""
        for size, rows in self._bins:
            self.kernel = self._kernel(size, dtype, *how)
            self.kernel(**rows, **self._given, **more)

    def _kernel(self, size: Bin, *how: Any) -> Kernel:
        start = time.perf_counter()
        made = lambda: lower(rows_program(size, *how), target=self._target)  # noqa: E731
        found = compiled((RowTables, size, *how), self._target, made)
        self.compile_seconds += time.perf_counter() - start
        return found

    @property
    def padding(self) -> float:
        """None: matrices are in CSR."""
        return 0.0

    def __call__(self, *values: Any, out: Any = None) -> Any:
        """The result's values, for those of both matrices.

        Parameters
        ----------
        *values : (nnz,) arrays
            Of each matrix, on the GPU, in the order of its pattern.
        out : (nnz,) array, optional
            Where they are written.

        Returns
        -------
        (nnz,) array
            In the order of `pattern`. Sums are added up in any order.

        Raises
        ------
        TypeError, ValueError
            Naming the argument.
        """
        if len(values) != 2:
            raise TypeError(f"{self.op}: expected values of 2 matrices, got {len(values)}")
        made = empty_like(values[0], (self._nnz,), self.op) if out is None else out
        shapes = {**self._shapes, "out": (self._nnz,)}
        for (name, shape), x in zip(shapes.items(), (*values, made), strict=True):
            got = tuple(getattr(x, "shape", ())), dtype_name(x)
            if got != (shape, self._dtype):
                raise ValueError(
                    f"{self.op}: argument '{name}': expected {self._dtype} of shape {shape}, got "
                    f"{got[1]} of {got[0]}"
                )
        a, b = values
        self._launch(self._dtype, {**self._found, "a": a, "b": b, "c": made}, self._how)
        return made

    def __repr__(self) -> str:
        return f"<sparsetir.RowTablesPlan {self.op} {self.config}>"


def _terms(A: Csr, B: Csr) -> np.ndarray:
    """How many terms each row of a product has."""
    ends = np.concatenate([[0], np.cumsum(np.diff(B.indptr)[A.indices], dtype=np.int64)])
    return np.diff(ends[A.indptr])


def binned(terms: np.ndarray, columns: int) -> list[tuple[Bin, np.ndarray, int, int]]:
    """Of each bin that has rows: these, how many ranges they go through, and columns of a range.

    terms : (rows,) of each row, or elements of a mask
    columns : of the result
    """
    found, least = [], 0  # rows without terms are as they were: empty
    for size in BINS:
        found.append((size, (terms > least) & (terms <= size.terms), 1, max(columns, 1)))
        least = size.terms
    long = -(-columns // size.slots)
    found.append((size, terms > least, long, size.slots))
    return [(s, np.flatnonzero(rows), r, w) for s, rows, r, w in found if rows.any()]
