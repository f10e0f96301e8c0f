"""Hyb, RelationalHyb and mixtures: against plain Python, padding, products, choosers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from conversions import converted, patterns, round_trip, run, spmm
from hypothesis import strategies as st
from tvm import tirx
from zoo import MATRICES, TENSORS

import sparsetir
from drawing import examples
from programs import PROGRAMS, tolerance
from sparsetir import formats as F
from sparsetir.formats import Operand, Pattern
from sparsetir.formats.hyb import Hyb
from sparsetir.formats.relational_hyb import RelationalHyb

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


@pytest.mark.parametrize("name", MATRICES)
def test_hyb_is_what_plain_python_makes(name: str) -> None:
    pattern = MATRICES[name]
    for c, k in PARAMETERS:
        conv = Hyb(c, k).convert(pattern)
        assert [pieces_of(p) for p in conv.parts] == slow_hyb(pattern, c, k)


@examples(25, 500, pattern=patterns(), c=st.integers(1, 5), k=st.integers(0, 4))
def test_hyb_of_random_patterns(pattern: Pattern, c: int, k: int) -> None:
    conv = converted(Hyb(c, k), pattern)
    assert [pieces_of(p) for p in conv.parts] == slow_hyb(pattern, c, k)


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


def test_parts_are_those_of_the_formats_on_their_elements() -> None:
    pattern = MATRICES["random"]
    mixture = F.Mixture("m", (F.Hyb(2, 1), F.CSR()), F.by_band(-3, 3))
    conv = mixture.convert(pattern)
    chosen = mixture.choose(pattern)
    want = [
        part
        for number, fmt in enumerate(mixture.formats)
        for part in fmt.convert(pattern.take(np.flatnonzero(chosen == number))).parts
    ]
    for part, other in zip(conv.parts, want, strict=True):
        assert part.rule.name.startswith(other.rule.name) and part.shape == other.shape
        have = [np.asarray(v).tolist() for v in part.indices.values()]
        assert have == [np.asarray(v).tolist() for v in other.indices.values()]


def test_a_format_may_come_twice_and_mixtures_nest() -> None:
    inner = F.Mixture("inner", (F.CSR(), F.CSR()), F.by_row_length(2))
    outer = F.Mixture("outer", (F.CSR(), inner), F.by_band(0, 0))
    names = [r.name for r in outer.rules(F.Operand(tag="_t"))]
    assert names == ["csr_t_0", "csr_t_1_0", "csr_t_1_1"]
    conv = round_trip(outer, MATRICES["random"])
    assert conv.padding == 0 and all(p.stored for p in conv.parts)
    spmm(outer, MATRICES["random"])


def test_tensors() -> None:
    mixture = F.Mixture(
        "relations",
        (F.RelationalHyb(1), F.RelationalHyb(2)),
        lambda p: (p.coords[0] > 1).astype(int),
    )
    conv = round_trip(mixture, TENSORS["relations"])
    assert [p.rule.name for p in conv.parts][2:] == [f"relational_hyb_2_b{b}_1" for b in range(3)]
    with pytest.raises(ValueError, match="relations: expected a pattern of 3 axes, got shape"):
        mixture.convert(MATRICES["random"])


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


def test_parts_add_up_in_any_order() -> None:
    """The init comes first; the parts behind it may change places."""
    fmt = F.Mixture("three", (F.BSR(2, 2), F.CSR(), F.ELL()), lambda p: np.arange(p.nnz) % 3)
    pattern = MATRICES["random"]
    program = PROGRAMS["spmm"].make("float32", "int32")
    conv = fmt.convert(pattern, F.Operand.of(program, "A"))
    _, compute = sparsetir.extract_preprocess(conv.decompose(program))
    init, *parts = compute.body.seq
    assert init.name == "spmm_init" and len(parts) == 3
    rng = np.random.default_rng(0)
    stored = rng.integers(-9, 9, pattern.nnz).astype("float32")  # sums of these are exact
    b = rng.integers(-9, 9, (pattern.shape[1], 4)).astype("float32")
    a = scipy.sparse.coo_array((stored, tuple(pattern.coords)), pattern.shape)
    sizes = {"m": pattern.shape[0], "n": pattern.shape[1], "feat": 4}
    for order in itertools.permutations(parts):
        c = np.full((pattern.shape[0], 4), np.nan, "float32")
        func = compute.replace(body=tirx.SeqStmt([init, *order]))
        sparsetir.interpret(func, conv.arguments(A=stored) | sizes | {"b": b, "c": c})
        np.testing.assert_array_equal(c, a @ b)
