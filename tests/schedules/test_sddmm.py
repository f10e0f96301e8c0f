"""SDDMM on the CPU: every feature size class, type and pattern against float64 sums."""

# pyright: reportAttributeAccessIssue=false

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

import sparsetir
from sparsetir import ScheduleError
from sparsetir.schedules.operators.problems import CsrPattern, Sddmm
from sparsetir.schedules.passes.lane_sums import add_lanes
from sparsetir.schedules.templates import sddmm
from sparsetir.schedules.templates.sddmm import SddmmGroups

# Relative to the sum of absolute values of an element.
CLOSE = {"float32": 2e-6, "float64": 1e-14, "float16": 1e-3, "bfloat16": 8e-3}


@functools.cache
def kernel(problem, config):
    func = sparsetir.lower_sparse_iter(sddmm.program(problem, config))
    return sparsetir.build(sddmm.schedule(func, problem, config))


def random_mask(m, n, density, seed=0):
    return np.random.default_rng(seed).random((m, n)) < density


def one_dense_row():
    mask = random_mask(9, 70, 0.05)
    mask[4] = True
    return mask


def empty_rows():
    mask = random_mask(35, 47, 0.1)
    mask[[0, 1, 2, 7, 8, 34]] = False
    return mask


PATTERNS = {
    "random": random_mask(61, 47, 0.1),
    "empty rows": empty_rows(),
    "nothing stored": np.zeros((6, 5), bool),
    "no rows": np.zeros((0, 5), bool),
    "no columns": np.zeros((5, 0), bool),
    "one dense row": one_dense_row(),
    "one column": random_mask(40, 1, 0.5),
    "one element": np.ones((1, 1), bool),
    "less than a group": np.arange(15).reshape(3, 5) % 3 == 0,
    "whole groups": np.ones((4, 12), bool),
}


def arranged(mask, problem, config):
    indptr = np.concatenate([[0], np.cumsum(mask.sum(axis=1))]).astype(problem.idtype)
    indices = np.nonzero(mask)[1].astype(problem.idtype)
    return sddmm.arrange(CsrPattern(indptr, indices, mask.shape), problem, config).arguments


def operands(mask, feat, problem, heads=3, seed=1):
    """x and y in the problem's type, and the rows and columns of the elements."""
    rng = np.random.default_rng(seed)
    before = (heads,) if problem.batched else ()
    kind = getattr(torch, problem.dtype)
    x, y = (torch.from_numpy(rng.standard_normal((*before, s, feat))).to(kind) for s in mask.shape)
    return x, y, *np.nonzero(mask)


def run(x, y, pattern, problem, config):
    """`pattern` holds the arrays that :func:`arrange` makes."""
    before = x.shape[:-2]
    out = torch.full((*before, len(pattern["rows"])), float("nan"), dtype=x.dtype)
    sizes = {"heads": int(np.prod(before)), "tiles": x.shape[-1] // config.tile}
    kernel(problem, config.compiled)(x=x, y=y, out=out, **pattern, **sizes)
    return out.double().numpy()


def check(mask, feat, problem=Sddmm(), config=None):  # noqa: B008
    config = config or SddmmGroups.for_features(problem, feat)
    x, y, rows, cols = operands(mask, feat, problem)
    found = run(x, y, arranged(mask, problem, config), problem, config)
    products = x.double().numpy()[..., rows, :] * y.double().numpy()[..., cols, :]
    size = np.abs(products).sum(-1)
    assert (np.abs(found - products.sum(-1)) <= CLOSE[problem.dtype] * (size + 1)).all()


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name):
    check(PATTERNS[name], 20)
    check(PATTERNS[name], 128)


# One or more of each class: scalars, short vectors, overlapping vectors, whole ones, tiles.
@pytest.mark.parametrize("feat", [1, 3, 8, 17, 100, 384])
def test_feature_sizes(feat):
    check(PATTERNS["random"], feat)


@pytest.mark.slow
@pytest.mark.parametrize("feat", range(1, 70))
def test_all_feature_sizes(feat):
    check(PATTERNS["random"], feat)


@pytest.mark.slow
@pytest.mark.parametrize("feat", [1, 3, 8, 9, 31, 64, 130, 256])
@pytest.mark.parametrize("dtype", CLOSE)
def test_all_types(dtype, feat):
    check(PATTERNS["random"], feat, Sddmm(dtype, batched=True))


@pytest.mark.slow
@pytest.mark.parametrize("feat", [500, 602, 1000, 1023, 1024])
def test_many_features(feat):
    check(PATTERNS["random"], feat)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_types(dtype):
    check(PATTERNS["random"], 20, Sddmm(dtype, "int64"))


@pytest.mark.parametrize("name", ["random", "nothing stored", "no rows", "less than a group"])
def test_heads(name):
    check(PATTERNS[name], 20, Sddmm(batched=True))


@pytest.mark.parametrize(
    "config",
    [SddmmGroups(8, 2, 3, 20), SddmmGroups(4, 1, 8), SddmmGroups(16, 16, 2)],
    ids=str,
)
def test_configs(config):
    check(PATTERNS["random"], config.feat or 96, config=config)


