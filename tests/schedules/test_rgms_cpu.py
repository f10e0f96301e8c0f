"""Relational gather-matmul-scatter by tiles of rows, on CPUs."""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import sparsetir
from pairs import by_turns
from rgms_common import arguments, exact
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.operators.rgms import Rgms, program
from sparsetir.schedules.templates.rgms import TiledRelations, apply

# relations, m, n, density
SHAPES = [
    (3, 50, 40, 0.1), (1, 1, 1, 1.0), (4, 3, 6, 0.0), (2, 133, 7, 0.6), (40, 9, 5, 0.05),
    (1, 70, 30, 1.0), (27, 60, 60, 0.02), (2, 0, 4, 0.0),
]  # fmt: skip
SIZES = [(32, 32), (16, 48), (12, 20), (7, 5), (1, 1), (160, 96)]
PROBLEMS = [
    Rgms(), Rgms(weighted=False), Rgms("float64", "int64"), Rgms("float16"),
    Rgms("float16", out="float32", values="float32"), Rgms("bfloat16", "int64", weighted=False),
]  # fmt: skip


@cache
def kernel(problem: Rgms, config: TiledRelations) -> Any:
    return sparsetir.build(program(problem), schedule=apply, config=config)


def given(problem: Rgms, shape: Any, sizes: tuple[int, int], rng: Any) -> Any:
    """A mask and arguments; bfloat16 in NumPy's way."""
    relations, m, n, density = shape
    mask = rng.random((relations, m, n)) < density
    mask[:, m // 2 : m // 2 + 1] |= density > 0.05  # a dense row
    dtype = "float32" if problem.dtype == "bfloat16" else problem.dtype
    args = arguments(rng, mask, *sizes, dtype, problem.idtype, problem.weighted)
    if problem.values:
        args["a"] = args["a"].astype(problem.values)
    return mask, args


@pytest.mark.parametrize(("problem", "sizes"), by_turns(
    [(p, s) for p in PROBLEMS if p.dtype != "bfloat16" for s in SIZES], 14), ids=str
)  # fmt: skip
@pytest.mark.default(1)
def test_results(problem: Rgms, sizes: tuple[int, int]) -> None:
    """All shapes, in as many ranges as suit and in several."""
    rng = np.random.default_rng(1)
    lanes, ranges = 16 if problem.dtype != "float64" else 8, 3 if sizes[0] % 32 else None
    config = TiledRelations.for_sizes(*sizes, lanes, ranges=ranges)
    for shape in SHAPES:
        mask, args = given(problem, shape, sizes, rng)
        if problem.out:
            args["out"] = args["out"].astype(problem.out)
        kernel(problem, config)(**args)
        rough = problem.dtype == "float16"
        tolerance = {"rtol": 2e-3, "atol": 2e-2} if rough else {"rtol": 1e-4, "atol": 1e-4}
        np.testing.assert_allclose(args["out"], exact(mask, args), **tolerance)


def test_each_step_means_the_same() -> None:
    """The program of the schedule, interpreted before stage II."""
    problem = Rgms("float16")
    sch = sparsetir.Schedule(program(problem))
    apply(sch, TiledRelations(6, 4, rows=3, tile=2, lanes=2, lanes_in=1, depth=3, ranges=2))
    rng = np.random.default_rng(2)
    for shape in [(3, 8, 5, 0.3), (1, 1, 1, 1.0), (2, 3, 4, 0.0)]:
        mask, args = given(problem, shape, (6, 4), rng)
        args |= {
            "relations": shape[0], "nnz_rows": len(args["rows"]), "nnz": len(args["indices"]),
            "feat_in": 6, "feat": 4,
        }  # fmt: skip
        sparsetir.interpret(sch.func, args)
        np.testing.assert_allclose(args["out"], exact(mask, args), rtol=1e-2, atol=1e-2)


def test_bfloat16() -> None:
    """Sums are in float32, and rounded once, where all relations have added to a row."""
    problem, dtype = Rgms("bfloat16", "int64", weighted=False), np.dtype(ml_dtypes.bfloat16)
    mask, args = given(problem, (9, 60, 60, 0.1), (16, 32), np.random.default_rng(5))
    args |= {name: args[name].astype(dtype) for name in ("x", "w", "out")}
    kernel(problem, TiledRelations.for_sizes(16, 32))(**args)
    wanted = exact(mask, args)
    np.testing.assert_allclose(args["out"].astype(float), wanted, rtol=2.0**-8, atol=1e-4)


@pytest.mark.parametrize("sizes", [(3, 8, 16), (2, 5, 7)])
@pytest.mark.default(1)
def test_features_in_blocks(sizes: tuple[int, int, int]) -> None:
    """Each block by a matrix, as by matrices with blocks on the diagonal; interpreted
    after the steps of stage I, and compiled."""
    blocks, k, feat = sizes
    problem = Rgms("float16" if k == 5 else "float32", "int64", in_blocks=True)
    config = TiledRelations.for_sizes(k, feat, ranges=2, blocks=blocks)
    sch = sparsetir.Schedule(program(problem))
    apply(sch, config)
    rng = np.random.default_rng(9)
    for shape in [(1, 1, 1, 1.0), (2, 5, 4, 0.4), *SHAPES[:4]]:
        mask, args = given(problem, shape, (blocks * k, blocks * feat), rng)
        w = rng.uniform(-1, 1, (shape[0], blocks, k, feat)).astype(problem.dtype)
        args["w"] = np.zeros((shape[0], blocks * k, blocks * feat))
        for b in range(blocks):
            args["w"][:, b * k : (b + 1) * k, b * feat : (b + 1) * feat] = w[:, b]
        wanted, (relations, m, n, _) = exact(mask, args), shape
        args |= {"w": w, "x": args["x"].reshape(n, blocks, k)}
        args["out"] = np.full((m, blocks, feat), np.nan, problem.dtype)
        tolerance = 2e-2 if problem.dtype == "float16" else 1e-4
        close = {"rtol": tolerance, "atol": tolerance}
        kernel(problem, config)(**args)
        np.testing.assert_allclose(args["out"].reshape(m, -1), wanted, **close)
        if m > 5:
            continue
        args |= {
            "relations": relations, "nnz_rows": len(args["rows"]), "nnz": len(args["indices"]),
            "blocks": blocks, "feat_in": k, "feat": feat,
        }  # fmt: skip
        args["out"][:] = np.nan
        sparsetir.interpret(sch.func, args)
        np.testing.assert_allclose(args["out"].reshape(m, -1), wanted, **close)
    with pytest.raises(
        ValueError, match="argument 'blocks': expected .*, as its schedule promises"
    ):
        more = {name: np.repeat(args[name], 2, axis=1) for name in ("w", "x", "out")}
        kernel(problem, config)(**{**args, **more, "blocks": 2 * blocks})


def test_nan_and_infinity_stay_in_their_rows() -> None:
    rng = np.random.default_rng(3)
    mask, args = given(Rgms(), (3, 50, 40, 0.1), (32, 32), rng)
    args["x"][3], args["x"][7] = np.nan, np.inf
    config = TiledRelations.for_sizes(32, 32, ranges=2)
    kernel(Rgms(), config)(**args)
    touched = mask[:, :, [3, 7]].any(axis=(0, 2))
    assert not np.isfinite(args["out"][touched]).any()
    clean = {**args, "x": np.nan_to_num(args["x"], nan=0, posinf=0)}
    np.testing.assert_allclose(
        args["out"][~touched], exact(mask, clean)[~touched], rtol=1e-4, atol=1e-4
    )


def test_patterns_of_triples() -> None:
    rng = np.random.default_rng(4)
    shape = (3, 20, 10)
    triples = [rng.integers(0, size, 100) for size in shape]
    for idtype in (None, "int64"):
        sparse = RelationPattern.of(*triples, shape, idtype)
        assert sparse.rows.dtype == np.dtype(idtype or "int32")
        rows = np.repeat(np.arange(len(sparse.rows)), np.diff(sparse.indptr))
        relation = np.repeat(np.arange(3), np.diff(sparse.row_ptr))[rows]
        values = np.arange(100.0)
        np.testing.assert_array_equal(sparse.values(A=values)["a"], values[sparse.order])
        for coords, key in zip((relation, sparse.rows[rows], sparse.indices), triples, strict=True):
            np.testing.assert_array_equal(coords, key[sparse.order])
        of_row = (relation[:, None] == relation) & (sparse.rows[rows][:, None] == sparse.rows[rows])
        np.testing.assert_array_equal(sparse.counts, of_row.sum(axis=1))
        assert np.all(np.diff(_joined(sparse, relation, rows)) >= 0)
    far = [triples[0], triples[1] * 2**40, triples[2] * 2**20]  # too far to sort as one number
    again = RelationPattern.of(*far, (3, 2**45, 2**24))
    np.testing.assert_array_equal(again.order, sparse.order)
    assert again.rows.dtype == np.int64
    nothing = np.zeros(0, "int64")
    empty = RelationPattern.of(nothing, nothing, nothing, (2, 3, 0))
    assert (empty.nnz, [*empty.row_ptr], [*empty.indptr]) == (0, [0, 0, 0], [0])


def _joined(pattern: RelationPattern, relation: Any, rows: Any) -> Any:
    return (relation * 20 + pattern.rows[rows]) * 10 + pattern.indices
