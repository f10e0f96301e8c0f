"""The bench of several processes: graphs, halos, the model of time, tables."""

from __future__ import annotations

import argparse
import json
import re

import numpy as np
import pytest
import torch

from bench import distributed, distributed_worker
from bench.distributed_model import Local, Network, Share, epoch, expected_share


def test_generated_graphs_are_the_same_in_any_parts(monkeypatch):
    monkeypatch.setattr(distributed_worker, "BLOCK", 16)
    whole = distributed_worker.generated(150, 3, 0.3, 0, 1)
    assert whole.shape == (2, 450) and (torch.bincount(whole[1]) == 3).all()
    assert 0 <= int(whole.min()) and int(whole.max()) < 150
    for parts in (2, 7, 20):  # of 20 some have nothing
        pieces = [distributed_worker.generated(150, 3, 0.3, part, parts) for part in range(parts)]
        assert torch.equal(torch.cat(pieces, 1), whole)


def test_expected_shares_are_those_of_generated_graphs():
    nodes, degree, far = 20_000, 8, 0.2
    source, target = distributed_worker.generated(nodes, degree, far, 0, 1).numpy()
    for parts in (1, 4, 16):
        size = nodes // parts
        far_edges = source // size != target // size
        pairs = np.unique(target[far_edges] // size * nodes + source[far_edges])
        most = np.bincount(pairs // nodes, minlength=parts).max()
        counted = (degree * size, size, most, far_edges.mean())
        graph = {"nodes": nodes, "degree": degree, "far": far, "near": 50}
        expected = expected_share(graph, parts)
        np.testing.assert_allclose(expected, counted, rtol=0.06, atol=0.01)


def test_model_of_time():
    local, share = Local(1e-6, 1e-5, 1e-6, 0.5e-3), Share(1000, 100, 50, 0.25)
    alone = epoch(local, share, Network(0, 1), 1, 10, 100)
    assert alone["epoch"] == pytest.approx(1e-3 + 1e-3 + 0.5e-3)
    times = epoch(local, share, Network(1e-4, 1e6), 4, 10, 100)
    exchange = 4 * (1e-4 + 2e-5) + 4 * 10 * 50 / 1e6
    reduce = 2 * 6 * 1e-4 + 4 * 100 * 6 / 4 / 1e6
    assert times["exchange"] == pytest.approx(exchange)
    assert times["hidden"] == pytest.approx(0.75e-3)  # all of the local edges' time
    assert times["reduce"] == pytest.approx(reduce)
    whole = 1e-3 + 1e-3 + 50e-6 + 0.5e-3 + exchange - 0.75e-3 + reduce
    assert times["epoch"] == pytest.approx(whole)
    crowded = epoch(local, share, Network(1e-4, 1e6), 4, 10, 100, crowding=2)
    assert crowded["compute"] == pytest.approx(2 * times["compute"])


def process(size, share, memory):
    split = dict.fromkeys((*distributed_worker.STEPS, "exchange", "reduce"), 1e-4)
    return {
        "own": share, "nnz": 10 * share, "halo": 5 if size > 1 else 0, "nodes": 100,
        "edges": 1000, "features": 8, "weights": 200, "losses": [2.0, 1.0],
        "epoch": {"min": 0.01 / size, "median": 0.02 / size},
        "split": {"epoch, profiled": 0.02 / size, **split}, "bytes needed": 400 * (size > 1),
        "bytes sent": 404 * (size > 1), "bytes that came": 408 * (size > 1),
        "memory": memory, "bytes": 4,
        "network": {"latency": 1e-4, "speed": 1e9}, "epoch of a small graph": 1e-3,
    }  # fmt: skip


def arguments(tmp_path, **more):
    defaults = {
        "graph": ["generated"], "model": ["sage"], "processes": [1, 2], "epochs": 3,
        "quick": True, "out": tmp_path, "orders": 1, "threads": 1,
    }  # fmt: skip
    return argparse.Namespace(**{**defaults, **more})


def test_tables_of_processes(tmp_path, capsys, monkeypatch):
    runs = {1: [process(1, 100, 10_000)], 2: [process(2, 50, 6_000), process(2, 50, 5_000)]}
    other = [{"losses": [2.0, 1.001]}]  # of one process, nodes in another order
    monkeypatch.setattr(
        distributed, "launch", lambda spec, size: other if spec["order"] else runs[size]
    )
    distributed.run(arguments(tmp_path))
    printed = capsys.readouterr().out
    assert re.search(r"sage, generated +2 +0.00 +1.010 +1.020 +1.163 +0.0 .* +5.0 +10.0", printed)
    (path,) = tmp_path.glob("distributed-*.json")
    results = json.loads(path.read_text())["results"]
    (cell,) = results["cells"]
    two = cell["runs"]["2"]
    assert two["bytes sent / needed"] == 1.01 and two["bytes needed"] == 800
    # Half of what one process takes, and a row of 8 float32 for each of 5 nodes.
    assert two["memory, share and halo"] == [5160, 5160]
    assert two["memory / share and halo"] == pytest.approx(6000 / 5160, rel=1e-4)
    check = cell["model of time"]["check"]["2"]
    assert check["model / measured"] == pytest.approx(check["model"] / 0.005, rel=1e-3)
    assert set(results["large"]["10 Gbit/s, 50 us"]) == {str(2**i) for i in range(1, 11)}
    assert cell["rounding"] == pytest.approx(1e-3)
    for losses in ([2.0, 1.003], [2.0, 1.005]):
        runs[2][0]["losses"] = runs[2][1]["losses"] = losses
        if losses[1] < 1.004:  # no more than rounding may do
            distributed.run(arguments(tmp_path))
    with pytest.raises(SystemExit, match="losses differ: generated"):
        distributed.run(arguments(tmp_path))
