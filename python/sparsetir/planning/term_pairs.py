"""The terms of a product of sparse matrices that a mask keeps, found once for a pattern."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sparsetir.planning.sparse_results import INT32, Csr

TERMS = 1 << 22  # that are looked at together, at least those of a row


def term_pairs(A: Csr, B: Csr, mask: Csr) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each element of the mask the places in A and in B of what its terms are made of.

    A, B : (m, l) and (l, n), columns increasing in each row
    mask : (m, n), alike

    Gives (nnz + 1,), where the terms of each element begin, and (terms,) twice, in the order of
    the inner axis. int32, or int64 where there are more terms than that numbers.
    """
    found = [(mask.indices[:0],) * 3]
    for element, a, b in _visits(A, B, mask):
        order = np.argsort(element, kind="stable")
        found.append((element[order], a[order], b[order]))
    element, a, b = _joined(found, mask)
    begins = np.zeros(len(mask.indices) + 1, np.int64)
    np.cumsum(np.bincount(element, minlength=len(mask.indices)), out=begins[1:])
    return begins.astype(a.dtype), a, b


def term_visits(A: Csr, B: Csr, mask: Csr) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same in the order of A's elements; in place of where they begin the mask's elements."""
    return _joined([(mask.indices[:0],) * 3, *_visits(A, B, mask)], mask)


def _joined(
    parts: list[tuple[np.ndarray, ...]], mask: Csr
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lists one after the other, in a type that numbers them."""
    element, a, b = (np.concatenate(x) for x in zip(*parts, strict=True))
    idtype = np.int32 if max(len(a), len(mask.indices)) <= INT32 else np.int64
    return element.astype(idtype), a.astype(idtype), b.astype(idtype)


def _visits(A: Csr, B: Csr, mask: Csr) -> Iterator[tuple[np.ndarray, ...]]:
    """The terms of some rows: elements of the mask, of A and of B, in A's order."""
    m, n = mask.shape
    terms = np.diff(B.indptr)[A.indices].astype(np.int64)  # of each element of A
    ends = np.concatenate([[0], np.cumsum(terms)])
    of_rows = ends[A.indptr]
    keys = np.repeat(np.arange(m, dtype=np.int64), np.diff(mask.indptr)) * n + mask.indices
    first = 0
    while first < m:
        last = int(np.searchsorted(of_rows, of_rows[first] + TERMS, side="right")) - 1
        last = min(max(last, first + 1), m)
        begin, end = A.indptr[first], A.indptr[last]
        a = np.repeat(np.arange(begin, end), terms[begin:end])
        b = np.arange(len(a)) - (ends[a] - ends[begin]) + B.indptr[A.indices[a]]
        rows = np.repeat(np.arange(first, last, dtype=np.int64), np.diff(of_rows[first : last + 1]))
        wanted = rows * n + B.indices[b]
        element = np.searchsorted(keys, wanted)
        kept = np.flatnonzero(np.append(keys, -1)[element] == wanted)
        yield element[kept], a[kept], b[kept]
        first = last
