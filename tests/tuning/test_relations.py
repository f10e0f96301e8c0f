"""Tuning of relational gather-matmul-scatter."""

import numpy as np
import pytest
import torch

import sparsetir
from fake_measurer import install
from refusals import refusals
from rgms_common import exact
from sparsetir import ops
from sparsetir.ops.relations import edge_copies, relations_of
from sparsetir.planning.plan import requested
from sparsetir.records.record import Record
from sparsetir.records.records import Records
from sparsetir.records.task import Outcome
from sparsetir.schedules.operators.relations import RelationPattern
from sparsetir.schedules.search.configs import to_data
from sparsetir.schedules.template import Choices
from sparsetir.tuning.program import ProgramTask
from sparsetir.tuning.sought import operator_search
from sparsetir.tuning.tuned import TunedProgram

RNG = np.random.default_rng(0)
MASK = RNG.random((3, 20, 15)) < 0.2
VALUES = RNG.uniform(-1, 1, int(MASK.sum())).astype("float32")
A = sparsetir.SparseTensor(MASK.nonzero(), VALUES, MASK.shape)
X = RNG.uniform(-1, 1, (15, 8)).astype("float32")
W = RNG.uniform(-1, 1, (3, 8, 32)).astype("float32")


def tune(**options):
    return sparsetir.tune("rgms", A, 32, **{"feat_in": 8, "threads": 2, "records": "", **options})


def is_right(plan):
    want = exact(MASK, {"a": VALUES, "x": X, "w": W})
    np.testing.assert_allclose(plan(X, W), want, atol=1e-4)


def test_a_search_begins_with_the_plans_config_and_ends_with_a_plan(monkeypatch, tmp_path):
    """Seconds are pretended: nothing is slower than the default prefetches."""
    chosen = sparsetir.plan("rgms", A, 32, feat_in=8, threads=2).config

    def measured(config):
        return Outcome("ok", seconds=2e-3 if config.prefetch == chosen.prefetch else 1e-3)

    install(monkeypatch, measured)
    file = tmp_path / "records.sqlite"
    result = tune(trials=5, records=file, graph="small")
    assert isinstance(result, TunedProgram) and len(result.trials) == 5
    assert result.trials[0].config == chosen
    assert result.default_seconds == 2e-3 and result.speedup == 2
    plan = result.plan()
    assert plan.config.prefetch != chosen.prefetch and plan.chosen_by == "user"
    is_right(plan)
    (record,) = Records(file).all()
    assert record.key.op == "rgms" and record.graph == "small"
    monkeypatch.setenv("SPARSETIR_RECORDS", str(file))
    again = sparsetir.plan("rgms", A, 32, feat_in=8, threads=2)
    assert again.chosen_by == "record" and again.config == plan.config
    is_right(again)
    triples = RelationPattern.of(*(c[::-1] for c in MASK.nonzero()), MASK.shape)
    assert sparsetir.plan("rgms", triples, 32, feat_in=8, threads=2).chosen_by == "record"
    for options in ({"feat_in": 16}, {"weighted": False}, {"threads": 1}, {"dtype": "float64"}):
        other = {"feat_in": 8, "threads": 2, **options}
        assert sparsetir.plan("rgms", A, 32, **other).chosen_by == "default"


def test_a_record_of_a_config_that_is_no_more(monkeypatch, tmp_path):
    """Plans warn, and take the default; sums of torch's tensors are planned by the same records."""
    monkeypatch.setenv("SPARSETIR_RECORDS", str(tmp_path / "records.sqlite"))
    relation, row, column = (torch.from_numpy(c) for c in MASK.nonzero())
    inputs = [torch.from_numpy(v) for v in (X, W)], torch.stack([column, row]), relation

    def planned():
        ops.clear_cache()
        (x, w), *graph = inputs
        ops.rgms(x, w, *graph, torch.from_numpy(VALUES), num_targets=20)
        caches = relations_of(*edge_copies(*graph), 15, 20, 3).by_target.made.values()
        (kept,) = (x for x in caches if isinstance(x, sparsetir.Plan))
        return kept.chosen_by

    wanted = requested("rgms", A, 32, feat_in=8)
    (branch,) = wanted.space().branches
    first = {name: values[0] for name, values in branch.choices.items()}
    key = wanted.key()
    assert planned() == "default"
    Records().add(Record(key, to_data(branch.make(**{**first, "prefetch": 3})), 1e-3))
    assert planned() == "record"
    Records().add(Record(key, to_data(Choices({"gone": 3})), 1e-4))
    with pytest.warns(RuntimeWarning, match="plan: the record with the config .* is not used"):
        assert planned() == "default"
    ops.clear_cache()


@pytest.mark.slow
def test_what_is_tried_is_right():
    """The plain program with the arguments of a search, by the ends of the space."""
    branch = requested("rgms", A, 32, feat_in=8, threads=2).space().branches[0]
    assert {n for n, values in branch.choices.items() if len(values) > 1} == {
        "rows", "tile", "cost", "cache", "prefetch", "threads", "packed", "ahead",
    }  # fmt: skip
    task = operator_search("rgms", A, 32, feat_in=8, threads=2, target="llvm", device=None)[0].task
    assert isinstance(task, ProgramTask)
    for n in (0, -1):
        chosen = {name: values[n] for name, values in branch.choices.items()}
        prepared = task.prepared(branch.config(chosen))
        prepared.call()
        assert prepared.wrong() is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_real_search(dtype):
    result = tune(trials=2, dtype=dtype, weighted=False)
    assert result.counts == {"ok": 2}
    plan = result.plan()
    x, w = X.astype(dtype), W.astype(dtype)
    np.testing.assert_allclose(plan(x, w), exact(MASK, {"x": x, "w": w}), rtol=1e-2, atol=2e-2)


GPU = {"kind": "cuda", "arch": "sm_90"}
FIRST = sparsetir.SparseMatrix(MASK[0].nonzero())
test_refusals = refusals(
    """
tune(target=GPU)  # ValueError: tune: argument 'target': expected a CPU
tune(space={"rows": [1]})  # ValueError: tune: argument 'space': expected none for 'rgms'
tune(modules=["json"])  # ValueError: tune: argument 'modules': expected none for 'rgms'
tune(heads=2)  # ValueError: tune: argument 'heads': expected None for 'rgms'
tune(feat_in=0)  # ValueError: tune: argument 'feat_in': expected 1 or more, got 0
sparsetir.tune("spmm", FIRST, 8, feat_in=8)  # ValueError: 'feat_in': expected None for .. got 8
sparsetir.tune(lambda: None, {}, feat_in=8)  # ValueError: 'feat_in': expected none for a function
""",
    globals(),
)
