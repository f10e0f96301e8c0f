"""Operators take what tuning has recorded for their patterns, and nothing else."""

import pytest
import torch

import sparsetir
from ops_common import Case, assert_close, dense, expected_spmm, rounded, tensor_operand
from sparsetir import ops
from sparsetir.formats import BSR, Hyb
from sparsetir.planning.request import default_threads
from sparsetir.planning.run_plan import Plan
from sparsetir.records import task as problem
from sparsetir.records.record import Key, Record
from sparsetir.records.task import Task
from sparsetir.schedules.search.configs import to_data
from sparsetir.schedules.template import Choices
from sparsetir.schedules.templates.decomposed import Decomposed
from sparsetir.schedules.templates.row_tile import RowTile
from sparsetir.schedules.templates.spmm_blocks import BlockRows
from sparsetir.schedules.templates.spmv import SlicedRows

M, N, FEAT = 24, 18, 16
MATRIX = sparsetir.SparseMatrix(dense((M, N)).to_sparse())
ROWS, COLS = (torch.from_numpy(x).long() for x in MATRIX.pattern.coords)
# None of these is what sizes alone choose.
ROW_BLOCKS, FORMAT = RowTile(tile=8, lanes=8), Decomposed(Hyb(1, 2))
PARTS = Choices({"sddmm.parts": 3, "sddmm.size": FEAT})


def edges_of(rows, cols):
    return Case((torch.stack([cols, rows]), (N, M)), rows, cols)


def cases():
    """The same pattern as users have it: name -> Case."""
    csr = dense((M, N)).to_sparse_csr()
    by_source = torch.argsort(COLS * M + ROWS)
    shuffled = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(0))
    backwards = torch.argsort(ROWS * N - COLS)
    flipped = torch.sparse_csr_tensor(
        csr.crow_indices(), COLS[backwards], torch.ones(len(ROWS)), (M, N), check_invariants=False
    )
    return {
        "csr": tensor_operand(csr),
        "csr, columns backwards": Case(flipped, ROWS, COLS[backwards]),
        "edges by source": edges_of(ROWS[by_source], COLS[by_source]),
        "edges in any order": edges_of(ROWS[shuffled], COLS[shuffled]),
        "matrix": Case(MATRIX, ROWS, COLS),
    }


CASES = cases()
pytestmark = pytest.mark.usefixtures("records")


@pytest.fixture
def runs(monkeypatch):
    """The operator, config, and source of the config of each plan that runs."""
    calls, inside = [], []

    def noting(run):
        def noted(self, *args, **values):
            if not inside:  # one of them calls the other
                calls.append((self.op, self.config, self.chosen_by))
            inside.append(run)
            try:
                return run(self, *args, **values)
            finally:
                inside.pop()

        return noted

    for name in ("__call__", "repeat"):
        monkeypatch.setattr(Plan, name, noting(getattr(Plan, name)))
    return calls


def add(records, op, config, feat=FEAT, matrix=MATRIX, dtype="float32", **options):
    """Add a record as `sparsetir tune` does."""
    task = Task(op, matrix, feat, dtype, **{"threads": default_threads(), **options})
    data = config if isinstance(config, dict) else to_data(config)
    records.add(Record(Key.of(task), data, 1.0))


def check_spmm(case, weighted, reduce="sum", feat=FEAT):
    """The product and its gradients, against torch's; without weights of edges, which have ones."""
    b, b64 = rounded((N, feat), "float32", 1)
    w, w64 = rounded((len(case.rows),), "float32", 2)
    if not weighted:
        w64 = torch.ones_like(w64, requires_grad=True)
    result = ops.spmm(case.A, b, reduce, w if weighted else None)
    want = expected_spmm(case, w64, b64, reduce, M)
    assert_close(result, want, "float32")
    grad, grad64 = rounded((M, feat), "float32", 3)
    result.backward(grad.detach())
    want.backward(grad64.detach())
    assert_close(b.grad, b64.grad, "float32")
    if weighted:
        assert_close(w.grad, w64.grad, "float32")


@pytest.mark.parametrize("config", [ROW_BLOCKS, FORMAT], ids=["RowTile", "Hyb"])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(records, runs, name, config):
    add(records, "spmm", config)
    add(records, "spmm", config, matrix=MATRIX.T)
    add(records, "sddmm", PARTS)
    check_spmm(CASES[name], weighted=True)
    assert runs[1] == ("sddmm", PARTS, "record")
    if config is FORMAT:  # would have to arrange values in each run
        assert [by for _, _, by in runs] == ["default", "record", "default"]
    else:
        assert runs[0] == runs[2] == ("spmm", config, "record")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("edges")])
