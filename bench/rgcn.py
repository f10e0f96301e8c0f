"""Relational graph convolution: a layer, a training step, an epoch and memory, beside PyG's."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench import memory, plots
from bench.harness import Call, beside, finish, geomean, in_a_process, inference, training
from bench.report import table
from bench.timing import interleaved, progress
from sparsetir import nn, ops
from sparsetir.tuning.process import go_ahead

OURS, PYG, FAST = "sparsetir", "RGCNConv", "FastRGCNConv"
WAYS = (OURS, PYG, FAST)
# Edges and relations; seeds that nothing was chosen by.
SIZES = ((10_000, 20), (30_000, 50), (100_000, 100), (300_000, 200), (1_000_000, 100))
SEED = 2026
FEATURES = (32, 16)
HIDDEN, CLASSES, BASES = 16, 4, 30
# FastRGCNConv has the weights of each edge; more bytes than this are not tried.
MOST_BYTES = 5 << 30
STEPS = ("inference", "training")
Clock = Callable[[], float]


class Graph(NamedTuple):
    """Edges (2, E) with relations (E,) between as many nodes."""

    name: str
    nodes: int
    edge_index: Tensor
    edge_type: Tensor

    @property
    def relations(self) -> int:
        return int(self.edge_type.max()) + 1

    @property
    def edges(self) -> int:
        return len(self.edge_type)


def generated(edges: int, relations: int, seed: int = SEED) -> Graph:
    """Ten edges for each node; some nodes and relations have many, most have few."""
    random = np.random.default_rng(seed)
    nodes = max(edges // 10, 1)
    ends = (nodes * random.random((2, edges)) ** 2).astype(np.int64)
    kind = (relations * random.random(edges) ** 2).astype(np.int64)
    kind[-1] = relations - 1
    return Graph(f"{edges:.0e}".replace("e+0", "e"), nodes, *map(torch.from_numpy, (ends, kind)))


def load(path: str) -> Graph:
    """Of an npz file: `num_nodes`, `src`, `dst` and `etype`."""
    with np.load(path) as arrays:
        ends = np.stack([arrays["src"], arrays["dst"]]).astype(np.int64)
        kind, nodes = arrays["etype"].astype(np.int64), int(arrays["num_nodes"])
    return Graph(Path(path).stem, nodes, torch.from_numpy(ends), torch.from_numpy(kind))


def graph_of(what: Any) -> Graph:
    """By sizes, or from a file."""
    return load(what) if isinstance(what, str) else generated(*what)


def layer_of(way: str, *given: Any, **options: Any) -> Any:
    """A layer of PyG or of ours."""
    if way in (PYG, FAST):
        import torch_geometric.nn as pyg

        return getattr(pyg, way)(*given, **options)
    return nn.RGCNConv(*given, **options)


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a result was wrong."""
    sizes = [s for s in SIZES if not args.edges or s[0] in args.edges]
    graphs: list[Any] = args.graph or ([(2000, 6)] if args.quick else sizes)
    seconds = 0.05 if args.quick else args.seconds
    ways = WAYS if args.peers is None else (OURS, *(w for w in WAYS if w in args.peers))
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    go_ahead()
    cells = []
    for what in graphs:
        graph = graph_of(what)
        for feat in FEATURES:
            progress(f"{graph.name}, d = {feat}")
            cells.append(measure(graph, feat, ways, seconds, clock))
        progress(f"{graph.name}, epoch")
        cells[-1]["epoch"] = epochs(graph, ways, seconds, clock)
        cells[-1]["memory"] = {way: peak(way, what, cells[-2]) for way in ways}
        ops.clear_cache()
    progress("")
    results = {"cells": cells, "summary": summary(cells), "clock": clock.__name__}
    show(results, args.threads)
    wrong = {(c["graph"], c["feat"]): c["wrong"] for c in cells if c["wrong"]}
    finish(args, "rgcn", results, wrong, draw, load=os.getloadavg()[0])


# -- times ----------------------------------------------------------------------------------------


