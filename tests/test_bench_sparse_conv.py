"""The bench of sparse convolutions: its layers, its tables, pictures and a run."""

import argparse
import json
import math

import numpy as np
import pytest
import torch

from bench import clouds, sparse_conv
from bench.names import CONVOLUTIONS
from sparsetir.data.graphs import GraphError
from sparsetir.nn import kernel_map
from sparsetir.plotting.kernel_map import plot_kernel_map


def test_a_scene_is_voxels_in_order():
    places = clouds.scene(beams=4, turns=60)
    assert places.shape[1] == 3 and len(places) > 100 and places.min() == 0
    assert (np.unique(places, axis=0) == places).all()


def test_points_of_a_file(tmp_path):
    points = np.array([[0.01, 0, 0, 9], [0.02, 0, 0, 9], [-0.03, 0, 0.06, 9]], np.float32)
    np.savez(tmp_path / "a.npz", points=points)
    assert clouds.read(tmp_path / "a.npz", 0.05).tolist() == [[0, 0, 1], [1, 0, 0]]
    np.savez(tmp_path / "b.npz", points=points[0])
    with pytest.raises(GraphError, match=r"b.npz: expected 'points' \(n, 3 or more\), got"):
        clouds.read(tmp_path / "b.npz", 0.05)
    np.savez(tmp_path / "c.npz", others=points)
    with pytest.raises(GraphError, match="c.npz: expected an npz file with 'points'"):
        clouds.read(tmp_path / "c.npz", 0.05)


def test_peers_agree():
    layer = next(clouds.layers(clouds.scene(beams=3, turns=20) // 4, torch.float32))
    pairs = sparse_conv.map_of(layer)
    x, weight = layer.points.features, layer.made.weight.detach()
    wanted = sparse_conv.gathered(pairs)(x.double(), weight.double()).float()
    assert sparse_conv.PEERS == CONVOLUTIONS
    found = sparse_conv.by_matrices(pairs, torch.float32)(x, weight)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_tables_and_picture(tmp_path, capsys):
    times = {"sparsetir": {"min": 0.002}, "gather": {"min": 0.01}}
    cell = {"dtype": "bfloat16", "layer": "3, level 0", "channels": [4, 32], "inputs": 10,
            "outputs": 10, "pairs": 35, "forward": {**times, "gather in float32": {"min": 0.004}},
            "training": times, "wrong": []}  # fmt: skip
    maps = [{"order": "in order", "kernel": "k", "min": 0.03}]
    memory = [{"way": "gather", "layer": "3", "channels": [4, 4], "bytes": 3 << 20,
               "pairs_bytes": 1, "operand_bytes": 1 << 20}]  # fmt: skip
    found = {"cloud": "a", "points": 10, "cells": [cell], "maps": maps, "memory": memory}
    assert math.isnan(sparse_conv.best(cell["forward"], "dense"))
    sparse_conv.show(found, 1)
    printed = capsys.readouterr().out
    assert "3, level 0, 4 to 32       10         3.5       2.00    2.00" in printed
    assert "geometric mean                                         5.00" in printed
    assert sparse_conv._times(math.nan) == "-"
    record = {"threads": 1, "cpu": "a CPU", "results": [found]}
    (tmp_path / "a.json").write_text(json.dumps(record))
    assert sparse_conv.draw(tmp_path / "a.json").stat().st_size > 1000


def test_picture_of_a_map():
    coords = torch.tensor([[0, 0, 0, 1], [0, 5, 0, 0], [0, 0, 0, 0]])
    figure = plot_kernel_map(kernel_map(coords, (1, 1, 3)))
    pattern, bars = figure.axes
    filled = np.asarray(pattern.images[0].get_array())[..., 0] < 1
    assert filled.tolist() == [[True, False, False], [True] * 3, [False, False, True]]
    assert [bar.get_width() for bar in bars.patches] == [1, 3, 1]
    assert pattern.get_title() == "3 offsets, 3 outputs: 5 pairs"
    assert plot_kernel_map(kernel_map(coords, 1), pattern) is pattern


@pytest.mark.slow  # kernels, and processes of their own that compile them again
def test_a_run(tmp_path, capsys):
    args = argparse.Namespace(
        quick=True, out=tmp_path, threads=1, points=None, dtype=["float32"], peers=["gather"],
        plot=True,
    )  # fmt: skip
    sparse_conv.run(args)
    (path,) = tmp_path.glob("*.json")
    (found,) = json.loads(path.read_text())["results"]
    assert len(found["cells"]) == 3 and not any(c["wrong"] for c in found["cells"])
    assert len(list(tmp_path.glob("*.png"))) == 2
    assert "geometric mean" in capsys.readouterr().out
