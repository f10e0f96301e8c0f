"""Kernels whose result is a sparse matrix that nobody knows beforehand."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sparsetir.runtime.arrays import is_torch
from sparsetir.runtime.build import build
from sparsetir.runtime.kernel import Kernel
from sparsetir.runtime.targets import resolve_target
from sparsetir.sparse_ir.assemble import assemble
from sparsetir.sparse_ir.nodes import SparseFunc


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
    `count` and `fill` are the two kernels, `params` what callers give. A call counts the elements
    of each row, allocates the result, and fills it; both go through the operands once, on all
    threads.
    """

    def __init__(self, func: SparseFunc, result: str, target: Any = "llvm") -> None:
        target = resolve_target(target)
        if "cpu" not in target.keys:
            raise ValueError(
                f"build_assembled: argument 'target': expected a CPU, got {target.kind.name!r}"
            )
        self.programs = assemble(func, result)
        self.name = func.name
        params = [str(p.name) for p in func.params]
        self.params = [n for n in params if n != self.programs.values]
        self.count = build(self.programs.count, target)
        self.fill = build(self.programs.fill, target)
        # What `count` has checked, and what comes of that, is not checked once more.
        checked = {*_index_names(self.count), self.programs.indptr}
        self.fill.check = not _index_names(self.fill) <= checked

    def __call__(self, *args: Any, **kwargs: Any) -> CsrArrays:
        """The result, of the kind of arrays that the operands are.

        Parameters
        ----------
        *args, **kwargs
            The program's parameters without the result's, in order or by name. NumPy arrays, or
            tensors of torch on the CPU.

        Raises
        ------
        TypeError, ValueError
            As of :class:`sparsetir.Kernel`.
        OverflowError
            For more elements than the type of the indices can number.
        """
        names, order = self.programs, self.params
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
        kept = {n: x for n, x in given.items() if n in self.count.signature.position}
        given = {n: x for n, x in given.items() if n in self.fill.signature.position}
        torch = any(map(is_torch, given.values()))
        signature = self.count.signature
        dtype = signature.dtypes[signature.position[names.counts]]
        (rows,) = self.count.shape_of(names.counts, kept)
        indptr = np.zeros(rows + 1, dtype)
        counts = np.empty(rows, dtype)
        self.count(**kept, **{names.counts: _as(torch, counts)})
        total = int(counts.sum(dtype=np.int64))
        if total > np.iinfo(dtype).max:
            raise OverflowError(
                f"{self.name}: the result has {total} elements, more than {dtype} numbers; "
                "expected int64 indices"
            )
        np.cumsum(counts, out=indptr[1:])
        made = {names.indptr: _as(torch, indptr), names.nnz: total}
        made[names.indices] = _as(torch, np.empty(total, dtype))
        known = {**given, **made}
        shape = self.fill.shape_of(names.values, known)
        made[names.values] = _values(torch, shape, self.fill.signature, names.values)
        self.fill(**given, **made)
        return CsrArrays(made[names.indptr], made[names.indices], made[names.values])

    def __repr__(self) -> str:
        return f"AssembledKernel({self.name!r})"


def build_assembled(func: SparseFunc, result: str, target: Any = "llvm") -> AssembledKernel:
    """Compile a program whose result is to be sparse, with the pattern that it visits.

    Parameters
    ----------
    func : SparseFunc
        Of stage I: one iteration, over rows, then over columns in increasing order, such as a
        union; its result over dense rows and columns.
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


def _index_names(kernel: Kernel) -> set[str]:
    return {kernel.signature.names[i] for i in kernel.signature.index_arrays}


def _as(torch: bool, array: np.ndarray) -> Any:
    if not torch:
        return array
    import torch as library

    return library.from_numpy(array)


def _values(torch: bool, shape: Any, signature: Any, name: str) -> Any:
    dtype = signature.dtypes[signature.position[name]]
    if torch:
        import torch as library

        return library.empty(*shape, dtype=getattr(library, dtype))
    return np.empty(shape, dtype)