def test_without_weights(records, runs, name):
    """Values are arranged once; gradients go by the record of the transposed pattern."""
    add(records, "spmm", FORMAT, matrix=MATRIX.T)
    check_spmm(CASES[name], weighted=False)
    assert [(op, by) for op, _, by in runs] == [("spmm", "default"), ("spmm", "record")]
    add(records, "spmm", FORMAT)
    ops.clear_cache()
    check_spmm(CASES[name], weighted=False)
    assert runs[2:] == [("spmm", FORMAT, "record")] * 2
    edges, (n, m) = CASES[name].A
    planned = ops.structure_of(torch.zeros(m + 1), edges, n).planned(
        "spmm", FEAT, torch.float32, ones=True
    )
    assert planned.plan.arranges_values and not planned.plan.needs_values


@pytest.mark.parametrize("tuned", ["spmv", "spmm"])
def test_spmv(records, runs, tuned):
    """Values that come with each run take the config's form for them."""
    config = SlicedRows(lanes=8, long=64, packed=True)
    add(records, tuned, config, feat=1)
    case, x = CASES["edges in any order"], torch.randn(N)
    values = torch.rand(len(case.rows))
    for weights_given in (None, values):
        weights = torch.ones(len(case.rows)) if weights_given is None else weights_given
        want = expected_spmm(case, weights.double(), x.double()[:, None], "sum", M)[:, 0]
        assert_close(ops.spmv(case.A, x, values=weights_given), want, "float32")
    assert runs == [("spmm", config, "record"), ("spmm", config.unpacked, "record")]


@pytest.mark.parametrize("config", [ROW_BLOCKS, FORMAT], ids=["RowTile", "Hyb"])
def test_parallel_edges(records, runs, config):
    """A record is for each place once; with edges that repeat one, the places are the same."""
    add(records, "spmm", config)
    again = torch.cat([torch.arange(len(ROWS)), torch.tensor([3])])
    for order in (again, again.flip(0), again.sort().values):
        for weighted in (True, False):
            check_spmm(edges_of(ROWS[order], COLS[order]), weighted)
    assert {by for *_, by in runs} == {"default"}


def test_other_records_cost_no_fingerprint(records, runs, monkeypatch):
    counted = []
    digest = problem._digest
    monkeypatch.setattr(problem, "_digest", lambda p: counted.append(1) or digest(p))
    others = [{"feat": 2 * FEAT}, {"threads": default_threads() + 1}, {"dtype": "float64"}]
    for options in (*others, {"reduce": "mean"}, {"heads": 1}):
        add(records, "spmm", ROW_BLOCKS, **options)
    add(records, "sddmm", PARTS)
    large = sparsetir.SparseMatrix(dense((8 * M, 8 * N)).to_sparse())
    add(records, "spmm", ROW_BLOCKS, matrix=large)
    counted.clear()
    edges, size = CASES["edges by source"].A
    for _ in range(3):
        ops.spmm((edges.clone(), size), torch.randn(N, FEAT))
    sparsetir.plan("spmm", sparsetir.SparseMatrix(MATRIX.to_scipy()), FEAT)
    assert not counted
    assert {by for *_, by in runs} == {"default"}
    other = sparsetir.SparseMatrix(dense((M, N), seed=1).to_sparse())  # of about the same size
    add(records, "spmm", ROW_BLOCKS, matrix=other)
    counted.clear()
    ops.spmm((edges.clone(), size), torch.randn(N, FEAT))
    assert counted == [1] and runs[-1][2] == "default"


@pytest.mark.filterwarnings("ignore:plan. the record with the config")
@pytest.mark.parametrize(
    "config",
    [
        to_data(RowTile(tile=16, lanes=16, feat=24)),  # for other features
        to_data(BlockRows(BSR(4, 4), 4, 16, 16, 24)),
    ],
    ids=["features", "format"],
)
def test_records_that_do_not_serve_are_passed_over(records, runs, config):
    add(records, "spmm", config)
    for weighted in (True, False):
        check_spmm(CASES["edges in any order"], weighted)
    assert {by for *_, by in runs} == {"default"}


def test_a_record_counts_for_plans_that_are_made_later(records, runs):
    edges, size = CASES["edges by source"].A
    b = torch.randn(N, FEAT)
    ops.spmm((edges, size), b)
    add(records, "spmm", ROW_BLOCKS)
    ops.spmm((edges, size), b)
    ops.spmm((edges.clone(), size), b)
    assert [by for *_, by in runs] == ["default", "default", "record"]
