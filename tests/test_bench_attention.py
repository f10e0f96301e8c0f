"""The bench of sparse attention: its masks, its tables, and a run."""

import argparse
import json

import pytest
import torch

from bench import attention
from bench.names import MASKS


def test_rules_are_the_masks():
    at = torch.arange(600)
    assert tuple(attention.MASKS) == MASKS
    for name, make in attention.MASKS.items():
        mask = make(600)
        held = attention.rule(name, mask)(0, 0, at[:, None], at[None])
        assert torch.equal(held, mask.to_dense())


def test_tables_and_picture(tmp_path, capsys):
    times = {"sparsetir": {"min": 0.002}, "dense": {"min": 0.01}, "flex 64": {"min": 0.004}}
    backward = {name: times[name] for name in ("sparsetir", "dense")}
    cell = {"mask": "band", "length": 256, "blocks": 18, "forward": times, "backward": backward,
            "no_gradient": {"flex 64": "none on a CPU"}}  # fmt: skip
    memory = [{"way": "sparsetir", "length": 256, "blocks": 18, "bytes": 3 << 20,
               "operand_bytes": 1 << 20}]  # fmt: skip
    attention.show([cell], memory, 2)
    printed = capsys.readouterr().out
    assert "band      18  2.0 (1.00)  10.0 (5.00)  4.0 (2.00)" in printed
    assert "flex 64 has no gradient here: none on a CPU" in printed
    assert "sparsetir     256      18  3.0     3.00" in printed
    record = {
        "threads": 2,
        "cpu": "a CPU",
        "results": {"heads": 2, "head_size": 64, "cells": [cell]},
    }
    (tmp_path / "a.json").write_text(json.dumps(record))
    assert attention.draw(tmp_path / "a.json").stat().st_size > 1000


@pytest.mark.slow  # kernels, and processes of their own that compile them again
def test_a_run(tmp_path, capsys):
    args = argparse.Namespace(
        quick=True, out=tmp_path, threads=1, mask=["band"], peers=["dense"], plot=True, target="cpu"
    )
    attention.run(args)
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    (cell,) = found["results"]["cells"]
    assert set(cell["forward"]) == set(cell["backward"]) == {"sparsetir", "dense"}
    assert not cell["wrong"] and cell["elements"] and path.with_suffix(".png").exists()
    assert [m["way"] for m in found["results"]["memory"]] == ["sparsetir"] * 3 + ["dense"]
    assert all(m["bytes"] > 0 for m in found["results"]["memory"]) and "cpu_features" in found
    assert "times q" in capsys.readouterr().out
