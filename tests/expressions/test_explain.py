"""`sparsetir.explain` of programs, scheduled, built or not, and of expressions."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse

import sparsetir
from programs import PROGRAMS
from sparsetir.runtime import explained

SPMM = PROGRAMS["spmm"].make("float32", "int32")
TEXT = "C[i,k] = A[i,j] * X[j,k]"
MATRIX = scipy.sparse.random(40, 30, 0.2, "csr", "float32", np.random.default_rng(0))
X = np.ones((30, 8), "float32")
GIVEN = {
    "a": MATRIX.data, "indptr": MATRIX.indptr, "indices": MATRIX.indices, "b": X, "m": 40,
}  # fmt: skip


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    monkeypatch.setattr(explained, "SECONDS", 0.01)
    monkeypatch.setattr(explained, "dense_rate", lambda seconds: 1e9)


@pytest.fixture(scope="module")
def kernel():
    return sparsetir.build(SPMM)


def split(sch):
    """A schedule."""
    (_, _, k) = sch.get_sp_iters(sch.get_sparse_iteration("spmm"))
    sch.split(k, [None, 8])


def scheduled():
    sch = sparsetir.Schedule(SPMM)
    split(sch)
    return sch


def test_a_program_without_arguments_is_not_run(monkeypatch):
    monkeypatch.setattr(explained, "measured", None)
    report = sparsetir.explain(SPMM)
    loops = [(x["loop"], x["parallel"]) for x in report.facts["loops"]]
    assert loops == [("i", "yes"), ("j", "no"), ("k", "yes")]
    assert report.title == "spmm, by the default schedule" and report.facts["roofline"] == {}
    assert str(report) == repr(report) == report.text() and "stage III:" not in str(report)
    assert "Not known without arguments" in str(report) and "if feat" in report.facts["scheduled"]
    loops = report.facts["scheduled"]
    assert "only the branches of their sizes" in str(report).replace("\n  ", " ")
    assert loops not in str(report) and loops in report.text(stages=True)
    assert "stage III:\n" in report.text(stages=True) and "source:\n" in report.text(stages=True)
    assert report.html().startswith("<!DOCTYPE html>") and "## Loops\n" in report.markdown()


def test_tiles_are_listed_in_order():
    (shape,) = sparsetir.explain(SPMM).facts["innermost"].values()
    listed = shape.removeprefix("tiles of ").removesuffix(" in registers").split(", ")
    tiles = [[int(part) for part in tile.split(" + ")] for tile in listed]
    assert tiles == sorted(tiles) and [1] in tiles and [8, 8] in tiles


def test_arguments_run_it_and_are_left_as_they_are():
    out = np.full((40, 8), 7, "float32")
    report = sparsetir.explain(SPMM, {**GIVEN, "c": out})
    assert report.facts["sizes"] == {"m": 40, "n": 30, "nnz": MATRIX.nnz, "feat": 8}
    line = report.facts["roofline"]
    assert line["visits"] == MATRIX.nnz * 8 and line["flops"] == 2 * MATRIX.nnz * 8
    assert line["seconds"] > 0 and (out == 7).all()
    assert report.title == f"spmm (m=40, n=30, nnz={MATRIX.nnz}, feat=8), by the default schedule"
    assert "if feat" not in report.facts["scheduled"]  # the branches that 8 features take


@pytest.mark.parametrize("by_name", [True, False])
def test_a_schedule(by_name):
    report = sparsetir.explain(SPMM, schedule=split) if by_name else sparsetir.explain(scheduled())
    by = "the schedule split" if by_name else "its schedule"
    assert report.title == f"spmm, by {by}"
    assert report.facts["schedule"] == ("split" if by_name else None)
    assert [x["loop"] for x in report.facts["loops"]] == ["i", "j", "k0", "k1"]
    written = report.text(stages=True).partition("as it was written:")[2].partition("Loops\n")[0]
    assert ("C[i, k0 * 8 + k1]" in written) != by_name


def test_a_kernel_is_the_one_that_is_shown(monkeypatch, kernel):
    monkeypatch.setattr(explained, "build", None)
    report = sparsetir.explain(kernel, GIVEN)
    assert report.kernel is kernel and report.title.endswith(", as it was built")
    assert report.facts["roofline"]["visits"] == MATRIX.nnz * 8
    assert "as it was written" not in report.text(stages=True)


def test_a_plan_is_explained_by_its_kernel():
    plan = sparsetir.plan("spmm", MATRIX, feat=8)
    report = sparsetir.explain(plan)
    assert report.kernel is plan.kernel and report.title == "spmm, as it was built"


def test_parameters_that_a_schedule_computes_are_not_given():
    """Computed parameters count as visits, and not among the bytes of the program."""
    sch = sparsetir.Schedule(SPMM)
    rows, columns, _ = sch.get_sp_iters(sch.get_sparse_iteration("spmm"))
    sch.sort_rows_by_length(rows, columns, 8)
    report = sparsetir.explain(sch, GIVEN)
    assert report.kernel.computed
    line, sizes = report.facts["roofline"], [x.nbytes for n, x in GIVEN.items() if n != "m"]
    assert (line["flops"], line["bytes"]) == (2 * MATRIX.nnz * 8, sum(sizes) + 4 * 40 * 8)


@pytest.mark.parametrize("text", [TEXT, "ij,jk->ik"])
def test_an_expression(text):
    named = {"A": MATRIX, "X": X} if text == TEXT else {}
    page = sparsetir.explain(text, *([] if named else [MATRIX, X]), **named)
    assert page.title.startswith(f"{text} (") and page.title.endswith(", by the default schedule")
    assert page.facts["roofline"]["flops"] == 2 * MATRIX.nnz * 8
    assert page.facts["innermost"] and page.kernel.target.kind.name == "llvm"


def test_an_operand_may_have_the_name_of_an_internal_argument():
    report = sparsetir.explain(
        "y[i] = who[i,j] * text[j]", who=MATRIX, text=X[:, 0].copy(), like=None
    )
    assert report.facts["roofline"]["flops"] == 2 * MATRIX.nnz


def test_an_expression_for_a_gpu_is_not_run():
    report = sparsetir.explain(TEXT, A=MATRIX, X=X, target="cuda")
    assert "seconds" not in report.facts["roofline"] and "not run" in str(report)
    assert report.facts["innermost"] == {} and "__global__" in report.text(stages=True)


REFUSED = {
    "explain: argument 'what': expected an expression, such as": (("spmm",), {}),
    "explain: argument 'what': expected a stage-I function, a Sch": ((3,), {}),
    "explain: argument 'feat': expected one of schedule, target; ": ((SPMM,), {"feat": 8}),
    "explain: argument 'inputs': expected one dict of arguments, got 2": ((SPMM, {}, {}), {}),
    "explain: argument 'arguments': expected a dict of arrays and": ((SPMM, X), {}),
    "explain: argument 'arguments': 'spmm' has no 'x'; it has a, ": ((SPMM, {"x": X}), {}),
    "explain: argument 'arguments': 'indptr' is missing: expected a torch, NumPy or TVM array": (
        (SPMM, {"feat": 8}),
        {},
    ),
    "explain: argument 'X': expected the operand of this name": ((TEXT,), {"A": MATRIX}),
    "explain: argument 'target': ": ((SPMM,), {"target": "gone"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    inputs, options = REFUSED[message]
    with pytest.raises((TypeError, ValueError)) as error:
        sparsetir.explain(*inputs, **options)
    assert str(error.value).startswith(message)


def test_kernels_that_cannot_be_explained(kernel, tmp_path):
    with pytest.raises(ValueError, match="argument 'target': expected none for a kernel"):
        sparsetir.explain(kernel, target="llvm")
    kernel.export(tmp_path / "spmm.so")
    with pytest.raises(ValueError, match="argument 'what': .*got the kernel 'spmm', of a file"):
        sparsetir.explain(sparsetir.load(tmp_path / "spmm.so"))
    second = sparsetir.build(sparsetir.lower_sparse_iter(SPMM))
    with pytest.raises(ValueError, match="stage-I function, got .*, of a function of stage II"):
        sparsetir.explain(second)
