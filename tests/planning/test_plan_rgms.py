"""Plans of relational gather-matmul-scatter."""

import numpy as np
import pytest
import torch
import tvm

import sparsetir
from cuda_plans import run_plans
from cuda_runner import requires_cuda_text
from refusals import refusals
from rgms_common import exact
from sparsetir.planning.plan import requested
from sparsetir.runtime import pool
from sparsetir.schedules.gpu.rgms import RelationalRows
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.templates.rgms import TiledRelations

RNG = np.random.default_rng(0)
MASK = RNG.random((3, 50, 40)) < 0.1
VALUES = RNG.uniform(-1, 1, int(MASK.sum())).astype("float32")
A = sparsetir.SparseTensor(MASK.nonzero(), VALUES, MASK.shape)
X = RNG.uniform(-1, 1, (40, 8)).astype("float32")
W = RNG.uniform(-1, 1, (3, 8, 16)).astype("float32")
X2, W2 = (RNG.uniform(-1, 1, s).astype("float32") for s in ((40, 19), (3, 19, 33)))
PLAN, ODD = (sparsetir.plan("rgms", A, out, feat_in=k) for k, out in ((8, 16), (19, 33)))
UNWEIGHTED = sparsetir.plan("rgms", A, 16, feat_in=8, weighted=False)
TRIPLES = [RNG.integers(0, size, 300) for size in MASK.shape]
PLAIN = sparsetir.plan("rgms", RelationPattern.of(*TRIPLES, MASK.shape, "int64"), 16, feat_in=8)
CUDA = {"kind": "cuda", "arch": "sm_90"}


def right(result, a=VALUES, x=X, w=W, mask=MASK, atol=1e-4):
    want = exact(mask, {"a": a, "x": x, "w": w})
    np.testing.assert_allclose(np.asarray(result, "float64"), want, atol=atol)


def test_the_values_of_the_tensor_and_of_a_run():
    assert PLAN.chosen_by == "default" and not PLAN.needs_values and not PLAN.arranges_values
    assert isinstance(PLAN.config, TiledRelations) and PLAN.padding == 0
    right(PLAN(X, W))
    other = VALUES[::-1].copy()
    right(PLAN(X, W, values=other), other)
    right(PLAN(X, W))  # the planned ones are as they were


def test_threads_start_where_there_is_work_for_them(monkeypatch):
    work = int(MASK.any(axis=2).sum()) * 8 * 16
    for least in (work, work + 1):
        monkeypatch.setattr(pool, "work_of_threads", lambda least=least: least)
        chosen = requested("rgms", A, 16, feat_in=8, threads=2).chosen()
        assert chosen.parallel == (least == work)


def test_arrays_of_torch_and_a_result_of_the_users():
    x, w, out = torch.from_numpy(X), torch.from_numpy(W), torch.full((50, 16), torch.nan)
    assert PLAN(x, w, out=out) is out
    right(out.numpy())
    assert isinstance(PLAN(x, w), torch.Tensor)


def test_triples_in_any_order_with_values_of_each_run():
    """int64 indices; elements that are alike add up."""
    values = RNG.uniform(-1, 1, 300).astype("float32")
    assert PLAIN.problem.idtype == "int64" and PLAIN.needs_values and PLAIN.arranges_values
    summed = sparsetir.SparseTensor(TRIPLES, values, MASK.shape)
    mask = np.zeros(MASK.shape, bool)
    mask[tuple(summed.pattern.coords)] = True
    right(PLAIN(X, W, values=values), summed.values, mask=mask)
    x, w, values = (torch.from_numpy(x) for x in (X, W, values))
    right(PLAIN(x, w, values=values), summed.values, mask=mask)


def test_without_values():
    pattern = RelationPattern.of(*MASK.nonzero(), MASK.shape)
    sparsetir.plan("rgms", A, 16, feat_in=8, weighted=False)  # the kernel of UNWEIGHTED may be gone
    before = sparsetir.compilations()
    other = sparsetir.plan("rgms", pattern, 16, feat_in=8, weighted=False)
    assert sparsetir.compilations() == before  # they share the kernel
    for plan in (UNWEIGHTED, other):
        assert "a" not in plan.kernel.signature.names and not plan.needs_values
        right(plan(X, W), 1.0)


def test_a_config_of_ones_own_and_other_types():
    config = TiledRelations.for_sizes(8, 16, ranges=3)
    plan = sparsetir.plan("rgms", A, 16, feat_in=8, config=config, dtype="float16",
                          out_dtype="float32")  # fmt: skip
    x, w, a = (v.astype("float16") for v in (X, W, VALUES))
    result = plan(x, w)
    assert result.dtype == "float32" and plan.config is config and plan.chosen_by == "user"
    right(result, a, x, w, atol=1e-3)
    assert "rgms_product" in plan.kernel.stages["I"].script()


@pytest.mark.parametrize("shape", [(3, 50, 40), (2, 0, 40), (1, 5, 0)])
def test_empty_patterns(shape):
    """Features without a kernel get zeros from that of the others."""
    coords = [np.zeros(0, "int32")] * 3
    a = sparsetir.SparseTensor(coords, np.zeros(0, "float32"), shape)
    plan = sparsetir.plan("rgms", a, 16, feat_in=8)
    relations, m, n = shape
    np.testing.assert_array_equal(plan(X[:n], W[:relations]), np.zeros((m, 16)))


