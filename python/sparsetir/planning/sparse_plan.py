"""A plan whose result is sparse: it keeps the pattern that its first call finds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sparsetir.data.sources import Stored
from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.formats.pattern import Pattern
from sparsetir.planning.compiled import compiled
from sparsetir.planning.request import Request
from sparsetir.planning.run_plan import Plan
from sparsetir.planning.sparse_results import (
    INT32,
    Csr,
    arguments,
    csr,
    factors,
    in_ratio,
    is_gathered,
    kernel_of,
    of_elements,
    ratio_of,
)
from sparsetir.planning.term_pairs import term_pairs, term_visits
from sparsetir.runtime.assembled import AssembledKernel, CsrArrays, Numeric
from sparsetir.runtime.pipeline import lower
from sparsetir.runtime.targets import host_target
from sparsetir.schedules.gpu.sparse_results import TermLanes
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.operators.sparse_results import (
    KRON,
    SparseResult,
    combined_program,
    kron_program,
    product_program,
)
from sparsetir.schedules.templates.sparse_results import Assembled
from sparsetir.sparse_ir.schedule import Schedule

FEW = 6  # terms of an element, below which they take less time in the order of visits


class SparsePlan(Plan):
    """A plan of a product or sum of sparse matrices; call it with values.

    Parameters
    ----------
    wanted : request
        The operator and its matrices.
    config : Assembled
        How results are made.
    chosen_by : {"user", "record", "default"}
        As of :class:`Plan`.

    Attributes
    ----------
    kernel : Kernel
        What a call after the first one runs, which other plans may share.
    convert_seconds, compile_seconds : float
        As of :class:`Plan`.
    """

    problem: SparseResult
    config: Assembled

    def _settle(self, wanted: Request, config: Any, chosen_by: str) -> None:
        wanted.template(config)  # which refuses others
        self.op, self.problem, self.feat = wanted.name, wanted.problem, wanted.feat
        self.config, self.chosen_by = config, chosen_by
        self.launches, self.needs_values, self.arranges_values = 1, False, False
        self.repeats, self.compile_seconds = False, 0.0

    def _bind(self, wanted: Request) -> None:
        start, problem, config = time.perf_counter(), wanted.problem, self.config
        self._wanted, self.problem, matrices = wanted, problem, wanted.matrices
        self._dtype, self._result = np.dtype(problem.dtype), np.dtype(problem.result)
        each = [_copy(csr(x), problem.idtype, self._dtype) for x in matrices.each]
        mask = None if matrices.mask is None else _copy(csr(matrices.mask), problem.idtype)
        m, n = self._shape = matrices.result_shape(wanted.name)
        self._columns: np.ndarray | None = None
        self._places: np.ndarray | None = None  # of the second one's values, in its other order
        self._names = [f"a{q}" for q in range(len(each))]
        sizes = {"m": m, "n": n}
        if problem.is_product:
            found = factors(wanted.name, each, mask, config.dotted)
            (*each, mask), self._columns, self._places = found
            self._names = ["a", "b"]
            sizes = {"m": m, "l": each[0].shape[1], "n": each[1].shape[1]}
        elif problem.how == KRON:
            self._names = ["a", "b"]
            sizes = dict(zip("mnpq", (*each[0].shape, *each[1].shape), strict=True))
        self._given = arguments(dict(zip(self._names, each, strict=True)), sizes, problem.idtype)
        self._known = mask and CsrArrays(mask.indptr, mask.indices, None)
        self._pattern = None if matrices.mask is None else matrices.mask.pattern
        self._threads = wanted.threads if config.parallel else 1
        self._repeat: Numeric | None = None
        # The values of a Kronecker product take as long as the product.
        self._repeated = (config.kept and problem.how != KRON) or mask is not None
        self._each = each
        if mask is not None and (config.listed or config.dotted):
            self.convert_seconds = time.perf_counter() - start
            self._repeat = self._of_terms(mask) if config.listed else self._of_elements(each, mask)
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
        self._bounds = self._numeric.bounds(self._given)
        self.convert_seconds = time.perf_counter() - start - self.compile_seconds
        if mask is None:
            start = time.perf_counter()
            levels = self._bounds.levels if config.levels is None else config.levels
            fill = self._assembling.fill(levels)
            self.kernel = self.kernel if self._repeated else fill
            self.compile_seconds += time.perf_counter() - start

    def _terms(self) -> int:
        """Of a product, all."""
        A, B = self._each
        return int(np.diff(B.indptr)[A.indices].sum(dtype=np.int64))

    def _of_terms(self, mask: Csr) -> Numeric:
        """What computes values of terms that are known: of few for an element in the order of the
        product's visits, else element by element."""
        problem, target, parallel = self.problem, self._wanted.target, self._threads > 1
        start, each = time.perf_counter(), self._each
        lists = term_visits(each[0], each[1], mask)
        visited = len(lists[0]) < FEW * len(mask.indices)
        if visited:
            lists = _in_parts(*lists, mask.indptr, self._threads)
        else:
            lists = term_pairs(each[0], each[1], mask)
        self.convert_seconds += time.perf_counter() - start
        idtype = str(lists[0].dtype)

        def schedule(sch: Schedule) -> None:
            if visited and parallel:
                parts, _ = sch.get_sp_iters(sch.get_sparse_iteration("visits"))
                sch.parallelize(parts, race="ignore")  # their elements differ
            elif not parallel:
                sch.lower()

        def stages() -> Any:
            return lower(problem.terms_program(idtype, visited), schedule, target=target)

        kernel = compiled((problem, idtype, parallel, visited, "terms"), target, stages)
        given = _listed(each, *lists) | {"nnz": len(mask.indices)}
        self._names = _numbered(each)
        self._given = {name: x.values for name, x in zip(self._names, each, strict=True)}
        return Numeric(kernel, {**given, **self._given}, "out")

    def _of_elements(self, each: Sequence[Csr], mask: Csr) -> Numeric:
        """What computes values of elements one by one."""
        problem, target, parallel = self.problem, self._wanted.target, self._threads > 1
        ratio = ratio_of(each[0], each[1], mask)

        def schedule(sch: Schedule) -> None:
            in_ratio(sch, ratio)
            if not parallel:
                sch.lower()

        def stages() -> Any:
            return lower(problem.elements_program(), schedule, target=target)

        kernel = compiled((problem, parallel, ratio, "elements"), target, stages)
        self._names = _numbered(each)
        given = of_elements(each[0], each[1], mask, problem.idtype)
        self._given = {name: given[name] for name in self._names}
        return Numeric(kernel, given, "out")

    def _kernel_of(self, gathered: bool) -> AssembledKernel:
        problem, target = self.problem, self._wanted.target
        target = None if target is host_target() else target
        types = problem.dtype, problem.sums, problem.idtype
        if problem.how == KRON:
            return kernel_of(kron_program, *types, target=target)
        if problem.is_product:
            return kernel_of(product_program, problem.how, *types, target=target)
        how = problem.how, problem.count, gathered
        return kernel_of(combined_program, *how, *types, target=target)

    @property
    def padding(self) -> float:
        """None: matrices are in CSR."""
        return 0.0

    @property
    def pattern(self) -> Pattern:
        """Of the result, or the mask's; assembled when it is first wanted."""
        if self._pattern is None:
            self()
        assert self._pattern is not None
        return self._pattern

    def __call__(self, *values: Any, out: Any = None) -> SparseMatrix:
        """The result for the matrices' values, or other ones.

        Parameters
        ----------
        *values : (nnz,) arrays or None, optional
            Of each matrix, of NumPy and the plan's dtype, in the order of its pattern; by default,
            and for None, those planned with.
        out : (nnz,) array, optional
            Where the result's values are written: of NumPy, contiguous and of the result's dtype.

        Returns
        -------
        SparseMatrix
            In CSR. Those of all calls share their pattern, where the config keeps it.

        Raises
        ------
        TypeError, ValueError
            Naming the argument.

        Notes
        -----
        The first call finds the pattern, later ones compute its values alone; a plan with a mask,
        whose pattern the result has, does from the first one on.
        """
        given, found = self._checked(values), None
        if self._known is None or not self._repeated:
            found = self._assembled({**self._given, **given})
            if found is None:  # with int64 indices it goes
                return self(*values, out=out)
        assert self._known is not None and self._pattern is not None
        nnz = len(self._known.indices)
        if out is not None:
            self._check_out(out, nnz, values)
        if found is None:
            if self._repeat is None:
                known = self._known.indptr, self._known.indices, self._given, self._bounds
                self._repeat = self._numeric.at(*known, self._threads)
            direct = out if self._result == np.dtype(self.problem.sums) else None
            found = self._repeat(given, direct)
        if out is not None and found is not out:
            out[...] = found
        made = found.astype(self._result, copy=False) if out is None else out
        return SparseMatrix.of_stored(Stored(self._pattern, made))

    def _assembled(self, given: Mapping[str, Any]) -> np.ndarray | None:
        """Values of a result that is assembled, whose pattern is kept; None for one that int32 does
        not number, of a plan that is then for int64."""
        kernel, bounds, config = self._assembling, self._bounds, self.config
        try:
            made = kernel.assembled(given, bounds, config.levels, self._threads)
        except OverflowError:
            if self.problem.idtype == "int64":
                raise
            wide = replace(self.problem, idtype="int64")
            self._bind(replace(self._wanted, problem=wide))
            return None
        if self._known is not None and config.kept:
            return made.values
        columns = made.indices if self._columns is None else self._columns[made.indices]
        self._pattern = Pattern.from_csr(made.indptr, columns, self._shape, check=False)
        if self._repeated:  # trusted from here on, while the user may write to the pattern
            self._known = CsrArrays(made.indptr.copy(), made.indices.copy(), None)
        else:
            self._known = made._replace(values=None)
        if config.listed and self._terms() < FEW * len(made.indices):
            start, before = time.perf_counter(), self.convert_seconds
            known = self._known.indptr, self._known.indices, None
            self._repeat = self._of_terms(Csr(*known, (len(made.indptr) - 1, bounds.columns)))
            self.kernel, listed = self._repeat.kernel, self.convert_seconds - before
            self.compile_seconds += time.perf_counter() - start - listed
        return made.values

    def _checked(self, values: Sequence[Any]) -> dict[str, np.ndarray]:
        """Values of a call, by parameter."""
        if len(values) > len(self._names):
            raise TypeError(
                f"{self.op}: expected values of {len(self._names)} matrices, got {len(values)}"
            )
        found: dict[str, np.ndarray] = {}
        for at, array in enumerate(values):
            if array is None:
                continue
            name = self._names[at]
            who = f"{self.op}: argument 'values[{at}]'"
            _check_array(who, array, self._given[name].shape, self._result)
            array = array if at == 0 or self._places is None else array[self._places]
            found[name] = np.ascontiguousarray(array).astype(self._dtype, copy=False)
        return found

    def _check_out(self, out: Any, nnz: int, values: Sequence[Any]) -> None:
        who = f"{self.op}: argument 'out'"
        _check_array(who, out, (nnz,), self._result)
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError(f"{who}: expected a contiguous array that can be written to")
        for at, array in enumerate(values):
            if array is not None and np.may_share_memory(out, array):
                raise ValueError(f"{who} shares memory with 'values[{at}]'")

    def __repr__(self) -> str:
        return f"<sparsetir.SparsePlan {self.op} {self._shape} {self.config}>"


