"""cuSPARSE's products of blocks: BSR and blocked ELL, by its C interface; see `bench.cusparse`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.peers.cusparse import (
    COLUMN_MAJOR,
    INT32,
    ROW_MAJOR,
    TYPES,
    ZERO_BASED,
    CuSparse,
    Refused,
)

BSR, ELL = "BSR", "blocked ELL"
DEFAULT = 0
# What the library calls its algorithms for these; the default one where it has them not.
ALGORITHMS = {BSR: (14, DEFAULT), ELL: (13, DEFAULT)}


class CuSparseBlocks(CuSparse):
    """Products of a matrix in square blocks with dense ones of 16-bit types, sums in float32."""

    def ways(self, case: Any, tensors: Any, name: str) -> dict[str, Callable[[int], Any]]:
        """Calls for both layouts of dense matrices that it has, by the number of the copy.

        case : with `op`, `dtype` and `matrix`, of which `shape` and `indptr`, `indices` and
            `blocks` (blocks, size, size) of the stored blocks are read
        tensors : with `copies` of ([dense operand], result), and `values`, which play no part

        Raises Refused where it has none.
        """
        found: dict[str, Callable[[int], Any]] = {}
        why = f"no {name} of {case.dtype}"
        for layout in (ROW_MAJOR, COLUMN_MAJOR):
            for number in ALGORITHMS[name]:
                text = "columns" if layout == COLUMN_MAJOR else "rows"
                try:
                    found[text] = self._call(case, tensors, name, number, layout)
                    break
                except (Refused, AttributeError) as error:
                    why = str(error)
        if not found:
            raise Refused(why)
        return found

    def _matrix(self, case: Any, tensors: Any, values: Any, name: str) -> ctypes.c_void_p:
        matrix = case.matrix
        (m, n), (count, size, _) = matrix.shape, matrix.blocks.shape
        if name == BSR:
            kept = [matrix.indptr, matrix.indices, matrix.blocks.contiguous()]
            words = [
                *map(ctypes.c_int64, (m // size, n // size, count, size, size)), *map(_at, kept),
                INT32, INT32, ZERO_BASED, TYPES[case.dtype], ROW_MAJOR,
            ]  # fmt: skip
            made = self._new("cusparseCreateBsr", *words)
        else:
            columns, blocks = in_ell(self.torch, matrix)
            kept = [columns, blocks]
            width = columns.shape[1] * size
            words = [
                *map(ctypes.c_int64, (m, n, size, width)), *map(_at, kept), INT32, ZERO_BASED,
                TYPES[case.dtype],
            ]  # fmt: skip
            made = self._new("cusparseCreateBlockedEll", *words)
        self._kept.append(kept)
        return made


def in_ell(torch: Any, matrix: Any) -> tuple[Any, Any]:
    """Columns of blocks (rows of blocks, most in a row), -1 where there is none, and their values.

    Values are those of a dense matrix of as many rows: (m, most * size), rows side by side.
    """
    indptr = matrix.indptr.cpu().numpy()
    counts, size = np.diff(indptr), matrix.blocks.shape[1]
    most = max(1, int(counts.max(initial=0)))
    rows = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(rows)) - indptr[rows]
    at = [torch.from_numpy(x).to(matrix.indices.device).long() for x in (rows, places)]
    columns = matrix.indices.new_full((len(counts), most), -1)
    columns[at[0], at[1]] = matrix.indices
    values = matrix.blocks.new_zeros(len(counts), size, most, size)
    values[at[0], :, at[1]] = matrix.blocks
    return columns, values.view(len(counts) * size, most * size)


def _at(tensor: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
