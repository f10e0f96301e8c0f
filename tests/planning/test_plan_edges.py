"""Plans of messages, softmax and attention along edges against NumPy, and what they refuse."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch

import sparsetir
from csr_zoo import ZOO
from fake_measurer import install
from ops_common import Case
from ops_table import attention, gspmm
from ops_table import softmax as row_softmax
from refusals import refusals
from sparsetir import SparseMatrix, ops
from sparsetir.ops import message_kernels
from sparsetir.planning.plan import requested
from sparsetir.records.record import Record
from sparsetir.records.task import Outcome
from sparsetir.reductions import REDUCERS
from sparsetir.schedules.operators.problems import CsrPattern
from sparsetir.schedules.search.configs import to_data
from sparsetir.schedules.template import Choices
from sparsetir.schedules.templates.row_tile import RowTile
from sparsetir.tuning.sought import operator_search

CLOSE = {"float32": 1e-5, "float64": 1e-12, "float16": 1e-2, "bfloat16": 8e-2}
A = SparseMatrix(ZOO["random"])
M, N = A.shape
U = np.random.default_rng(1).normal(size=(N, 8)).astype("float32")


def case_of(matrix):
    rows, columns = (torch.from_numpy(x).long() for x in matrix.pattern.coords)
    return Case(None, rows, columns, matrix.shape)


def drawn(*shape, seed=2, dtype="float32"):
    """Numbers that may be divided by."""
    x = np.random.default_rng(seed).normal(size=shape)
    return (np.sign(x) * (np.abs(x) + 0.5)).astype(ml_dtypes.bfloat16 if dtype[0] == "b" else dtype)


def exact(matrix, op, reduce, u, e):
    """The result of torch's operators in float64: zero in rows without elements, NaN is kept."""
    operands = {"copy_u": {"u": u}, "copy_e": {"e": e}}.get(op, {"u": u, "e": e})
    wide = [torch.from_numpy(np.asarray(x, "float64")) for x in operands.values()]
    return gspmm(op, reduce, operands).exact(case_of(matrix), *wide).numpy()


def softmax(matrix, x):
    return row_softmax(case_of(matrix), torch.from_numpy(np.asarray(x, "float64"))).numpy()


def is_close(result, want, dtype="float32"):
    result = np.asarray(result, "float64")
    scale = np.nan_to_num(np.abs(want), posinf=0).max(initial=1.0)
    np.testing.assert_allclose(result, want, rtol=CLOSE[dtype], atol=CLOSE[dtype] * scale)


# -- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_zoo(name):
    """Each pattern with kernels that all share; no pattern gets another's result."""
    matrix = SparseMatrix(ZOO[name])
    (m, n), nnz = matrix.shape, matrix.nnz
    u, e = drawn(n, 2, 5), drawn(nnz, 2, 5, seed=3)
    run = sparsetir.plan("u_sub_e_max", matrix, u, edge_feat=5, threads=1)
    is_close(run(u, e), exact(matrix, "u_sub_e", "max", u, e))
    u = drawn(n, 5)
    unweighted = sparsetir.plan("u_add_e_mean", matrix, 5, threads=1)
    is_close(unweighted(u), exact(matrix, "u_add_e", "mean", u, matrix.values))
    x = drawn(nnz, 3) * 9
    result = sparsetir.plan("softmax", matrix, x, threads=1)(x)
    is_close(result, softmax(matrix, x))
    q, k, v = drawn(m, 2, 4), drawn(n, 2, 4, seed=5), drawn(n, 2, 6, seed=6)
    result = sparsetir.plan("attention", matrix, v, feat_in=4, threads=1)(q, k, v)
    wide = [torch.from_numpy(x.astype("float64")) for x in (q, k, v)]
    is_close(result, attention("mhk", "nhk", "nhw").exact(case_of(matrix), *wide).numpy())


@pytest.mark.parametrize("reduce", REDUCERS)
@pytest.mark.parametrize("op", ["copy_u", "copy_e", "u_add_e", "u_sub_e", "u_mul_e", "u_div_e"])
def test_every_message(op, reduce):
    """Plans of one matrix and two; with its own values, and those of a run."""
    if op == "copy_e":
        e = drawn(A.nnz, 8)
        run = sparsetir.plan(f"copy_e_{reduce}", A, e)
        return is_close(run(e), exact(A, op, reduce, None, e))
    run = sparsetir.plan(op, A, U, reduce=reduce)
    named = sparsetir.plan(f"{op}_{reduce}", A, U)
    assert run.kernel is named.kernel
    values = np.ones(A.nnz) if op == "copy_u" else A.values
    is_close(run(U), exact(A, op, reduce, U, values))
    if op != "copy_u":
        other = drawn(A.nnz)
        is_close(named(U, values=other), exact(A, op, reduce, U, other))
    return None


