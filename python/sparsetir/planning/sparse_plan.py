"""Plans with a sparse result, whose pattern the first call, or a GPU, computes and keeps."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sparsetir.data.sources import Stored
from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.formats.pattern import Pattern
from sparsetir.planning.request import Request
from sparsetir.planning.run_plan import Plan, compiled
from sparsetir.planning.sparse_results import (
    INT32,
    Csr,
    arguments,
    csr,
    element_arguments,
    factors,
    in_ratio,
    is_gathered,
    kernel_of,
    ratio_of,
    term_ends,
    term_pairs,
    term_visits,
)
from sparsetir.runtime.arrays import dtype_name, empty_like, to_numpy
from sparsetir.runtime.assembled import AssembledKernel, CsrArrays, Numeric
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.pipeline import Stages, lower
from sparsetir.runtime.refusals import wrong
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.operators.sparse_results import KRON, SparseResult
from sparsetir.schedules.targets import host_target
from sparsetir.schedules.templates.sparse_results import Assembled
from sparsetir.sparse_ir.index_arrays import row_numbers
from sparsetir.sparse_ir.schedule import Schedule

FEW = 6  # terms per element, from which listing them does not pay


class SparsePlan(Plan):
    """A plan of a product or sum of sparse matrices; call it with values.

    Attributes
    ----------
    kernel : Kernel
        The kernel of calls after the first one, which other plans may share.
    convert_seconds, compile_seconds : float
        The same as for :class:`Plan`.
    """

    problem: SparseResult
    config: Assembled

    def _configure(self, wanted: Request, config: Any, chosen_by: str) -> None:
        wanted.template(config)  # raises for other configs
        self._name(wanted, config, chosen_by)

    def _bind(self, wanted: Request) -> None:
        start, problem, config = time.perf_counter(), wanted.problem, self.config
        self._wanted, self.problem, matrices = wanted, problem, wanted.matrix
        self._dtype, self._result = np.dtype(problem.dtype), np.dtype(problem.result)
        each = [_copy(csr(x), problem.idtype, self._dtype) for x in matrices.each]
        mask = None if matrices.mask is None else _copy(csr(matrices.mask), problem.idtype)
        m, n = self._shape = matrices.result_shape(wanted.name)
        self._columns: np.ndarray | None = None
        self._places: np.ndarray | None = None  # permutation of the second matrix's values
        self._names = [f"a{q}" for q in range(len(each))]
        sizes = {"m": m, "n": n}
        if problem.is_product:
            kernel_factors = factors(wanted.name, each, mask, config.dotted)
            (*each, mask), self._columns, self._places = kernel_factors
            self._names = ["a", "b"]
            sizes = {"m": m, "l": each[0].shape[1], "n": each[1].shape[1]}
        elif problem.how == KRON:
            self._names = ["a", "b"]
            sizes = dict(zip("mnpq", (*each[0].shape, *each[1].shape), strict=True))
        self._given = arguments(self._names, each, sizes, problem.idtype)
        self._known = mask and CsrArrays(mask.indptr, mask.indices, None)
        self._pattern = None if matrices.mask is None else matrices.mask.pattern
        self._threads = wanted.threads if config.parallel else 1
        self._repeat: Numeric | None = None
        # The values of a Kronecker product alone take as long as the product.
        self._repeated = (config.kept and problem.how != KRON) or mask is not None
        self._each = each
        if mask is not None and (config.listed or config.dotted):
            self.convert_seconds = time.perf_counter() - start
            self._repeat = self._by_terms(mask) if config.listed else self._by_elements(each, mask)
            self.kernel = self._repeat.kernel
            self.compile_seconds = time.perf_counter() - start - self.convert_seconds
            return
        converted = time.perf_counter() - start
        by_size = is_gathered(problem.how, each)
        self._numeric = self._assembling = self._kernel_of(config.gathered)
        if self._repeated:
            self._assembling = self._kernel_of(by_size)
        self.kernel = self._numeric.bound
        if self._repeated:
            self.kernel = self._numeric.numeric
        self.compile_seconds = time.perf_counter() - start - converted
        self._bounds = self._numeric.bounds(self._given, self._numeric.bound)
        self.convert_seconds = time.perf_counter() - start - self.compile_seconds
        if mask is None:
            start = time.perf_counter()
            levels = self._bounds.levels if config.levels is None else config.levels
            fill = self._assembling.fill(levels)
            self.kernel = self.kernel if self._repeated else fill
            self.compile_seconds += time.perf_counter() - start

    def _by_terms(self, mask: Csr) -> Numeric:
        """The numeric phase from known terms, in the order of the product's visits."""
        problem, target, parallel = self.problem, self._wanted.target, self._threads > 1
        start, each = time.perf_counter(), self._each
        lists = _in_parts(*term_visits(each[0], each[1], mask), mask.indptr, self._threads)
        self.convert_seconds += time.perf_counter() - start
        idtype = str(lists[0].dtype)

        def schedule(sch: Schedule) -> None:
            if parallel:
                parts, _ = sch.get_sp_iters(sch.get_sparse_iteration("visits"))
                sch.parallelize(parts, race="ignore")  # parts write different elements
            else:
                sch.lower()

        def stages() -> Stages:
            return lower(problem.terms_program(idtype, visited=True), schedule, target=target)

        kernel = compiled((problem, idtype, parallel, "visits"), target, stages)
        named = _listed(each, *lists) | {"nnz": len(mask.indices)}
        self._names = _numbered(each)
        self._given = {name: x.values for name, x in zip(self._names, each, strict=True)}
        return Numeric(kernel, {**named, **self._given}, "out")

    def _by_factors(self, result: Csr) -> Numeric:
        """The numeric phase of an elementwise product, from the positions of each factor."""
        problem, target, parallel = self.problem, self._wanted.target, self._threads > 1
        start, self._names = time.perf_counter(), _numbered(self._each)
        self._given = {n: x.values for n, x in zip(self._names, self._each, strict=True)}
        elements = _numbers(result)
        named: dict[str, Any] = {**self._given, "nnz": len(elements)}
        for name, x in zip(self._names, self._each, strict=True):
            places = np.searchsorted(_numbers(x), elements).astype(problem.idtype)
            named |= {f"{name}_places": places, f"{name}_nnz": len(x.indices)}
        self.convert_seconds += time.perf_counter() - start

        def stages() -> Stages:
            schedule = None if parallel else Schedule.lower
            return lower(problem.factors_program(), schedule, target=target)

        return Numeric(compiled((problem, parallel, "factors"), target, stages), named, "out")

    def _by_elements(self, each: Sequence[Csr], mask: Csr) -> Numeric:
        """The numeric phase element by element."""
        problem, target, parallel = self.problem, self._wanted.target, self._threads > 1
        ratio = ratio_of(each[0], each[1], mask)

        def schedule(sch: Schedule) -> None:
            in_ratio(sch, ratio)
            if not parallel:
                sch.lower()

        def stages() -> Stages:
            return lower(problem.elements_program(), schedule, target=target)

        kernel = compiled((problem, parallel, ratio, "elements"), target, stages)
        self._names = _numbered(each)
        named = element_arguments(each[0], each[1], mask, problem.idtype)
        self._given = {name: named[name] for name in self._names}
        return Numeric(kernel, named, "out")

    def _kernel_of(self, gathered: bool) -> AssembledKernel:
        target = self._wanted.target
        on = None if target is host_target() else target
        return kernel_of(*self.problem.made_by(gathered), target=on)

    @property
    def pattern(self) -> Pattern:
        """The pattern of the result, or of the mask; computed on first use."""
        if self._pattern is None:
            self()
        assert self._pattern is not None
        return self._pattern

    def __call__(self, *values: Any, out: Any = None) -> SparseMatrix:
        """Compute the result for the matrices' values, or other ones.

        Parameters
        ----------
        *values : (nnz,) arrays or None, optional
            NumPy arrays of each matrix's values, of the plan's dtype, in the order of its pattern;
            by default, and for None, those planned with.
        out : (nnz,) array, optional
            A contiguous NumPy array of the result's dtype, for the result's values.

        Returns
        -------
        SparseMatrix
            The result in CSR. All calls share its pattern, if the config keeps it.

        Raises
        ------
        TypeError, ValueError
            For an invalid argument, which the message names.

        Notes
        -----
        The first call computes the pattern, later ones the values alone; with a mask, which is the
        result's pattern, so does the first one.
        """
        passed, computed = self._checked(values), None
        if self._known is None or not self._repeated:
            computed = self._assembled({**self._given, **passed})
            if computed is None:  # the plan has switched to int64 indices
                return self(*values, out=out)
        assert self._known is not None and self._pattern is not None
        nnz = len(self._known.indices)
        if out is not None:
            self._check_out(out, nnz, values)
        if computed is None:
            if self._repeat is None:
                known = self._known.indptr, self._known.indices, self._given, self._bounds
                self._repeat = self._numeric.at(*known, self._threads)
            direct = out if self._result == np.dtype(self.problem.sums) else None
            computed = self._repeat(passed, direct)
        if out is not None and computed is not out:
            out[...] = computed
        stored = computed.astype(self._result, copy=False) if out is None else out
        return SparseMatrix.of_stored(Stored(self._pattern, stored))

    def _assembled(self, given: Mapping[str, object]) -> np.ndarray | None:
        """Assemble the result, keep its pattern, and return its values; None if it has too many
        elements for int32, after switching the plan to int64."""
        kernel, bounds, config = self._assembling, self._bounds, self.config
        try:
            result = kernel.assembled(given, bounds, config.levels, self._threads)
        except OverflowError:
            if self.problem.idtype == "int64":
                raise
            wide = replace(self.problem, idtype="int64")
            self._bind(replace(self._wanted, problem=wide))
            return None
        if self._known is not None and config.kept:
            return result.values
        columns = result.indices if self._columns is None else self._columns[result.indices]
        self._pattern = Pattern.from_csr(result.indptr, columns, self._shape, check=False)
        if self._repeated:  # a copy, as it is trusted, and the user may write to the pattern
            self._known = CsrArrays(result.indptr.copy(), result.indices.copy(), None)
        else:
            self._known = result._replace(values=None)
        factors = self.problem.lists == "factors"
        if config.listed and (factors or term_ends(*self._each)[-1] < FEW * len(result.indices)):
            start, before = time.perf_counter(), self.convert_seconds
            known = self._known.indptr, self._known.indices, None
            of = self._by_factors if factors else self._by_terms
            self._repeat = of(Csr(*known, (bounds.rows, bounds.columns)))
            self.kernel, listed = self._repeat.kernel, self.convert_seconds - before
            self.compile_seconds += time.perf_counter() - start - listed
        return result.values

    def _checked(self, values: Sequence[Any]) -> dict[str, np.ndarray]:
        """Values of a call, by parameter."""
        if len(values) > len(self._names):
            raise TypeError(
                f"{self.op}: expected values of {len(self._names)} matrices, got {len(values)}"
            )
        checked: dict[str, np.ndarray] = {}
        for i, array in enumerate(values):
            if array is None:
                continue
            name = self._names[i]
            caller = f"{self.op}: argument 'values[{i}]'"
            _check_array(caller, array, self._given[name].shape, self._result)
            array = array if i == 0 or self._places is None else array[self._places]
            checked[name] = np.ascontiguousarray(array).astype(self._dtype, copy=False)
        return checked

    def _check_out(self, out: Any, nnz: int, values: Sequence[Any]) -> None:
        caller = f"{self.op}: argument 'out'"
        _check_array(caller, out, (nnz,), self._result)
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(f"{caller}: expected a contiguous array that can be written to")
        for i, array in enumerate(values):
            if array is not None and np.may_share_memory(out, array):
                raise ValueError(f"{caller} shares memory with 'values[{i}]'")

    def __repr__(self) -> str:
        return f"<sparsetir.SparsePlan {self.op} {self._shape} {self.config}>"


