"""Plans of relational gather-matmul-scatter."""

import numpy as np
import pytest
import torch
import tvm

import sparsetir
from cuda_plans import run_plans
from cuda_runner import requires_cuda_text
from rgms_common import exact
from sparsetir.planning.relational_request import relational_request
from sparsetir.runtime import pool
from sparsetir.schedules.gpu.rgms import RelationalRows
from sparsetir.schedules.gpu.rgms_tensor_cores import RelationalTensorCores
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.templates.rgms import TiledRelations

RNG = np.random.default_rng(0)
MASK = RNG.random((3, 50, 40)) < 0.1
VALUES = RNG.uniform(-1, 1, int(MASK.sum())).astype("float32")
A = sparsetir.SparseTensor(MASK.nonzero(), VALUES, MASK.shape)
X = RNG.uniform(-1, 1, (40, 8)).astype("float32")
W = RNG.uniform(-1, 1, (3, 8, 16)).astype("float32")
PLAN = sparsetir.plan("rgms", A, 16, feat_in=8)
CUDA = {"kind": "cuda", "arch": "sm_90"}


def right(got, a=VALUES, x=X, w=W, mask=MASK, atol=1e-4):
    want = exact(mask, {"a": a, "x": x, "w": w})
    np.testing.assert_allclose(np.asarray(got, "float64"), want, atol=atol)


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
        chosen = relational_request("rgms", A, 16, feat_in=8, threads=2).chosen()
        assert chosen.parallel == (least == work)


def test_arrays_of_torch_and_a_result_of_the_users():
    x, w, out = torch.from_numpy(X), torch.from_numpy(W), torch.full((50, 16), torch.nan)
    assert PLAN(x, w, out=out) is out
    right(out.numpy())
    assert isinstance(PLAN(x, w), torch.Tensor)


def test_triples_in_any_order_with_values_of_each_run():
    """int64 indices; elements that are alike add up."""
    triples = [RNG.integers(0, size, 300) for size in MASK.shape]
    values = RNG.uniform(-1, 1, 300).astype("float32")
    pattern = RelationPattern.of(*triples, MASK.shape, "int64")
    plan = sparsetir.plan("rgms", pattern, 16, feat_in=8)
    assert plan.problem.idtype == "int64" and plan.needs_values and plan.arranges_values
    summed = sparsetir.SparseTensor(triples, values, MASK.shape)
    mask = np.zeros(MASK.shape, bool)
    mask[tuple(summed.pattern.coords)] = True
    right(plan(X, W, values=values), summed.values, mask=mask)
    right(plan(torch.from_numpy(X), torch.from_numpy(W), values=torch.from_numpy(values)),
          summed.values, mask=mask)  # fmt: skip
    with pytest.raises(TypeError, match="rgms: argument 'values': expected an array, got None"):
        plan(X, W)


def test_without_values():
    pattern = RelationPattern.of(*MASK.nonzero(), MASK.shape)
    plans = [sparsetir.plan("rgms", A, 16, feat_in=8, weighted=False)]
    before = sparsetir.compilations()
    plans.append(sparsetir.plan("rgms", pattern, 16, feat_in=8, weighted=False))
    assert sparsetir.compilations() == before  # they share the kernel
    for plan in plans:
        assert "a" not in plan.kernel.signature.names and not plan.needs_values
        right(plan(X, W), 1.0)
    with pytest.raises(TypeError, match="rgms: argument 'values': the operator takes none"):
        plans[0](X, W, values=VALUES)


def test_a_config_of_ones_own_and_other_types():
    config = TiledRelations.for_sizes(8, 16, ranges=3)
    plan = sparsetir.plan("rgms", A, 16, feat_in=8, config=config, dtype="float16",
                          out_dtype="float32")  # fmt: skip
    x, w, a = (v.astype("float16") for v in (X, W, VALUES))
    got = plan(x, w)
    assert got.dtype == "float32" and plan.config is config and plan.chosen_by == "user"
    right(got, a, x, w, atol=1e-3)
    assert "rgms_product" in plan.kernel.stages["I"].script()


@pytest.mark.parametrize("shape", [(3, 50, 40), (2, 0, 40), (1, 5, 0)])
def test_empty_patterns(shape):
    """With the kernel of the others, they get zeros."""
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
    made = relational_request("rgms", A, 16, feat_in=8, target=CUDA)
    assert isinstance(made.chosen(), RelationalRows) and made.pattern is A.pattern
    half = relational_request(
        "rgms", A, 16, feat_in=8, target=CUDA, dtype="float16", out_dtype="float32"
    )
    kinds = [type(config) for config in half.candidates()]
    assert kinds[0] is RelationalTensorCores and kinds[-1] is RelationalRows