@pytest.mark.parametrize("idtype", ["int32", "int64"])
def test_pattern_without_values(idtype):
    """Columns in any order, edges more than once: nothing is merged, nothing sorted."""
    rng = np.random.default_rng(4)
    indptr = np.array([0, 3, 3, 9, 10], idtype)
    pattern = CsrPattern(indptr, rng.integers(0, 6, 10).astype(idtype), (4, 6))
    u, values = drawn(6, 3), drawn(10)
    run = sparsetir.plan("u_add_e_sum", pattern, 3)
    messages = u[pattern.indices].astype("float64") + values[:, None]
    want = np.stack([messages[a:b].sum(0) for a, b in zip(indptr, indptr[1:], strict=False)])
    assert run.needs_values
    is_close(run(u, values=values), want)
    with pytest.raises(TypeError, match="u_add_e_sum: argument 'values': expected an array"):
        run(u)
    x = drawn(10)
    result = sparsetir.plan("edge_softmax", pattern, x)(x)
    sums = [result[a:b].sum() for a, b in zip(indptr, indptr[1:], strict=False)]
    np.testing.assert_allclose(sums, [1, 0, 1, 1], atol=1e-6)


# -- edges ----------------------------------------------------------------------------------------

EDGES = np.array([[2, 0, 1, 2], [0, 1, 1, 0]])  # sources, targets: not in order, one twice


def test_parallel_edges_of_an_edge_index():
    x = drawn(3, 4)
    torch_x, edges = torch.from_numpy(x), torch.from_numpy(EDGES)
    run = sparsetir.plan("copy_u_sum", (EDGES, 3), x)
    is_close(run(x), ops.gspmm((edges, 3), "copy_u", "sum", torch_x).numpy())
    run = sparsetir.plan("copy_u_max", (EDGES, 3), x)
    is_close(run(x), ops.gspmm((edges, 3), "copy_u", "max", torch_x).numpy())
    for op in ("copy_u_mean", "u_mul_e_max", "u_add_e_sum", "attention", "softmax"):
        with pytest.raises(ValueError, match=f"expected each element once for '{op}', got 4 of"):
            sparsetir.plan(op, (EDGES, 3), None if op == "softmax" else x)
    for reduce in ("mean", "max"):
        with pytest.raises(ValueError, match="expected each element once for 'spmm', got 4 of"):
            sparsetir.plan("spmm", (EDGES, 3), x, reduce=reduce)


def test_numbers_of_edges_have_an_order():
    """Edges in another order are refused, but for a SparseMatrix, since their numbers would mix."""
    edges, e = EDGES[:, 1:], drawn(3, 4)
    for op, options in (("copy_e_sum", {"feat": 4}), ("softmax", {})):
        with pytest.raises(ValueError, match=r"expected elements in the order.*A\.arrange"):
            sparsetir.plan(op, (edges, 3), **options)
    matrix = SparseMatrix.from_edge_index(edges, shape=(3, 3))
    result = sparsetir.plan("copy_e_sum", matrix, 4)(matrix.arrange(e))
    want = np.zeros((3, 4))
    np.add.at(want, edges[1], e)
    is_close(result, want)
    x = drawn(3, 2)
    attended = sparsetir.plan("attention", (edges, 3), x)(x, x, x)
    x = torch.from_numpy(x)
    is_close(attended, ops.attention((torch.from_numpy(edges), 3), x, x, x).numpy())


# -- refusals -------------------------------------------------------------------------------------

