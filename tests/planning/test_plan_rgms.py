"""Plans of relational gather-matmul-scatter."""

import numpy as np
import torch
import tvm

import sparsetir
from cuda_plans import run_plans
from cuda_runner import requires_cuda_text
from refusals import refusals
from rgms_common import exact
from sparsetir.planning.plan import requested
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


def test_a_config_of_ones_own_and_other_types():
    config = TiledRelations.for_sizes(8, 16, ranges=3)
    plan = sparsetir.plan("rgms", A, 16, feat_in=8, config=config, dtype="float16",
                          out_dtype="float32")  # fmt: skip
    x, w, a = (v.astype("float16") for v in (X, W, VALUES))
    result = plan(x, w)
    assert result.dtype == "float32" and plan.config is config and plan.chosen_by == "user"
    right(result, a, x, w, atol=1e-3)
    assert "rgms_product" in plan.kernel.stages["I"].script()


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