@requires_cuda_text
def test_a_plan_for_a_gpu(monkeypatch):
    """Its kernel on the CPU, for a tensor and for triples in any order; 15 features are padded."""
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
    x, w = (RNG.uniform(-1, 1, s).astype("float32") for s in ((40, 19), (3, 19, 33)))
    plan = sparsetir.plan("rgms", A, 33, feat_in=19)
    assert plan.config.feat_in % plan.config.lanes == 0 and plan.config.lanes > 1
    assert plan.feat == 33
    right(plan(x, w), x=x, w=w)
    arrays = [torch.from_numpy(v) for v in (x, w)]
    out = torch.empty(50, 33)
    assert plan(*arrays, out=out) is out
    right(out.numpy(), x=x, w=w)
    own = [tvm.runtime.tensor(v) for v in (x, w)]
    right(plan(*own).numpy(), x=x, w=w)
    made = tvm.runtime.empty((50, 33))
    assert plan(*own, out=made) is made
    right(made.numpy(), x=x, w=w)
    for given, error, message in (
        ((x[:, 1:], w), ValueError, r"rgms: argument 'x': expected an array of shape \(40, 19\)"),
        ((x.astype("float64"), w), TypeError, "rgms: argument 'x': expected dtype float32"),
        ((x,), TypeError, r"rgms: expected 2 operands \(x, w\), got 1"),
        ((arrays[0].requires_grad_(), arrays[1]), ValueError, "'x': it requires a gradient"),
    ):
        with pytest.raises(error, match=message):
            plan(*given)
    with pytest.raises(ValueError, match="rgms: argument 'out': expected an array of shape"):
        plan(x, w, out=np.empty((50, 48), "float32"))


REFUSED = [
    (lambda: PLAN(X), TypeError, r"rgms: expected 2 operands \(x, w\), got 1"),
    (lambda: PLAN(X[:5], W), ValueError, r"'x': expected shape \(40, 8\), got \(5, 8\)"),
    (lambda: PLAN(X, W[:2]), ValueError, r"'w': expected shape \(3, 8, 16\), got \(2, 8, 16\)"),
    (lambda: PLAN(X.astype("float64"), W), TypeError, "'x': expected dtype float32, got float64"),
    (lambda: PLAN(X, W.astype("float16")), TypeError, "'w': expected dtype float32, got float16"),
    (lambda: PLAN(X[:, ::-1], W), ValueError, "'x': expected a contiguous array"),
    (lambda: PLAN(X, W, values=VALUES[:3]), ValueError, "'values': expected an array of shape"),
    (
        lambda: PLAN(torch.from_numpy(X), torch.from_numpy(W).requires_grad_()),
        ValueError,
        "'w': it requires a gradient, .* use sparsetir.ops.rgms",
    ),
    (
        lambda: sparsetir.plan("rgms", MASK[0].nonzero(), 8),
        ValueError,
        r"'matrix': expected a SparseTensor by \(relation, row, column\) for 'rgms', got shape",
    ),
    (lambda: sparsetir.plan("rgms", A, 0), ValueError, "'feat': expected 1 or more, got 0"),
    (
        lambda: sparsetir.plan("rgms", A, 8, feat_in=-1),
        ValueError,
        "'feat_in': expected 1 or more, got -1",
    ),
    (lambda: sparsetir.plan("rgms", A, 8, heads=2), ValueError, "'heads': expected None for 'rgms"),
    (
        lambda: sparsetir.plan("rgms", A, 8, reduce="mean"),
        ValueError,
        "'reduce': expected 'sum' for 'rgms'",
    ),
    (
        lambda: sparsetir.plan("rgms", A, 8, format=sparsetir.formats.CSR()),
        ValueError,
        "'format': expected None for 'rgms', got CSR",
    ),
    (lambda: sparsetir.plan("rgms", A, 8, weighted=0), TypeError, "'weighted': expected True or"),
    (lambda: sparsetir.plan("rgms", A, 8, dtype=8), TypeError, "'dtype': expected a name as"),
    (
        lambda: sparsetir.plan("rgms", A, 8, dtype="int8"),
        ValueError,
        "'dtype': expected one of float",
    ),
    (
        lambda: sparsetir.plan("rgms", A, 16, feat_in=8, config=RelationalRows()),
        TypeError,
        "'config': expected TiledRelations for this operator and target, got RelationalRows",
    ),
    (
        lambda: sparsetir.plan("rgms", A, 16, config=PLAN.config),
        sparsetir.ScheduleError,
        "'feat_in': the config serves 8 features, got 16",
    ),
    (
        lambda: sparsetir.plan("rgms", A, 8, config=PLAN.config, feat_in=8),
        sparsetir.ScheduleError,
        "'feat': the config serves 16 features, got 8",
    ),
    (
        lambda: sparsetir.plan("spmm", A, 8, feat_in=8),
        ValueError,
        "'feat_in': expected None for 'spmm', got 8",
    ),
    (
        lambda: sparsetir.plan("spmm", A, 8, weighted=False),
        ValueError,
        "'weighted': expected True for 'spmm', got False",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
