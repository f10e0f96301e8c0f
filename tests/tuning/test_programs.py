"""Tuning of a user's function, and of templates of a plug-in module."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import pickle
import subprocess
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

import sparsetir
from fake_measurer import install
from programs import PROGRAMS
from refusals import refusals
from small import small
from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.extras import WITHOUT_TORCH
from sparsetir.formats import format
from sparsetir.planning.plan import requested
from sparsetir.records.records import Records
from sparsetir.records.task import Outcome
from sparsetir.runtime.bound_arguments import bound_arguments
from sparsetir.schedules.search import program_space
from sparsetir.schedules.search.configs import from_data, to_data
from sparsetir.schedules.search.program_space import config_of, space_of
from sparsetir.schedules.template import Choices
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.tuning import search
from sparsetir.tuning.program import ProgramTask
from sparsetir.tuning.report import short, table, write_report
from sparsetir.tuning.schedule_ref import ScheduleRef, load_file, load_module
from sparsetir.tuning.search import tune
from sparsetir.tuning.worker import Tuner
from tuning import user_schedules

SPMM = PROGRAMS["spmm"].make("float32", "int32")


def arguments(name="spmm", case="small"):
    """Arguments of a test program, without the outputs."""
    program = PROGRAMS[name]
    inputs = program.inputs(np.random.default_rng(0), case, "float32", "int32")
    return {key: x for key, x in inputs.items() if key not in program.outputs}


def run(inputs=None, **options):
    options = {"records": "", "threads": 1, **options}
    return tune(SPMM, arguments() if inputs is None else inputs, **options)


def task(ref=None, **changes):
    return ProgramTask(SPMM, bound_arguments(SPMM, {**arguments(), **changes}), ref)


# The space that is made from a program.


ITERATIONS = {"hypergraph": "two_hop", "distances_ell": "distances", "spmm_coo_scatter": "zero"}


@pytest.mark.parametrize("name", ["spmm", "mttkrp", "ttm", "sddmm", *ITERATIONS])
@pytest.mark.default("spmm", "ttm", "hypergraph", "spmm_coo_scatter")
def test_a_made_space_is_right(name):
    """First and last choices and a mixture, on small inputs with empty rows."""
    program = PROGRAMS[name]
    func = program.make("float32", "int32")
    inputs = program.inputs(np.random.default_rng(1), "small", "float32", "int32")
    space = space_of(func, {"feat": inputs["feat"]}, 64, 2)
    assert {n.partition(".")[0] for n in space} - {"threads"} == {ITERATIONS.get(name, name)}
    mixed = {n: values[(i % 2) * -1] for i, (n, values) in enumerate(space.items())}
    ends = ({n: values[end] for n, values in space.items()} for end in (0, -1))
    for config in (mixed, *ends):
        result = {n: np.full_like(inputs[n], np.nan) for n in program.outputs}
        kernel = sparsetir.build(func, schedule=program_space.apply, config=config)
        kernel(**{**inputs, **result})
        for n, want in program.oracle(inputs).items():
            np.testing.assert_allclose(result[n], want, rtol=1e-4, atol=1e-4, err_msg=str(config))


def test_a_made_space_goes_by_what_the_program_is():
    mttkrp = space_of(PROGRAMS["mttkrp"].make("float32", "int32"), {"feat": 96}, 512, 1)
    assert mttkrp["mttkrp.vectors"] == (1, 2, 4) and mttkrp["mttkrp.lanes"] == (16,)
    assert mttkrp["mttkrp.inner"] == ("", "J") and mttkrp["mttkrp.size"] == (96, 0)
    assert mttkrp["mttkrp.blocks"] == (0,) and mttkrp["mttkrp.parallel"] == (False,)
    spmm = space_of(SPMM, {"feat": 8}, 512, 2)
    assert spmm["spmm.lanes"] == (8,) and spmm["spmm.inner"] == ("",)
    assert spmm["spmm.blocks"] == (0, 8, 32) and spmm["spmm.parallel"] == (True, False)
    sampled = PROGRAMS["sddmm"].make("float32", "int32")
    sizes = {"m": 9, "n": 20000, "nnz": 1100, "feat": 80}
    assert space_of(sampled, {}, 512, 1) == {"sddmm.parts": (0, 1)}
    assert space_of(sampled, sizes, 512, 1)["sddmm.parts"] == (0, 1, 4, 18, 36)
    assert space_of(sampled, sizes | {"m": 99}, 512, 1)["sddmm.parts"] == (1, 2, 4)
    assert space_of(PROGRAMS["csf_sum"].make("float32", "int32"), {}, 512, 1) == {}


@pytest.mark.parametrize("visit", ["rows", "parts 3", "sorted 3", "panels 2", "panels 3"])
@pytest.mark.default("rows", "sorted 3")
def test_a_made_space_visits_rows_in_other_orders(visit, monkeypatch):
    """A space for any program of that shape, whatever its operator: here with a gate."""
    monkeypatch.setattr(program_space, "ROWS", 1)
    func = small("gated", """
    with T.sp_iter([I, J, K], "SRS", "gated") as [i, j, k]:
        with T.init():
            OUT[i, k] = 0.0
        OUT[i, k] = OUT[i, k] + A[i, j] * B[j, k] * T.tanh(G[i, k])
    """, A="I J", B="N K", G="I K", OUT="I K")  # fmt: skip
    rows = sp.random_array((40, 30), density=0.15, format="csr", dtype="float32", rng=0)
    rows = sp.vstack([rows, sp.csr_array((3, 30)), np.ones((1, 30))]).tocsr().astype("float32")
    rng = np.random.default_rng(0)
    b, g = (rng.random((size, 16), dtype="float32") for size in (30, 44))
    arrays = {"indptr": rows.indptr, "indices": rows.indices, "a": rows.data, "b": b, "g": g}
    sizes = {"m": 44, "n": 30, "nnz": rows.nnz, "feat": 16}
    space = space_of(func, sizes, 128, 2)
    kinds = {text.partition(" ")[0] for text in space["gated.visit"]}
    assert kinds == {"rows", "parts", "sorted", "panels"}
    for order in space["gated.order"]:
        chosen = {name: values[0] for name, values in space.items()}
        chosen |= {"gated.visit": visit, "gated.order": order, "gated.vectors": 2}
        config = config_of(**chosen)
        kernel = sparsetir.build(func, schedule=program_space.apply, config=config)
        out = np.full((44, 16), np.nan, "float32")
        kernel(**arrays, **sizes, out=out)
        np.testing.assert_allclose(out, (rows @ b) * np.tanh(g), rtol=1e-5, atol=1e-6)
    # Tiles that overlap are not added to twice, and panels ask for no rows ahead.
    assert config_of(**chosen | {"gated.size": 0}) is None or not visit.startswith("parts")
    assert config_of(**chosen | {"gated.ahead": 4}) is None or not visit.startswith("panels")


@pytest.mark.parametrize("name", ["spmm_coo", "spmm_ell", "spmm_dbsr"])
def test_rows_without_results_of_their_own_are_in_no_blocks(name):
    """These have no rows of varying lengths, or rows that add to one result."""
    func = PROGRAMS[name].make("float32", "int32")
    space = space_of(func, {"feat": 64, "m": 90, "n": 90, "nnz": 600}, 512, 2)
    for config in itertools.product(*(space[f"spmm.{x}"] for x in ("order", "blocks", "parallel"))):
        named = dict(zip(("spmm.order", "spmm.blocks", "spmm.parallel"), config, strict=True))
        chosen = {choice: values[0] for choice, values in space.items()} | named
        program_space.apply(Schedule(func), config_of(**chosen))


def test_a_made_schedule_without_choices_changes_nothing():
    sch = Schedule(SPMM)
    program_space.apply(sch, {})
    assert sch.func.same_as(SPMM) and sch.stage_two is None


def test_failures_of_all_other_configs_are_told(monkeypatch):
    """The default is no winner then."""
    failed = Outcome("failed", message="ValueError: no such loop")
    install(monkeypatch, lambda config: failed if config else Outcome("ok", seconds=1e-3))
    options = {"schedule": user_schedules.apply, "space": user_schedules.SPACE}
    told = "all configs besides the default failed (2); the first failure: ValueError: no such loop"
    with pytest.warns(RuntimeWarning) as caught:
        tuned = run(**options)
    assert [str(w.message) for w in caught] == [f"tune: {told}"] and caught[0].filename == __file__
    assert tuned.warnings == [told] and "ValueError: no such loop>" in repr(tuned)
    assert f"warning: {told}" in table(tuned).replace("\n  ", " ")


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
    inputs = arguments()
    y = np.full((inputs["m"], inputs["feat"]), np.nan, "float32")
    sparsetir.build(SPMM, schedule=tuned.schedule, config=tuned.config)(**inputs, c=y)
    want = PROGRAMS["spmm"].oracle({**inputs, "c": y})["c"]
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    y[:] = np.nan
    tuned.kernel()(**inputs, c=y)
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


def test_a_wrong_kernel_is_seen():
    case = task()
    right = case.prepared(Choices())
    right.call()
    assert right.wrong() is None
    case.results[1]["c"][2, 1] += 1
    assert right.wrong().startswith("'c': 1 of 91 wrong, the first at [2, 1]: ")


@pytest.mark.parametrize("limit", [0, 10**6])
def test_the_interpreter_and_the_default_kernel_say_the_same(monkeypatch, limit):
    monkeypatch.setattr("sparsetir.tuning.program.INTERPRETED", limit)
    case = task()
    assert (case.by_kernel is None) == (limit > 0)
    want = PROGRAMS["spmm"].oracle(dict(task().arguments))["c"]
    np.testing.assert_allclose(case.results[1]["c"], want, rtol=1e-4, atol=1e-4)


def test_a_worker_gets_what_the_task_is():
    ref = ScheduleRef.of(user_schedules.apply)
    sent = task(ref)
    again = pickle.loads(pickle.dumps(sent))
    assert again.key() == sent.key() and again.schedule == ref
    assert list(again.arguments) == list(sent.arguments)


# What is kept, and found again.


def test_a_key_goes_by_program_arguments_and_schedule(tmp_path):
    key = task().key()
    assert key == task().key() and key.feat == 0 and key.dtype == "float32"
    assert key == task(a=arguments()["a"] + 1).key()  # values play no part
    indices = arguments()["indices"][::-1].copy()
    moved = task(indices=indices).key()
    assert moved.fingerprint != key.fingerprint and moved.reduce == key.reduce
    assert task(ScheduleRef.of(user_schedules.apply)).key().reduce != key.reduce
    file = tmp_path / "mine.py"
    texts = []
    for text in ("def apply(sch, config): pass\n", "def apply(sch, config): return\n"):
        file.write_text(text)
        texts.append(task(ScheduleRef.of(load_file(file).apply)).key().reduce)
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


def test_an_expression_is_tuned_for_its_operands(monkeypatch):
    install(monkeypatch)
    A, X = sparsetir.SparseMatrix.from_dense(np.eye(3)), np.ones((3, 8))
    tuned = tune("C[i,k] = A[i,j] * X[j,k]", {"A": A, "X": X}, trials=2, records="")
    assert isinstance(tuned, search.TunedProgram) and "C.order" in tuned.trials[1].config


def test_choices_are_data():
    config = Choices({"tile": 4, "order": "rows", "pack": True, "none": None})
    assert from_data(to_data(config)) == config and hash(from_data(to_data(config))) == hash(config)


# Arguments and refusals.


def test_sizes_and_outputs_may_be_left_out():
    inputs = {n: x for n, x in arguments().items() if n not in ("nnz", "m", "feat")}
    assert bound_arguments(SPMM, inputs).keys() == task().arguments.keys()
    assert bound_arguments(SPMM, inputs)["c"].shape == (13, 7)


def prepared(ref, how):
    task(ref).prepared(Choices({"how": how}))


GONE, MINE = ScheduleRef("", "/gone.py", "apply"), ScheduleRef.of(user_schedules.apply)
BIG = {"a": range(1000), "b": range(1000)}
GPU = {"kind": "cuda", "arch": "sm_90"}


def with_argument(**change):
    run({**arguments(), **change})


def mine(**options):
    run(schedule=user_schedules.apply, **options)


test_refusals = refusals(
    """
