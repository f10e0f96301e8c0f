"""The bench of a weight in blocks on a CPU."""

from __future__ import annotations

import argparse
import json
import os

import pytest
import torch

from bench import blocks

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture(autouse=True)
def same_process(monkeypatch):
    """The tests that follow have the priority and the threads of before."""
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def test_a_run(tmp_path, capsys):
    args = argparse.Namespace(target="cpu", quick=True, threads=1, out=tmp_path, seconds=1)
    blocks.run(args)
    (path,) = tmp_path.glob("blocks-*-1t.json")
    found = json.loads(path.read_text())
    assert found["cpu"] and "cpu_features" in found and len(found["results"]["load"]["after"]) == 3
    times, wrong = found["results"]["times"], found["results"]["wrong"]
    assert {f"sparsetir BSR {d}" for d in ("float32", "float16", "bfloat16")} < set(times)
    assert {"torch dense float32", "torch BSR float32", "sparsetir CSR float32"} < set(times)
    assert not wrong and all(0 < t["min"] <= t["median"] for t in times.values())
    assert "/ sparsetir BSR float32" in capsys.readouterr().out


def test_a_wrong_result_ends_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "of_type", lambda *_: {"bad": lambda: lambda: torch.ones(128, 32)})
    args = argparse.Namespace(target="cpu", quick=True, threads=1, out=tmp_path, seconds=1)
    monkeypatch.setattr(blocks, "interleaved", lambda ways, *_, **__: dict.fromkeys(ways))
    with pytest.raises(SystemExit, match="wrong: {'bad float32': '4096 of 4096"):
        blocks.run(args)