class ValuesPlan(Plan):
    """A plan of a product or sum of sparse matrices for a GPU.

    The pattern is computed on the CPU, once. Calls map values of all matrices to the result's.

    Attributes
    ----------
    pattern : Pattern
        The pattern of the result.
    """

    def __init__(self, wanted: Request, config: Any, chosen_by: str = "user") -> None:
        start, mask = time.perf_counter(), wanted.matrix.mask
        if mask is None:
            on_host = replace(wanted, target=host_target())
            self.pattern = SparsePlan(on_host, Assembled(kept=False)).pattern
        else:
            self.pattern = mask.pattern
        request = _at_pattern(wanted, self.pattern, getattr(config, "listed", False))
        pattern_seconds = time.perf_counter() - start
        super().__init__(request, config, chosen_by)
        self.convert_seconds += pattern_seconds


def _at_pattern(wanted: Request, pattern: Pattern, listed: bool) -> Request:
    """The request for a result's values from operands named x0, x1, ...

    listed : whether a product's terms are listed
    """
    problem, each = wanted.problem, wanted.matrix.each
    if pattern.nnz > INT32:
        problem = replace(problem, idtype="int64")
    matrices = [_copy(csr(x), problem.idtype) for x in each]
    m, n = wanted.matrix.result_shape(wanted.name)
    out = _copy(Csr(pattern.indptr, pattern.columns, None, (m, n)), problem.idtype)
    sizes: dict[str, Any] = {}
    if wanted.problem.is_product:
        (*matrices, narrow), _, places = factors(wanted.name, matrices, out, not listed)
        out = narrow or out
        if places is None:
            places = np.arange(each[1].nnz, dtype=problem.idtype)
        if listed:
            begins, of_a, of_b = term_pairs(matrices[0], matrices[1], out)
            if len(of_a) > INT32:
                problem = replace(problem, idtype="int64")
            lists = (x.astype(problem.idtype) for x in (begins, of_a, places[of_b]))
            sizes = _listed(matrices, *lists)
        else:
            sizes = {"l": matrices[0].shape[1], "x1_places": places}
    elif wanted.problem.how == KRON:
        sizes = dict(zip(("x0_m", "x0_n", "p", "q"), (*each[0].shape, *each[1].shape), strict=True))
    for name, x in zip(_numbered(each), matrices, strict=True):
        arrays = {"indptr": x.indptr, "indices": x.indices, "nnz": len(x.indices)}
        sizes |= {f"{name}_{what}": array for what, array in arrays.items()}
    out = _copy(out, problem.idtype)
    dims = {name: str(q) for q, name in enumerate(_numbered(each))}  # each has one of its own
    callers = {"feat": None, "heads": None, **{str(q): x.nnz for q, x in enumerate(each)}}
    operator = replace(wanted.operator, dims={**dims, "out": "nnz"}, reads_values=False)
    stored = CsrPattern(out.indptr, out.indices, (m, out.shape[1]))
    return replace(
        wanted, problem=problem, matrix=stored, sizes=sizes, operator=operator, callers=callers,
        there=(*dims, "out"),
    )  # fmt: skip