RUN = sparsetir.plan("u_add_e_max", A, 8, edge_feat=8)
E = drawn(A.nnz, 8)
ONE = np.ones((1, 8), "float32")
test_refusals = refusals(
    """
RUN(np.ones((5, 7), "float32"), E)  # ValueError: u_add_e_max: argument 'u': expected shape
sparsetir.plan("u_pow_e_sum", A, 8)  # ValueError: 'op': expected one of spmm, .. got 'u_pow_e_sum'
sparsetir.plan("u_add_e_prod", A, 8)  # ValueError: 'op': expected one of spmm
sparsetir.plan("u_add_e_max", A, 8, reduce="min")  # ValueError: 'reduce': expected none with
sparsetir.plan("u_add_e_max", A)  # TypeError: 'feat': expected the number of features for 'u_add_e
sparsetir.plan("u_add_e_max", A, 0)  # ValueError: 'feat': expected 1 or more, got 0
sparsetir.plan("u_add_e_max", A, 8, edge_feat=3)  # ValueError: 'edge_feat': expected 1 or 8
sparsetir.plan("copy_e_max", A, 8, edge_feat=1)  # ValueError: 'edge_feat': expected 8
sparsetir.plan("copy_u_max", A, 8, edge_feat=8)  # ValueError: 'edge_feat': expected none
sparsetir.plan("u_add_e_max", A, 8, feat_in=8)  # ValueError: 'feat_in': expected None
sparsetir.plan("u_add_e_max", A, 8, scale=2.0)  # ValueError: 'scale': expected None
sparsetir.plan("u_add_e_max", A, 8, weighted=False)  # ValueError: 'weighted': expected True
sparsetir.plan("u_add_e_max", A, 8, dtype="int32")  # ValueError: 'dtype': expected float32 or
sparsetir.plan("u_add_e_max", A, 8, config=RowTile())  # TypeError: 'config': expected Choices
sparsetir.plan("u_add_e_max", A, 8, config=Choices({"gspmm.size": 16}))
    # ScheduleError: 'gspmm.size': serves 16 features, got 8
sparsetir.plan("u_add_e_max", A, 8, format=sparsetir.formats.CSR())  # ValueError: 'format'
sparsetir.plan("u_add_e_max", A, 8, out_dtype="float32")  # ValueError: 'out_dtype': expected None
sparsetir.plan("attention", A, 8, config=Choices({"gspmm.size": 8}))
    # ScheduleError: 'gspmm.size': expected choices of rows, score, top
sparsetir.plan("attention", A, 8, edge_feat=8)  # ValueError: 'edge_feat': expected None
sparsetir.plan("attention", A, 8, reduce="max")  # ValueError: 'reduce': expected 'sum'
sparsetir.plan("attention", A, 8, scale="2")  # TypeError: 'scale': expected a number, got '2'
sparsetir.plan("attention", A, 8, feat_in=0)  # ValueError: 'feat_in': expected 1 or more, got 0
sparsetir.plan("attention", A, 8)(drawn(M, 8), drawn(M, 8), U)  # ValueError: 'k'
sparsetir.plan("softmax", A, 8)  # ValueError: 'feat': expected None for 'softmax', or its operand
sparsetir.plan("softmax", A, dtype="float16")  # ValueError: 'dtype': expected float32 or float64
sparsetir.plan("softmax", A, heads=0)  # ValueError: 'heads': expected 1 or more, got 0
sparsetir.plan("softmax", A, heads=3)(drawn(3, A.nnz))  # ValueError: 'x': expected shape (1, .. 3)
sparsetir.plan("sparse_softmax", A, drawn(3, A.nnz))  # ValueError: 'feat': expected heads as the
sparsetir.plan("softmax", A)(torch.ones(A.nnz, requires_grad=True))
    # ValueError: use sparsetir.ops.sparse_softmax
sparsetir.plan("spmm", A, 8, edge_feat=8)  # ValueError: 'edge_feat': expected None for 'spmm'
sparsetir.plan("sddmm", A, 8, scale=1.0)  # ValueError: 'scale': expected None for 'sddmm'
sparsetir.tune("attention", A, 8, target={"kind": "cuda", "arch": "sm_90"}, records="")
    # ValueError: tune: argument 'target': expected a CPU for 'attention'
RUN(U)  # TypeError: u_add_e_max: expected 2 operands (u, e), got 1
RUN(U, E[:-1])  # ValueError: 'e'
RUN(U.astype("float64"), E)  # TypeError: 'u'
RUN(U, E, values=drawn(A.nnz))  # TypeError: argument 'values': the operator takes none
sparsetir.plan("u_add_e_max", SparseMatrix(ZOO["one element"]), 8)(ONE, out=ONE)
    # ValueError: 'out' shares memory with
""",
    globals(),
    RowTile,
)