with_argument(z=1)  # ValueError: 'arguments': 'spmm' has no 'z'; it has a, b, c, indptr, indices
run({"a": arguments()["a"]})  # TypeError: tune: argument 'arguments': 'b' is missing: expected a
with_argument(b=None)  # TypeError: 'b': expected a torch, NumPy or TVM array, got NoneType
with_argument(b=np.zeros((11, 7)))  # TypeError: 'b': expected dtype float32, got float64
with_argument(b=np.zeros((12, 7), "float32"))  # ValueError: 'arguments': 'b': .. got (12, 7)
with_argument(m="many")  # TypeError: 'm': expected an integer, got str 'many'
run(schedule=lambda sch, config: None, space={"a": [1]})  # ValueError: got a lambda
run(schedule=user_schedules.Holder.apply, space={"a": [1]})  # ValueError: ' .. got 'Holder.apply'
run(schedule=functools.partial(user_schedules.apply), space={"a": [1]})
    # TypeError: got an object of partial
run(schedule=3, space={"a": [1]})  # TypeError: got int
mine()  # ValueError: tune: argument 'space': expected a dict of choices
mine(space=BIG)  # ValueError: tune: .. at most 100,000 configs, got 1,000,000
run(space={"what": [1]})  # ValueError: there is no 'what' without a schedule; there are spmm.vec
run(space={})  # ValueError: argument 'space': expected a dict of choices by name, got {}
run(space={"a": 3})  # ValueError: 'a': expected a list of choices, got 3
run(space={"a": [[1]]})  # ValueError: 'a': expected numbers, texts, booleans or None, got [1]
run(space={"a": [1, 1]})  # ValueError: 'a': expected choices that differ, got [1, 1]
run(space={1: [1]})  # ValueError: expected texts as names, got 1
run(heads=2)  # ValueError: tune: argument 'heads': expected none for a function, got 2
run(threads=1.5)  # ValueError: tune: argument 'threads': expected 1 or more, got 1.5
run(threads=0)  # ValueError: tune: argument 'threads': expected 1 or more, got 0
run(target=GPU)  # ValueError: tune: argument ' .. expected one for a GPU
tune(PROGRAMS["csf_sum"].make("float32", "int32"), arguments("csf_sum"), records="")
    # ValueError: 'csf_sum', as none is derived: no innermost loop
