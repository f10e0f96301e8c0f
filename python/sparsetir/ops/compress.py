"""Elements sorted by rows or columns, by counting: no comparison, and equal coordinates stay.

On a CPU scipy counts: from compressed rows to compressed columns it adds nothing up, other than
between other formats.
"""

from __future__ import annotations

import scipy.sparse as sp
import torch
from torch import Tensor

__all__ = ["compress", "sorted_by", "transpose"]


def transpose(rowptr: Tensor, col: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The transposed (n, m) matrix: its row pointers, columns, and the place of each element.

    rowptr, col : (m + 1,) and (nnz,)
    """
    m = len(rowptr) - 1
    if col.device.type == "cpu":
        places = torch.arange(len(col), dtype=col.dtype).numpy()
        found = sp.csr_array((places, col.numpy(), rowptr.numpy()), shape=(m, n)).tocsc()
        arrays = (torch.from_numpy(x) for x in (found.indptr, found.indices, found.data))
        starts, rows, order = arrays
        return starts.to(col.dtype), rows.to(col.dtype), order.long()
    rows = torch.repeat_interleave(rowptr[1:] - rowptr[:-1])
    order = torch.argsort(col, stable=True)
    return _starts(col, n), rows[order].to(col.dtype), order


def compress(edges: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compressed rows of (2, nnz) edges, columns first, then rows.

    Gives row pointers (m + 1,), columns (nnz,), and the place of each element among the edges, None
    where they are in order already. Those of a row stay in the order of the edges.
    """
    col, row = edges.contiguous()
    rowptr, order = sorted_by(row, m)
    order = order.long()
    if bool((order[1:] > order[:-1]).all()):
        return rowptr, col, None
    return rowptr, col[order], order


def sorted_by(keys: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Where each key begins (size + 1,), and the elements in the order of the keys.

    keys : (nnz,) from 0 to size - 1; on a CPU results are of their type, and take no more for long
    """
    if keys.device.type != "cpu":
        return _starts(keys, size), torch.argsort(keys, stable=True)
    # One element in each row of an incidence matrix: its columns are what has each key.
    rows = torch.arange(len(keys) + 1, dtype=keys.dtype).numpy()
    one_each = torch.zeros(len(keys), dtype=torch.int8).numpy()
    found = sp.csr_array((one_each, keys.numpy(), rows), shape=(len(keys), size)).tocsc()
    starts, order = (torch.from_numpy(x).to(keys.dtype) for x in (found.indptr, found.indices))
    return starts, order


def _starts(rows: Tensor, m: int) -> Tensor:
    """(m + 1,) row pointers of elements with these rows."""
    counts = torch.bincount(rows, minlength=m)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(rows.dtype)