def test_gpu():
    """A kernel for one is made; there is no device to run it."""
    target = {"kind": "cuda", "arch": "sm_90"}
    wanted = requested("attention", A, 8, target=target)
    sizes = {"rows.size": 1, "score.size": 8, "weigh.size": 8}
    assert wanted.chosen() == Choices({**sizes, "registers": 1})
    assert "III" in wanted.stages(wanted.chosen())
    assert wanted.candidates() == [wanted.chosen()]


# -- tuning ---------------------------------------------------------------------------------------

TUNED = [
    ("u_add_e_max", {"feat": 8, "edge_feat": 8}, {"gspmm.size": 8}),
    ("copy_u_sum", {"feat": 8, "heads": 2}, {"gspmm.size": 16}),
    ("edge_softmax", {"heads": 4}, {"rows.size": 4}),
    ("attention", {"feat": 8, "heads": 2}, {"score.size": 8, "weigh.size": 8}),
]


@pytest.mark.parametrize(("op", "options", "best"), TUNED)
@pytest.mark.slow
def test_a_search_ends_with_a_plan_and_a_record(op, options, best, records, monkeypatch):
    """Seconds are pretended; each config that is tried gives the right result."""
    best = Choices(best)

    def measured(config):
        return Outcome("ok", seconds=1e-3 if config == best else 2e-3)

    install(monkeypatch, measured)
    tuned = sparsetir.tune(op, A, threads=2, sampler="exhaustive", graph="small", **options)
    assert tuned.config == best and tuned.speedup == 2 and tuned.configs == len(tuned.trials)
    (record,) = records.all()
    assert record.graph == "small"
    again = sparsetir.plan(op, A, threads=2, **options)
    assert (again.chosen_by, again.config) == ("record", tuned.plan().config)
    assert sparsetir.plan(op, A, threads=1, **options).chosen_by == "default"
    task = operator_search(
        op, A, options.pop("feat", None), threads=2, target="llvm", device=None, **options
    )[0].task
    prepared = task.prepared(best)
    prepared.call()
    assert prepared.wrong() is None


def test_operators_of_torch_take_records(records, monkeypatch):
    """Records serve the same pattern in any order, and no other one; a failure is reported once."""
    rows, columns = (torch.from_numpy(x).long() for x in A.pattern.coords)
    order = torch.randperm(A.nnz, generator=torch.Generator().manual_seed(0))
    edges = torch.stack([columns, rows])[:, order], (N, M)
    u, e = torch.from_numpy(drawn(N, 2, 8)), torch.from_numpy(drawn(A.nnz, 2, 8))
    q, v = torch.from_numpy(drawn(M, 2, 8)), torch.from_numpy(drawn(N, 2, 8))
    kernels = []
    launch = message_kernels.launch

    def noting(kernel, named):
        kernels.append(kernel)
        launch(kernel, named)

    monkeypatch.setattr(message_kernels, "launch", noting)

    def all_of_them():
        kernels.clear()
        ops.clear_cache()
        results = (
            ops.gspmm(edges, "u_add_e", "max", u, e[order]),
            ops.attention(edges, q, v, v),
            ops.edge_softmax(edges, e[order, :, 0].contiguous()),
        )
        return list(kernels), results

    def record(op, config, seconds=1e-3, **options):
        key = requested(op, A, **options).key()
        records.add(Record(key, to_data(Choices(config)), seconds))

    before, plain = all_of_them()
    messages = {"feat": 8, "heads": 2, "edge_feat": 8}
    cases = [
        ("u_add_e_max", {"gspmm.size": 16}, messages),
        ("attention", {"score.size": 8}, {"feat": 8, "heads": 2}),
        ("edge_softmax", {"rows.size": 2}, {"heads": 2}),
    ]
    for op, config, options in cases:
        record(op, config, **options)
    after, tuned = all_of_them()
    assert not set(before) & set(after)
    for a, b in zip(plain, tuned, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    plans = [sparsetir.plan(op, A, **options) for op, _, options in cases]
    assert [plan.chosen_by for plan in plans] == ["record"] * 3
    # They share kernels, but for that of messages in another order.
    assert [plan.kernel in after for plan in plans] == [False, True, True]
    record("attention", {"gspmm.size": 8}, 1e-4, feat=8, heads=2)  # of messages
    with pytest.warns(RuntimeWarning, match=re.escape("is not used, it failed")):
        last, _ = all_of_them()
    assert last[1] in before
    ops.clear_cache()