def too_large(way: str, edges: int, feat: int) -> bool:
    """Whether the weights of each edge, there and back, are more than is tried."""
    return way == FAST and 2 * 4 * edges * feat**2 > MOST_BYTES


def measure(
    graph: Graph, feat: int, ways: tuple[str, ...], seconds: float, clock: Clock
) -> dict[str, Any]:
    """Shortest and median times of a layer with as many features before as after."""
    torch.manual_seed(0)
    x, grad = torch.randn(2, graph.nodes, feat)
    first = layer_of(OURS, feat, feat, graph.relations)
    calls: dict[str, dict[str, Callable[[], Any]]] = {step: {} for step in STEPS}
    missing, wrong, found = [], [], {}
    for way in ways:
        if too_large(way, graph.edges, feat):
            missing.append(way)
            continue
        layer = layer_of(way, feat, feat, graph.relations)
        layer.load_state_dict(first.state_dict())
        calls["inference"][way], calls["training"][way] = steps_of(layer, x, graph, grad)
        found[way] = [calls["inference"][way](), *calls["training"][way]()]
        for mine, other in zip(found[way], found[OURS], strict=True):
            if not (mine - other).abs().max() < 1e-4 * (1 + other.abs().max()):  # NaN is wrong
                wrong.append(way)
    times = {step: interleaved(calls[step], seconds, 3, clock=clock) for step in STEPS}
    return {
        "graph": graph.name, "nodes": graph.nodes, "edges": graph.edges,
        "relations": graph.relations, "feat": feat, **times, "missing": missing, "wrong": wrong,
    }  # fmt: skip


def steps_of(layer: Any, x: Tensor, graph: Graph, grad: Tensor) -> tuple[Call, Call]:
    """The result of a layer; the gradients of its parameters and of the features."""
    way = lambda features: layer(features, *graph[2:])  # noqa: E731
    return inference(way, [x]), training(way, [x], grad, layer.parameters())


