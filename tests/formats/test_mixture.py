"""Mixture: five of them, choosers, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse
from conversions import patterns, round_trip, spmm
from hypothesis import given, settings
from tvm import tirx
from zoo import MATRICES, TENSORS

import sparsetir
from programs import PROGRAMS
from sparsetir import formats as F
from sparsetir.formats.partition import check_partition

MIXTURES = [
    F.Mixture("blocks_and_rows", (F.BSR(2, 2), F.RowELL(2)), F.by_block_fill(2, 2, 0.75)),
    F.Mixture("band_and_hyb", (F.DIA(), F.Hyb(2, 1)), F.by_band(-1, 2)),
    F.Mixture("blocks_and_hyb", (F.BSR(3, 2), F.Hyb(1, 2)), F.by_block_fill(3, 2, 0.5)),
    F.Mixture("even_and_long_rows", (F.ELL(), F.DCSR()), F.by_row_length(6)),
    F.Mixture("patterns_and_coo", (F.EnumeratedPatterns(4), F.COO()), F.by_block_fill(4, 1, 0.5)),
]
each = pytest.mark.parametrize("mixture", MIXTURES, ids=lambda m: m.label)


@each
@settings(max_examples=25, deadline=None, derandomize=True)
@given(pattern=patterns())
def test_random_patterns(mixture: F.Mixture, pattern: F.Pattern) -> None:
    split = mixture.split(pattern)
    check_partition(pattern.coords, split)
    conv = round_trip(mixture, pattern, ("float32",))
    for part, taken in zip(conv.parts, split, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(part.places >= 0), taken)


@each
@pytest.mark.parametrize("name", ["random", "one dense row", "nothing stored"])
def test_spmm_interpreted(mixture: F.Mixture, name: str) -> None:
    spmm(mixture, MATRICES[name])


@each
def test_both_formats_of_a_mixture_have_work(mixture: F.Mixture) -> None:
    # Otherwise the tests above would say nothing about mixing.
    chosen = mixture.choose(MATRICES["one dense row"])
    assert set(chosen.tolist()) == {0, 1}


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
