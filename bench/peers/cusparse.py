"""cuSPARSE by its C interface, with all preparation before the timed call.

Written for CUDA 12 and 13; the library is the one that torch has loaded. Buffers are allocated
and `*_preprocess` is called once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers.cases import Case

NOT_TRANSPOSED, TRANSPOSED = 0, 1
INT32, ZERO_BASED = 2, 0
COLUMN_MAJOR, ROW_MAJOR = 1, 2
TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
FLOAT32 = TYPES["float32"]
SPMM = {"CSR_ALG1": 4, "CSR_ALG2": 6, "CSR_ALG3": 12}
SPMM |= {"COO_ALG1": 1, "COO_ALG2": 2, "COO_ALG3": 3, "COO_ALG4": 5}
SPMV = {"CSR_ALG1": 2, "CSR_ALG2": 3, "COO_ALG1": 1, "COO_ALG2": 4}
SDDMM = {"default": 0}


class Refused(Exception):
    """A combination of algorithm, dtype and layout that cuSPARSE lacks."""


def load() -> Any:
    """The library; OSError if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcusparse.so" in line:
            return ctypes.CDLL(line.split()[-1])
    return ctypes.CDLL("libcusparse.so")


class CuSparse:
    """Calls for a case: each algorithm, and both layouts of dense matrices.

    tensors : the values, dense operands and output of a case on the GPU, in several copies that
        take turns
    """

    def __init__(self, torch: Any) -> None:
        self.torch, self.library = torch, load()
        self.handle = ctypes.c_void_p()
        self._do("cusparseCreate", ctypes.byref(self.handle))
        self._kept: list[Any] = []

    def _do(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise Refused(f"{name}: status {status}")

    def _new(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._do(name, ctypes.byref(handle), *arguments)
        return handle

    def prepare(self, case: Case, tensors: Any) -> dict[str, Callable[[int], Any]]:
        """Calls by copy number, which return their output; a combination may raise Refused."""
        out: dict[str, Callable[[int], Any]] = {}
        algorithms = {"spmm": SPMM, "sddmm": SDDMM, "spmv": SPMV}[case.op]
        layouts = (ROW_MAJOR, COLUMN_MAJOR) if case.op == "spmm" else (ROW_MAJOR,)
        for layout in layouts:
            for name, number in algorithms.items():
                text = f"{name} columns" if layout == COLUMN_MAJOR else name
                try:
                    out[text] = self._call(case, tensors, name, number, layout)
                except Refused:
                    continue
        return out

    def _matrix(self, case: Case, tensors: Any, values: Any, name: str) -> ctypes.c_void_p:
        m, n = (ctypes.c_int64(x) for x in case.matrix.shape)
        kind, nnz = TYPES[case.dtype], ctypes.c_int64(case.matrix.nnz)
        columns, data = _at(tensors.indices), _at(values)
        rest = (columns, data, INT32, ZERO_BASED, kind)
        if name.startswith("COO"):
            return self._new("cusparseCreateCoo", m, n, nnz, _at(tensors.rows), *rest)
        rest = (columns, data, INT32, INT32, ZERO_BASED, kind)
        return self._new("cusparseCreateCsr", m, n, nnz, _at(tensors.indptr), *rest)

    def _dense(self, tensor: Any, layout: int, dtype: str) -> ctypes.c_void_p:
        if tensor.ndim == 1:
            size = ctypes.c_int64(len(tensor))
            return self._new("cusparseCreateDnVec", size, _at(tensor), TYPES[dtype])
        rows, columns = (ctypes.c_int64(x) for x in tensor.shape)
        step = columns if layout == ROW_MAJOR else rows
        where = (_at(tensor), TYPES[dtype], layout)
        return self._new("cusparseCreateDnMat", rows, columns, step, *where)

    def _call(
        self, case: Case, tensors: Any, name: str, number: int, layout: int
    ) -> Callable[[int], Any]:
        """A prepared call for each copy."""
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        stem = {"spmm": "SpMM", "sddmm": "SDDMM", "spmv": "SpMV"}[case.op]
        ready, outputs = [], []
        for dense, out_of in tensors.copies:
            # A matrix by columns has the same shape, with its numbers in another order.
            dense, out = [_laid_out(x, layout) for x in dense], _laid_out(out_of, layout)
            out.fill_(float("nan"))  # `out_of` may hold the right result from another way
            values = out if case.op == "sddmm" else tensors.values
            a = self._matrix(case, tensors, values, name)
            operands = [self._dense(x, layout, case.dtype) for x in dense]
            if case.op == "sddmm":
                first = (NOT_TRANSPOSED, TRANSPOSED, ctypes.byref(one), *operands)
                words = (*first, ctypes.byref(zero), a, FLOAT32, number)
            else:
                result = self._dense(out, layout, case.dtype)
                ops = (NOT_TRANSPOSED,) * (2 if case.op == "spmm" else 1)
                first = (*ops, ctypes.byref(one), a, *operands, ctypes.byref(zero), result)
                words = (*first, FLOAT32, number)
            size = ctypes.c_size_t()
            self._do(f"cusparse{stem}_bufferSize", self.handle, *words, ctypes.byref(size))
            buffer = self.torch.empty(max(1, size.value), dtype=self.torch.uint8, device="cuda")
            words = (self.handle, *words, _at(buffer))
            if hasattr(self.library, f"cusparse{stem}_preprocess"):
                self._do(f"cusparse{stem}_preprocess", *words)
            self._kept.append((buffer, dense, out, one, zero))
            ready.append(words)
            outputs.append(out)
        function = getattr(self.library, f"cusparse{stem}")

        def call(copy: int) -> Any:
            if function(*ready[copy]):
                raise Refused(f"cusparse{stem}: {name}")
            return outputs[copy]

        call(0)  # also refuses unsupported combinations
        return call

    def release(self) -> None:
        """Forget buffers and copies; descriptors are a few bytes each."""
        self._kept = []


def _at(tensor: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _laid_out(tensor: Any, layout: int) -> Any:
    """The tensor, or a copy with its columns contiguous."""
    if layout == ROW_MAJOR or tensor.ndim == 1:
        return tensor
    return tensor.t().contiguous().t()
