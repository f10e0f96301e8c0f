"""Relational products on a CPU: sums before products, or products before sums (SparseTIR, 4.4).

Times of all relations in the first order, of all in the second one, and of what is chosen by sizes
for each relation: on graphs where the orders differ, and on files of a user's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import plots
from bench.report import table
from bench.rgcn import Graph, generated, load
from bench.studies import common
from bench.timing import interleaved
from sparsetir import ops
from sparsetir.ops.relation_orders import ProductsFirst
from sparsetir.ops.relations import Relations, relations_of

SUMS, PRODUCTS, CHOSEN = "sums first", "products first", "by relation"
WAYS = (SUMS, PRODUCTS, CHOSEN)
FEATURES = ((16, 16), (32, 32), (128, 128), (64, 16), (256, 32), (16, 64))
# Nodes and edges; seconds for each graph and pair of features.
SIZES = {"quick": (60, 600, 0.01), "times": (20_000, 400_000, 0.5)}
FEW = 10  # columns of a relation that is an attribute
TOLERANCE = 1e-4


def attributes(nodes: int, edges: int, relations: int = 40, seed: int = 0) -> Graph:
    """Relations whose sources are few, the same turned round, and as many others."""
    rng = np.random.default_rng(seed)
    kind = np.sort(rng.integers(0, relations, edges))
    ends = rng.integers(0, nodes, (2, edges))
    for end, part in ((0, 4), (1, 2)):  # a quarter of the relations each
        mine = kind % 4 == part % 4
        ends[end, mine] = (kind[mine] * FEW + ends[end, mine] % FEW) % nodes
    return Graph("attributes", nodes, torch.from_numpy(ends), torch.from_numpy(kind))


def crowded(nodes: int, edges: int) -> Graph:
    """Few relations, so that nodes have many edges in each."""
    rng = np.random.default_rng(1)
    ends, kind = rng.integers(0, nodes, (2, edges)), rng.integers(0, 4, edges)
    kind[-1] = 3
    return Graph("crowded", nodes, torch.from_numpy(ends), torch.from_numpy(kind))


def turned_too(graph: Graph) -> Graph:
    """With each relation turned round, as an RGCN takes a graph of facts."""
    edges = torch.cat([graph.edge_index, graph.edge_index.flip(0)], 1)
    kind = torch.cat([graph.edge_type, graph.edge_type + graph.relations])
    return Graph(graph.name, graph.nodes, edges, kind)


def run(args: argparse.Namespace) -> None:
    """The command."""
    torch.set_num_threads(args.threads)
    nodes, edges, seconds = SIZES["quick" if args.quick else "times"]
    graphs = [generated(edges, 50), attributes(nodes, edges), crowded(nodes, 4 * edges)]
    files = [] if args.data is None else sorted(Path(args.data).glob("*.npz"))
    graphs += [turned_too(load(str(path))) for path in files]
    pairs = FEATURES[1:2] if args.quick else FEATURES
    step, cells = common.Steps(len(graphs) * len(pairs)), []
    for graph in graphs:
        for pair in pairs:
            step(f"{graph.name}, {pair[0]} to {pair[1]}")
            cells.append(measure(graph, *pair, seconds))
        ops.clear_cache()
    rows = [
        [c["graph"], c["edges"], c["rows"], c["columns"], f"{c['in']} to {c['out']}",
         f"{c['products']} of {c['first']}", *(
            f"{1e3 * c['times'][w]['min']:.2f}" if w in c["times"] else "-" for w in WAYS
        )]
        for c in cells
    ]  # fmt: skip
    head = ["graph", "edges", "rows", "columns", "features", "products of relations", *WAYS]
    table("Relational products by order of work: ms of CPU time", head, rows)
    results = {
        "clock": "process_time",
        "meanings": {
            "rows": "of all relations, that have edges", "columns": "of all relations, likewise",
            "first, products": "relations that are multiplied first by choice, and their columns",
        },
        "cells": cells,
    }  # fmt: skip
    draw(common.finish(args, "times", results))


def measure(graph: Graph, feat_in: int, feat: int, seconds: float) -> dict[str, Any]:
    """A mean in each relation by each order."""
    torch.manual_seed(0)
    x = torch.randn(graph.nodes, feat_in)
    weight = torch.randn(graph.relations, feat_in, feat)
    relations = relations_of(*graph[2:], graph.nodes, graph.nodes, graph.relations)
    wanted = _call(graph, x, weight)()
    orders = dict(_orders(relations, (feat_in, feat, 1)))
    calls: dict[str, Callable[[], Tensor]] = {}
    for way, order in orders.items():
        if way != CHOSEN or order is not None:
            calls[way] = _by(relations, order, _call(graph, x, weight))
            found = calls[way]()
            if not (found - wanted).abs().max() < TOLERANCE * (1 + wanted.abs().max()):
                raise SystemExit(f"study relations: wrong: {graph.name}, {way}")
    chosen, rows = orders[CHOSEN], relations.by_target
    assert rows.orders is not None
    sizes = rows.orders["sizes"]
    counts = {
        "rows": int(sizes.rows.sum()), "columns": int(sizes.columns.sum()),
        "products": 0 if chosen is None else chosen.sums.n,
        "first": 0 if chosen is None else int((chosen.products.row_ptr.diff() > 0).sum()),
    }  # fmt: skip
    return {
        "graph": graph.name, "nodes": graph.nodes, "edges": graph.edges,
        "relations": graph.relations, "in": feat_in, "out": feat, **counts,
        "times": interleaved(calls, seconds, 3, clock=time.process_time),
    }  # fmt: skip


def _call(graph: Graph, x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.no_grad():
            return ops.rgms(x, weight, *graph[2:], None, "mean")

    return call


def _orders(
    relations: Relations, sizes: tuple[int, int, int]
) -> Iterator[tuple[str, ProductsFirst | None]]:
    """What each way divides a graph into, after a call, which has chosen."""
    rows = relations.by_target
    assert rows.orders is not None
    yield SUMS, None
    every = rows.row_ptr.diff().numpy() > 0
    yield PRODUCTS, ProductsFirst(rows, every, relations.m, relations.n)
    yield CHOSEN, rows.orders[sizes]


def _by(
    relations: Relations, order: ProductsFirst | None, call: Callable[[], Tensor]
) -> Callable[[], Tensor]:
    """The call, in an order."""
    orders = relations.by_target.orders
    assert orders is not None
    keys = [key for key in orders if isinstance(key, tuple)]

    def ordered() -> Tensor:
        orders.update(dict.fromkeys(keys, order))
        return call()

    return ordered


def draw(path: Path) -> Any:
    """How many times as fast as sums first the choice is, beside the JSON file."""
    plt, _, results = plots.load(path)
    cells = results["cells"]
    names = list(dict.fromkeys(c["graph"] for c in cells))
    pairs = list(dict.fromkeys((c["in"], c["out"]) for c in cells))
    figure, axis = plt.subplots(figsize=(7, 3.4))
    speed = {}
    for name in names:
        mine = {(c["in"], c["out"]): c["times"] for c in cells if c["graph"] == name}
        speed[name] = [
            mine[p][SUMS]["min"] / mine[p].get(CHOSEN, mine[p][SUMS])["min"] for p in pairs
        ]
    plots.bars(axis, [f"{a} to {b}" for a, b in pairs], speed)
    axis.axhline(1, color="#444444", linewidth=0.7)
    axis.set_ylabel("times as fast as sums first")
    plots.legend_on_top(figure, axis, "Order of work, chosen for each relation")
    return plots.save(plt, figure, path)
