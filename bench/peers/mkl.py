"""Sparse products of MKL by its C interface, with the least overhead that it offers."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NOT_TRANSPOSED, GENERAL, ROW_MAJOR, ZERO_BASED = 10, 20, 101, 0
CALLS = 1000  # the hint for the expected number of calls
VALUES_OF_PATTERN, PATTERN_ALONE = 92, 93  # stages of a sparse product
# MKL's libraries, one of which it selects by CPU, in words.
CODES = {"def": "generic code", "mc3": "SSE4 code", "avx2": "AVX2 code", "avx512": "AVX-512 code"}
CODES["avx10"] = "AVX10 code"
MAPS = Path("/proc/self/maps")


class Description(ctypes.Structure):
    """MKL's matrix_descr."""

    _fields_ = [("type", ctypes.c_int), ("mode", ctypes.c_int), ("diag", ctypes.c_int)]


def load() -> Any:
    """libmkl_rt: the one that MKL_RT names, or that of the mkl wheel in this environment.

    OSError if there is none.
    """
    folder = Path(sys.prefix) / "lib"
    paths = [os.environ.get("MKL_RT"), *map(str, sorted(folder.glob("libmkl_rt.so*")))]
    path = next((p for p in paths if p), None)
    if path is None:
        raise OSError("is not installed: `pip install mkl`, or set MKL_RT to libmkl_rt.so")
    return ctypes.CDLL(path)


def code(maps: Path = MAPS) -> str | None:
    """The library that MKL selected for this CPU: one of `CODES`, such as "def" or "avx512".

    maps : the system's list of a process's memory mappings

    None before the first product, and if the system has no such file. On AMD's CPUs MKL 2026
    selects "def", whatever their features.
    """
    try:
        match = re.search(rf"/libmkl_({'|'.join(CODES)})\.so", maps.read_text())
    except OSError:
        return None
    return match and match[1]


def version(library: Any) -> str:
    """The version that the library reports."""
    text = ctypes.create_string_buffer(200)
    library.MKL_Get_Version_String(text, len(text))
    return text.value.decode(errors="replace").strip()


def _check(status: int, routine: str) -> None:
    if status:
        raise RuntimeError(f"{routine}: status {status}")


class Handle:
    """An MKL handle of a CSR matrix of float32 or float64 and int32; `close` it.

    inspect : whether MKL may analyse the matrix and keep data that speed up many products
    """

    def __init__(self, library: Any, a: Any, feat: int, inspect: bool) -> None:
        self.library, self.arrays, self.feat = library, (a,), feat
        double = a.dtype == np.float64
        self.letter, self.number = ("d", ctypes.c_double) if double else ("s", ctypes.c_float)
        create = self._function("create_csr")
        self.pointer = ctypes.c_void_p()
        self.description = Description(GENERAL, 0, 0)
        starts, indices, values = (self._at(x) for x in (a.indptr, a.indices, a.data))
        ends = ctypes.c_void_p(a.indptr.ctypes.data + a.indptr.itemsize)
        _check(
            create(ctypes.byref(self.pointer), ZERO_BASED, *a.shape, starts, ends, indices, values),
            "mkl_sparse_create_csr",
        )
        if inspect:
            hint, layout = (self.pointer, NOT_TRANSPOSED, self.description), (ROW_MAJOR, feat)
            if feat == 1:
                _check(library.mkl_sparse_set_mv_hint(*hint, CALLS), "mkl_sparse_set_mv_hint")
            else:
                status = library.mkl_sparse_set_mm_hint(*hint, *layout, CALLS)
                _check(status, "mkl_sparse_set_mm_hint")
            _check(library.mkl_sparse_optimize(self.pointer), "mkl_sparse_optimize")

    def _function(self, name: str) -> Any:
        return getattr(self.library, f"mkl_sparse_{self.letter}_{name}")

    @staticmethod
    def _at(array: np.ndarray) -> ctypes.c_void_p:
        return ctypes.c_void_p(array.ctypes.data)

    def product(self, b: np.ndarray, out: np.ndarray) -> Callable[[], np.ndarray]:
        """A call that writes A b into `out`: a matrix by a matrix, or by a vector."""
        one, zero = self.number(1), self.number(0)
        self.arrays = (*self.arrays, b, out)  # MKL only has their addresses
        first = (NOT_TRANSPOSED, one, self.pointer, self.description)
        if b.ndim == 1:
            function = self._function("mv")
            arguments = (*first, self._at(b), zero, self._at(out))
        else:
            function = self._function("mm")
            size = ctypes.c_int(self.feat)
            arguments = (*first, ROW_MAJOR, self._at(b), size, size, zero, self._at(out), size)

        def call() -> np.ndarray:
            _check(function(*arguments), "mkl_sparse_mm")
            return out

        return call

    def sparse_product(self, other: Handle) -> Callable[[], None]:
        """A call that computes the product with a sparse matrix, with ordered columns."""
        return self._making(lambda out: self.library.mkl_sparse_spmm(
            NOT_TRANSPOSED, self.pointer, other.pointer, out
        ), other)  # fmt: skip

    def sparse_sum(self, other: Handle) -> Callable[[], None]:
        """A call that computes the sum with a sparse matrix, with ordered columns."""
        add, one = self._function("add"), self.number(1)
        return self._making(lambda out: add(
            NOT_TRANSPOSED, self.pointer, one, other.pointer, out
        ), other)  # fmt: skip

    def _making(self, make: Callable[[Any], int], other: Handle) -> Callable[[], None]:
        self.arrays = (*self.arrays, other)

        def call() -> None:
            out = ctypes.c_void_p()
            _check(make(ctypes.byref(out)), "a sparse result")
            _check(self.library.mkl_sparse_order(out), "mkl_sparse_order")
            self.library.mkl_sparse_destroy(out)

        return call

    def numeric_phase(self, other: Handle) -> Callable[[], None]:
        """A call that computes the values of a product whose pattern exists."""
        out, general = ctypes.c_void_p(), Description(GENERAL, 0, 0)
        self.arrays = (*self.arrays, other, out)

        def run(stage: int) -> None:
            first, second = (NOT_TRANSPOSED, general, self.pointer), (
                NOT_TRANSPOSED, general, other.pointer)  # fmt: skip
            status = self.library.mkl_sparse_sp2m(*first, *second, stage, ctypes.byref(out))
            _check(status, "mkl_sparse_sp2m")

        run(PATTERN_ALONE)
        return lambda: run(VALUES_OF_PATTERN)

    def close(self) -> None:
        """Free MKL's data."""
        self.library.mkl_sparse_destroy(self.pointer)
