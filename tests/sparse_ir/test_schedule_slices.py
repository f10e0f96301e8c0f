"""Slices, pack, rows by length, and operands in tiles: what they make, and the same meaning."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from pairs import by_turns
from positions_common import relations
from rows_common import operands
from schedule_common import gives, keeps_meaning, opened, program
from sparsetir.sparse_ir.computed import value_parameters
from sparsetir.sparse_ir.legal import parallelizable
from sparsetir.sparse_ir.nodes import sparse_iterations
from sparsetir.sparse_ir.races import FREE
from sparsetir.sparse_ir.recipes import diagonals as of_bands
from sparsetir.sparse_ir.recipes import slices as recipes

RNG = np.random.default_rng(0)
# Test programs of one iteration, whose first loops are over rows and what they store.
SLICED = ["spmv", "spmm", "row_sum", "spmm_bsr", "relational", "row_max"]
OPTIONS = [
    {},
    {"longest": 4, "window": 3},
    {"longest": 5, "filled": 101},
    {"longest": "long", "window": "window", "filled": "filled"},
    {"longest": 4, "diagonals": 1},
]


def sliced(func: Any, lanes: int = 4, **options: Any) -> tuple[Any, list[Any]]:
    """A schedule of a program of one iteration over rows I and columns J."""
    sch, _, (rows, columns, *_) = opened(func)
    return sch, sch.sell_slices(rows, columns, lanes, **options)


@pytest.mark.parametrize(
    ("name", "options"), by_turns(itertools.product(SLICED, OPTIONS), 3), ids=str
)
@pytest.mark.slow
def test_the_result_stays(name: str, options: dict[str, Any]) -> None:
    sch, _ = sliced(program(name), 1 if options.get("filled") == 101 else 4, **options)
    keeps_meaning(sch, name)


def test_rows_and_elements_are_each_somewhere_once() -> None:
    """Rows of 0 to 79 elements: positions of all three iterations, and slots that are used."""
    lengths = RNG.permutation(np.repeat(np.arange(80), 3))
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype("int32")
    lanes = 8
    for longest, filled in ((80, 101), (30, 101), (30, 90), (8, 50)):
        how = {"lanes": lanes, "longest": longest, "filled": filled}
        order = recipes.row_order(indptr, window=40, **how)
        assert sorted(order) == [*range(240)]
        count = recipes.slice_count(indptr, **how)
        left = recipes.left_count(indptr, lanes, longest)
        longs = recipes.long_count(indptr, count, lanes, left)
        assert (count * lanes + longs + left, left < lanes) == (240, True)
        rows = recipes.rows_of_slices(order, count, lanes)
        tall = recipes.lengths_of_rows(indptr, rows)
        ptr = recipes.slice_ptr(tall, lanes)
        slots = recipes.slice_slots(indptr, rows, tall, ptr, lanes)
        assert slots.shape == (ptr[-1], lanes)
        positions = []
        for s, lane in np.ndindex(count, lanes):
            row = rows[s * lanes + lane]
            here = slots[ptr[s] : ptr[s] + lengths[row], lane].tolist()
            assert here == [*range(indptr[row], indptr[row + 1])]
            positions += here
        many = recipes.long_rows(order, left, longs)
        assert (lengths[many] >= longest).all() and (np.diff(many) > 0).all()
        vectors = recipes.vector_ptr(indptr, many, lanes)
        ends = recipes.last_vectors(indptr, many, lanes)
        for row, count_of, begin, end in zip(
            many, np.diff(vectors), recipes.row_starts(indptr, many), ends, strict=True
        ):
            places = set()
            for u in range(count_of):
                places |= {*range(min(begin + u * lanes, end), min(begin + u * lanes, end) + lanes)}
            assert places == {*range(indptr[row], indptr[row + 1])}
            positions += places
        few = recipes.left_rows(order, left)
        offsets = recipes.offsets_of_rows(indptr, few)
        positions += recipes.positions_of_rows(indptr, few, offsets).tolist()
        assert sorted(positions) == [*range(len(range(indptr[-1])))]


def test_long_rows_of_about_one_length_are_in_slices() -> None:
    lengths = np.array([*range(300, 332), 1000, 400, 900, 500])
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    how = {"lanes": 16, "longest": 256}
    assert recipes.slice_count(indptr, **how, filled=90) == 2
    assert recipes.slice_count(indptr, **how, filled=101) == 0
    order = recipes.row_order(indptr, **how, window=1, filled=90)
    assert recipes.long_rows(order, 0, 4).tolist() == [32, 33, 34, 35]


@pytest.mark.parametrize(("lanes", "free"), [(4, True), (5, False)])
def test_slices_of_diagonals_have_rows_of_their_own(lanes: int, free: bool) -> None:
    """Their first rows are multiples of 4, so that more lanes would reach into the next slice."""
    sch, _ = sliced(program("spmv"), 4, diagonals=30)
    head = "I_band_lanes = T.dense_fixed("
    text = sch.func.script().replace(f"{head}4", f"{head}{lanes}")
    func = sparsetir.from_source(text)
    (bands,) = (it for it in sparse_iterations(func) if it.name == "spmv_diagonals")
    slices, _, rows = parallelizable(func, bands)
    assert ({slices, rows} == {FREE}) == free


@pytest.mark.parametrize("chunk", [1, 100, 1 << 18])
def test_slices_of_diagonals(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are those that are filled and inside the matrix; each nonzero of them has one slot."""
    monkeypatch.setattr(of_bands, "CHUNK", chunk)
    m, n, lanes = 67, 70, 4
    a = sp.diags_array(np.ones((5, m)), offsets=[-2, -1, 0, 1, 3], shape=(m, n)).tolil()
    a[8:12] = RNG.random((4, n)) < 0.1  # too few on each diagonal
    a[20, 20:40], a[24:28] = 1, 0
    a = sp.csr_array(a)
    where = {"indptr": a.indptr, "indices": a.indices, "n": n, "lanes": lanes}
    held = of_bands.slice_diagonals(**where, dense=50)
    rows = of_bands.first_rows(held, a.indptr, lanes)
    inside = {*range(1, 16)} - {2, 5, 6}  # of the first, diagonals begin before the matrix
    assert {*rows // lanes} == inside and of_bands.diagonal_slice_count(rows) == len(inside)
    ptr = of_bands.diagonal_ptr(held, a.indptr, rows, lanes)
    first = of_bands.first_columns(held, a.indptr, a.indices, n, lanes)
    masks, slots = of_bands.diagonal_masks(held), of_bands.diagonal_slots(a.indptr, held)
    assert (first >= 0).all() and (first + lanes <= n).all()
    positions = []
    for s, lane in np.ndindex(len(rows), lanes):
        here = [d for d in range(ptr[s], ptr[s + 1]) if masks[d] >> lane & 1]
        row = rows[s] + lane
        positions += [slots[d, lane] for d in here]
        assert [first[d] + lane for d in here] == [*a.indices[a.indptr[row] : a.indptr[row + 1]]]
    every = np.add.outer(rows, np.arange(lanes))
    assert len({*positions}) == len(positions) == np.diff(a.indptr)[every].sum()
    unordered = np.append(a.indices[1:], a.indices[:1])
    assert not len(of_bands.slice_diagonals(**where | {"indices": unordered}, dense=1))
    assert not len(of_bands.slice_diagonals(**where | {"n": 3}, dense=1))
    assert of_bands.diagonal_masks(np.zeros((1, 32), "int32")) == [-1]


def test_no_loop_needs_a_guard_and_all_are_free_of_races() -> None:
    sch, (s, _, lane, p, _, vector, q, _, band, _, _) = sliced(program("spmm"), diagonals=50)
    sch.precompute("C", s, [lane, *_features(sch, "spmm")], scope="global")
    for loop in (s, p, q):
        sch.parallelize(loop)
    sch.parallelize(band, race="ignore")  # no proof knows that slices are apart
    text = sparsetir.lower_sparse_iter(sch.func).script()
    assert "if_then_else" not in text and "search" not in text
    assert vector.name == "I_vector_lanes"


def _features(sch: Any, name: str) -> list[Any]:
    return sch.get_sp_iters(sch.get_sparse_iteration(name))[3:]


# -- pack -------------------------------------------------------------------------------------


def packed_spmm(longest: int = 5) -> tuple[Any, str]:
    sch, (s, _, lane, *_) = sliced(program("spmm"), longest=longest)
    steps = sch.precompute("C", s, [lane, *_features(sch, "spmm")], scope="global")
    return sch, sch.pack("A", steps[1])


def matrix(seed: int = 0, m: int = 13, n: int = 9, feat: int = 5) -> dict[str, Any]:
    a = sp.random_array((m, n), density=0.4, format="csr", rng=seed)
    return operands(a, "int32", feat)


def exact(args: dict[str, Any]) -> np.ndarray:
    shape = args["m"], args["n"]
    return sp.csr_array((args["a"], args["indices"], args["indptr"]), shape=shape) @ args["b"]


def test_packed_values_follow_those_that_are_given() -> None:
    """Values are packed in each call, also of arrays changed in place; interpreted and compiled."""
    sch, name = packed_spmm()
    assert name == "A_packed" and value_parameters(sch.func) == ["a_packed"]
    assert "A_packed[i_slice, i_step, i_lane]" in sch.func.script()
    kernel = sparsetir.build(sch)
    for seed in range(3):
        args = matrix(seed)
        for change in (0.0, 1.0):
            args["a"] += change
            kernel(**args)
            np.testing.assert_allclose(args["c"], exact(args), rtol=1e-5, atol=1e-5)
        gives(sch, args, {"c": exact(args)}, atol=1e-5, kernel=kernel)


def test_a_packed_kernel_is_exported_and_refuses_what_is_no_array(tmp_path: Any) -> None:
    kernel = sparsetir.build(packed_spmm()[0])
    kernel.export(tmp_path / "k.so")
    loaded = sparsetir.load(tmp_path / "k.so")
    args = matrix(4)
    loaded(**args)
    np.testing.assert_allclose(args["c"], exact(args), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"spmm: argument 'b': expected shape \(9, 5\), got \(8,"):
        loaded(**{**args, "b": args["b"][:8]})
    with pytest.raises(ValueError, match="spmm: argument 'a': expected shape"):
        loaded(**{**args, "a": args["a"][:-1]})
    with pytest.raises(TypeError, match="argument 'a': expected a torch, NumPy or TVM array, got"):
        loaded(**{**args, "a": "values"})


def test_packed_values_that_are_too_few() -> None:
    """A buffer whose length no index array implies."""
    sch, ref, _ = opened(relations, "relations")
    sch.assume("coordinates", buffer="ETYPE", axis="R")
    sch.pack("W", ref)
    kernel = sparsetir.build(sch)
    args = {
        "etype": np.array([[0, 3], [2, 1]], "int32").ravel(), "out": np.zeros(2, "float32"),
        "indices": np.array([0, 1, 0, 1], "int32"),
    }  # fmt: skip
    sizes = {"m": 2, "n": 2, "slots": 2}
    kernel(w=np.arange(4, dtype="float32"), **args, **sizes, r=4)
    np.testing.assert_array_equal(args["out"], [3, 3])
    with pytest.raises(ValueError, match="argument 'w': expected 4 elements or more, which it is"):
        kernel(w=np.arange(3, dtype="float32"), **args, **sizes, r=3)


def by_length(func, window=4):
    sch, ref, (rows, columns, *_) = opened(func)
    return sch, ref, sch.sort_rows_by_length(rows, columns, window)


@pytest.mark.parametrize("name", ["spmv", "spmm", "row_sum", "row_max"])
def test_rows_by_length_keep_the_result(name):
    keeps_meaning(by_length(program(name))[0], name)


def test_rows_are_sorted_in_windows():
    """Up in one window and down in the next; each row once, those of a length in their order."""
    lengths = np.array([3, 0, 3, 1, 0, 5, 2, 2, 9, 1])
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    order = recipes.rows_by_length(indptr, 4)
    assert order.tolist() == [1, 3, 0, 2, 5, 6, 7, 4, 9, 8]
    whole = recipes.rows_by_length(indptr, 100)
    assert whole.tolist() == np.argsort(lengths, kind="stable").tolist()
    assert recipes.rows_by_length(np.zeros(1, "int32"), 4).tolist() == []


ORDER = ["K0", "J_0", "J_1", "K1", "J_2"]


def in_tiles(sizes: Any = None, order: Any = None, **options: Any) -> tuple[Any, Any]:
    """SpMM in a workspace, with B in tiles."""
    sch, it, (i, j, k) = opened()
    k0, k1 = sch.split(k, [None, 4])
    sch.sparse_reorder(it, [i, k0, j, k1])
    sch.precompute("C", k0, [k1])
    sizes = {"J_": [2, 2], "K": [4]} if sizes is None else sizes
    return sch, sch.tiles("B", it, sizes, order=ORDER if order is None else order, **options)


@pytest.mark.parametrize("sizes, order", [
    (None, None), ({"K": [4]}, ["K0", "J_", "K1"]), ({"J_": [3]}, ["J_0", "K", "J_1"]),
    ({"J_": [1, 8], "K": [2, 2]}, ["J_2", "K2", "J_1", "K1", "J_0", "K0"]),
])  # fmt: skip
@pytest.mark.parametrize("feat", [1, 5, 8])
def test_it_means_the_same(sizes: Any, order: Any, feat: int) -> None:
    """Sizes that tiles divide and others; interpreted and compiled."""
    sch, copy = in_tiles(sizes, order)
    assert copy.name == "B_tiles_copy"
    for n in (1, 10, 16):
        args = matrix(0, 7, n, feat)
        gives(sch, args, {"c": exact(args)}, atol=1e-5)


def test_tiles_that_the_caller_gives() -> None:
    sch, copy = in_tiles(given=True)
    assert copy is None
    args = matrix(0, 7, 10)
    wanted, b = exact(args), args.pop("b")
    whole = np.zeros((12, 8), "float32")
    whole[:10, :5] = b
    args["b"] = np.ascontiguousarray(whole.reshape(3, 2, 2, 2, 4).transpose(3, 0, 1, 4, 2))
    kernel = sparsetir.build(sch)
    kernel(**args)
    np.testing.assert_allclose(args["c"], wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"argument 'b': expected shape \(2, 3, 2, 4, 2\), got"):
        kernel(**{**args, "b": args["b"][:1]})
