"""SDDMM on the CPU: every feature size class, type and pattern against float64 sums."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

import sparsetir
from csr_zoo import ZOO
from sparsetir.schedules.operators.problems import CsrPattern, Sddmm
from sparsetir.schedules.operators.sddmm import program
from sparsetir.schedules.templates.sddmm import SddmmGroups, apply

# Relative to the sum of absolute values of an element.
CLOSE = {"float32": 2e-6, "float64": 1e-14, "float16": 1e-3, "bfloat16": 8e-3}


@functools.cache
def kernel(problem, config):
    return sparsetir.build(program(problem), schedule=apply, config=config)


PATTERNS = {name: matrix.toarray() != 0 for name, matrix in ZOO.items()} | {
    "less than a group": np.arange(15).reshape(3, 5) % 3 == 0,
    "whole groups": np.ones((4, 12), bool),
}


def pattern(mask, idtype="int32"):
    indptr = np.concatenate([[0], np.cumsum(mask.sum(axis=1))]).astype(idtype)
    return CsrPattern(indptr, np.nonzero(mask)[1].astype(idtype), mask.shape)


def operands(mask, feat, problem, heads=3, seed=1):
    """x and y in the problem's type, and the rows and columns of the elements."""
    rng = np.random.default_rng(seed)
    before = (heads,) if problem.batched else ()
    kind = getattr(torch, problem.dtype)
    x, y = (torch.from_numpy(rng.standard_normal((*before, s, feat))).to(kind) for s in mask.shape)
    return x, y, *np.nonzero(mask)


def run(x, y, mask, problem, config):
    """The result of a kernel; of a plan where the number of parts is to be given."""
    stored = pattern(mask, problem.idtype)
    out = torch.full((*x.shape[:-2], stored.nnz), float("nan"), dtype=x.dtype)
    if config.parts == 1:
        kernel(problem, config)(x, y, out, stored.indptr, stored.indices)
    else:
        heads = len(x) if problem.batched else None
        plan = sparsetir.plan(
            "sddmm", stored, x.shape[-1], dtype=problem.dtype, heads=heads, config=config
        )
        if heads is None:
            plan(x, y, out=out)
        else:  # which plans have second
            out = plan(*(each.transpose(0, 1).contiguous() for each in (x, y))).t()
    return out.double().numpy()


def check(mask, feat, problem=Sddmm(), config=None):  # noqa: B008
    config = config or SddmmGroups.for_features(problem, feat)
    x, y, rows, cols = operands(mask, feat, problem)
    found = run(x, y, mask, problem, config)
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_types(dtype):
    check(PATTERNS["random"], 20, Sddmm(dtype, "int64"))


def test_a_kernel_serves_other_patterns_with_its_own_number_of_parts():
    """Called as a kernel in the order of storage is; the number of parts has a default."""
    config = SddmmGroups(parts=2, vectors=4)
    for name in ("random", "one dense row", "empty"):
        mask = PATTERNS[name]
        x, y, rows, cols = operands(mask, 64, Sddmm())
        out, stored = torch.full((len(rows),), float("nan")), pattern(mask)
        kernel(Sddmm(), config)(x, y, out, stored.indptr, stored.indices)
        assert torch.allclose(out, (x[rows] * y[cols]).sum(-1), atol=1e-4)


def test_columns_in_any_order_and_more_than_once():
    """As edges of a graph are; plans trust such patterns."""
    indices = np.array([3, 1, 1, 0, 4, 4, 2, 0, 3, 3, 1], "int32")
    stored = CsrPattern(np.array([0, 5, 5, 11], "int32"), indices, (3, 5))
    rows = np.repeat([0, 2], [5, 6])
    x, y = torch.randn(3, 20), torch.randn(5, 20)
    for config in (None, SddmmGroups(16, 8, 2, 20, parts=2)):
        found = sparsetir.plan("sddmm", stored, 20, config=config)(x, y)
        assert torch.allclose(found, (x[rows] * y[indices]).sum(-1), atol=1e-4)


@pytest.mark.parametrize("name", ["random", "empty", "no rows", "less than a group"])
def test_heads(name):
    check(PATTERNS[name], 20, Sddmm(batched=True))


@pytest.mark.parametrize(
    "config", [SddmmGroups(8, 2, 3, 20), SddmmGroups(4, 1, 8), SddmmGroups(16, 16, 2)], ids=str
)
def test_configs(config):
    check(PATTERNS["random"], config.feat or 96, config=config)


@pytest.mark.parametrize("feat", [3, 20, 128])
def test_nan_and_infinity_stay_in_their_elements(feat):
    """An element without them is finite, and one with them is what float64 sums are."""
    mask = PATTERNS["random"]
    x, y, rows, cols = operands(mask, feat, Sddmm())
    x[3, 0], x[5, -1], x[7, 1] = float("nan"), float("inf"), float("inf")
    y[2, -1], y[4, 0] = float("nan"), -float("inf")
    config = SddmmGroups.for_features(Sddmm(), feat)
    found = run(x, y, mask, Sddmm(), config)
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
    for name in ("random", "empty", "no columns"):
        check(PATTERNS[name], 37, problem, config)


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
    assert config.row_vectors > config.vectors and config.feat == feat
    check(PATTERNS["random"], feat, config=config)
