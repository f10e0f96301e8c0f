"""The run of PyG's own tests, on a file made up for it."""

import pytest

import pyg_tests

TESTS = """
import os
import sys

import pytest
import torch
from torch_geometric.nn import MessagePassing

PLAIN = MessagePassing.__call__


def test_fails_in_each_way():
    raise ValueError("here")


def test_fails_inside_of_accelerate():
    assert MessagePassing.__call__ is PLAIN, "replaced"


def test_ends_the_process_inside_of_accelerate():
    if MessagePassing.__call__ is not PLAIN:
        os._exit(70)


@pytest.mark.parametrize("n", [1, 2])
def test_runs_by_the_backend(n):
    torch.compile(lambda x: x + n, fullgraph=True)(torch.rand(2))
    assert n == 1 or "sparsetir.graph.backend" not in sys.modules, "compiled"
"""


@pytest.mark.slow
def test_outcomes_in_each_way(tmp_path, capsys):
    pytest.importorskip("torch_geometric")
    (tmp_path / "test_one.py").write_text(TESTS)
    assert pyg_tests.main([str(tmp_path), "--ways", "layers", "sparsetir"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "test_one" in line] == [
        "  layers: test_one.py::test_fails_inside_of_accelerate: failed: AssertionError: replaced",
        "  layers: test_one.py::test_ends_the_process_inside_of_accelerate: ended the process",
        "  sparsetir: test_one.py::test_runs_by_the_backend[2]: failed: AssertionError: compiled",
    ]
    assert lines[0] == "plain: 1 failed, 4 passed"


def test_what_counts(capsys, monkeypatch):
    """Tests that pass in the reference of a way, and fail in the way."""
    passed, failed = ("passed", ""), ("failed", "ValueError: here")
    outcomes = {
        "plain": {"a": passed, "b": passed, "c": passed, "d": failed},
        "aot_eager": {"a": passed, "b": failed, "c": passed},
        "sparsetir": {"a": failed, "b": failed, "c": passed, "d": failed},
        "products": {"a": passed, "b": passed, "c": passed},
    }
    monkeypatch.setattr(pyg_tests, "run", lambda tests, parts, way, more: outcomes[way])
    assert pyg_tests.main(["tests", "--ways", "products", "aot_eager"]) == 0
    assert "  aot_eager: b: failed: ValueError: here\n" in capsys.readouterr().out
    assert pyg_tests.main(["tests", "nn", "--ways", "sparsetir"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "  sparsetir: a: failed: ValueError: here",
        "sparsetir: 1 of 2 fail that pass in aot_eager",
    ]