def test_one_kernel_for_all_multiples_of_a_tile():
    problem = Sddmm()
    configs = {SddmmGroups.for_features(problem, feat) for feat in (128, 256, 384, 1024)}
    assert configs == {SddmmGroups()}


@pytest.mark.parametrize("feat", [3, 20, 128])
def test_nan_and_infinity_stay_in_their_elements(feat):
    """An element without them is finite, and one with them is what float64 sums are."""
    mask = PATTERNS["random"]
    x, y, rows, cols = operands(mask, feat, Sddmm())
    x[3, 0], x[5, -1], x[7, 1] = float("nan"), float("inf"), float("inf")
    y[2, -1], y[4, 0] = float("nan"), -float("inf")
    config = SddmmGroups.for_features(Sddmm(), feat)
    found = run(x, y, arranged(mask, Sddmm(), config), Sddmm(), config)
    with np.errstate(invalid="ignore"):
        expected = (x.double().numpy()[rows] * y.double().numpy()[cols]).sum(-1)
    assert not np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PATTERNS)
def test_parts_of_the_columns(name):
    check(PATTERNS[name], 64, config=SddmmGroups(parts=3, vectors=4))


@pytest.mark.parametrize("problem", [Sddmm(), Sddmm("float16", batched=True)], ids=str)
def test_copies_that_begin_at_vectors(problem):
    config = replace(SddmmGroups.for_features(problem, 37), pack=True, parts=2)
    for name in ("random", "nothing stored", "no columns"):
        check(PATTERNS[name], 37, problem, config)


def test_parts_and_copies_where_they_pay():
    def chosen(m, n, nnz, feat):
        config = SddmmGroups.for_pattern(Sddmm(), m, n, nnz, feat)
        return config.parts, config.pack

    assert chosen(2000, 2000, 200_000, 512) == (6, False)
    assert chosen(2000, 2000, 8_000, 512) == (1, False)
    assert chosen(2000, 2000, 200_000, 32) == (1, False)
    assert chosen(2000, 2000, 200_000, 33) == (1, True)
    assert chosen(2000, 2000, 8_000, 33) == (1, False)


def test_one_kernel_for_any_number_of_parts():
    assert SddmmGroups(parts=3).compiled == SddmmGroups(parts=70).compiled != SddmmGroups()


def test_vectors_of_the_whole_width_and_no_allocation():
    """No guard makes the vectors scalar, and sums stay in registers."""
    problem = Sddmm()
    llvm = kernel(problem, SddmmGroups.for_features(problem, 128)).source("ll")
    assert "<16 x float>" in llvm
    assert "TVMBackendAllocWorkspace(" not in llvm.split("define")[-1]


def test_lanes_of_no_such_block_are_refused():
    func = sparsetir.lower_sparse_iter(sddmm.program(Sddmm(), SddmmGroups()))
    with pytest.raises(ScheduleError, match="add_lanes: .* no two loops around a block 'totals0'"):
        add_lanes(func, "totals0")


@pytest.mark.parametrize(
    "values, message",
    [
        ({"lanes": 12}, "'lanes': expected a power of two"),
        ({"group": 32}, "'group': expected a power of two up to lanes = 16"),
        ({"vectors": 0}, "'vectors': expected 1 or more, got 0"),
        ({"feat": 8}, "'feat': expected 113 or more features, got 8"),
    ],
)
def test_refusals(values, message):
    with pytest.raises(ValueError, match=f"SddmmGroups: argument {message}"):
        SddmmGroups(**values)


def test_configs_that_do_not_serve_a_feature_size():
    from sparsetir import ScheduleError
    from sparsetir.schedules.templates.sddmm_gpu import FusedNonzeros

    for config in (sddmm.SddmmGroups(16, 8, 2), FusedNonzeros(8, 16, 2, 4, 1)):
        assert config.tiles(64) == 2
        with pytest.raises(ScheduleError, match="serves multiples of 32 features, got 40"):
            config.tiles(40)


@pytest.mark.parametrize(
    "feat, config",
    [
        (300, SddmmGroups(16, 8, 4, 300)),  # a rest that overlaps
        (304, SddmmGroups(16, 8, 4, 304)),  # a rest of whole vectors
        (320, SddmmGroups(16, 8, 4, 320)),  # no rest
        (300, SddmmGroups(16, 8, 4, 300, parts=2, pack=True)),
    ],
)
def test_whole_tiles_and_a_rest(feat, config):
    assert config.whole_tiles and config.feat == feat
    check(PATTERNS["random"], feat, config=config)


@pytest.mark.parametrize("feat", [257, 1433, 3703, 8191, 16385, 2**20 + 7])
def test_code_of_bounded_length_for_any_feature_size(feat):
    config = SddmmGroups.for_features(Sddmm(), feat)
    assert config.vectors + config.rest_vectors <= sddmm.MAX_STRAIGHT


def test_code_is_as_long_for_many_features_as_for_some():
    """LLVM does not write the loop over tiles out."""
    some, many = (
        len(kernel(Sddmm(), SddmmGroups.for_features(Sddmm(), feat)).source("asm").splitlines())
        for feat in (297, 16385)
    )
    assert many < 1.5 * some