class Model(torch.nn.Module):
    """Two layers, the first of which has rows of weights for nodes."""

    def __init__(self, way: str, graph: Graph) -> None:
        super().__init__()
        shared = {"num_bases": min(BASES, graph.relations)}
        self.first = layer_of(way, graph.nodes, HIDDEN, graph.relations, **shared)
        self.second = layer_of(way, HIDDEN, CLASSES, graph.relations, **shared)

    def forward(self, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        return self.second(self.first(None, edge_index, edge_type).relu(), edge_index, edge_type)


def epochs(graph: Graph, ways: tuple[str, ...], seconds: float, clock: Clock) -> dict[str, Any]:
    """Times of an epoch of a model of two layers without features."""
    bytes_of_table = 4 * graph.nodes * graph.relations * HIDDEN
    if 12 * bytes_of_table > MOST_BYTES:
        return {}
    labels = torch.arange(graph.nodes) % CLASSES
    calls = {}
    for way in ways:
        if too_large(way, graph.edges, HIDDEN):
            continue
        torch.manual_seed(0)
        calls[way] = epoch(Model(way, graph), graph, labels)
    return interleaved(calls, seconds, 3, clock=clock)


def epoch(model: Model, graph: Graph, labels: Tensor) -> Callable[[], None]:
    """A step of the optimizer."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def call() -> None:
        optimizer.zero_grad()
        out = model(*graph[2:])
        torch.nn.functional.cross_entropy(out, labels).backward()
        optimizer.step()

    return call


# -- memory ---------------------------------------------------------------------------------------


def peak(way: str, what: Any, cell: dict[str, Any]) -> dict[str, int]:
    """Bytes that a layer takes at most, beside operands and parameters, in its own process."""
    if too_large(way, cell["edges"], cell["feat"]):
        return {}
    return in_a_process(_peak, way, what, cell["feat"], torch.get_num_threads())


def _peak(way: str, what: Any, feat: int, threads: int) -> dict[str, int]:
    """Of the first call and of a later one, for each step; what layers keep is counted."""
    torch.set_num_threads(threads)
    found: dict[str, int] = {}
    for graph in (generated(2000, 2), graph_of(what)):  # the first compiles
        x, grad = torch.randn(2, graph.nodes, feat)
        layer = layer_of(way, feat, feat, graph.relations)
        before = memory.held()
        for step, call in zip(STEPS, steps_of(layer, x, graph, grad), strict=True):
            for turn in ("first", "later"):
                memory.begin_peak()
                call()
                found[f"{step}, {turn}"] = max(memory.peak() - before, 0)
    return found


# -- what is shown --------------------------------------------------------------------------------


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of how many times as long, or as much memory, others take."""
    found: dict[str, Any] = {}
    for step in STEPS:
        for feat in FEATURES:
            mine = [c for c in cells if c["feat"] == feat]
            ratios = [_times(c[step], "PyG") / c[step][OURS]["min"] for c in mine]
            ratios = [r for r in ratios if math.isfinite(r)]
            if ratios:
                found[f"{step}, d = {feat}, PyG"] = geomean(ratios)
    return found


def _times(times: dict[str, Any], way: str) -> float:
    """Of a way; of PyG the shorter one."""
    names = (PYG, FAST) if way == "PyG" else (way,)
    return min((times[n]["min"] for n in names if n in times), default=math.nan)


def show(results: dict[str, Any], threads: int) -> None:
    cells = results["cells"]
    for step in (*STEPS, "epoch"):
        mine = [c for c in cells if c.get(step)]
        if not mine:
            continue
        names = [w for w in WAYS if any(w in c[step] for c in mine)]
        rows = []
        for cell in mine:
            width = cell["feat"] if step != "epoch" else HIDDEN
            about = [cell["graph"], cell["edges"], cell["relations"], width]
            rows.append([*about, *beside(cell[step], names, OURS)])
        title = f"RGCN, {step}: ms, and times what sparsetir takes; threads: {threads}"
        table(title, ["graph", "edges", "relations", "d", *names], rows)
    rows = []
    for cell in (c for c in cells if c.get("memory")):
        for what in next(iter(cell["memory"].values())):
            sizes = [m.get(what) for m in cell["memory"].values()]
            texts = ["-" if s is None else f"{s / 2**20:.1f}" for s in sizes]
            rows.append([cell["graph"], what, *texts])
    if rows:
        names = list(next(c["memory"] for c in cells if c.get("memory")))
        title = f"Most memory of a layer, d = {FEATURES[0]}, beside operands: MiB"
        table(title, ["graph", "step", *names], rows)
    rows = [[name, f"{value:.2f}"] for name, value in results["summary"].items()]
    table("Geometric means: times what sparsetir takes", ["", ""], rows)


def draw(path: Path) -> Path:
    """A picture of a JSON file of this command, beside it: times as fast as PyG's RGCNConv."""
    plt, record, results = plots.load(path)
    cells = results["cells"]
    there = {way for cell in cells for way in cell[STEPS[0]]}
    base = next(way for way in (PYG, FAST, OURS) if way in there)
    colours = dict(zip(WAYS, ("#c8102e", "#8a8a8a", "#c4c4c4"), strict=True))
    figure, axes = plt.subplots(2, len(FEATURES), squeeze=False, figsize=(10, 6), sharex="col")
    for row, step in zip(axes, STEPS, strict=True):
        for axis, feat in zip(row, FEATURES, strict=True):
            mine = [c for c in cells if c["feat"] == feat and base in c[step]]
            speed = {
                way: [c[step][base]["min"] / _times(c[step], way) for c in mine]
                for way in WAYS if way in there
            }  # fmt: skip
            plots.bars(axis, [c["graph"] for c in mine], speed, colours=colours)
            axis.set_title(f"{step}, d = {feat}", fontsize=9)
    axes[0, 0].legend(fontsize=7, frameon=False)
    name = "RGCNConv of PyG" if base == PYG else base
    figure.supylabel(f"times as fast as {name}", fontsize=8)
    figure.supxlabel(f"graphs by edges, float32, {plots.place(record)}", fontsize=8)
    return plots.save(plt, figure, path)
