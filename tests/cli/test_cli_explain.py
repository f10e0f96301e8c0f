"""`sparsetir explain`: loops and their proofs, the schedule's branches, the roofline, pages."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import numpy as np
import pytest

from programs import PROGRAMS
from small import small
from sparsetir.cli import main
from sparsetir.runtime import explained
from sparsetir.runtime.pipeline import lower
from sparsetir.schedules.loop_shapes import loop_shapes
from sparsetir.sparse_ir.computed import compute
from sparsetir.sparse_ir.nodes import sparse_iterations
from sparsetir.sparse_ir.schedule import Schedule

SPMM = f"""
import sparsetir
from small import small
from tvm.script import sparse_tir as T
{PROGRAMS["spmm"].make("float32", "int32").script()}
def apply(sch):
    i, j, k = sch.get_sp_iters(sch.get_sparse_iteration("spmm"))
    sch.split(k, [None, 8])
"""
ON_CORA = ("--graph", "cora", "--arg", "feat=64")


@pytest.fixture
def explain(capsys, tmp_path, monkeypatch):
    """Runs the command in a folder with spmm.py: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(explained, "SECONDS", 0.01)
    (tmp_path / "spmm.py").write_text(SPMM)

    def run(*words):
        code = main(["explain", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def program(name):
    """A test program and its arguments."""
    tested = PROGRAMS[name]
    rng = np.random.default_rng(0)
    return tested.make("float32", "int32"), tested.inputs(rng, "dense_row", "float32", "int32")


class Balance(HTMLParser):
    """Fails where elements are not closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_program_on_a_graph(explain, tmp_path):
    code, out, err = explain("spmm.py", *ON_CORA, "--html", "page.html", "--markdown", "page.md")
    assert (code, err) == (0, "")
    assert out.startswith("spmm (m=2,708, n=2,708, nnz=10,556, feat=64), by the default schedule\n")
    heads = ["Program", "Loops", "Schedule", "Roofline", "Made by"]
    begins = [out.index(f"\n{head}\n---") for head in heads]
    assert begins == sorted(begins)
    assert "update the same\n" in out and "access other elements: C[i, k]" in out
    # The branch that 64 features take: one tile of them, no others.
    assert "acc[k_lane] + A[i, j] * B[J_indices[i, j]," in out and "if feat" not in out
    assert f"flops      {2 * 10556 * 64:,} in {10556 * 64:,} visits" in out
    size = 4 * (2709 + 2 * 10556 + 2 * 2708 * 64)
    assert f"bytes      {size:,}, " in out and " % of the bound\n" in out
    page = (tmp_path / "page.html").read_text()
    balance = Balance()
    balance.feed(page)
    # As it was written, facts, II, II scheduled, III, source.
    assert not balance.open and balance.tags.count("details") == 6
    assert "C[i, k] + A[i, j] * B[j, k]" in page and "<script" not in page
    assert "## Roofline\n" in (tmp_path / "page.md").read_text()


@pytest.mark.slow
def test_facts_as_json(explain):
    code, out, err = explain("spmm.py:spmm", *ON_CORA, "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert [(x["loop"], x["parallel"]) for x in facts["loops"]] == [
        ("i", "yes"), ("j", "no"), ("k", "yes"),
    ]  # fmt: skip
    assert facts["order"] == {"spmm": "its visits may come in any order"}
    line = facts["roofline"]
    assert line["bound_seconds"] == max(line["memory_seconds"], line["compute_seconds"])
    assert line["reached"] == pytest.approx(line["bound_seconds"] / line["seconds"])
    assert line["memory_seconds"] == line["bytes"] / line["copy_bytes_per_second"]
    assert 0 < line["seconds"] <= line["median"]


@pytest.mark.slow
def test_an_operator_by_its_name(explain):
    code, out, _ = explain("sddmm", "--graph", "cora", "--json")
    facts = json.loads(out)
    sizes = facts["sizes"]
    assert code == 0 and (sizes["nnz"], sizes["feat"]) == (10_556, 32)
    assert facts["roofline"]["flops"] > 0
    assert {x["loop"]: x["parallel"] for x in facts["loops"]} == {"ij": "yes", "k": "no"}


def test_without_arguments_nothing_runs(explain, monkeypatch):
    monkeypatch.setattr(explained, "measured", None)
    code, out, _ = explain("spmm.py", "--schedule", "spmm.py:apply", "--stages")
    assert code == 0 and "by the schedule spmm.py:apply" in out
    assert "Not known without arguments" in out and "stage III:\n" in out and "source:\n" in out
    # A split loop has two variables; the program as it was written is shown, too.
    assert "C[i, k0 * 8 + k1]" in out and "as it was written:\n" in out


REFUSED = """
gone  # argument OP|FILE: expected spmm, spmv, sddmm, one of a plug-in (--modules)
spgemm  # argument OP|FILE: expected spmm, spmv, sddmm, one of a plug-in (--modules)
spmm.py --graph cora  # argument --arg: 'feat' is missing, and no array's shape
spmm.py --graph cora --arg feat=nan  # argument --arg: 'feat': expected an integer, got float nan
spmm.py --graph cora --arg feat=-3  # argument --arg: 'b': expected lengths of 0 or more, got
spmm.py --arg k=3  # argument --arg: 'spmm' has no 'k'; it has a, b, c, indptr
spmm.py --graph cora --arg a=2  # argument --arg: 'a': expected a torch, NumPy or TVM array, got int
spmm.py --arg feat=2  # argument --arg: 'indptr' is missing: expected a torch, NumPy or TVM array
spmm.py --graph gone  # argument --graph: gone: no such file
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_refusals(explain, row):
    words, message = row.split("  # ")
    code, out, err = explain(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"sparsetir explain: {message}") and err.count("\n") == 1


@pytest.mark.slow
def test_a_page_that_cannot_be_written(explain):
    code, _, err = explain("spmm.py", "--html", "gone/page.html")
    assert code == 1 and err == "sparsetir explain: gone/page.html: No such file or directory\n"


def test_visits_are_counted():
    """Visits are counted by index arrays: rows, padding, attached and sibling axes."""
    counted = {}
    for name in ("spmm", "spmm_ell", "hypergraph", "ragged_matmul", "sddmm_fused", "add_csr"):
        func, args = program(name)
        counted[name] = explained.work_of(func, args)["visits"], args
    visits, args = counted["spmm"]
    assert visits == args["nnz"] * args["feat"]
    visits, args = counted["sddmm_fused"]
    assert visits == args["nnz"] * args["feat"]
    _, args = program("spmm_ell")
    assert (args["indices"] < 0).any()
    assert counted["spmm_ell"][0] == (args["indices"] >= 0).sum() * args["feat"]
    visits, args = counted["hypergraph"]
    assert visits == np.diff(args["ev_ptr"])[args["ve_idx"]].sum() * args["feat"]
    visits, args = counted["ragged_matmul"]
    i, j, k = (np.diff(args[f"{axis}_ptr"]) for axis in "ijk")
    assert visits == (i * j * k).sum() > 0
    assert counted["add_csr"][0] is None  # merged axes: not known before they are visited


CUTS = {
    "rows": ("spmm", lambda sch, i, j, k: sch.divide(i, 8)),
    "equal work": ("spmm", lambda sch, i, j, k: sch.divide(i, "parts", by="work")),
    "elements": ("spmm", lambda sch, i, j, k: sch.divide(j, 3)),
    "columns": ("spmm", lambda sch, i, j, k: sch.divide(j, 3, by="coordinates")),
    "tiles": ("spmm", lambda sch, i, j, k: sch.split(j, [None, 2])),
    "features": ("spmm", lambda sch, i, j, k: sch.divide(k, 2)),
    "pieces": ("spmm", lambda sch, i, j, k: sch.divide(fused(sch, i, j), 4)),
    "positions": ("sddmm_fused", lambda sch, ij, k: sch.divide(ij, 4)),
}


def fused(sch, *loops):
    return sch.sparse_fuse(sch.get_sparse_iteration(loops[0].iteration), loops)


@pytest.mark.parametrize("name", CUTS)
def test_parts_have_the_visits_of_the_whole(name):
    tested, cut = CUTS[name]
    func, args = program(tested)
    sch = Schedule(func)
    (it,) = sparse_iterations(func)
    cut(sch, *sch.get_sp_iters(sch.get_sparse_iteration(it.name)))
    assert "T.part(" in sch.func.script()
    work = explained.work_of(sch.func, args, compute(sch.func, args))
    assert work == explained.work_of(func, args) and work["visits"]


def test_races_name_their_accesses():
    loops = {x["loop"]: x["why"] for x in explained.loops_of(program("spmm_coo_scatter")[0])}
    assert loops["e"] == "a race: visits that differ in e may meet at C[ROWS[e], k]"
    loops = [x for x in explained.loops_of(program("spmm_coo")[0]) if x["loop"] == "i"]
    assert loops[0]["why"] == "a race: i may be the same under another parent"


SHAPES = {
    "spmm": {"spmm1": "tiles of 16 + 16 in registers"},
    "spmm_coo_scatter": {
        "zero0": "left to LLVM, which has vectors for it",
        "scatter0": "vectors of at most 8 lanes; each thread updates the elements that it owns",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_innermost_loops_say_what_became_of_them(name):
    stages = lower(program(name)[0], target={"kind": "llvm", "mcpu": "haswell"})
    shapes = loop_shapes(stages["II"], explained.with_sizes(stages["II scheduled"], {"feat": 32}))
    assert shapes == SHAPES[name]


OBSTACLES = {
    "OUT[I_[e]] = OUT[I_[e]] + A[e]": "it stores OUT[I_[e]], which are not next to each other",
    "OUT[2 * e] = A[e]": "it stores OUT[T.int64(2) * ",
    "F[e] = A[e] > T.float32(1)": "there are no vectors of booleans",
    "if A[e] > T.float32(1):\n        OUT[e] = A[e]": "each visit of e has a condition of its own",
    "OUT[e] = A[e]\n    A[e] = T.float32(0)": "its body is more than one store",
}


@pytest.mark.parametrize("body", OBSTACLES)
def test_what_stays_scalar_has_a_reason(body):
    func = small(
        "one", f'with T.sp_iter([E], "S", "one") as [e]:\n    {body}', "E = T.dense_fixed(m)",
        A="E", I_="E int32", OUT="E", F="E bool",
    )  # fmt: skip
    stages = lower(func)
    (shape,) = loop_shapes(stages["II"], stages["II scheduled"]).values()
    assert shape.startswith(f"one by one, as {OBSTACLES[body]}")


def test_branches_go_by_sizes():
    func, args = program("spmm")
    scheduled = lower(func)["II scheduled"]
    every = explained.scheduled_loops(scheduled, {})
    sizes = {n: int(x) for n, x in args.items() if np.ndim(x) == 0}
    some = explained.scheduled_loops(scheduled, sizes)
    assert every.count("\nelse:") > 0 and "else:" not in some and len(some) < len(every) / 3
    assert "T.reads" not in every and "sblock(" not in every and "T.axis" not in every
