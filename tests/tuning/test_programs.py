"""Tuning of a user's function: what is searched, measured, kept and refused."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import scipy.sparse as sp
from tvm.script import sparse_tir as T

import sparsetir
from fake_measurer import install
from programs import PROGRAMS
from sparsetir.records.record import Key
from sparsetir.records.records import Records
from sparsetir.records.task import Outcome
from sparsetir.schedules.search import program_space
from sparsetir.schedules.search.configs import from_data, to_data
from sparsetir.schedules.search.program_space import space_of
from sparsetir.schedules.template import Choices
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.tuning import search
from sparsetir.tuning.html import write_report
from sparsetir.tuning.program import ProgramTask, bound_arguments
from sparsetir.tuning.program_case import ProgramCase
from sparsetir.tuning.report import short, table
from sparsetir.tuning.schedule_ref import ScheduleRef, load_file
from sparsetir.tuning.search import tune
from tuning import user_schedules

SPMM = PROGRAMS["spmm"].make("float32", "int32")


def arguments(name="spmm", case="small"):
    """Of a test program, the outputs left out."""
    program = PROGRAMS[name]
    given = program.inputs(np.random.default_rng(0), case, "float32", "int32")
    return {key: x for key, x in given.items() if key not in program.outputs}


def run(given=None, **options):
    options = {"records": "", "threads": 1, **options}
    return tune(SPMM, arguments() if given is None else given, **options)


def task(ref=None, **changes):
    return ProgramTask(SPMM, bound_arguments(SPMM, {**arguments(), **changes}), ref)


def words(error):
    return str(error.value)


# The space that is made from a program.


@pytest.mark.parametrize(
    ("name", "iteration"),
    [("spmm", "spmm"), ("mttkrp", "mttkrp"), ("hypergraph", "two_hop"), ("ttm", "ttm")],
)
def test_a_made_space_is_right(name, iteration):
    """Its first choices, its last ones and a mixture, on small inputs with empty rows."""
    program = PROGRAMS[name]
    func = program.make("float32", "int32")
    given = program.inputs(np.random.default_rng(1), "small", "float32", "int32")
    space = space_of(func, {"feat": given["feat"]}, 64, 2)
    assert {n.partition(".")[0] for n in space} == {iteration}
    mixed = {n: values[(i % 2) * -1] for i, (n, values) in enumerate(space.items())}
    ends = ({n: values[at] for n, values in space.items()} for at in (0, -1))
    for config in (mixed, *ends):
        result = {n: np.full_like(given[n], np.nan) for n in program.outputs}
        kernel = sparsetir.build(func, schedule=program_space.apply, config=config)
        kernel(**{**given, **result})
        for n, want in program.oracle(given).items():
            np.testing.assert_allclose(result[n], want, rtol=1e-4, atol=1e-4, err_msg=str(config))


def test_a_made_space_goes_by_what_the_program_is():
    mttkrp = space_of(PROGRAMS["mttkrp"].make("float32", "int32"), {"feat": 96}, 512, 1)
    assert mttkrp["mttkrp.vectors"] == (1, 2, 4) and mttkrp["mttkrp.lanes"] == (16,)
    assert mttkrp["mttkrp.inner"] == ("", "J") and mttkrp["mttkrp.size"] == (96, 0)
    assert mttkrp["mttkrp.blocks"] == (0,) and mttkrp["mttkrp.parallel"] == (False,)
    spmm = space_of(SPMM, {"feat": 8}, 512, 2)
    assert spmm["spmm.lanes"] == (8,) and spmm["spmm.inner"] == ("",)
    assert spmm["spmm.blocks"] == (0, 8, 32) and spmm["spmm.parallel"] == (True, False)
    assert space_of(PROGRAMS["csf_sum"].make("float32", "int32"), {}, 512, 1) == {}


@T.prim_func
def two_products(
    a: T.handle, x: T.handle, w: T.handle, c: T.handle, indptr: T.handle, indices: T.handle,
    m: T.int32, n: T.int32, nnz: T.int32, inner: T.int32, feat: T.int32,
):  # fmt: skip
    """C = A (X W), where A alone is sparse."""
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (indptr, indices))
    J_ = T.dense_fixed(n)
    R = T.dense_fixed(inner)
    K = T.dense_fixed(feat)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    X = T.match_sparse_buffer(x, (J_, R), "float32")
    W = T.match_sparse_buffer(w, (R, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    H = T.alloc_sparse_buffer((J_, K), "float32")
    with T.sp_iter([J_, R, K], "SRS", "dense") as [j, r, k]:
        with T.init():
            H[j, k] = 0.0
        H[j, k] = H[j, k] + X[j, r] * W[r, k]
    with T.sp_iter([I, J, K], "SRS", "sparse") as [i, j, k]:
        with T.init():
            C[i, k] = 0.0
        C[i, k] = C[i, k] + A[i, j] * H[j, k]


def test_nothing_is_prefetched_where_nothing_is_gathered():
    space = space_of(two_products, {"feat": 16}, 128, 2)
    assert space["dense.ahead"] == (0,) and space["sparse.ahead"] == (0, 4, 16)
    rng = np.random.default_rng(0)
    a = sp.random(20, 30, 0.2, "csr", "float32", random_state=0)
    a.sort_indices()
    x, w = rng.random((30, 5), dtype="float32"), rng.random((5, 16), dtype="float32")
    for at in (0, -1):
        c = np.full((20, 16), np.nan, "float32")
        config = {name: values[at] for name, values in space.items()}
        kernel = sparsetir.build(two_products, schedule=program_space.apply, config=config)
        kernel(a.data, x, w, c, a.indptr, a.indices)
        np.testing.assert_allclose(c, a @ (x @ w), rtol=1e-5)


def test_a_made_schedule_without_choices_changes_nothing():
    sch = Schedule(SPMM)
    program_space.apply(sch, {})
    assert sch.func.same_as(SPMM) and sch.stage_two is None


# Measuring.


@pytest.mark.slow  # docs/new_operator.md and docs/tutorial.md search too
def test_a_search_measures_a_users_schedule(monkeypatch, tmp_path):
    """A real one: the default, one that is right, one that fails with its message."""
    space = {"how": ["tiled", "refused"]}
    file = tmp_path / "records.sqlite"
    options = {"schedule": user_schedules.apply, "space": space, "records": file}
    tuned = run(graph="small", **options)
    assert isinstance(tuned, search.TunedProgram)
    states = {short(t.config): t.outcome for t in tuned.trials}
    assert states["default schedule"].state == states["how=tiled"].state == "ok"
    refused = states["how=refused"]
    assert refused.state == "failed" and "is not proven free of races" in refused.message
    given = arguments()
    y = np.full((given["m"], given["feat"]), np.nan, "float32")
    sparsetir.build(SPMM, schedule=tuned.schedule, config=tuned.config)(**given, c=y)
    want = PROGRAMS["spmm"].oracle({**given, "c": y})["c"]
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    y[:] = np.nan
    tuned.kernel()(**given, c=y)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    text = table(tuned, graph="small")
    assert "spmm on small (m=13, n=11" in text and "1 failed" in text
    page = write_report(tuned, tmp_path / "report.html").read_text()
    assert "The function" in page and "T.sp_iter" in page
    (record,) = Records(file).all()
    assert record.key == tuned.key and record.key.op == "spmm"
    assert record.key.reduce.startswith("program-") and record.graph == "small"
    fake = install(monkeypatch)  # goes on with the trials, and measures the finalist alone
    again = run(**options)
    assert [t.outcome for t in again.trials] == [t.outcome for t in tuned.trials]
    assert set(fake.log) == {json.dumps(to_data(Choices({"how": "tiled"})), sort_keys=True)}


def test_a_wrong_kernel_is_seen(tmp_path):
    case = ProgramCase(task(), tmp_path)
    made = case.prepared(Choices())
    made.call()
    assert made.wrong() is None
    case.expected["c"][2, 1] += 1
    assert made.wrong().startswith("'c': 1 of 91 wrong, the first at [2, 1]: ")


def test_an_output_that_is_not_written_is_wrong(tmp_path):
    case = ProgramCase(task(), tmp_path)
    assert np.isnan(case.start["c"]).all()
    assert "91 of 91 wrong" in case.error({"c": case.start["c"]})


@pytest.mark.parametrize("limit", [0, 10**6])
def test_the_interpreter_and_the_default_kernel_say_the_same(monkeypatch, tmp_path, limit):
    monkeypatch.setattr("sparsetir.tuning.program_case.INTERPRETED", limit)
    case = ProgramCase(task(), tmp_path)
    assert (case._reference is None) == (limit > 0)
    want = PROGRAMS["spmm"].oracle(dict(task().arguments))["c"]
    np.testing.assert_allclose(case.expected["c"], want, rtol=1e-4, atol=1e-4)


def test_nan_and_infinity_are_right_where_they_are_expected(tmp_path):
    given = arguments(case="nonfinite")
    case = ProgramCase(ProgramTask(SPMM, bound_arguments(SPMM, given)), tmp_path)
    assert not np.isfinite(case.expected["c"]).all()
    assert case.error(case.expected) is None
    other = {"c": np.where(np.isfinite(case.expected["c"]), case.expected["c"], 0)}
    assert case.error(other) is not None


def test_a_worker_gets_what_the_task_is(tmp_path):
    ref = ScheduleRef.of(user_schedules.apply)
    given = task(ref)
    data = given.saved(tmp_path)
    assert data.pop("kind") == "program"
    again = ProgramTask.loaded(data, tmp_path)
    assert again.identity() == given.identity() and again.schedule == ref
    assert list(again.arguments) == list(given.arguments)


# What is kept, and found again.


def test_a_key_goes_by_program_arguments_and_schedule(tmp_path):
    key = Key.of(task())
    assert key == Key.of(task()) and key.feat == 0 and key.dtype == "float32"
    assert key == Key.of(task(a=arguments()["a"] + 1))  # values play no part
    indices = arguments()["indices"][::-1].copy()
    moved = Key.of(task(indices=indices))
    assert moved.fingerprint != key.fingerprint and moved.reduce == key.reduce
    assert Key.of(task(ScheduleRef.of(user_schedules.apply))).reduce != key.reduce
    file = tmp_path / "mine.py"
    texts = []
    for text in ("def apply(sch, config): pass\n", "def apply(sch, config): return\n"):
        file.write_text(text)
        texts.append(Key.of(task(ScheduleRef.of(load_file(file).apply))).reduce)
    assert len({*texts, key.reduce}) == 3


def test_a_search_begins_with_what_was_best_for_other_arguments(monkeypatch, tmp_path):
    best = Choices({"how": "fast"})

    def measured(config):
        return Outcome("ok", seconds=1e-3 if config == best else 2e-3)

    install(monkeypatch, measured)
    space = {"how": ["a", "b", "c", "d", "fast"]}
    options = {
        "schedule": user_schedules.apply, "space": space, "records": tmp_path / "r.sqlite",
    }  # fmt: skip
    first = run(**options)
    assert first.config == {"how": "fast"} and first.speedup == 2
    second = run(arguments(case="dense_row"), **options)
    assert second.key.fingerprint != first.key.fingerprint
    assert [t.config for t in second.trials[:2]] == [Choices(), best]


def test_the_default_schedule_may_be_the_best(monkeypatch):
    install(monkeypatch, lambda config: Outcome("ok", seconds=2e-3 if config else 1e-3))
    tuned = run(schedule=user_schedules.apply, space=user_schedules.SPACE)
    assert tuned.config is None and tuned.schedule is None and tuned.speedup == 1
    assert "default schedule" in table(tuned)


def test_a_space_replaces_choices_of_the_made_one(monkeypatch):
    install(monkeypatch)
    tuned = run(space={"spmm.ahead": [0], "spmm.order": ["rows"], "spmm.vectors": [1]})
    assert {t.config.get("spmm.ahead", 0) for t in tuned.trials} == {0}
    assert {t.config.get("spmm.order", "rows") for t in tuned.trials} == {"rows"}


def test_choices_are_data():
    config = Choices({"tile": 4, "order": "rows", "pack": True, "none": None})
    assert from_data(to_data(config)) == config and hash(from_data(to_data(config))) == hash(config)
    with pytest.raises(ValueError, match="expected Choices with a dict of 'values'"):
        from_data({"template": "Choices"})
    with pytest.raises(ValueError, match="'tile': expected a number, text or None, got \\[1\\]"):
        from_data({"template": "Choices", "values": {"tile": [1]}})


# Arguments and refusals.


def test_sizes_and_outputs_may_be_left_out():
    given = {n: x for n, x in arguments().items() if n not in ("nnz", "m", "feat")}
    assert bound_arguments(SPMM, given).keys() == task().arguments.keys()
    assert bound_arguments(SPMM, given)["c"].shape == (13, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": 1}, "'spmm' has no 'z'; it has a, b, c, indptr, indices, m, n, nnz, feat"),
        ({"b": None}, "'b': expected an array, got nothing"),
        ({"b": np.zeros((11, 7))}, "'b': expected dtype float32, got float64"),
        ({"b": np.zeros((12, 7), "float32")}, "'b': expected shape (11, 7), got (12, 7)"),
        ({"m": "many"}, "'m': expected a number, got 'many'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    with pytest.raises((ValueError, TypeError)) as error:
        run({**arguments(), **change})
    assert words(error) == f"tune: argument 'arguments': {message}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": lambda sch, config: None, "space": {"a": [1]}}, "got a lambda"),
        ({"schedule": user_schedules.Holder.apply, "space": {"a": [1]}},
         "got 'Holder.apply', which is made inside another"),
        ({"schedule": functools.partial(user_schedules.apply), "space": {"a": [1]}},
         "got an object of partial"),
        ({"schedule": 3, "space": {"a": [1]}}, "got int"),
        ({"schedule": user_schedules.apply}, "argument 'space': expected a dict of choices"),
        ({"space": {"what": [1]}}, "there is no 'what' without a schedule; there are spmm.vec"),
        ({"space": {}}, "argument 'space': expected a dict of choices by name, got {}"),
        ({"space": {"a": 3}}, "'a': expected a list of choices, got 3"),
        ({"space": {"a": [[1]]}}, "'a': expected numbers, texts, booleans or None, got [1]"),
        ({"space": {"a": [1, 1]}}, "'a': expected choices that differ, got [1, 1]"),
        ({"space": {1: [1]}}, "expected texts as names, got 1"),
        ({"schedule": user_schedules.apply,
          "space": {"a": range(1000), "b": range(1000)}}, "at most 100,000 configs, got 1,000,000"),
        ({"heads": 2}, "argument 'heads': expected none for a function, got 2"),
        ({"threads": 0}, "argument 'threads': expected 1 or more, got 0"),
        ({"target": {"kind": "cuda", "arch": "sm_90"}}, "expected one for a GPU"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises((ValueError, TypeError)) as error:
        run(**options)
    assert words(error).startswith("tune: argument '") and message in words(error)


def test_what_nothing_is_made_from_is_refused():
    with pytest.raises(ValueError, match="'csf_sum', of which none is made: no iteration sums"):
        tune(PROGRAMS["csf_sum"].make("float32", "int32"), arguments("csf_sum"), records="")


def test_an_operator_takes_no_schedule():
    with pytest.raises(ValueError, match="'space': expected none for 'spmm', got {'a': "):
        tune("spmm", np.eye(3, dtype="float32"), space={"a": [1]})
    with pytest.raises(TypeError, match="the name of an operator or a stage-I function, got int"):
        tune(3, {})


def test_a_file_that_tunes_when_it_is_imported_is_refused(tmp_path):
    file = tmp_path / "careless.py"
    file.write_text("import sparsetir\nsparsetir.tune(None, {})\n")
    with pytest.raises(RuntimeError, match="put the call under if __name__ == '__main__'"):
        load_file(file)


def test_a_schedule_of_a_script_is_found_by_its_file(tmp_path):
    file = tmp_path / "script.py"
    file.write_text("def apply(sch, config): return 'mine'\n")
    module = load_file(file)
    ref = ScheduleRef.of(module.apply)
    assert ref == ScheduleRef("", str(file), "apply") and ref.load()(None, None) == "mine"
    known = ScheduleRef.of(user_schedules.apply)
    assert known.module == "tuning.user_schedules" and known.load() is user_schedules.apply
    exec("def typed(sch, config): pass", names := {})
    with pytest.raises(ValueError, match="got 'typed' of <string>, which is no file"):
        ScheduleRef.of(names["typed"])


def test_a_schedule_whose_file_is_gone_is_the_trials_failure(tmp_path):
    case = ProgramCase(task(ScheduleRef("", str(tmp_path / "gone.py"), "apply")), tmp_path)
    with pytest.raises(FileNotFoundError, match="gone.py"):
        case.prepared(Choices({"how": "fast"}))


def test_a_schedules_own_error_is_the_trials(tmp_path):
    case = ProgramCase(task(ScheduleRef.of(user_schedules.apply)), tmp_path)
    with pytest.raises(ScheduleError, match="made of {'how': 'broken'}"):
        case.prepared(Choices({"how": "broken"}))
