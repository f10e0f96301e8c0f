"""EnumeratedPatterns: the converter against plain Python, its statistics, products, refusals."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest
from conversions import as_inferred, patterns, round_trip, spmm
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import MATRICES

from sparsetir.formats import EnumeratedPatterns, Pattern
from sparsetir.formats.partition import check_partition

Column = tuple[int, int, int, list[int]]


def slow_columns(pattern: Pattern, rows: int) -> list[Column]:
    """(panel, bit mask, column, rows in the panel) of all columns of panels, sorted."""
    stored: dict[tuple[int, int], list[int]] = {}
    for i, j in zip(*(c.tolist() for c in pattern.coords), strict=True):
        stored.setdefault((i // rows, j), []).append(i % rows)
    return sorted((p, sum(1 << r for r in at), j, at) for (p, j), at in stored.items())


def columns_of(part: Any) -> list[tuple[int, int, list[int]]]:
    """(panel, column, rows) that the index arrays of a part say."""
    names = ("indptr_jc", "indices_jc", "indices_ii")
    indptr, columns, rows = (part.indices[part.rule.renamed(n)] for n in names)
    panel = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    rows = rows.reshape(len(columns), int(part.rule.axis("II").nnz_cols)).tolist()
    return list(zip(panel.tolist(), columns.tolist(), rows, strict=True))


@pytest.mark.parametrize("name", MATRICES)
def test_statistics_are_those_of_plain_python(name: str) -> None:
    pattern = MATRICES[name]
    found = EnumeratedPatterns(4).patterns(pattern)
    grouped = groupby(slow_columns(pattern, 4), key=lambda c: c[:2])
    want = [(panel, mask, len(list(columns))) for (panel, mask), columns in grouped]
    assert list(zip(*(f.tolist() for f in found), strict=True)) == want


@settings(max_examples=60, deadline=None, derandomize=True)
@given(patterns(), st.integers(1, 16))
def test_random_patterns(pattern: Pattern, rows: int) -> None:
    fmt = EnumeratedPatterns(rows)
    check_partition(pattern.coords, fmt.split(pattern))
    as_inferred(fmt, pattern, places=False)
    conv = round_trip(fmt, pattern, ("float32",))
    want = [(p, j, at) for p, _, j, at in slow_columns(pattern, rows)]
    have = [c for part in conv.parts for c in columns_of(part)]
    assert sorted(have) == sorted(want)
    found = fmt.patterns(pattern)
    bits = np.array([int(m).bit_count() for m in found.mask], int)
    stored = [(found.columns * bits)[bits == q].sum() for q in range(1, rows + 1)]
    assert stored == [p.stored for p in conv.parts]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(patterns(longest=12), st.integers(1, 5))
def test_by_pattern(pattern: Pattern, rows: int) -> None:
    """A rule for each pattern, whose columns are its own and whose places are all filled."""
    fmt = EnumeratedPatterns(rows, "pattern")
    check_partition(pattern.coords, fmt.split(pattern))
    as_inferred(fmt, pattern)
    conv = round_trip(fmt, pattern, ("float32",))
    columns = slow_columns(pattern, rows)
    for mask, part in enumerate(conv.parts, 1):
        indptr, indices = (
            part.indices[part.rule.renamed(f"{n}_jc")] for n in ("indptr", "indices")
        )
        panel = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        want = [(p, j) for p, m, j, _ in columns if m == mask]
        assert list(zip(panel.tolist(), indices.tolist(), strict=True)) == want
        assert part.full and part.rule.name == f"enum_{rows}_p{mask}"
    assert conv.padding == 0


def test_spmm_by_pattern() -> None:
    spmm(EnumeratedPatterns(2, "pattern"), MATRICES["random"])
    spmm(EnumeratedPatterns(2, "pattern"), MATRICES["one dense column"], build=True, feat=6)


def test_more_groups_than_16_bits_count() -> None:
    rows = np.arange(70_000, dtype=np.int32)
    pattern = Pattern([rows, rows % 3], (70_000, 3))
    as_inferred(EnumeratedPatterns(1), pattern)