tune("spmm", np.eye(3, dtype="float32"), space={"a": [1]})  # ValueError: 'space': expected none for
tune("y[i] = A[i,j]", np.eye(3))  # TypeError: 'matrix': expected a dict of .. operands, got ndarray
tune(3, {})  # TypeError: the name of an operator or a stage-I function, got int
prepared(GONE, "fast")  # FileNotFoundError: gone.py
prepared(MINE, "broken")  # ScheduleError: made of {'how': 'broken'}
from_data({"template": "Choices"})  # ValueError: expected Choices with a dict of 'values'
from_data({"template": "Choices", "values": {"tile": [1]}})  # ValueError: 'tile': expected a number
""",
    globals(),
    functools,
)


def test_a_schedule_of_a_script_is_found_by_its_file(tmp_path):
    file = tmp_path / "script.py"
    file.write_text("def apply(sch, config): return 'mine'\n")
    module = load_file(file)
    ref = ScheduleRef.of(module.apply)
    assert ref == ScheduleRef("", str(file), "apply") and ref.load()(None, None) == "mine"
    named = ScheduleRef.of(user_schedules.apply)
    assert named.module == "tuning.user_schedules" and named.load() is user_schedules.apply
    exec("def typed(sch, config): pass", names := {})
    with pytest.raises(ValueError, match="got 'typed' of <string>, which is not a file"):
        ScheduleRef.of(names["typed"])


PLUG_IN = """
from sparsetir.formats.format import Format, register
class Mine(Format): name, rules = "mine", None
register(Mine)
{then}
"""


def test_workers_run_the_modules_that_register(tmp_path, monkeypatch):
    """Modules by name where others can import them, else by file; at a prompt there are none."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(format, "REGISTRY", {})
    monkeypatch.setattr(search, "REGISTRY", format.REGISTRY)

    def plug_ins(task):
        """Without those of templates that other tests have registered."""
        return [name for name in search._plug_ins(task) if not name.startswith("tuning.")]

    file, wanted = tmp_path / "registering.py", requested("spmm", SparseMatrix(sp.eye(2)), 4)
    file.write_text(PLUG_IN.format(then=""))
    plugged = importlib.import_module("registering")
    assert plug_ins(wanted) == ["registering"] and plug_ins(task()) == []
    load_file(file)
    assert plug_ins(wanted) == [str(file)]
    assert load_module(str(file)) is not plugged is load_module("registering")
    monkeypatch.setitem(sys.modules, "__main__", main := types.ModuleType("__main__"))
    exec(PLUG_IN.format(then=""), vars(main))
    with pytest.raises(ValueError, match="'Mine': expected to be registered in a file"):
        plug_ins(wanted)
    main.__file__ = str(file)  # as of `python registering.py`
    assert plug_ins(wanted) == [str(file)]
    main.__spec__ = plugged.__spec__  # as of `python -m registering`
    assert plug_ins(wanted) == ["registering"]
    for ref in (str(file), "tunes_at_once"):
        file.with_stem("tunes_at_once").write_text(then := "import sparsetir; sparsetir.tune(0, 0)")
        file.write_text(PLUG_IN.format(then=then))
        with pytest.raises(RuntimeError, match="put the call under if __name__ == '__main__'"):
            load_module(ref)
    with pytest.raises(ValueError, match="modules that register what.*, got 'mine'.*, got none"):
        Tuner(pickled(tmp_path, replace(wanted, name="mine")), [])


