"""The command line: what it prints, where, its exit codes and what it refuses."""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from fake_measurer import install
from refusals import in_order
from small import text_of
from sparsetir.cli import arguments, main
from sparsetir.cli.tune import report_path
from sparsetir.data.graphs import load_relations
from sparsetir.data.sparse_tensor import SparseMatrix
from sparsetir.formats.format import REGISTRY
from sparsetir.machine import assume, macos
from sparsetir.planning.plan import requested
from sparsetir.records.record import Key, Record
from sparsetir.records.task import Outcome
from sparsetir.runtime.texts import WIDTH, readable
from sparsetir.schedules.operators.registry import OPERATORS
from sparsetir.schedules.search.configs import to_data
from sparsetir.schedules.templates.registry import TEMPLATES
from sparsetir.schedules.templates.row_tile import RowTile
from sparsetir.tuning import report, search
from sparsetir.tuning.tuned import Trial, Tuned

COMMANDS = ("tune", "bench", "lower", "explain", "formats", "records", "doctor")
HEAD = "import sparsetir\nfrom tvm.script import sparse_tir as T\n"
PROGRAM = HEAD + text_of("scale", """
with T.sp_iter([I, J], "SS", "scale") as [i, j]:
    A[i, j] = A[i, j] * T.float32(2)
""", A="I J")  # fmt: skip


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs the command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def reports(monkeypatch):
    """Reports are short, as pictures take a while: feature sizes by path."""
    written = {}

    def write_report(tuned, path, *, graph):
        path.write_text(graph)
        written[str(path)] = tuned.task.feat
        return path

    monkeypatch.setattr(report, "write_report", write_report)
    return written


def found(interrupted=False, states=("ok", "ok", "wrong"), **options):
    """A pretended search, and the arguments that it was called with."""
    calls = []

    def tune(op, matrix, feat, **options_given):
        calls.append((op, feat, options_given))
        matrix = SparseMatrix(matrix)
        task = requested(op, matrix, feat, threads=1)
        configs = [RowTile(tile=16, lanes=n) for n in (16, 8, 4)]
        trials = []
        for number, (state, config) in enumerate(zip(states, configs, strict=False)):
            seconds = 1e-5 * (3 - number) if state == "ok" else None
            message = "" if state == "ok" else "1 of 3 wrong"
            outcome = Outcome(state, seconds, seconds, message, padding=0.0, bytes=100)
            trials.append(Trial(number, config, outcome, number + 1.0))
        return Tuned(task, task.key(), trials, configs[0], interrupted=interrupted, **options)

    tune.calls = calls
    return tune