def _listed(
    each: Sequence[Csr], begins: np.ndarray, a: np.ndarray, b: np.ndarray,
    places: np.ndarray | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of kernels of listed terms, except values."""
    named = {f"{name}_nnz": len(x.indices) for name, x in zip(_numbered(each), each, strict=True)}
    sizes = {"nnz" if places is None else "parts": len(begins) - 1, "terms": len(a)}
    named |= {**sizes, "begins": begins, "x0_places": a, "x1_places": b}
    return named if places is None else {**named, "places": places}


def _in_parts(
    element: np.ndarray, a: np.ndarray, b: np.ndarray, indptr: np.ndarray, threads: int
) -> tuple[np.ndarray, ...]:
    """Divide terms into one part of whole rows per thread: the starts of parts, the positions of
    terms in A and B, and their elements.

    indptr : that of the result, whose elements increase from row to row
    """
    cuts = len(a) * np.arange(1, threads) // threads
    rows = np.searchsorted(indptr, element[cuts], side="right") - 1 if len(a) else cuts
    inside = np.searchsorted(np.maximum.accumulate(element), indptr[rows]) if len(a) else cuts
    begins = np.array([0, *inside, len(a)], a.dtype)
    return begins, a, b, element


def _numbers(matrix: Csr) -> np.ndarray:
    """The position of each element in a dense matrix, (nnz,)."""
    return row_numbers(matrix.indptr) * matrix.shape[1] + matrix.indices


def _numbered(each: Sequence[object]) -> list[str]:
    """The names of operands."""
    return [f"x{q}" for q in range(len(each))]


def _copy(matrix: Csr, idtype: str, dtype: Any = None) -> Csr:
    """A copy of a matrix with values of another type, or none."""
    indptr, indices = (np.array(x, idtype) for x in matrix[:2])
    values = None if dtype is None else np.array(matrix.values, dtype)
    return matrix._replace(indptr=indptr, indices=indices, values=values)


def _check_array(caller: str, array: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{caller}: expected an array of NumPy, got {type(array).__name__}")
    if array.dtype != dtype:
        raise TypeError(f"{caller}: expected dtype {dtype}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{caller}: expected shape {shape}, got {array.shape}")


# -- products by hash tables on a GPU -------------------------------------------------------------


class RowTablesPlan(Plan):
    """A plan of a product of sparse matrices on a GPU with `RowTables`.

    The GPU counts elements and fills rows: once for the pattern, and again for the values of each
    call. With a mask there is nothing to count.

    Attributes
    ----------
    pattern : Pattern
        The pattern of the result.
    """

    config: Any

    def _configure(self, wanted: Request, config: Any, chosen_by: str) -> None:
        wanted.template(config)  # raises for other configs
        self._set_device(wanted)
        self._name(wanted, config, chosen_by)
        self.needs_values = True

    def _bind(self, wanted: Request) -> None:
        start, each = time.perf_counter(), [csr(x) for x in wanted.matrix.each]
        m, n = wanted.matrix.result_shape(wanted.name)
        wanted_mask = wanted.matrix.mask
        known = None if wanted_mask is None else csr(wanted_mask)
        (left, right, mask), columns, _ = factors(wanted.name, each, known, False)
        self._target, self._dtype = wanted.target, wanted.problem.dtype
        self._check_sizes(left, right)
        sizes = {"m": m, "l": left.shape[1]}
        named = arguments("ab", (left, right), sizes, "int32")
        values = [named.pop(x) for x in "ab"]
        self._shapes = {"values[0]": values[0].shape, "values[1]": values[1].shape}
        self._given = {k: self._to_device(x) for k, x in named.items()}
        ends = term_ends(left, right)[left.indptr] if mask is None else mask.indptr
        self._bins = [
            (size, {"rows": self._to_device(rows), "count": len(rows), "ranges": r, "width": w})
            for size, rows, r, w in self.config.binned(np.diff(ends), right.shape[1])
        ]
        self.launches = len(self._bins)
        if mask is None:
            counts = self._to_device(np.zeros(m, np.int32))
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
            "c_indices": self._to_device(inside),
        }  # fmt: skip
        if wanted_mask is None:
            a, b, c = (self._to_device(x.astype(self._dtype)) for x in (*values, np.zeros(nnz)))
            self._launch(self._dtype, {**self._found, "a": a, "b": b, "c": c}, self._how)
            indices = to_numpy(self._found["c_indices"])
            indices = indices if columns is None else columns[indices]
            self.pattern = Pattern.from_csr(indptr, indices, (m, n), check=False)
        else:
            self.pattern = wanted_mask.pattern
            for size, _ in self._bins:
                self.kernel = self._kernel(size, self._dtype, *self._how)
        self.convert_seconds = time.perf_counter() - start - self.compile_seconds

    def _check_sizes(self, left: Csr, right: Csr) -> None:
        """Raise for operands whose sizes exceed int32; the result may have more elements."""
        most = max(*left.shape, right.shape[1], len(left.indices), len(right.indices))
        if most > INT32:
            raise OverflowError(
                f"{self.op}: expected numbers of rows, columns and elements of the operands that "
                f"int32 holds, got {most}; ElementThreads takes more"
            )

    def _to_device(self, array: Any) -> Any:
        """Move an argument to the kernels' device, integers as int32."""
        if not isinstance(array, np.ndarray):
            return array
        whole = array.astype(np.int32, copy=False) if array.dtype.kind == "i" else array
        return self._on_device(whole)

    def _launch(
        self, dtype: str | None, more: Mapping[str, object], how: tuple[object, ...]
    ) -> None:
        """Launch a kernel for each bin, to fill values, or to count if `dtype` is None."""
        for size, rows in self._bins:
            self.kernel = self._kernel(size, dtype, *how)
            self.kernel(**rows, **self._given, **more)

    def _kernel(self, size: Hashable, *how: Hashable) -> Kernel:
        start, program = time.perf_counter(), self.config.rows_program
        stages = lambda: lower(program(size, *how), target=self._target)  # noqa: E731
        kernel = compiled((type(self.config), size, *how), self._target, stages)
        self.compile_seconds += time.perf_counter() - start
        return kernel

    def __call__(self, *values: Any, out: Any = None) -> Any:
        """Compute the result's values from those of both matrices.

        Parameters
        ----------
        *values : (nnz,) arrays
            Values of each matrix, on the GPU, in the order of its pattern.
        out : (nnz,) array, optional
            The array to write to.

        Returns
        -------
        (nnz,) array
            The values in the order of `pattern`. Terms are added in any order.

        Raises
        ------
        TypeError, ValueError
            For an invalid argument, which the message names.
        """
        if len(values) != 2:
            raise TypeError(f"{self.op}: expected values of 2 matrices, got {len(values)}")
        result = empty_like(values[0], (self._nnz,), self.op) if out is None else out
        shapes = {**self._shapes, "out": (self._nnz,)}
        for (name, shape), x in zip(shapes.items(), (*values, result), strict=True):
            got = tuple(getattr(x, "shape", ())), dtype_name(x)
            if got != (shape, self._dtype):
                expected = f"{self._dtype} of shape {shape}"
                raise wrong(self.op, name, expected, f"{got[1]} of {got[0]}")
        a, b = values
        self._launch(self._dtype, {**self._found, "a": a, "b": b, "c": result}, self._how)
        return result

    def __repr__(self) -> str:
        return f"<sparsetir.RowTablesPlan {self.op} {self.config}>"
