"""Relational graph convolution: a layer, a training step and an epoch, beside PyG's."""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import finish, measure_each, refuse_bad
from bench.report import show_others, show_times
from bench.training import Trained
from bench.ways import Comparison, Device
from sparsetir import nn, ops

OURS, PYG, FAST = "sparsetir", "RGCNConv", "FastRGCNConv"
WAYS = (OURS, PYG, FAST)
# Edges and relations; sizes and seeds that no choice was based on.
SIZES = ((10_000, 20), (30_000, 50), (100_000, 100), (300_000, 200), (1_000_000, 100))
SEED = 2026
FEATURES = (32, 16)
HIDDEN, CLASSES, BASES = 16, 4, 30
# FastRGCNConv has weights per edge; cases with more bytes than this are skipped.
MOST_BYTES = 5 << 30
STEPS = ("inference", "training")


class Graph(NamedTuple):
    """Edges (2, E) with relations (E,) between a number of nodes."""

    nodes: int
    relations: int
    edge_index: Tensor
    edge_type: Tensor


def generated(edges: int, relations: int) -> Graph:
    """Ten edges per node; some nodes and relations have many, most have few."""
    random = np.random.default_rng(SEED)
    nodes = max(edges // 10, 1)
    ends = (nodes * random.random((2, edges)) ** 2).astype(np.int64)
    kind = (relations * random.random(edges) ** 2).astype(np.int64)
    return Graph(nodes, relations, *map(torch.from_numpy, (ends, kind)))


def layer_of(way: str, *args: Any, **options: Any) -> Any:
    """A layer of PyG or of ours."""
    if way in (PYG, FAST):
        import torch_geometric.nn as pyg

        return getattr(pyg, way)(*args, **options)
    return nn.RGCNConv(*args, **options)


class OnGraph(torch.nn.Module):
    """A layer with the edges of a graph, so that only features are passed."""

    def __init__(self, way: str, graph: Graph, feat: int) -> None:
        super().__init__()
        self.layer = layer_of(way, feat, feat, graph.relations)
        self.edges = graph[2:]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, *self.edges)


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong."""
    sizes = [s for s in SIZES if not args.edges or s[0] in args.edges]
    ways = WAYS if args.peers is None else (OURS, *(w for w in WAYS if w in args.peers))
    clock = time.process_time if args.cpu_time else time.perf_counter
    device = Device.of(args, clock=clock, least=3)
    assert device is not None
    cells = []
    for edges, relations in [(2000, 6)] if args.quick else sizes:
        graph = generated(edges, relations)
        about = {"graph": f"{edges:.0e}".replace("e+0", "e"), "nodes": graph.nodes, "edges": edges}
        todo = ((f"{edges} edges, {f}", partial(measure, graph, f, ways, device)) for f in FEATURES)
        cells += [{**about, "relations": relations, **cell} for cell in measure_each(todo)]
        cells[-1]["epoch"] = epochs(graph, ways, device)
        ops.clear_cache()
    columns = ("graph", "edges", "relations", "feat")
    for step in (*STEPS, f"epoch, {HIDDEN} hidden"):
        title = f"RGCN, {step}: ms, and times what sparsetir takes; threads: {args.threads}"
        show_times(title, cells, step.split(",")[0], columns, OURS)
    show_others(cells, lambda c: f"{c['graph']}, {c['feat']}")
    finish(args, "rgcn", {"cells": cells, "clock": clock.__name__})
    refuse_bad(cells)


def too_large(way: str, graph: Graph, feat: int) -> bool:
    """Whether the weights of each edge, forward and backward, exceed the limit."""
    return way == FAST and 2 * 4 * len(graph.edge_type) * feat**2 > MOST_BYTES


def measure(graph: Graph, feat: int, ways: tuple[str, ...], device: Device) -> dict[str, Any]:
    """Times of a layer with equal numbers of features in and out; all ways have equal weights."""
    torch.manual_seed(0)
    x, grad = torch.randn(2, graph.nodes, feat)
    # The reference: PyG's if it is installed and measured.
    first = OnGraph(next((w for w in (PYG, FAST) if w in ways), OURS), graph, feat)

    def made(way: str) -> OnGraph:
        if too_large(way, graph, feat):
            raise ValueError("it has more weights than are tried")
        layer = OnGraph(way, graph, feat)
        layer.load_state_dict(first.state_dict())
        return layer

    compared = Comparison([[x]], first, grads=[grad], steps=STEPS)
    return {"feat": feat, **compared.measure({w: partial(made, w) for w in ways}, device)}


class Model(torch.nn.Module):
    """Two layers; the weights of the first have a row per node."""

    def __init__(self, way: str, graph: Graph) -> None:
        super().__init__()
        shared = {"num_bases": min(BASES, graph.relations)}
        self.first = layer_of(way, graph.nodes, HIDDEN, graph.relations, **shared)
        self.second = layer_of(way, HIDDEN, CLASSES, graph.relations, **shared)

    def forward(self, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        return self.second(self.first(None, edge_index, edge_type).relu(), edge_index, edge_type)


def epochs(graph: Graph, ways: tuple[str, ...], device: Device) -> dict[str, Any]:
    """Times of an epoch of a model of two layers without features."""
    if 12 * 4 * graph.nodes * graph.relations * HIDDEN > MOST_BYTES:
        return {}
    labels = torch.arange(graph.nodes) % CLASSES
    calls = {}
    for way in (w for w in ways if not too_large(w, graph, HIDDEN)):
        torch.manual_seed(0)
        trained = Trained(
            way, Model(way, graph), lambda call: F.cross_entropy(call(*graph[2:]), labels)
        )
        calls[way] = [trained.epoch]
    return device.times(calls)
