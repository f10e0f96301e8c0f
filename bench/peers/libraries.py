"""Peers of sparsetir on a CPU; each class runs in a separate process.

Libraries are imported when a peer is constructed, in its process.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import mkl
from bench.peers.cases import Case, rows_of
from sparsetir.schedules.operators.names import OPS
from sparsetir.schedules.operators.operands import CHUNK, gathered
from sparsetir.schedules.operators.registry import OPERATORS
from sparsetir.tuning.case import aligned
from sparsetir.tuning.serving import Missing

Calls = dict[str, Callable[[], Any]]
DTYPES = ("float32", "float16", "bfloat16", "float64")  # of torch
REDUCTIONS = {"sum": "sum", "mean": "mean", "max": "amax"}  # with torch's names


class Peer:
    """A library. A subclass computes a case in one or more ways.

    threads : how many it may use; environment variables are set accordingly
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.told: dict[str, Any] = {}

    def prepare(self, case: Case) -> Calls:
        """Calls that compute the case, by name of the way.

        A way that writes into a given result has its own, filled with NaN to reveal missing writes.
        """
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """Further facts of the prepared case."""
        return self.told

    def release(self) -> None:
        """Release the data of the case."""

    def to_numpy(self, result: Any) -> np.ndarray:
        """A result as float32, or as float64 if it is that."""
        return np.asarray(result)


def wide(dtype: str) -> str:
    """The NumPy type that represents all numbers of a dtype."""
    return "float64" if dtype == "float64" else "float32"


def output(case: Case) -> np.ndarray:
    """An output array filled with NaN, in float32 (or float64)."""
    a, record = case.matrix, OPERATORS[case.op]
    shape = record.shapes(a.shape, a.nnz, case.feat, case.heads)["out"]
    return aligned(np.full(shape, np.nan, wide(case.dtype)))


def needs(
    case: Case, dtypes: Sequence[str] = ("float32",), reductions: Sequence[str] = ("sum",)
) -> None:
    """Raise Failed if a library lacks the operator, dtype, reduction or heads of a case."""
    if case.op not in OPS:
        raise Missing(f"has no {case.op}")
    if case.dtype not in dtypes:
        raise Missing(f"has no {case.dtype}")
    if case.reduce not in reductions:
        raise Missing(f"has no {case.reduce} of rows")
    if case.heads is not None:
        raise Missing("has no heads that share a pattern")


class Scipy(Peer):
    """scipy, which allocates its result and uses one thread."""

    def prepare(self, case: Case) -> Calls:
        """A product, or gathered rows by NumPy, since scipy has no SDDMM."""
        needs(case, ("float32", "float64"))
        a, dense = case.matrix, case.operands
        if case.op != "sddmm":
            return {"product": lambda: a @ dense[0]}
        rows, out, (x, y) = rows_of(a), output(case), dense
        return {"gather": lambda: gathered(rows, a.indices, x, y, out)}


class Torch(Peer):
    """torch's CSR tensors; torch.mm and torch.mv write into a given result, `@` allocates one."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        import torch

        warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch = torch

    def prepare(self, case: Case) -> Calls:
        """Products with and without a given result; SDDMM by its operator and by gathering."""
        needs(case, DTYPES, tuple(REDUCTIONS) if case.op == "spmm" else ("sum",))
        torch, a = self.torch, case.matrix
        dtype = getattr(torch, case.dtype)
        indptr, indices = torch.from_numpy(a.indptr), torch.from_numpy(a.indices)
        values = torch.from_numpy(a.data).to(dtype)
        matrix = torch.sparse_csr_tensor(indptr, indices, values, a.shape)
        dense = [torch.from_numpy(x).to(dtype) for x in case.operands]
        if case.op == "sddmm":
            return self._sddmm(matrix, rows_of(a), indices, *dense)
        if case.reduce != "sum":
            reduce = REDUCTIONS[case.reduce]
            return {"new": lambda: torch.sparse.mm(matrix, dense[0], reduce)}
        out, product = torch.from_numpy(output(case)).to(dtype), torch.mm
        if case.op == "spmv":
            product = torch.mv
        return {"out": lambda: product(matrix, dense[0], out=out), "new": lambda: matrix @ dense[0]}

    def _sddmm(self, matrix: Any, rows: np.ndarray, columns: Any, x: Any, y: Any) -> Calls:
        torch, transposed = self.torch, y.t()
        sampled = matrix.clone()
        rows = torch.from_numpy(rows)
        values = torch.empty(len(rows), dtype=x.dtype)
        step = max(1, CHUNK // x.shape[1])

        def gather() -> Any:
            for start in range(0, len(rows), step):
                rows_at = slice(start, start + step)
                torch.sum(x[rows[rows_at]] * y[columns[rows_at]], dim=1, out=values[rows_at])
            return values

        return {
            "sampled_addmm": lambda: torch.sparse.sampled_addmm(
                matrix, x, transposed, beta=0.0, out=sampled
            ),
            "gather": gather,
        }

    def to_numpy(self, result: Any) -> np.ndarray:
        """A dense tensor, or the values of a sparse one."""
        dense = result.values() if result.layout == self.torch.sparse_csr else result
        return (dense if dense.dtype == self.torch.float64 else dense.float()).numpy()


class MKL(Peer):
    """MKL by its own handles, with and without its inspection of the matrix."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        try:
            self.library = mkl.load()
        except OSError as error:
            raise Missing(str(error)) from None
        self._handles: list[mkl.Handle] = []

    def prepare(self, case: Case) -> Calls:
        """Products, all into a given result."""
        if case.op == "sddmm":
            raise Missing("has no SDDMM")
        needs(case, ("float32", "float64"))
        a, b = case.matrix, case.operands[0]
        ways = {"inspected": True, "plain": False}
        self._handles = [mkl.Handle(self.library, a, case.feat, i) for i in ways.values()]
        return {
            name: handle.product(b, output(case))
            for name, handle in zip(ways, self._handles, strict=True)
        }

    def about(self) -> dict[str, Any]:
        """The version: MKL may come from outside this environment, whose packages are recorded.

        `code`: the library that it selected for this CPU; `preloaded`: the names of libraries
        loaded before it (LD_PRELOAD), by which it can be made to select another.
        """
        before = re.split(r"[\s:]+", os.environ.get("LD_PRELOAD", ""))
        code_facts = {"code": mkl.code(), "preloaded": [Path(name).name for name in before if name]}
        return {"version": mkl.version(self.library), **{k: v for k, v in code_facts.items() if v}}

    def release(self) -> None:
        """Free MKL's copies of the matrix."""
        for handle in self._handles:
            handle.close()
        self._handles = []


def _ours(kind: str, threads: int) -> Peer:
    return getattr(import_module("bench.peers.ours"), kind)(threads)


OURS, FLOAT32 = "sparsetir", "sparsetir float32"
BEFORE = "before"  # another version of this project
PEERS: dict[str, Callable[[int], Peer]] = {
    OURS: partial(_ours, "Ours"),
    FLOAT32: partial(_ours, "OursFloat32"),
    "scipy": Scipy,
    "torch": Torch,
    "mkl": MKL,
}
