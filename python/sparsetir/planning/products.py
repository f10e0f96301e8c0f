"""`A @ x` of a SparseMatrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparsetir.planning.plan import plan
from sparsetir.runtime.arrays import is_array, is_torch

MOST_PLANS = 16  # of one matrix


def product(matrix: Any, x: Any, plans: dict[Any, Any], ops: Callable[[], Any]) -> Any:
    """See :meth:`sparsetir.SparseMatrix.__matmul__`.

    plans : those of this matrix, by their kind
    ops : gives `sparsetir.ops`, which multiplies tensors of torch
    """
    if not is_array(x):
        return NotImplemented
    if len(x.shape) not in (1, 2) or x.shape[0] != matrix.shape[1]:
        n = matrix.shape[1]
        raise ValueError(
            f"SparseMatrix: argument 'x' of A @ x: expected shape ({n},) or ({n}, feat), got "
            f"{tuple(x.shape)}"
        )
    if is_torch(x):
        return ops().spmv(matrix, x) if x.dim() == 1 else ops().spmm(matrix, x)
    x = np.asarray(x)
    dtype = x.dtype if x.dtype == matrix.dtype else np.result_type(x.dtype, matrix.dtype)
    x = np.ascontiguousarray(x, dtype)
    op = "spmv" if x.ndim == 1 else "spmm"
    key = op, x.shape[1:], dtype
    if key not in plans:
        while len(plans) >= MOST_PLANS:
            plans.pop(next(iter(plans)))
        plans[key] = plan(op, matrix, x)
    return plans[key](x)
