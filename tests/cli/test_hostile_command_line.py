"""The command line under clumsy and hostile words, names, streams and variables."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparsetir
from sparsetir.cli import main
from sparsetir.planning.request import default_threads

HUGE = "9" * 400


def test_no_choice_is_near(capsys):
    assert main(["xyzzy\x1b[31m"]) == 2
    err = capsys.readouterr().err
    assert "'xyzzy\\x1b[31m'" in err and "did you mean" not in err


def test_names_with_codes(tmp_path, capsys):
    path = tmp_path / "a\x1b[31m\nb.txt"
    path.write_text("0 1\n")
    assert main(["formats", str(path), "--format", "csr"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a\\x1b[31m\\nb: 2 x 2") and "\x1b" not in out
    path.write_text("0 x\n")
    assert main(["formats", str(path)]) == 2
    err = capsys.readouterr().err
    assert "a\\x1b[31m\\nb.txt: line 1" in err and err.count("\n") == 1


def test_streams_of_few_characters(tmp_path, monkeypatch):
    """A name that the stream has no characters for is written in codes; nothing is raised."""
    path = tmp_path / "ünï\udcff.txt"
    path.write_text("0 1\n")
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["formats", str(path), "--format", "csr"]) == 0
    out.flush()
    assert out.buffer.getvalue().startswith(b"\\xfcn\\xef\\udcff: 2 x 2")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_closed_and_full_streams(tmp_path):
    """Closed and full streams; without torch, which takes seconds to import."""
    (tmp_path / "torch.py").write_text("raise ImportError('not here')\n")
    paths = os.pathsep.join([str(Path(sparsetir.__file__).parents[1]), str(tmp_path)])
    env = {**os.environ, "PYTHONPATH": paths, "SPARSETIR_RECORDS": "/nonexistent/records"}
    for way, code, said in (
        ("--help | true", 0, ""),
        ("--help >&-", 0, ""),
        ("records list >/dev/full", 1, "No space left on device\n"),
    ):
        text = f'"{sys.executable}" -m sparsetir {way}; exit ${{PIPESTATUS[0]}}'
        done = subprocess.run(
            ["bash", "-c", text], env=env, capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stderr[-len(said) :] if said else done.stderr) == (code, said)


@pytest.mark.parametrize("text", ["", "0", "-5", "x", "1000000000000", HUGE, "1.5"])
def test_numbers_of_threads_that_are_none(monkeypatch, text):
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    without = default_threads()
    monkeypatch.setenv("TVM_NUM_THREADS", text)
    assert default_threads() == without
