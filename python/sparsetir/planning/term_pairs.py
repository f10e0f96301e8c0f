"""The terms of a product of sparse matrices that a mask keeps, found once for a pattern."""

from __future__ import annotations

import numpy as np

from sparsetir.planning.sparse_results import Csr

TERMS = 1 << 22  # that are looked at together, at least those of a row


def term_pairs(A: Csr, B: Csr, mask: Csr) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each element of the mask the places in A and in B of what its terms are made of.

    A, B : (m, l) and (l, n), columns increasing in each row
    mask : (m, n), alike

    Gives (nnz + 1,), where the terms of each element begin, and (terms,) twice, in the order of
    the inner axis. int32, or int64 where there are more terms than that numbers.
    """
    m, n = mask.shape
    terms = np.diff(B.indptr)[A.indices].astype(np.int64)  # of each element of A
    ends = np.concatenate([[0], np.cumsum(terms)])
    of_rows = ends[A.indptr]
    keys = np.repeat(np.arange(m, dtype=np.int64), np.diff(mask.indptr)) * n + mask.indices
    found: list[tuple[np.ndarray, ...]] = [(keys[:0],) * 3]
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
        element = element[kept]
        order = np.argsort(element, kind="stable")
        found.append((element[order], a[kept[order]], b[kept[order]]))
        first = last
    element, a, b = (np.concatenate(x) for x in zip(*found, strict=True))
    idtype = np.int32 if len(a) <= np.iinfo(np.int32).max else np.int64
    begins = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(np.bincount(element, minlength=len(keys)), out=begins[1:])
    return begins.astype(idtype), a.astype(idtype), b.astype(idtype)
