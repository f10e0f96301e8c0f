"""Expressions on the command line: an option for each operand, programs, searches, refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp

import sparsetir
from fake_measurer import install
from sparsetir.cli import main
from sparsetir.datasets import load_cora
from sparsetir.runtime import explained
from sparsetir.runtime.pipeline import lower

SPMM = "C[i,k] = A[i,j] * X[j,k]"
ON_CORA = ("--A", "cora", "--X", "2708x64")


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Runs the command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        return main([str(word) for word in words]), *capsys.readouterr()

    return run


def programs(text, *operands, **by_name):
    """The programs that `einsum` runs."""
    return [p.script() for p in sparsetir.plan(text, *operands, **by_name).programs]


def test_lower_prints_the_program_of_einsum(run):
    A, X = sparsetir.SparseMatrix(load_cora()), np.ones((2708, 64), "float32")
    code, out, err = run("lower", SPMM, *ON_CORA)
    assert (code, err) == (0, "") and [out] == programs(SPMM, A=A, X=X)
    assert [run("lower", SPMM, "--A", "csc:cora", "--X", "2708x64")[1]] == programs(
        SPMM, A=A, X=X, formats={"A": "csc"}
    )
    sampled = "S[i,j] = A[i,j] * X[i,k] * Y[j,k]"
    words = (*ON_CORA, "--Y", "2708x64", "--dtype", "float16", "--like", "A")
    X = X.astype("float16")
    want = programs(sampled, A=A.astype("float16"), X=X, Y=X, like="A")
    assert [run("lower", sampled, *words)[1]] == want
    squared = "C[i,k] = A[i,j] * A[j,k]"
    want = programs(squared, A=A, format="csr")
    assert [run("lower", squared, "--A", "cora", "--format", "csr")[1]] == want
    sums = "C[i,k] = A[i,j] * A[j,k] + A[i,k]"
    out = run("lower", sums, "--A", "cora", "--format", "csr")[1]
    assert "T.sparse_variable(I, (n_k, None)" in out and out.count("T.sp_iter") == 2
    out = run("lower", "C[i,j] = A[i,j] + A[j,i]", "--A", "cora", "--format", "csr")[1]
    assert "T.union(" in out and out.count("T.sp_iter") == 1
    code, out, err = run("lower", squared, "--A", "cora", "--format", "csr", "--stage", "2")
    assert (code, err) == (0, "") and "C1_indptr: T.Buffer(" in out and "c_nnz: T.int32" in out
    code, out, _ = run("lower", SPMM, *ON_CORA, "--stage", "3", "--json")
    data = json.loads(out)
    assert code == 0 and data["program"] == SPMM and data["config"] is None
    assert "T.vectorized" in data["text"] and "A: T.Buffer((A1_nnz,)" in data["text"]


def test_operands_are_graphs_arrays_shapes_and_numbers(run):
    """The order of options is free; subscripts, +=, relations, one pattern for one file."""
    matrix = sp.random_array((6, 5), density=0.4, format="csr", dtype="float32", rng=0)
    sp.save_npz("a.npz", matrix)
    np.save("x.npy", np.ones(5))
    A = sparsetir.SparseMatrix(matrix)
    x, wide = np.ones(5, "float32"), np.ones((5, 4), "float32")
    rest = ("--x", "x.npy", "--A", "a.npz", "--alpha", "-0.5", "y[i] += alpha * A[i,j] * x[j]")
    want = programs(rest[-1], A=A, x=x.astype("float64"), alpha=-0.5, y=np.ones(6, "float32"))
    assert [run("lower", "--y", "6", *rest)[1]] == want
    assert [run("lower", "ij,jk->ik", "--A1", "5x4", "--A0", "a.npz")[1]] == programs(
        "ij,jk->ik", A, wide
    )
    both = "C[i,j] = A[i,j] + 2 * B[i,j]"
    assert [run("lower", both, "--A", "a.npz", "--B", "a.npz")[1]] == programs(both, A=A, B=A)
    edges = {name: np.arange(9) % size for name, size in (("src", 5), ("dst", 4), ("etype", 2))}
    np.savez("g.npz", **edges, num_nodes=6)
    code, out, _ = run("lower", "M[r] = P[r,i,j] * V[i] * W[j]", "--P", "g.npz", "--V=6", "--W=6")
    assert code == 0 and "with T.sp_iter([I, J, R], " not in out and '"SRR"' in out


def test_explain_runs_it(run, monkeypatch):
    monkeypatch.setattr(explained, "SECONDS", 0.01)
    code, out, err = run("explain", "C[i,k] = s * A[i,j] * X[j,k]", *ON_CORA, "--s", "2")
    assert (code, err) == (0, "")
    assert out.startswith("C[i,k] = s * A[i,j] * X[j,k] (n_i=2,708, n_j=2,708, A1_nnz=10,556), by")
    assert "access other elements: C[i, k]" in out and "C1: tiles of 64 in registers" in out
    assert f"in {10556 * 64:,} visits" in out and " % of the bound\n" in out


@pytest.mark.parametrize("format", ["csr", "dcsr"])
def test_sparse_results_are_explained_and_tuned_at_their_pattern(run, monkeypatch, format):
    monkeypatch.setattr(explained, "SECONDS", 0.01)
    squared = "C[i,k] = A[i,j] * A[j,k]"
    A = load_cora().astype("float32")
    words = ("--A", "cora", "--format", format)
    code, out, err = run("explain", squared, *words)
    visits = int(np.diff(A.indptr)[A.indices].sum())
    assert (code, err) == (0, "") and f"={(abs(A) @ abs(A)).nnz:,}, " in out
    assert f"in {visits:,} visits" in out and " % of the bound\n" in out
    install(monkeypatch)
    code, out, err = run("tune", squared, *words, "--trials", 2)
    assert code == 2 and "expected one for 'expression', as none is derived" in err
    sampled = "C[i,j] = A[i,j] * X[i,k] * Y[j,k]"
    features = ("--X", "2708x8", "--Y", "2708x8", "--trials", 2, "--json", "--no-report")
    code, out, _ = run("tune", sampled, *words, *features)
    (tuned,) = json.loads(out)["runs"]
    assert code == 0 and tuned["counts"] == {"ok": 2}


def test_tune_keeps_a_record(run, records, monkeypatch):
    install(monkeypatch)
    words = ("tune", SPMM, *ON_CORA, "--trials", 4, "--threads", 1)
    code, out, _ = run(*words)
    assert code == 0 and "expression on cora (n_i=2,708, n_j=2,708, A1_nnz=10,556), 1 thr" in out
    assert "C.vectors=" in out and "report: sparsetir-tune-expression-cora.html\n" in out
    (kept,) = records.all()
    assert (kept.key.op, kept.graph, kept.trials) == ("expression", "cora", 4)
    code, out, _ = run(*words, "--json", "--no-report", "--space", '{"C.vectors": [1]}')
    data = json.loads(out)
    assert (data["program"], data["graph"]) == (SPMM, "cora")
    A, X = sparsetir.SparseMatrix(load_cora()), np.ones((2708, 64), "float32")
    program = sparsetir.plan(SPMM, A=A, X=X).programs[0]
    arguments = {"a": A.values, "x": X, "A1_ptr": A.pattern.indptr, "A1_idx": A.pattern.columns}
    tuned = sparsetir.tune(program, arguments, trials=1, threads=1)
    assert tuned.key == kept.key  # of the program of `einsum`, on this pattern
    config = dict(data["runs"][0]["best"][0]["config"]["values"])
    lower(program, tuned.schedule, config)  # is one of its schedules


REFUSED = """
lower; --A cora  # the following arguments are required: --X
lower; --A cora --X 2708x8 --like B  # argument 'like': expected a sparse tensor, or the name of
lower; --A cora --X 2708x8 --graph cora  # argument --graph: expected none for an expression
lower; --A cora --X 2708x8 --feat 8  # argument --feat: expected none for an expression
lower; --A cora --X 2708x8 --template  # argument --template: expected none for an expression
lower; --A gone --X 2708x8  # argument --A: gone: no such file
lower; --A coo:gone --X 2708x8  # argument --A: gone: no such file
lower; --A csf_0_2:cora --X 2708x8  # argument 'A': expected a format of 2 dimensions
lower; --A cora --X x.npy  # argument --X: x.npy: No such file or directory
explain; --A cora --X 2708x8 --arg A=2  # argument --arg: expected none for an expression
explain; --A cora --X 2708x8 --reduce max  # argument --reduce: expected none for an expression
tune; --A cora --X 2708x8 --arg A=2  # argument --arg: expected none for an expression
tune; --A cora --X 2708x8 --heads 2  # argument --heads: expected none for an expression
tune; --A cora --X 2708x8 --graph cora  # argument --graph: expected none for an expression
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_refusals(run, row):
    words, message = row.split("  # ")
    command, rest = words.split("; ")
    code, out, err = run(command, SPMM, *rest.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"sparsetir {command}: {message}") and err.count("\n") == 1