class ValuesPlan(Plan):
    """A plan of a product or sum of sparse matrices for a GPU.

    The pattern is found on the CPU, once. Calls take values of all matrices, and give the result's.

    Parameters
    ----------
    wanted : request
        The operator and its matrices.
    config : ElementThreads or TermLanes
        Of the kernel.
    chosen_by : {"user", "default"}
        As of :class:`Plan`.

    Attributes
    ----------
    pattern : Pattern
        Of the result.
    """

    def __init__(self, wanted: Request, config: Any, chosen_by: str = "user") -> None:
        start, mask = time.perf_counter(), wanted.matrices.mask
        if mask is None:
            there = replace(wanted, target=host_target())
            self.pattern = SparsePlan(there, Assembled(kept=False)).pattern
        else:
            self.pattern = mask.pattern
        at = _at_pattern(wanted, self.pattern, isinstance(config, TermLanes))
        found = time.perf_counter() - start
        super().__init__(at, config, chosen_by)
        self.convert_seconds += found


def _at_pattern(wanted: Request, pattern: Pattern, listed: bool) -> Request:
    """The request of a result's values, which operands named x0, x1, ... are of.

    listed : whether the terms of a product are
    """
    problem, each = wanted.problem, wanted.matrices.each
    if pattern.nnz > INT32:
        problem = replace(problem, idtype="int64")
    matrices = [_copy(csr(x), problem.idtype) for x in each]
    m, n = wanted.matrices.result_shape(wanted.name)
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
        sizes |= {f"{name}_{what}": given for what, given in arrays.items()}
    out = _copy(out, problem.idtype)
    dims = {name: str(q) for q, name in enumerate(_numbered(each))}  # each has a letter of its own
    callers = {"feat": None, "heads": None, **{str(q): x.nnz for q, x in enumerate(each)}}
    operator = replace(wanted.operator, dims={**dims, "out": "e"}, reads_values=False)
    there = CsrPattern(out.indptr, out.indices, (m, out.shape[1]))
    return replace(
        wanted, problem=problem, matrix=there, sizes=sizes, operator=operator, callers=callers,
        there=(*dims, "out"),
    )  # fmt: skip