def test_candidates_begin_with_the_chosen_config():
    first, *others = sparsetir.plan_candidates("rgms", A, 16, feat_in=8, threads=2)
    assert first == PLAN.config
    assert {"rows", "cost", "cache", "prefetch", "threads"} <= {
        name for c in others for name, x in vars(c).items() if x != getattr(first, name)
    }
    assert len({first, *others}) == len(others) + 1


def test_what_is_chosen_for_a_gpu():
    wanted = requested("rgms", A, 16, feat_in=8, target=CUDA)
    assert isinstance(wanted.chosen(), RelationalRows) and wanted.pattern is A.pattern
    half = requested("rgms", A, 16, feat_in=8, target=CUDA, dtype="float16", out_dtype="float32")
    first, *_, last = half.candidates()
    assert first.shares is not None and last.shares is None


@requires_cuda_text
def test_a_plan_for_a_gpu(monkeypatch):
    """The kernel on the CPU, for a tensor and for triples in any order; 15 features are padded."""
    kernels = run_plans(monkeypatch)
    config = RelationalRows.for_features(16, 16, k=1, rows=16)
    order = RNG.permutation(len(VALUES))
    triples = RelationPattern.of(*(c[order] for c in MASK.nonzero()), MASK.shape)
    x, w = (RNG.uniform(-1, 1, s).astype("float32") for s in ((40, 16), (3, 16, 15)))
    for matrix, values in ((A, None), (triples, VALUES[order])):
        plan = sparsetir.plan("rgms", matrix, 15, feat_in=16, target=CUDA, config=config)
        assert plan.launches == 2 and plan.arranges_values
        right(plan(x, w, values=values), x=x, w=w)
    assert len(kernels) == 1


def test_features_that_fill_no_vectors():
    """Zeros are put behind them; results are what was asked for, in the caller's array too."""
    assert ODD.config.feat_in % ODD.config.lanes == 0 and ODD.config.lanes > 1
    assert ODD.feat == 33
    right(ODD(X2, W2), x=X2, w=W2)
    for kind, out in (
        (torch.from_numpy, torch.empty(50, 33)),
        (tvm.runtime.tensor, tvm.runtime.empty((50, 33))),
    ):
        inputs = [kind(v) for v in (X2, W2)]
        right(ODD(*inputs).numpy(), x=X2, w=W2)
        assert ODD(*inputs, out=out) is out
        right(out.numpy(), x=X2, w=W2)


test_refusals = refusals(
    """
PLAN(X)  # TypeError: rgms: expected 2 operands (x, w), got 1
PLAN(X[:5], W)  # ValueError: 'x': expected shape (40, 8), got (5, 8)
PLAN(X, W[:2])  # ValueError: 'w': expected shape (3, 8, 16), got (2, 8, 16)
PLAN(X.astype("float64"), W)  # TypeError: 'x': expected dtype float32, got float64
PLAN(X, W.astype("float16"))  # TypeError: 'w': expected dtype float32, got float16
PLAN(X[:, ::-1], W)  # ValueError: 'x': expected a contiguous array
PLAN(X, W, values=VALUES[:3])  # ValueError: 'values': expected an array of shape
PLAN(torch.from_numpy(X), torch.from_numpy(W).requires_grad_())  # ValueError: 'w': it requires a
PLAIN(X, W)  # TypeError: rgms: argument 'values': expected an array, got None
UNWEIGHTED(X, W, values=VALUES)  # TypeError: rgms: argument 'values': the operator takes none
ODD(X2[:, 1:], W2)  # ValueError: rgms: argument 'x': expected an array of shape (40, 19)
ODD(X2.astype("float64"), W2)  # TypeError: rgms: argument 'x': expected dtype float32
ODD(X2)  # TypeError: rgms: expected 2 operands (x, w), got 1
ODD(torch.from_numpy(X2).requires_grad_(), torch.from_numpy(W2))  # ValueError: 'x': it requires a
ODD(X2, W2, out=np.empty((50, 48), "float32"))  # ValueError: 'out': expected an array of shape
sparsetir.plan("rgms", MASK[0].nonzero(), 8)  # ValueError: 'matrix': expected a .. got shape
sparsetir.plan("rgms", A, 0)  # ValueError: 'feat': expected 1 or more, got 0
sparsetir.plan("rgms", A, 8, feat_in=-1)  # ValueError: 'feat_in': expected 1 or more, got -1
sparsetir.plan("rgms", A, 8, heads=2)  # ValueError: 'heads': expected None for 'rgms
sparsetir.plan("rgms", A, 8, reduce="mean")  # ValueError: 'reduce': expected 'sum' for 'rgms'
sparsetir.plan("rgms", A, 8, format=sparsetir.formats.CSR())  # ValueError: 'format': .. got CSR
sparsetir.plan("rgms", A, 8, weighted=0)  # TypeError: 'weighted': expected True or
sparsetir.plan("rgms", A, 8, dtype=8)  # TypeError: 'dtype': expected a name as
sparsetir.plan("rgms", A, 8, dtype="int8")  # ValueError: 'dtype': expected one of float
sparsetir.plan("rgms", A, 16, feat_in=8, config=RelationalRows())  # TypeError: 'config': expected
sparsetir.plan("rgms", A, 16, config=PLAN.config)  # ScheduleError: 'feat_in': the config .. got 16
sparsetir.plan("rgms", A, 8, config=PLAN.config, feat_in=8)  # ScheduleError: 'feat': the .. got 8
sparsetir.plan("spmm", A, 8, feat_in=8)  # ValueError: 'feat_in': expected None for 'spmm', got 8
sparsetir.plan("spmm", A, 8, weighted=False)  # ValueError: 'weighted': expected True .. got False
""",
    globals(),
)
