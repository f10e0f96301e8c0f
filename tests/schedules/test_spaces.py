"""The spaces of searches: their configs, and that all of these work."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from pairs import by_default, by_turns
from sparsetir.formats import BSR, DBSR
from sparsetir.schedules.operators.problems import CsrPattern, Sddmm, Spmm
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.search.choose import Statistics, candidates
from sparsetir.schedules.search.configs import from_data, to_data
from sparsetir.schedules.search.spaces import Space, space
from sparsetir.schedules.targets import resolve_target
from sparsetir.schedules.template import Branch
from sparsetir.schedules.templates.spmm_blocks import BlockRows
from sparsetir.sparse_ir.errors import ScheduleError

MATRIX = sp.random_array((300, 300), density=0.03, format="csr", dtype="float32", rng=0)
GPU = {"kind": "cuda", "arch": "sm_90"}
# The vectors of this machine play no part.
CPU = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake-avx512"}
FEATURES = (1, 2, 3, 7, 16, 20, 33, 64, 100, 128, 200, 500, 512, 1000, 1024)


def given(matrix, feat, threads=2, size=4):
    longest = int(np.diff(matrix.indptr).max(initial=0))
    return Statistics(*matrix.shape, matrix.nnz, feat, threads, size, longest)


def of(problem, feat, target=CPU, matrix=MATRIX, threads=2, more=1):
    """The space, and what `candidates` returns; statistics have `more` times as many elements."""
    statistics = given(matrix, feat, threads, 8 if problem.dtype == "float64" else 4)
    statistics = Statistics(**{**vars(statistics), "nnz": statistics.nnz * more})
    pattern = CsrPattern(matrix.indptr, matrix.indices, matrix.shape)
    target = resolve_target(target)
    return space(problem, pattern, statistics, target), candidates(problem, statistics, target)


@pytest.mark.parametrize(("problem", "target"), by_turns(itertools.product([
    Spmm(), Spmm("float16"), Spmm("float64"), Spmm(reduce="max"), Spmm(reduce="mean"),
    Spmm(batched=True), Sddmm(), Sddmm("bfloat16"), Sddmm("float64", batched=True),
], [CPU, GPU]), 3), ids=str)  # fmt: skip
@pytest.mark.default(3)
def test_candidates_are_points_for_all_features(problem, target):
    for feat, (threads, more) in zip(FEATURES, itertools.cycle(((1, 1), (6, 10**5)))):
        tried, known_configs = of(problem, feat, target, threads=threads, more=more)
        for config in known_configs:
            point = tried.point(config)
            assert point is not None, (feat, threads, config)
            assert tried.config(point) == config


@pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("problem", [Spmm(), Spmm("float64", reduce="mean"), Sddmm()], ids=str)
def test_points_are_scalars_and_each_config_is_there_once(problem, target):
    for feat in (1, 33, 128):
        tried, _ = of(problem, feat, target)
        points = tried.points()
        configs = [config for _, config in points]
        assert len(set(configs)) == len(configs) > 5
        assert points == of(problem, feat, target)[0].points()
        for point, config in points:
            assert tried.config(point) == config == from_data(to_data(config))
            assert tried.point(config) == point
            assert all(v is None or type(v) in (int, str, bool) for v in point.values())
            config.tiles(feat)  # raises for features that it does not serve


@pytest.mark.parametrize("threads", by_default([1, 2], 2))
def test_full_blocks_have_a_branch_of_their_own(threads):
    mask = np.random.default_rng(0).random((8, 8)) < 0.3
    blocks = sp.csr_array(np.kron(mask, np.ones((8, 8), "float32")))
    statistics = replace(given(blocks, 100, threads), block=8)
    pattern, target = CsrPattern(blocks.indptr, blocks.indices, blocks.shape), resolve_target(CPU)
    whole = space(Spmm(), pattern, statistics, target)
    configs = [c for _, c in whole.points() if isinstance(c, BlockRows)]
    assert {c.format for c in configs} == {BSR(8, 8), BSR(4, 4), DBSR(8, 8), DBSR(4, 4)}
    for config in candidates(Spmm(), statistics, target):
        assert whole.config(whole.point(config)) == config == from_data(to_data(config))
    assert all(c.filled and c.tiles(100) for c in configs)
    for config in configs[:: 15 * threads]:
        b = np.random.default_rng(1).random((64, 100), "float32")
        out = sparsetir.plan("spmm", blocks, 100, config=config, threads=threads)(b)
        np.testing.assert_allclose(out, blocks @ b, rtol=1e-4)
    assert "BlockRows" not in [b.name for b in of(Spmm(), 100)[0].branches]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (4, 3)])
def test_patterns_without_elements(shape):
    for problem in (Spmm(), Sddmm()):
        for feat in (1, 24):
            for target in (CPU, GPU):
                tried, configs = of(problem, feat, target, sp.csr_array(shape, dtype="float32"))
                assert tried.point(configs[0]) is not None


@pytest.mark.parametrize(("op", "feat"), by_turns([("spmm", 40), ("spmv", 1), ("sddmm", 40)], 2))
@pytest.mark.default("sddmm-40")
def test_configs_are_accepted_and_right(op, feat):
    """Some of them, far from each other."""
    problem = Sddmm() if op == "sddmm" else Spmm()
    tried, _ = of(problem, feat, "llvm")
    rng = np.random.default_rng(0)
    b = rng.random((300, feat), "float32")
    points = tried.points()
    for _, config in points[:: len(points) // 5]:
        run = sparsetir.plan(op, MATRIX, feat, config=config)
        if op == "sddmm":
            x = rng.random((300, feat), "float32")
            rows, cols = MATRIX.nonzero()
            out, wanted = run(x, b), (x @ b.T)[rows, cols]
        else:
            b_or_x = b if op == "spmm" else b[:, 0]
            out, wanted = run(b_or_x), MATRIX @ b_or_x
        np.testing.assert_allclose(out, wanted, rtol=1e-4, err_msg=str(config))


def test_points_of_elsewhere_are_refused():
    tiny = Space(
        (Branch("T", {"a": (1, 2), "b": (1, 2)}, lambda a, b: (a, b) if a != b else None),)
    )
    assert tiny.points() == [
        ({"template": "T", "T.a": 1, "T.b": 2}, (1, 2)),
        ({"template": "T", "T.a": 2, "T.b": 1}, (2, 1)),
    ]
    assert tiny.config({"template": "T", "T.a": 1, "T.b": 1}) is None
    assert tiny.point((1, 1)) is None
    with pytest.raises(ValueError, match="with 'template' of T, got"):
        tiny.config({"template": "U"})
    for point in ({"template": "T", "T.a": 1}, {"template": "T", "T.a": 1, "T.b": 3}):
        with pytest.raises(ValueError, match=r"with 'T.b' of \(1, 2\), got"):
            tiny.config(point)


def test_an_operator_of_which_no_template_says_what_is_chosen():
    with pytest.raises(ScheduleError, match="expected one for Rgms, as no template"):
        candidates(Rgms(), given(MATRIX, 8), resolve_target(CPU))