def _listed(
    each: Sequence[Csr], begins: np.ndarray, a: np.ndarray, b: np.ndarray,
    places: np.ndarray | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What kernels of listed terms are given, but values."""
    found = {f"{name}_nnz": len(x.indices) for name, x in zip(_numbered(each), each, strict=True)}
    sizes = {"nnz" if places is None else "parts": len(begins) - 1, "terms": len(a)}
    found |= {**sizes, "begins": begins, "x0_places": a, "x1_places": b}
    return found if places is None else {**found, "places": places}


def _in_parts(
    element: np.ndarray, a: np.ndarray, b: np.ndarray, indptr: np.ndarray, threads: int
) -> tuple[np.ndarray, ...]:
    """Terms in as many parts as there are threads, of whole rows: where parts begin, the places of
    terms in A and B, and their elements.

    indptr : of the result, whose elements increase from row to row
    """
    cuts = len(a) * np.arange(1, threads) // threads
    rows = np.searchsorted(indptr, element[cuts], side="right") - 1 if len(a) else cuts
    inside = np.searchsorted(np.maximum.accumulate(element), indptr[rows]) if len(a) else cuts
    begins = np.array([0, *inside, len(a)], a.dtype)
    return begins, a, b, element


def _numbered(each: Sequence[Any]) -> list[str]:
    """Names of operands."""
    return [f"x{q}" for q in range(len(each))]


def _copy(matrix: Csr, idtype: str, dtype: Any = None) -> Csr:
    """With arrays of its own; values of another type, or none."""
    indptr, indices = (np.array(x, idtype) for x in matrix[:2])
    values = None if dtype is None else np.array(matrix.values, dtype)
    return matrix._replace(indptr=indptr, indices=indices, values=values)


def _check_array(who: str, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{who}: expected an array of NumPy, got {type(array).__name__}")
    if array.dtype != dtype:
        raise TypeError(f"{who}: expected dtype {dtype}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{who}: expected shape {shape}, got {array.shape}")