def test_help_names_the_commands(run, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--help")
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "examples:" in out
    assert all(f"\n    {command} " in out for command in COMMANDS)
    assert run() == (0, out, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_examples(run, capsys, command):
    with pytest.raises(SystemExit) as stop:
        run(command, "--help")
    out = capsys.readouterr().out
    assert stop.value.code == 0 and out.startswith(f"usage: sparsetir {command} ")
    assert command == "bench" or f"examples:\n  sparsetir {command}" in out


# Words, and what is said of them: of a command's argument, where it begins with "--".
USAGE = """
--debug  # sparsetir: the following arguments are required: COMMAND
tune spmm  # --graph: expected a graph for spmm, such as
tune spam --graph cora  # argument OP|FILE: expected spmm, spmv, sddmm, softmax
tune spmm --graph cora --arg a=1  # --arg: expected none for an operator
tune spmm --graph cora --feat-in 4  # --feat-in: expected none for spmm
tune rgms --graph cora  # --graph: cora: no such file; a graph with relations is an .npz
tune gone.py  # argument OP|FILE: gone.py: no such file
tune one.py --feat 8  # --feat: expected none for a function in a file
tune one.py --graph gone  # --graph: gone: no such file
tune spmm --modules gone.mod --graph cora  # --modules: gone.mod: ModuleNotFoundError: No module
explain one.py --feat 8  # --feat: expected none for a function in a file
explain spmv --feat 8  # argument 'feat': expected 1 for 'spmv', got 8
lower one.py --feat 8  # --feat: expected none for a function in a file
lower one.py --graph cora  # --graph: expected none for a function in a file
lower one.py --threads 2  # --threads: expected none for a function in a file
lower spmm --schedule gone.py:f  # --schedule: gone.py: no such file
tune one.py --arg a  # --arg: expected NAME=VALUE, got 'a'
tune one.py --arg a=1 --arg a=2  # --arg: expected 'a' once
tune one.py --arg a=b  # --arg: a: expected a number, file.npy or file.npz:key, got 'b'
tune one.py --arg a=b.npy  # --arg: a: b.npy:
tune one.py --schedule apply  # --schedule: expected file.py:function, got 'apply'
tune one.py --schedule gone.py:apply  # --schedule: gone.py: no such file
tune one.py --space [1]  # --space: expected a JSON object, got '[1]'
tune spmm --graph gone.mtx  # --graph: gone.mtx: no such file
tune spmm --graph cora --trials 0  # --trials: expected an integer of at least 1, got '0'
tune spmm --graph cora --seconds nan  # --seconds: expected a number of at least 0.001, got 'nan'
tune spmm --graph cora --memory-limit 4X  # --memory-limit: expected bytes, such as 512M or 4G
tune spmm --graph cora --target {  # --target: expected JSON, got '{'
tune spmm --graph cora --remote here  # --remote: expected HOST:PORT:KEY, got 'here'
tune spmm --graph cora --feat 32 32  # --feat: expected each size once
tune spmv --graph cora --feat 2  # argument 'feat': expected 1 for 'spmv', got 2
tune spmm --graph cora --target what  # argument 'target':
lower spmm --config {}  # --config: from_data: 'template' is
lower what  # argument OP|FILE: expected spmm
lower gone.py  # argument OP|FILE: gone.py: no such file
formats gone  # argument graph: gone: no such file
formats cora --format spam  # --format: expected .. csr
formats cora --picture x.bmp  # --picture: expected .png
records  # the following arguments are required: ACTION
records list --records gone  # --records: gone: no such
records forget --records .  # forget: expected --op
tune spmm --graph cora --feat 0  # --feat: expected an integer of at least 1, got '0'
tune spmm --graph cora --feat 1e9  # --feat: expected an integer of at least 1, got '1e9'
tune spmm --graph cora --feat {TENS}  # --feat: expected an integer from 1 to 2,147,483,647, got
tune spmm --graph cora --heads {NINES}  # --heads: expected an integer from 1 to 2,147,483,647
tune spmm --graph cora --threads 1000000000000  # --threads: expected an integer from 1 to 65,536
tune spmm --graph cora --workers 1000000000000  # --workers: expected an integer from 1 to
tune spmm --graph cora --trials=-1  # --trials: expected an integer of at least 1, got '-1'
tune spmm --graph cora --seed {NINES}  # --seed: expected an integer from 0 to 2,147,483,647
tune spmm --graph cora --seconds 1e400  # --seconds: expected a number from 0.001 to 100,000,000
tune spmm --graph cora --time-limit 1e12  # --time-limit: expected a number from 0.001 to
tune spmm --graph cora --memory-limit {NINES}  # --memory-limit: expected bytes, such as 512M or 4G
tune spmm --graph cora --memory-limit 1000000000000T  # --memory-limit: expected bytes
tune spmm --graph cora --target {DEEP}  # --target: expected JSON, got '{ .. ...': maximum recurs
tun spmm  # argument COMMAND: invalid choice: 'tun' .. ; did you mean tune?
format cora  # ; did you mean formats?
records lst  # ; did you mean list?
tune spmm --graph cora --sampler randm  # ; did you mean random?
tune softmax --graph cora --feat 8  # --feat: expected none for softmax
tune spgemm --graph cora --feat 8  # --feat: expected none for spgemm
tune attention --graph cora --feat 8 --edge-feat 8  # --edge-feat: expected none
tune u_add_e_max --graph cora --feat-in 8  # --feat-in: expected none for u_add_e_max
tune u_add_e_max --graph cora --reduce min  # 'reduce': expected none with 'u_add_e_max'
lower spmm --template Frog  # unknown template 'Frog'; expected one of Assembled
lower spmm --template Frog --config {"template":"Groups"}  # --template: expected the one of
lower one.py --template  # --template: expected none for a function in a file
formats cora --format bsr(8  # with parameters, such as BSR(8, 8); got bsr(8
formats cora --format bsr_0_1  # bsr_0_1: BSR: argument 'rows': expected a positive integer, got 0
formats cora --format bsr(1,2,3,4,5,6)  # bsr(1,2,3,4,5,6):
formats cora --format bsr(__import__('os'))  # bsr(__import__('os')): malformed node or string
"""
HUGE = {"{NINES}": "9" * 400, "{TENS}": "10" * 9, "{DEEP}": '{"a":' * 3000}


@pytest.mark.parametrize("row", re.split(r"\n(?! )", USAGE.strip()))
def test_wrong_words_are_told_in_one_line(run, row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.py").touch()
    words, _, message = (part.strip() for part in row.partition("# "))
    code, out, err = run(*(HUGE.get(word, word) for word in words.split()))
    assert (code, out) == (2, "")
    assert err.startswith("sparsetir") and err.count("\n") == 1 and err.endswith("\n")
    start = f"sparsetir {words.split()[0]}: argument " if message.startswith("--") else ""
    assert err.startswith(start)
    in_order(err[len(start) :], message.split(" .. "))


def test_debug_shows_where_an_error_comes_from(run, monkeypatch):
    def broken(*words, **options):
        raise KeyError("lost")

    monkeypatch.setattr(search, "tune", broken)
    code, out, err = run("tune", "spmm", "--graph", "cora")
    assert (code, out) == (1, "")
    assert err == "sparsetir tune: KeyError: 'lost' (--debug shows where)\n"
    code, _, err = run("tune", "spmm", "--graph", "cora", "--debug")
    assert code == 1 and "Traceback" in err and ", in broken" in err


def test_tune_prints_a_table_and_writes_a_report(run, records, reports, monkeypatch):
    tune = found()
    monkeypatch.setattr(search, "tune", tune)
    words = ("tune", "spmm", "--graph", "cora")
    code, out, err = run(*words, "--feat", 32, 64, "--memory-limit", "2G", "--seed", 7)
    assert code == 0 and err == ""
    assert out.count("best: ") == 2 and out.count("3 trials: 2 measured") == 2
    for feat in (32, 64):
        assert out.count(f"report: sparsetir-tune-spmm-cora-{feat}.html\n") == 1
        assert reports[f"sparsetir-tune-spmm-cora-{feat}.html"] == feat
    assert out.count(f"record: {records.path}\n") == 2
    (op, feat, options), _ = tune.calls
    assert (op, feat, options["memory_limit"], options["seed"]) == ("spmm", 32, 2**31, 7)
    assert options["graph"] == "cora" and "records" not in options
    _, out, _ = run(*words)
    assert "report: sparsetir-tune-spmm-cora-32-2.html" in out


MINE = HEAD + text_of("sums", """
with T.sp_iter([I, J, K], "SRS", "sums") as [i, j, f]:
    with T.init():
        Y[i, f] = 0.0
    Y[i, f] = Y[i, f] + A[i, j, f]
""", A="I J K", Y="I K") + """
def apply(sch, config):
    iteration = sch.get_sparse_iteration("sums")
    i, j, f = sch.get_sp_iters(iteration)
    outer, inner = sch.split(f, [None, config["tile"]])
    sch.sparse_reorder(iteration, [i, outer, j, inner])
"""  # fmt: skip


def test_tune_takes_a_function_in_a_file(run, records, monkeypatch):
    """The limits that workers measure by, without starting one."""
    install(monkeypatch)
    Path("mine.py").write_text(MINE)
    a = sp.random_array((20, 30), density=0.2, format="csr", dtype="float32", rng=0)
    features = np.ones((a.nnz, 8), "float32")
    np.savez("a.npz", indptr=a.indptr.astype("int64"), columns=a.indices.astype("int32"))
    np.save("features.npy", features)
    words = ["tune", "mine.py:sums", "--arg", "indptr=a.npz", "--arg", "indices=a.npz:columns"]
    words += ["--arg", "a=features.npy", "--arg", "n=30", "--threads", "1", "--trials", "4"]
    code, out, _ = run(*words)
    assert code == 0 and "sums (m=20, n=30, nnz=120, feat=8), 1 thread" in out
    assert "sums.vectors=" in out and "report: sparsetir-tune-sums.html\n" in out
    assert Path("sparsetir-tune-sums.html").is_file()
    words += ["--schedule", "mine.py:apply", "--space", '{"tile": [2, 4]}', "--json"]
    code, out, _ = run(*words, "--no-report")
    data = json.loads(out)
    assert code == 0 and data["program"] == "mine.py:sums" and data["runs"][0]["trials"] == 3
    tried = [x["config"]["values"] for x in data["runs"][0]["best"]]
    assert {json.dumps(x) for x in tried} == {"{}", '{"tile": 2}', '{"tile": 4}'}
    assert {record.key.op for record in records.all()} == {"sums"}
    code, out, _ = run("records", "list")
    assert code == 0 and "sums" in out and "2 problems" in out
    some = ("--graph", "cora", "--arg", "feat=8", "--trials", "1", "--threads", "1", "--json")
    data = json.loads(run(*words[:2], *some, "--no-report")[1])
    assert data["graph"] == "cora" and data["runs"][0]["trials"] == 1
    code, _, err = run(*words[:2], "--arg", "a=a.npz:what")
    assert code == 2 and "--arg: a: a.npz has no 'what', but indptr, columns" in err
    code, _, err = run(*words[:2], "--schedule", "mine.py:gone")
    assert (
        code == 2 and err == "sparsetir tune: argument --schedule: mine.py has no function gone\n"
    )


def test_tune_takes_a_graph_with_relations(run, records, monkeypatch):
    install(monkeypatch)
    edges = {name: np.arange(9) % size for name, size in (("src", 5), ("dst", 4), ("etype", 2))}
    np.savez("g.npz", **edges, num_nodes=6)
    words = ("tune", "rgms", "--graph", "g.npz", "--feat", 15, "--feat-in", 8, "--unweighted")
    code, out, _ = run(*words, "--threads", 1, "--trials", 2, "--no-report")
    assert code == 0 and "rgms on g (relations=2, m=6, n=6, nnz_rows=4, nnz=9, feat_in=8," in out
    (kept,) = records.all()
    assert (kept.key.op, kept.key.feat, kept.graph) == ("rgms", 15, "g")
    code, out, _ = run("records", "list", "--op", "rgms")
    assert code == 0 and "sum-of-8-unweighted" in out
    matrix = load_relations("g.npz")
    options = {"feat_in": 8, "weighted": False, "threads": 1}
    assert sparsetir.plan("rgms", matrix, 15, **options).chosen_by == "record"
    np.savez("g.npz", src=edges["src"])
    code, _, err = run(*words)
    assert code == 2 and "--graph: g.npz: has no dst, etype, num_nodes" in err


def test_tune_takes_messages_softmax_and_attention(run, records, monkeypatch):
    install(monkeypatch)
    common = ("--graph", "cora", "--threads", 1, "--no-report", "--trials", 2)
    for words, op, reduce in (
        (("u_add_e_amax", "--feat", 8, "--edge-feat", 1), "u_add_e_max", "max-of-f-1"),
        (("copy_e", "--feat", 1, "--reduce", "add"), "copy_e_sum", "sum-of-1-1"),
        (("copy_u_mean", "--feat", 8), "spmm", "mean"),
        (("u_dot_v", "--feat", 8), "sddmm", "sum"),
        (("edge_softmax", "--heads", 8), "softmax", "forward"),
        (("attention", "--feat", 8, "--feat-in", 4), "attention", "of-4"),
        (("spgemm",), "spgemm", "plus_times"),
    ):
        code, out, _ = run("tune", *words, *common)
        one = words[0] == "copy_e"
        assert code == 0 and ("There is one config for this problem" in out) == one
        assert max(map(len, out.splitlines())) <= WIDTH
        assert (records.all()[-1].key.op, records.all()[-1].key.reduce) == (op, reduce)
    code, _, err = run("tune", "u_add_e_max", "--target", "cuda", *common)
    assert code == 1 and "argument --target: there is no cuda device here" in err


def test_tune_prints_one_json_document(run, records, monkeypatch):
    monkeypatch.setattr(search, "tune", found(warnings=["the disk is full"]))
    code, out, _ = run("tune", "sddmm", "--graph", "cora", "--json", "--no-report")
    data = json.loads(out)
    (only,) = data["runs"]
    assert code == 0
    assert (data["op"], data["graph"], data["records"]) == ("sddmm", "cora", str(records.path))
    assert only["feat"] == 32 and only["report"] is None and only["trials"] == 3
    assert only["best"][0]["config"]["lanes"] == 8 and only["best"][0]["seconds"] == 2e-5
    assert only["default"]["seconds"] == pytest.approx(3e-5)
    assert only["speedup"] == pytest.approx(1.5)
    assert only["failures"] == {"2": "wrong: 1 of 3 wrong"}
    assert only["warnings"] == ["the disk is full"]


def test_tune_that_is_interrupted_tells_what_was_found(run, records, reports, monkeypatch):
    tune = found(interrupted=True)
    monkeypatch.setattr(search, "tune", tune)
    code, out, _ = run("tune", "spmm", "--graph", "cora", "--feat", 32, 64)
    assert code == 130 and len(tune.calls) == 1
    assert "best: " in out and "; interrupted" in out and "report: " in out


def test_tune_where_nothing_worked(run, records, monkeypatch):
    monkeypatch.setattr(search, "tune", found(states=("wrong", "wrong")))
    code, out, _ = run("tune", "spmm", "--graph", "cora", "--no-report")
    assert code == 1 and "No config worked." in out


def test_names_of_reports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = Path("sparsetir-tune-spmm-weights-conv1-32.html")
    assert report_path(None, "spmm-weights:conv1-32", 32) == name
    name.touch()
    second = name.with_stem(f"{name.stem}-2")
    assert report_path(None, "spmm-weights:conv1-32", 32) == second
    assert report_path(tmp_path, "spmm-weights:conv1-32", 32) == tmp_path / second
    assert report_path(Path("a.html"), "spmm-weights:conv1-32", 32) == Path("a-32.html")
    assert report_path(Path("a.html"), "spmm-cora-32") == Path("a.html")


def test_lower_prints_each_stage_of_an_operator(run):
    texts = {}
    for stage in ("1", "2", "scheduled", "3", "source"):
        words = ("--template",) if stage == "1" else ()
        code, texts[stage], err = run("lower", "spmm", "--stage", stage, "--feat", 512, *words)
        assert code == 0 and err.startswith('config: {"template": "RowTile"')
    assert len(set(texts.values())) == len(texts)
    assert "T.sp_iter" in texts["1"] and "T.sp_iter" not in texts["2"]
    assert "T.vectorized" in texts["scheduled"] and "T.vectorized" not in texts["2"]
    # A's values are flat from stage III on.
    assert "A: T.Buffer((nnz,)" in texts["3"] and "A: T.Buffer((nnz,)" not in texts["2"]
    assert "target triple" in texts["source"]
    # What is compiled, the last passes included: the kernel that a plan has.
    kernel = sparsetir.plan("spmm", arguments.graph("cora")[1], 512).kernel
    names = {"1": "I", "2": "II", "scheduled": "II scheduled", "3": "III"}
    for stage, name in names.items():
        assert texts[stage] == readable(kernel.stages[name]) + "\n"
        assert "metadata" not in texts[stage]


def test_lower_prints_the_plain_program_of_an_operator(run):
    from sparsetir.schedules.operators import spmm
    from sparsetir.schedules.operators.problems import Spmm

    code, out, err = run("lower", "spmm", "--reduce", "amin")
    assert (code, err) == (0, "") and out == spmm.program(Spmm(reduce="min")).script()
    code, out, err = run("lower", "spmm", "--template", "RowTile", "--feat", 64)
    assert code == 0 and "RowTile" in err and out.count("T.sp_iter(") > 2


def test_lower_prints_a_program_that_cannot_be_lowered(run, monkeypatch):
    def refuse(*args, **options):
        raise sparsetir.LoweringError("scale: it cannot be lowered")

    monkeypatch.setattr(sys.modules["sparsetir.runtime.pipeline"], "lower", refuse)
    Path("one.py").write_text(PROGRAM)
    code, out, _ = run("lower", "one.py", "--stage", "1")
    assert code == 0 and "T.sp_iter" in out
    code, _, err = run("lower", "one.py", "--stage", "2")
    assert code != 0 and "scale: it cannot be lowered" in err


def test_lower_with_a_config_for_a_gpu(run):
    config = json.dumps(to_data(sparsetir.plan_candidates("spmm", sp.eye_array(4), 32)[0]))
    code, _, err = run("lower", "spmm", "--config", config, "--stage", 2, "--target", "cuda")
    assert code == 2 and err.startswith("sparsetir lower: argument 'config': expected RowSplit")
    code, out, _ = run("lower", "sddmm", "--stage", "source", "--json", "--target",
                       '{"kind": "cuda", "arch": "sm_80"}')  # fmt: skip
    data = json.loads(out)
    assert (
        code == 0 and "__global__" in data["text"] and data["config"]["template"] == "FusedNonzeros"
    )


SPLIT = """
def apply(sch):
    it = sch.get_sparse_iteration("scale")
    sch.divide(sch.get_sp_iters(it)[0], 4)
"""


def test_lower_a_function_of_a_file(run):
    Path("one.py").write_text(PROGRAM)
    for stage, mark in (("1", "T.sp_iter"), ("2", "T.sblock"), ("3", "nnz"), ("asm", ".text")):
        code, out, err = run("lower", "one.py", "--stage", stage)
        assert (code, err) == (0, "") and mark in out
    Path("two.py").write_text(PROGRAM + "\nother = scale\n")
    code, _, err = run("lower", "two.py")
    assert code == 2 and "two.py holds scale, other: name one, as two.py:scale" in err
    assert run("lower", "two.py:other")[0] == 0
    Path("fast.py").write_text(SPLIT)
    code, out, _ = run("lower", "two.py:other", "--schedule", "fast.py:apply", "--stage", "2")
    assert code == 0 and "in range(4)" in out
    code, _, err = run("lower", "two.py:third")
    assert code == 2 and "two.py has no third, but scale, other" in err
    Path("none.py").write_text("x = 1\n")
    code, _, err = run("lower", "none.py")
    assert code == 2 and "none.py holds no @T.prim_func" in err
    Path("bad.py").write_text("1 / 0\n")
    code, _, err = run("lower", "bad.py")
    assert (code, err) == (1, "sparsetir lower: bad.py: ZeroDivisionError: division by zero\n")


def test_formats(run, tmp_path, monkeypatch):
    matrix = np.array([[0, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 1]])
    rows, cols = np.nonzero(matrix)
    np.savez(tmp_path / "g.npz", row=rows, col=cols, shape=[4, 4])
    code, out, err = run("formats", "g.npz", "--json")
    data = json.loads(out)
    about = data["statistics"]
    assert (code, err) == (0, "")
    assert about["shape"] == [4, 4] and about["nnz"] == 5 and about["density"] == 5 / 16
    assert about["symmetric"] and about["bandwidth"] == 2 and about["diagonal"] == 1
    assert about["empty_rows"] == 1 and about["row_length"]["mean"] == 1.25
    assert about["row_length"]["quantiles"]["1"] == 2
    cells = {cell["format"]: cell for cell in data["formats"]}
    assert cells["csr"]["places"] == 5 and cells["csr"]["padding"] == 0
    assert cells["csr"]["bytes"] == 5 * 4 + 5 * 4 + 5 * 4
    assert cells["ell"]["places"] == 8 and cells["ell"]["padding"] == pytest.approx(3 / 8)
    assert data["defaults"]["spmm, 32 features"]["template"] == "RowTile"
    code, out, _ = run("formats", "g.npz", "--picture", "g.png", "--format", "hyb_1_1")
    assert code == 0 and "pattern symmetric, 1 on the diagonal, bandwidth 2" in out
    assert "picture: g.png" in out and "hyb_1_1" in out and "\nell " not in out
    drawn = Path("g.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")

    def savefig(figure, path):
        Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
    code, _, err = run("formats", "g.npz", "--picture", "g.png", "--format", "csr")
    assert code == 1 and err.endswith("g.png: cannot be written: No space left on device\n")
    assert Path("g.png").read_bytes() == drawn


def test_formats_of_a_graph_without_elements(run, tmp_path):
    np.savez(tmp_path / "g.npz", shape=[0, 3], indptr=[0], indices=np.empty(0, int))
    code, out, err = run("formats", "g.npz", "--format", "csr")
    assert (code, err) == (0, "") and "0 x 3, 0 elements" in out


def test_formats_does_not_make_what_is_too_large(run):
    code, out, _ = run("formats", "cora", "--format", "dia", "csr")
    assert code == 0 and "not made: 95 MB" in out and "least memory" in out
    assert max(map(len, out.splitlines())) <= 100


def test_formats_take_parameters(run):
    words = ("BSR(8, 8)", "hyb_2_4", "row_ell_16", "sr_bcrs(4,16)", "enum_2", "csr")
    code, out, _ = run("formats", "cora", "--json", "--format", *words)
    names = [cell["format"] for cell in json.loads(out)["formats"]]
    assert code == 0
    assert names == ["bsr_8_8", "hyb_2_4", "row_ell_16", "sr_bcrs_4_16", "enum_2", "csr"]


def record(op="spmm", graph="cora", feat=32, seconds=1e-5):
    pattern = hashlib.md5(graph.encode()).hexdigest()
    key = Key(op, "float32", "sum", None, feat, 2, "llvm", "cpu", "m1", pattern)
    config = to_data(RowTile(tile=32))
    return Record(key, config, seconds, 2e-5, graph=graph, trials=9)


def test_records(run, records):
    for one in (record(), record(seconds=5e-6), record(feat=64), record(graph="pubmed")):
        records.add(one)
    code, out, err = run("records", "list")
    lines = out.splitlines()
    assert (code, err, len(lines)) == (0, "", 8) and max(map(len, lines[:-1])) <= 100
    assert lines[2] == "    RowTile tile=32"
    assert lines[1].split()[:8] == ["spmm", "cora", "32", "float32", "sum", "2", "5.00", "µs"]
    assert lines[-1] == f"3 problems, 4 records in {records.path}"
    assert len(json.loads(run("records", "list", "--graph", "cora", "--json")[1])["records"]) == 3
    code, out, _ = run("records", "export", "all.json")
    assert (code, out) == (0, "4 records written to all.json\n")
    code, _, err = run("records", "export", "all.json")
    assert code == 1 and err.startswith("sparsetir records: all.json exists already")
    assert run("records", "export", "all.json", "--replace")[0] == 0
    code, out, _ = run("records", "forget", "--graph", "cora", "--feat", 32)
    assert (code, out) == (0, f"2 records deleted from {records.path}\n")
    code, out, _ = run("records", "import", "all.json", "--json")
    assert code == 0 and json.loads(out) == {"records": 2}
    assert run("records", "forget", "--all")[1].startswith("4 records deleted")


def test_records_of_other_versions_are_counted(run, records):
    records.add(record())
    records.add(replace(record(graph="pubmed"), versions={"sparsetir": "0.0.1"}))
    out = run("records", "list")[1]
    assert "cora" in out and "pubmed" not in out
    assert out.splitlines()[-1].endswith(f"{records.path}, 1 of other versions, which plans ignore")


def test_records_that_cannot_be_read(run, tmp_path, monkeypatch):
    (tmp_path / "bad.sqlite").write_text("no database, but long enough to be looked at" * 99)
    code, out, err = run("records", "list", "--records", "bad.sqlite")
    assert (code, out) == (1, "") and "bad.sqlite" in err and err.count("\n") == 1
    monkeypatch.setenv("SPARSETIR_RECORDS", "")
    code, _, err = run("records", "list")
    assert code == 1 and err.startswith("sparsetir records: records are switched off")


def test_doctor(run, records):
    records.add(record())
    code, out, err = run("doctor")
    assert (code, err) == (0, "") and "all that is needed works" in out
    assert len(out.splitlines()) <= 24
    assert f"{records.path}: 1 record in " in out
    data = json.loads(run("doctor", "--json")[1])
    assert data["versions"]["sparsetir"] == sparsetir.__version__
    assert data["targets"][0] == "llvm" and data["cpu"]["vector_bits"] >= 128
    features = " ".join(data["cpu"]["features"])
    assert f"features: {features}" in out and all(x[0] in "+-" for x in data["cpu"]["unlike"])
    assert data["kernel"]["largest_error"] < 1e-4 and data["problems"] == []


def test_doctor_where_there_is_no_linux(run, monkeypatch):
    """A machine without /proc, /sys, CPU affinity and advice on memory."""
    opened = io.open

    def elsewhere(file, *words, **options):
        if str(file).startswith(("/proc", "/sys")):
            raise FileNotFoundError(file)
        return opened(file, *words, **options)

    for module in (builtins, io):
        monkeypatch.setattr(module, "open", elsewhere)
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name)
    with assume(macos(lambda name: b"", "arm64", range(8))):
        code, out, err = run("doctor")
    assert (code, err) == (0, "") and "all that is needed works" in out
    assert "caches: the system does not say" in out and "8 cores" in out
    assert "macOS on arm64: not tested" in out


def test_doctor_tells_what_is_broken(run, tmp_path, monkeypatch):
    (tmp_path / "bad.sqlite").write_text("no database" * 999)
    monkeypatch.setenv("SPARSETIR_RECORDS", str(tmp_path / "bad.sqlite"))

    def broken(*words, **options):
        raise RuntimeError("LLVM is\nill")

    monkeypatch.setattr(sparsetir, "plan", broken)
    code, out, _ = run("doctor")
    assert code == 1 and "RuntimeError: LLVM is\n" in out and "bad.sqlite" in out
    assert "all that is needed works" not in out
    assert len(json.loads(run("doctor", "--json")[1])["problems"]) == 2


PLUG_IN = """
from dataclasses import dataclass, replace
from sparsetir.formats import BSR
from sparsetir.formats.format import register as register_format
from sparsetir.schedules.operators.operands import OPERATORS, register
from sparsetir.schedules.operators.problems import Sddmm
from sparsetir.schedules.operators.sddmm import program
from sparsetir.schedules.template import Template, register as register_template
from sparsetir.schedules.templates.register_tile import Tiled

@dataclass(frozen=True)
class Mine(Tiled):
    tile: int = 1
    lanes: int = 16
    feat: None = None

@dataclass(frozen=True)
class Ours(BSR):
    pass

register(replace(OPERATORS["sddmm"], name="mine"))
register_template(Template(Mine, Sddmm, program, lambda sch, config: None))
register_format(Ours)
"""
# Words beside those of the plug-in, and what their output has.
PLUGGED_IN = """
tune mine --graph cora --feat 8 --trials 1 --threads 1 --no-report  # mine on cora
lower mine  # with T.sp_iter
lower mine --template Mine --feat 128  # def sddmm
lower mine --config {"template":"Mine","lanes":8} --feat 128  # def sddmm
explain mine --feat 8 --dtype float16  # "float16"
formats cora --format ours_8_8  # bsr_8_8
records list  # Mine lanes=8
"""


@pytest.fixture
def registries(monkeypatch):
    """Restore the registries in the end."""
    every = [OPERATORS, TEMPLATES, REGISTRY, sys.modules]
    before = [dict(registry) for registry in every]
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for registry, kept in zip(every, before):
        for name in registry.keys() - kept.keys():
            del registry[name]


@pytest.mark.parametrize("row", PLUGGED_IN.strip().splitlines())
@pytest.mark.slow
def test_plug_ins(run, records, registries, monkeypatch, row):
    """Each command imports registered modules before it reads its other arguments."""
    install(monkeypatch)
    records.add(replace(record(), config={"template": "Mine", "lanes": 8}))
    Path("plugged_in.py").write_text(PLUG_IN)
    words, line = row.split("  # ")
    code, out, err = run(*words.split(), "--modules", "plugged_in")
    assert code == 0 and line in out, err


def test_plug_ins_of_the_bench(run, registries, capsys):
    Path("plugged_in.py").write_text(PLUG_IN)
    with pytest.raises(SystemExit):
        run("bench", "run", "--op", "gone", "--modules", "plugged_in")
    assert ", mine, got 'gone'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="sparsetir bench: argument --modules: gone: ModuleNot"):
        run("bench", "run", "--modules", "gone")
    Path("bad.py").write_text("1 / 0")
    code, _, err = run("doctor", "--modules", "bad")
    assert code == 1 and err.endswith(
        "argument --modules: bad: ZeroDivisionError: division by zero\n"
    )


def process(*words, **options):
    folder = str(Path(sparsetir.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": folder}, **options,
    )  # fmt: skip


@pytest.mark.slow
def test_ctrl_c_stops_a_search(records, tmp_path):
    """An interrupt as from a terminal: the signal goes to the whole group."""
    pytest.importorskip("optuna")
    words = ("tune", "spmm", "--graph", "cora", "--no-report", "--sampler", "random")
    with process("-m", "sparsetir", *words, start_new_session=True) as running:
        deadline = time.monotonic() + 120
        for line in running.stderr:
            if "trial" in line or time.monotonic() > deadline:
                break
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130, out + err
    assert "best: " in out and "interrupted" in out and "Traceback" not in err
    assert len(records.all()) == 1
