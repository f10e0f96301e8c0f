"""The command line under clumsy and hostile words, names, streams and variables."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparsetir
from sparsetir.cli import main
from sparsetir.planning.request import default_threads

TUNE = ["tune", "spmm", "--graph", "cora"]
HUGE = "9" * 400


@pytest.mark.parametrize(
    "words, message",
    [
        (["--feat", "0"], "--feat: expected an integer from 1 on, got '0'"),
        (["--feat", "1e9"], "--feat: expected an integer from 1 on, got '1e9'"),
        (["--feat", "nan"], "--feat: expected an integer from 1 on, got 'nan'"),
        (["--feat", "10" * 9], "--feat: expected an integer from 1 to 2,147,483,647, got '10101"),
        (["--heads", HUGE], "--heads: expected an integer from 1 to 2,147,483,647, got '999"),
        (["--threads", "1000000000000"], "--threads: expected an integer from 1 to 65,536, got"),
        (["--workers", "1000000000000"], "--workers: expected an integer from 1 to 2,147,483,647"),
        (["--trials", "-1"], "--trials: expected an integer from 1 on, got '-1'"),
        (["--seed", HUGE], "--seed: expected an integer from 0 to 2,147,483,647"),
        (["--seconds", "nan"], "--seconds: expected a number from 0.001 on, got 'nan'"),
        (["--seconds", "1e400"], "--seconds: expected a number from 0.001 to 100,000,000, got"),
        (["--time-limit", "1e12"], "--time-limit: expected a number from 0.001 to 100,000,000"),
        (["--memory-limit", HUGE], "--memory-limit: expected bytes, as 512M or 4G, got '999"),
        (["--memory-limit", "1000000000000T"], "--memory-limit: expected bytes"),
        (["--target", '{"a":' * 3000], "--target: expected JSON, got '.{200}...': maximum recurs"),
    ],
)
def test_absurd_values(capsys, words, message):
    assert main([*TUNE, f"{words[0]}={words[1]}"]) == 2
    out, err = capsys.readouterr()
    assert re.match(f"sparsetir tune: argument {message}", err) and err.count("\n") == 1, err
    assert not out


@pytest.mark.parametrize(
    "words, near",
    [
        (["tun", "spmm"], "tune"),
        (["format", "cora"], "formats"),
        (["records", "lst"], "list"),
        ([*TUNE, "--sampler", "randm"], "random"),
    ],
)
def test_nearest_choice(capsys, words, near):
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(f"; did you mean {near}?\n")


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
def test_closed_and_full_streams():
    """As `| head -0`, `>&-` and a full disk."""
    paths = str(Path(sparsetir.__file__).parents[1])
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