def test_unknown_operands_are_refused_by_name(run):
    code, _, err = run("lower", SPMM, *ON_CORA, "--Z", "3x3")
    assert (code, err) == (2, "sparsetir: unrecognized arguments: --Z 3x3\n")
    code, _, err = run("lower", "y[i] = graph[i,j]", "--graph", "cora")
    assert code == 2 and "expected another name for the operand 'graph', as --graph is an" in err
    code, _, err = run("lower", "y[i] = c * A[i,j]", "--A", "cora", "--c", "two")
    assert code == 2 and "argument --c: expected a number, file.npy or file.npz:key, got" in err


PLACES = """
C[i,k] = A[i,j] * X[j,k; --A cora # '[' was never closed
C[i,k] = A[i,j] * X[j,k]; --A cora --X 2700x8 # index 'j' has size 2708 in dimension 1 of 'A' and
C[i,k] = A[i,j] * X[j,k]; --A cora --X 2708 # operand 'X' has 1 dimension, got 2 indices
y[i] = c * A[i,j]; --A cora --c 2x2 # operand 'c' has 2 dimensions, got 0 indices
ij,jk->iz; --A0 cora --A1 2708x8 # 'z': expected an index of an operand, once
"""


@pytest.mark.parametrize("row", PLACES.strip().splitlines())
def test_what_does_not_fit_is_shown_with_its_place(run, row):
    text, rest = row.split("; ")
    words, message = rest.split(" # ")
    code, out, err = run("lower", text, *words.split())
    first, shown, caret, end = err.split("\n")
    assert (code, out, shown, end) == (2, "", f"    {text}", "")
    assert first.startswith(f"sparsetir lower: {message}") and caret.strip(" ^") == ""


def test_help_names_the_operands(run, capsys):
    with pytest.raises(SystemExit) as stop:
        run("explain", SPMM, "--help")
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "of the expression:" in out and "  --X X " in out
