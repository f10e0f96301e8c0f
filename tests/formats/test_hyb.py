"""Hyb and RelationalHyb: converters against plain Python, padding, products, refusals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from conversions import as_inferred, patterns, round_trip, run, spmm
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo import MATRICES, TENSORS

from programs import PROGRAMS, tolerance
from sparsetir.formats import Operand, Pattern
from sparsetir.formats.hyb import Hyb
from sparsetir.formats.partition import check_partition
from sparsetir.formats.relational_hyb import RelationalHyb
from sparsetir.sparse_ir.errors import StructureError

PARAMETERS = [(1, 0), (1, 2), (2, 1), (3, 3), (50, 1)]
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
    """For each part and bucket the pieces (0, row, columns), element by element."""
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
    """For each bucket the pieces (relation, row, columns), relation by relation."""
    out: list[list[Piece]] = [[] for _ in range(k + 1)]
    r, i, j = pattern.coords
    for relation in range(pattern.shape[0]):
        of = Pattern([i[r == relation], j[r == relation]], pattern.shape[1:])
        for b, pieces in enumerate(slow_hyb(of, 1, k)):
            out[b] += [(relation, row, columns) for _, row, columns in pieces]
    return out


def pieces_of(part: Any) -> list[Piece]:
    """What the index arrays of a part say."""
    _, row, col = part.rule.axes_after_rewrite
    names = (f"indptr_{row.lower()}", f"indices_{row.lower()}", f"indices_{col.lower()}")
    indptr, rows, columns = (part.indices[part.rule.renamed(n)] for n in names)
    columns = columns.reshape(len(rows), int(part.rule.axis(col).nnz_cols))
    parent = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return [(int(p), int(i), js.tolist()) for p, i, js in zip(parent, rows, columns, strict=True)]


@pytest.mark.parametrize("name", MATRICES)
def test_hyb_is_what_plain_python_makes(name: str) -> None:
    pattern = MATRICES[name]
    for c, k in PARAMETERS:
        conv = Hyb(c, k).convert(pattern)
        assert [pieces_of(p) for p in conv.parts] == slow_hyb(pattern, c, k)


@pytest.mark.parametrize("name", MATRICES)
def test_hyb_gives_values_back(name: str) -> None:
    for c, k in PARAMETERS[:4]:
        round_trip(Hyb(c, k), MATRICES[name])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(patterns(), st.integers(1, 5), st.integers(0, 4))
def test_hyb_of_random_patterns(pattern: Pattern, c: int, k: int) -> None:
    fmt = Hyb(c, k)
    check_partition(pattern.coords, fmt.split(pattern))
    as_inferred(fmt, pattern)
    conv = round_trip(fmt, pattern, ("float32",))
    assert [pieces_of(p) for p in conv.parts] == slow_hyb(pattern, c, k)


def test_long_rows_are_split_and_remainders_go_where_they_fit() -> None:
    # 11 elements at k = 2: two pieces of 4, and 3 that bucket 2 takes with one slot padded;
    # 9 elements: two pieces of 4, and one element that bucket 0 takes.
    rows = np.repeat([0, 2], [11, 9])
    pattern = Pattern([rows, np.concatenate([np.arange(11), np.arange(9) + 3])], (3, 12))
    conv = Hyb(1, 2).convert(pattern)
    assert [pieces_of(p) for p in conv.parts] == [
        [(0, 2, [11])],
        [],
        [
            (0, 0, [0, 1, 2, 3]), (0, 0, [4, 5, 6, 7]), (0, 0, [8, 9, 10, -1]),
            (0, 2, [3, 4, 5, 6]), (0, 2, [7, 8, 9, 10]),
        ],
    ]  # fmt: skip
    assert (conv.places, conv.padding) == (21, pytest.approx(1 / 21))


def test_columns_are_cut_into_parts_of_equal_width() -> None:
    # Seven columns in three parts: 0-2, 3-5 and 6.
    pattern = Pattern([np.zeros(7, int), np.arange(7)], (1, 7))
    conv = Hyb(3, 2).convert(pattern)
    assert [p.rule.name for p in conv.parts if p.stored] == [
        "hyb_3_2_p0_b2", "hyb_3_2_p1_b2", "hyb_3_2_p2_b0",
    ]  # fmt: skip
    assert [pieces_of(p) for p in conv.parts if p.stored] == [
        [(0, 0, [0, 1, 2, -1])], [(0, 0, [3, 4, 5, -1])], [(0, 0, [6])],
    ]  # fmt: skip


def test_padding_follows_from_the_lengths_of_rows() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 40, 50)
    columns = [np.sort(rng.permutation(64)[:n]) for n in lengths]
    pattern = Pattern([np.repeat(np.arange(50), lengths), np.concatenate(columns)], (50, 64))
    for k in range(5):
        places = sum(
            n // 2**k * 2**k + (2 ** math.ceil(math.log2(n % 2**k)) if n % 2**k else 0)
            for n in lengths.tolist()
        )
        conv = Hyb(1, k).convert(pattern)
        assert conv.places == places
        assert conv.padding == pytest.approx(1 - pattern.nnz / places)


def test_rules_are_those_of_the_parameters_alone() -> None:
    names = [r.name for r in Hyb(2, 1).rules(Operand(tag="_x"))]
    assert names == [f"hyb_2_1_p{p}_b{b}_x" for p in range(2) for b in range(2)]
    empty = Hyb(2, 1).convert(MATRICES["nothing stored"])
    assert [p.shape for p in empty.parts] == [(0,)] * 4
    assert [len(a) for a in empty.parts[0].indices.values() if isinstance(a, np.ndarray)] == [
        2, 0, 0,
    ]  # fmt: skip
    unique = [r.axis("IB").unique for r in Hyb(1, 2).rules(Operand())]
    assert unique == [True, True, False]


@pytest.mark.parametrize(
    ("rows", "nnz", "k"), [(4, 0, 0), (4, 4, 0), (4, 5, 1), (4, 8, 1), (4, 9, 2), (0, 0, 0)]
)
def test_k_is_the_logarithm_of_the_mean_length_rounded_up(rows: int, nnz: int, k: int) -> None:
    coords = np.nonzero(np.arange(rows * 5).reshape(rows, 5) < nnz)
    assert Hyb.for_pattern(Pattern(coords, (rows, 5)), c=2) == Hyb(2, k)


@pytest.mark.parametrize("name", ["one dense row", "empty rows", "int64", "nothing stored"])
def test_spmm_on_hyb(name: str) -> None:
    spmm(Hyb(2, 1), MATRICES[name])


def test_one_kernel_of_hyb_serves_other_patterns() -> None:
    kernel = spmm(Hyb(2, 2), MATRICES["one dense row"], build=True, feat=5)
    pattern = MATRICES["empty rows"]
    conv = Hyb(2, 2).convert(pattern)
    b = np.random.default_rng(0).standard_normal((12, 5)).astype("float32")
    c = np.full((17, 5), np.nan, "float32")
    a = np.arange(pattern.nnz, dtype="float32")
    kernel(b=b, c=c, **conv.arguments(A=a))
    dense = np.zeros(pattern.shape, "float32")
    dense[tuple(pattern.coords)] = a
    np.testing.assert_allclose(c, dense @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TENSORS)
def test_relational_hyb_is_what_plain_python_makes(name: str) -> None:
    pattern = TENSORS[name]
    for k in (0, 1, 3):
        conv = round_trip(RelationalHyb(k), pattern)
        assert [pieces_of(p) for p in conv.parts] == slow_relational(pattern, k)


def tiles_of(part: Any, rows: int) -> list[tuple[int, list[Piece]]]:
    """What the index arrays of a part in tiles say: of each the relation and the pieces."""
    _, tile, row, col = part.rule.axes_after_rewrite
    names = (f"indptr_{tile.lower()}", f"indices_{tile.lower()}", f"indices_{row.lower()}",
             f"indices_{col.lower()}")  # fmt: skip
    indptr, relation, row_of, columns = (part.indices[part.rule.renamed(n)] for n in names)
    assert indptr.tolist() == [0, len(relation)]
    columns = columns.reshape(len(relation), rows, int(part.rule.axis(col).nnz_cols))
    out = []
    for r, own, slots in zip(relation, row_of.reshape(-1, rows), columns, strict=True):
        count = int((own >= 0).sum())  # padding comes last
        assert count and (own[count:] == -1).all() and (slots[count:] == -1).all()
        out.append((int(r), [(int(r), int(own[t]), slots[t].tolist()) for t in range(count)]))
    return out


@settings(max_examples=40, deadline=None, derandomize=True)
@given(patterns(order=3, longest=9), st.integers(0, 2), st.integers(1, 5))
def test_tiles_have_the_pieces_of_one_relation(pattern: Pattern, k: int, rows: int) -> None:
    conv = round_trip(RelationalHyb(k, rows), pattern, ("float32",))
    for part, pieces in zip(conv.parts, slow_relational(pattern, k), strict=True):
        tiles = tiles_of(part, rows)
        assert [p for _, own in tiles for p in own] == pieces
        for before, after in itertools.pairwise(tiles):  # full but for the last of a relation
            assert len(before[1]) == rows or before[0] != after[0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(patterns(order=3, longest=9), st.integers(0, 3))
def test_relational_hyb_of_random_tensors(pattern: Pattern, k: int) -> None:
    fmt = RelationalHyb(k)
    check_partition(pattern.coords, fmt.split(pattern))
    as_inferred(fmt, pattern)
    round_trip(fmt, pattern, ("float32",))


@pytest.mark.parametrize(("k", "build"), [(0, False), (2, False), (2, True)])
def test_rgms_on_relational_hyb(k: int, build: bool) -> None:
    program = PROGRAMS["relational_csf"]
    func = program.make("float32", "int32")
    for case in ("small", "nonfinite") if build else ("empty", "nonfinite"):
        args = program.inputs(np.random.default_rng(k), case, "float32", "int32")
        with np.errstate(all="ignore"):
            want = program.oracle(args)["y"]
        fiber = np.repeat(np.arange(args["nnz_i"]), np.diff(args["j_ptr"]))
        relation = np.repeat(np.arange(args["relations"]), np.diff(args["i_ptr"]))[fiber]
        coords = [relation, args["i_idx"][fiber], args["j_idx"]]
        pattern = Pattern(coords, (args["relations"], args["m"], args["n"]))
        run(RelationalHyb(k), pattern, func, args, build)
        np.testing.assert_allclose(args["y"], want, err_msg=case, **tolerance("float32"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hyb(0, 1), "Hyb: argument 'c': expected a positive integer, got 0"),
        (lambda: Hyb(1, -1), r"Hyb: argument 'k': expected an integer in \[0, 30\], got -1"),
        (lambda: Hyb(1, 31), r"Hyb: argument 'k': expected an integer in \[0, 30\], got 31"),
        (lambda: RelationalHyb(True), r"RelationalHyb: argument 'k': .* \[0, 30\], got True"),
        (lambda: RelationalHyb(1, 0), "RelationalHyb: argument 'rows': .* integer, got 0"),
        (lambda: Hyb(1, 1).convert(TENSORS["random"]), "hyb_1_1: expected a pattern of 2 axes"),
        (
            lambda: RelationalHyb(1).convert(MATRICES["random"]),
            "relational_hyb_1: expected a pattern of 3 axes",
        ),
    ],
)
def test_refused_parameters(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_lengths_that_the_index_type_does_not_hold_are_refused() -> None:
    pattern = Pattern([np.array([0]), np.array([2**31])], (1, 2**32))
    with pytest.raises(
        StructureError, match=f"'hyb_1_0_p0_b0': length of axis 'JB' = {2**32} does"
    ):
        Hyb(1, 0).convert(pattern, Operand(idtype="int32"))
    conv = Hyb(2, 1).convert(pattern)
    assert conv.parts[2].indices["indices_jb_hyb_2_1_p1_b0"].tolist() == [2**31]
