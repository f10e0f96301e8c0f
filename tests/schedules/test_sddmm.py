"""SDDMM on the CPU: every feature size class, type and pattern against float64 sums."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sparsetir
from csr_zoo import ZOO
from pairs import by_turns
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.template import Choices

# Relative to the sum of absolute values of an element.
CLOSE = {"float32": 2e-6, "float64": 1e-14, "float16": 1e-3, "bfloat16": 8e-3}
PATTERNS = {name: matrix.toarray() != 0 for name, matrix in ZOO.items()} | {
    "less than a group": np.arange(15).reshape(3, 5) % 3 == 0,
    "whole groups": np.ones((4, 12), bool),
}
RANDOM = PATTERNS["random"]


def case(mask, feat, dtype="float32", idtype="int32", heads=()):
    """A pattern, with x and y in the type, and the rows of the elements."""
    rng, kind = np.random.default_rng(1), getattr(torch, dtype)
    indptr = np.concatenate([[0], np.cumsum(mask.sum(axis=1))]).astype(idtype)
    rows, columns = np.nonzero(mask)
    stored = CsrPattern(indptr, columns.astype(idtype), mask.shape)
    x, y = (torch.from_numpy(rng.standard_normal((s, *heads, feat))).to(kind) for s in mask.shape)
    return SimpleNamespace(pattern=stored, x=x, y=y, rows=rows)


def check(tested, **choices):
    """The result of a plan, whose config is the default but for some choices."""
    x, y, dtype = tested.x, tested.y, str(tested.x.dtype).removeprefix("torch.")
    options = {"dtype": dtype, "heads": x.shape[1] if x.ndim == 3 else None}
    default, *_ = sparsetir.plan_candidates("sddmm", tested.pattern, x.shape[-1], **options)
    config = Choices({**default, **{f"sddmm.{name}": value for name, value in choices.items()}})
    plan = sparsetir.plan("sddmm", tested.pattern, x.shape[-1], config=config, **options)
    out = torch.full((len(tested.rows), *x.shape[1:-1]), float("nan"), dtype=x.dtype)
    result = plan(x, y, out=out).double().numpy()
    terms = (x[tested.rows].double() * y[tested.pattern.indices].double()).numpy()
    with np.errstate(invalid="ignore"):
        exact, size = terms.sum(-1), np.abs(terms).sum(-1)
        right = np.abs(result - exact) <= CLOSE[dtype] * (size + 1)
    right |= (result == exact) | (np.isnan(result) & np.isnan(exact))
    assert right.all()


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.default("empty", "less than a group")
def test_patterns(name):
    """Sampled products in the order of storage, and in parts of the columns."""
    check(case(PATTERNS[name], 20))
    check(case(PATTERNS[name], 64), parts=3)
    check(case(PATTERNS[name], 64), parts=0, size=0)


# One or more of each class: scalars, short vectors, overlapping vectors, whole ones, tiles.
@pytest.mark.parametrize("feat", by_turns([1, 2, 3, 4, 7, 8, 17, 40, 100, 128, 300, 304, 384], 3))
def test_feature_sizes(feat):
    check(case(RANDOM, feat))
    check(case(RANDOM, feat), size=0)


@pytest.mark.slow
@pytest.mark.parametrize("feat", range(1, 300))
def test_all_feature_sizes(feat):
    test_feature_sizes(feat)


@pytest.mark.parametrize("feat", by_turns([3, 20, 128], 2))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.default("float64-3")
def test_types(dtype, feat):
    check(case(RANDOM, feat, dtype, "int64"), size=0)
    check(case(RANDOM, feat, dtype, heads=(2,)), parts=2)


@pytest.mark.parametrize("feat", by_turns([3, 20, 128], 2))
def test_nan_and_infinity_stay_in_their_elements(feat):
    """An element without them is finite, and one with them is what float64 sums are."""
    tested = case(RANDOM, feat)
    tested.x[3, 0], tested.x[5, -1], tested.x[7, 1] = float("nan"), float("inf"), float("inf")
    tested.y[2, -1], tested.y[4, 0] = float("nan"), -float("inf")
    check(tested)
    check(tested, parts=2, size=0)
