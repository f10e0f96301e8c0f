"""Hyb and RelationalHyb against plain Python; what chooses among the formats of mixtures."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from conversions import converted, patterns, round_trip
from hypothesis import strategies as st
from zoo import MATRICES

from drawing import examples
from sparsetir import formats as F
from sparsetir.formats import Pattern
from sparsetir.formats.hyb import Hyb
from sparsetir.formats.relational_hyb import RelationalHyb

Piece = tuple[int, int, list[int]]


def dealt(columns: list[int], k: int) -> list[tuple[int, list[int]]]:
    """The pieces of a row with their buckets."""
    out = []
    while len(columns) >= 2**k:
        out.append((k, columns[: 2**k]))
        columns = columns[2**k :]
    if columns:
        b = math.ceil(math.log2(len(columns)))
        out.append((b, columns + [-1] * (2**b - len(columns))))
    return out


def slow_hyb(pattern: Pattern, c: int, k: int) -> list[list[Piece]]:
    """The pieces (0, row, columns) of each part and bucket, element by element."""
    out: list[list[Piece]] = [[] for _ in range(c * (k + 1))]
    width = math.ceil(pattern.shape[1] / c)
    for part in range(c):
        for row in range(pattern.shape[0]):
            columns = [
                int(j) for i, j in zip(*pattern.coords, strict=True)
                if i == row and part * width <= j < (part + 1) * width
            ]  # fmt: skip
            for b, piece in dealt(columns, k):
                out[part * (k + 1) + b].append((0, row, piece))
    return out


def slow_relational(pattern: Pattern, k: int) -> list[list[Piece]]:
    """The pieces (relation, row, columns) of each bucket, relation by relation."""
    out: list[list[Piece]] = [[] for _ in range(k + 1)]
    r, i, j = pattern.coords
    for relation in range(pattern.shape[0]):
        of = Pattern([i[r == relation], j[r == relation]], pattern.shape[1:])
        for b, pieces in enumerate(slow_hyb(of, 1, k)):
            out[b] += [(relation, row, columns) for _, row, columns in pieces]
    return out


def pieces_of(part: Any) -> list[Piece]:
    """The pieces in the index arrays of a part."""
    _, row, col = part.rule.axes_after_rewrite
    names = (f"indptr_{row.lower()}", f"indices_{row.lower()}", f"indices_{col.lower()}")
    indptr, rows, columns = (part.indices[part.rule.renamed(n)] for n in names)
    columns = columns.reshape(len(rows), int(part.rule.axis(col).nnz_cols))
    parent = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return [(int(p), int(i), js.tolist()) for p, i, js in zip(parent, rows, columns, strict=True)]


@examples(25, 500, pattern=patterns(), c=st.integers(1, 5), k=st.integers(0, 4))
def test_hyb_of_random_patterns(pattern: Pattern, c: int, k: int) -> None:
    conv = converted(Hyb(c, k), pattern)
    assert [pieces_of(p) for p in conv.parts] == slow_hyb(pattern, c, k)


@pytest.mark.parametrize(
    ("rows", "nnz", "k"), [(4, 0, 0), (4, 4, 0), (4, 5, 1), (4, 8, 1), (4, 9, 2), (0, 0, 0)]
)
def test_k_is_the_logarithm_of_the_mean_length_rounded_up(rows: int, nnz: int, k: int) -> None:
    coords = np.nonzero(np.arange(rows * 5).reshape(rows, 5) < nnz)
    assert Hyb.for_pattern(Pattern(coords, (rows, 5)), c=2) == Hyb(2, k)


def tiles_of(part: Any, rows: int) -> list[tuple[int, list[Piece]]]:
    """The relation and the pieces of each tile in the index arrays of a part."""
    _, tile, row, col = part.rule.axes_after_rewrite
    names = (f"indptr_{tile.lower()}", f"indices_{tile.lower()}", f"indices_{row.lower()}",
             f"indices_{col.lower()}")  # fmt: skip
    indptr, relation, row_of, columns = (part.indices[part.rule.renamed(n)] for n in names)
    assert indptr.tolist() == [0, len(relation)]
    columns = columns.reshape(len(relation), rows, int(part.rule.axis(col).nnz_cols))
    out = []
    for r, held, slots in zip(relation, row_of.reshape(-1, rows), columns, strict=True):
        count = int((held >= 0).sum())  # padding comes last
        assert count and (held[count:] == -1).all() and (slots[count:] == -1).all()
        out.append((int(r), [(int(r), int(held[t]), slots[t].tolist()) for t in range(count)]))
    return out


@examples(
    40, 500, pattern=patterns(order=3, longest=9), k=st.integers(0, 2), rows=st.integers(1, 5)
)
def test_tiles_have_the_pieces_of_one_relation(pattern: Pattern, k: int, rows: int) -> None:
    conv = round_trip(RelationalHyb(k, rows), pattern, ("float32",))
    for part, pieces in zip(conv.parts, slow_relational(pattern, k), strict=True):
        tiles = tiles_of(part, rows)
        assert [p for _, held in tiles for p in held] == pieces
        for before, after in itertools.pairwise(tiles):  # full but for the last of a relation
            assert len(before[1]) == rows or before[0] != after[0]


@examples(20, 500, pattern=patterns(order=3, longest=9), k=st.integers(0, 3))
def test_relational_hyb_of_random_tensors(pattern: Pattern, k: int) -> None:
    conv = converted(RelationalHyb(k), pattern)
    assert [pieces_of(p) for p in conv.parts] == slow_relational(pattern, k)


@pytest.mark.parametrize("name", MATRICES)
def test_choosers_say_what_dense_matrices_do(name: str) -> None:
    pattern = MATRICES[name]
    dense, (i, j) = np.zeros(pattern.shape, bool), pattern.coords
    dense[i, j] = True
    diagonals = np.subtract.outer(np.arange(dense.shape[1]), np.arange(dense.shape[0])).T
    in_band = (diagonals >= -2) & (diagonals <= 1)
    assert F.by_band(-2, 1)(pattern).tolist() == [0 if b else 1 for b in in_band[i, j]]
    short = dense.sum(axis=1) <= 3
    assert F.by_row_length(3)(pattern).tolist() == [0 if s else 1 for s in short[i]]
    filled = [dense[a // 3 * 3 :, b // 2 * 2 :][:3, :2].sum() for a, b in zip(i, j, strict=True)]
    assert F.by_block_fill(3, 2, 0.5)(pattern).tolist() == [0 if f >= 3 else 1 for f in filled]
