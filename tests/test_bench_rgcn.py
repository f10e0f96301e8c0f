"""The bench of relational layers: its graphs, its reference, its tables, and a run."""

import argparse
import json

import numpy as np
import pytest
import torch

from bench import rgcn
from bench.rgcn_unfused import Unfused
from sparsetir import nn


def test_graphs(tmp_path):
    graph = rgcn.generated(500, 7)
    assert (graph.name, graph.nodes, graph.edges, graph.relations) == ("5e2", 50, 500, 7)
    assert graph.edge_index.max() < 50 and torch.equal(graph[2], rgcn.generated(500, 7)[2])
    src, dst = graph.edge_index.numpy()
    arrays = {"num_nodes": 50, "src": src, "dst": dst, "etype": graph.edge_type.numpy()}
    np.savez(tmp_path / "mine.npz", **arrays)
    found = rgcn.load(str(tmp_path / "mine.npz"))
    assert found.name == "mine" and torch.equal(found.edge_index, graph.edge_index)


@pytest.mark.parametrize("sizes", [(8, 4), (4, 8)])  # weights first, and sums first
def test_the_layer_before_computes_the_same(sizes):
    graph = rgcn.generated(300, 4)
    mine, before = (kind(*sizes, graph.relations, num_bases=2) for kind in (nn.RGCNConv, Unfused))
    before.load_state_dict(mine.state_dict())
    x = torch.randn(graph.nodes, sizes[0])
    torch.testing.assert_close(before(x, *graph[2:]), mine(x, *graph[2:]), rtol=1e-4, atol=1e-5)
    rows = rgcn.layer_of(rgcn.BEFORE, graph.nodes, 3, graph.relations)
    other = nn.RGCNConv(graph.nodes, 3, graph.relations)
    other.load_state_dict(rows.state_dict())
    torch.testing.assert_close(rows(None, *graph[2:]), other(None, *graph[2:]))


def test_tables_and_picture(tmp_path, capsys):
    def times(ours, theirs):
        return {
            "sparsetir": {"min": ours},
            "unfused": {"min": 2 * ours},
            "RGCNConv": {"min": theirs},
        }

    cells = [
        {"graph": "1e4", "nodes": 1000, "edges": 10000, "relations": 20, "feat": feat,
         "inference": times(0.001, 0.008), "training": times(0.002, 0.008), "missing": [],
         "wrong": []}
        for feat in rgcn.FEATURES
    ]  # fmt: skip
    cells[-1] |= {"epoch": times(0.1, 0.3)}
    cells[-1] |= {"memory": {"sparsetir": {"training, later": 1 << 20}, "FastRGCNConv": {}}}
    results = {"cells": cells, "summary": rgcn.summary(cells)}
    assert results["summary"]["training, d = 32, PyG"] == pytest.approx(4)
    rgcn.show(results, 2)
    printed = capsys.readouterr().out
    assert "1e4    10000         20  32  1.00 (1.00)  2.00 (2.00)  8.00 (8.00)" in printed
    assert "training, later        1.0             -" in printed
    record = {"threads": 2, "cpu": "a CPU", "results": results}
    (tmp_path / "a.json").write_text(json.dumps(record))
    with_pyg = rgcn.draw(tmp_path / "a.json").read_bytes()
    for cell in cells:
        for step in rgcn.STEPS:
            del cell[step]["RGCNConv"]
    (tmp_path / "a.json").write_text(json.dumps(record))
    assert rgcn.draw(tmp_path / "a.json").read_bytes() != with_pyg


@pytest.mark.slow  # kernels, and processes of their own that compile them again
def test_a_run(tmp_path, capsys):
    pytest.importorskip("torch_geometric")
    args = argparse.Namespace(
        quick=True,
        out=tmp_path,
        threads=1,
        graph=None,
        edges=None,
        cpu_time=False,
        plot=True,
        peers=["unfused", "RGCNConv"],
    )
    rgcn.run(args)
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert [c["feat"] for c in found["results"]["cells"]] == list(rgcn.FEATURES)
    last = found["results"]["cells"][-1]
    assert set(last["epoch"]) == set(last["memory"]) == {"sparsetir", "unfused", "RGCNConv"}
    assert not last["wrong"] and path.with_suffix(".png").exists() and "load" in found
    assert "Geometric means" in capsys.readouterr().out
