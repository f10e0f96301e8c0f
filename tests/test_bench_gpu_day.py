"""`python -m bench gpu_day`: steps one by one, each written down, ended when they take too long."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from bench import gpu_day
from bench.gpu_day import Step


def run(folder, chosen, monkeypatch, **options):
    """The command with these steps; the states by name, and its JSON file."""
    monkeypatch.setattr(gpu_day, "steps", lambda *_: chosen)
    given = {"out": folder, "quick": True, "target": "cpu", "minutes": 0.2, "only": None}
    try:
        gpu_day.run(argparse.Namespace(threads=1, **{**given, **options}))
    finally:
        (path,) = folder.glob("gpu_day-*.json")
        cells = json.loads(path.read_text())["results"]["steps"]
    return {c["step"]: c for c in cells}


def python(text):
    return (sys.executable, "-c", text)


def test_steps_are_written_down(tmp_path, monkeypatch, capsys):
    chosen = [Step("a", python("print('hello')"), 0.5), Step("b", python("print('there')"), 0.5)]
    cells = run(tmp_path, chosen, monkeypatch)
    assert [(c["state"], c["printed"]) for c in cells.values()] == [
        ("done", "hello\n"), ("done", "there\n"),
    ]  # fmt: skip
    assert "A day on cpu" in capsys.readouterr().out
    assert list(run(tmp_path, chosen, monkeypatch, only=["b"])) == ["b"]


def test_a_step_that_takes_too_long_is_ended_with_what_it_started(tmp_path, monkeypatch):
    """The last one has no time left; what was printed is kept."""
    started = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    chosen = [Step("long", python(started), 0.2), Step("next", python(""), 0.5),
              Step("late", python(""), 0.05)]  # fmt: skip
    cells = run(tmp_path, chosen, monkeypatch)
    assert [c["state"] for c in cells.values()] == ["ended", "done", "no time"]
    assert cells["long"]["printed"] == "begun\n" and cells["long"]["seconds"] < 10


def test_failures_are_told_and_the_rest_is_run(tmp_path, monkeypatch):
    chosen = [Step("bad", python("raise SystemExit(3)"), 0.4), Step("good", python(""), 0.4)]
    with pytest.raises(SystemExit) as error:
        run(tmp_path, chosen, monkeypatch)
    assert error.value.code == 1
    (path,) = tmp_path.glob("gpu_day-*.json")
    cells = json.loads(path.read_text())["results"]["steps"]
    assert [(c["state"], c["code"]) for c in cells] == [("failed", 3), ("done", 0)]


def test_unknown_steps_are_refused(tmp_path):
    given = argparse.Namespace(
        threads=1, out=tmp_path, quick=True, target="cpu", minutes=1, only=["spnn"]
    )
    with pytest.raises(SystemExit, match="'--only': expected some of tests, spmm, .*got .'spnn'"):
        gpu_day.run(given)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_commands_are_known(target, quick, tmp_path):
    """Those of the bench are parsed; shares leave each some time."""
    from bench.__main__ import parser

    steps = gpu_day.steps(target, quick, tmp_path)
    for step in steps:
        if "bench" in step.command:
            parser().parse_args(step.command[step.command.index("bench") + 1 :])
    assert [s.name for s in steps][:2] == ["tests", "spmm"] and all(s.share < 0.5 for s in steps)