def pickled(folder, wanted):
    (folder / "task").write_bytes(pickle.dumps((wanted, None)))
    return folder / "task"


LIMIT = 3  # seconds, for the one that hangs


@pytest.mark.slow  # each fault alone in test_measure.py, searches with workers in docs/
def test_faulty_templates_are_three_failures_of_a_search_that_ends(tmp_path):
    matrix = sp.random_array((60, 50), density=0.1, rng=np.random.default_rng(0), dtype="float32")
    scipy.io.mmwrite(tmp_path / "small.mtx", matrix)
    code = f"import runpy, sys; {WITHOUT_TORCH}; runpy.run_module('sparsetir', run_name='__main__')"
    command = [
        *(sys.executable, "-c", code, "tune", "spmm", "--graph", "small.mtx"),
        *("--feat", "16", "--threads", "1", "--trials", "5", "--modules", "tuning.faulty_plugin"),
        *("--time-limit", str(LIMIT), "--records", "r.sqlite", "--no-report"),
        "--json",
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert run["trials"] == 5 and run["counts"]["ok"] + run["counts"].get("pruned", 0) == 2
    crashed, hung, wrong = (run["failures"][number] for number in "123")
    assert crashed.startswith("crashed: ") and "SIGSEGV" in crashed
    assert hung.startswith("hung: ") and f"longer than {LIMIT}" in hung
    assert wrong.startswith("wrong: ")
    assert run["best"][0]["config"]["template"] in ("RowTile", "Decomposed")
