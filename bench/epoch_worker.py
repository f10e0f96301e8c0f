"""A process that trains layers, of PyG and of a checkout's package, and tells how long steps take.

Words: threads, seconds, graphs. `epochs` asks.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

FEATURES, HIDDEN, CLASSES, HEADS = 128, 64, 8, 4
NEW = ((2_000, 10_000), (2_000, 100_000))  # nodes and edges that are new in each step
NEW_FEATURES, GROWTH = 32, 1_000
MANY = 200  # steps after which no kernel is new
Step = Callable[[], float]


def graph(text: str) -> tuple[int, Tensor]:
    """Nodes and edges."""
    from sparsetir.data.graphs import load_graph

    matrix: Any = load_graph(text)
    ends = matrix.tocoo()
    edges = np.stack([ends.col, ends.row]).astype("int64")
    return matrix.shape[0], torch.from_numpy(edges)


def models(nodes: int, edges: Tensor) -> Iterator[tuple[str, Step]]:
    """Epochs by model and the way it is made."""
    import torch_geometric.nn as pyg

    from sparsetir import nn
    from sparsetir.nn import accelerate

    x, labels = torch.randn(nodes, FEATURES), torch.randint(0, CLASSES, (nodes,))
    kinds: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "gcn": (pyg.GCNConv, nn.GCNConv, {"cached": True}),
        "sage": (pyg.SAGEConv, nn.SAGEConv, {}),
        "gat": (pyg.GATConv, nn.GATConv, {"heads": HEADS}),
    }
    for name, (theirs, own, options) in kinds.items():
        for way, kind in (("PyG", theirs), ("sparsetir.nn", own)):
            some = {k: v for k, v in options.items() if kind is theirs or k == "heads"}
            step = epochs(kind, some, x, labels, edges)
            yield f"{name}, {way}", timed(step)
            if kind is theirs and name != "gat":
                yield f"{name}, accelerate", timed(step, accelerate)


def epochs(
    kind: Any, options: dict[str, Any], x: Tensor, labels: Tensor, edges: Any
) -> Callable[[], Any]:
    """An epoch of two layers."""
    torch.manual_seed(0)
    wide = HIDDEN // options.get("heads", 1)
    last = {k: v for k, v in options.items() if k != "heads"}
    layers = torch.nn.ModuleList([kind(FEATURES, wide, **options), kind(HIDDEN, CLASSES, **last)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        out = layers[1](torch.relu(layers[0](x, edges)), edges)
        torch.nn.functional.cross_entropy(out, labels).backward()
        optimizer.step()

    return step


def timed(step: Callable[[], Any], around: Any = None) -> Step:
    """Seconds of a step, in a context."""

    def run() -> float:
        if around is None:
            start = time.perf_counter()
            step()
            return time.perf_counter() - start
        with around():
            return timed(step)()

    return run


def new_edges(nodes: int, nnz: int) -> Iterator[tuple[str, Step]]:
    """SAGE on edges that are new in each step, or known."""
    from torch_geometric.nn import SAGEConv

    from sparsetir.nn import accelerate

    torch.manual_seed(0)
    layer, x = SAGEConv(NEW_FEATURES, NEW_FEATURES), torch.randn(nodes, NEW_FEATURES)
    known = torch.randint(0, nodes, (2, nnz))

    def with_new() -> float:
        edges = torch.randint(0, nodes, (2, nnz))
        return timed(lambda: layer(x, edges).sum().backward())()

    def accelerated() -> float:
        with accelerate():
            return with_new()

    yield "PyG", with_new
    yield "accelerate", accelerated
    yield "accelerate, known edges", timed(lambda: layer(x, known).sum().backward(), accelerate)


def measured(
    steps: dict[str, Step], seconds: float, warm_up: int = 3
) -> dict[str, dict[str, float]]:
    """Minimum and median of steps that take turns."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(warm_up):
            step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(taken.values()))) < 3:
        for name, step in steps.items():
            step()  # after another way: its threads and caches
            taken[name].append(step())
    return {
        name: {"min": min(t), "median": statistics.median(t), "rows": len(t)}
        for name, t in taken.items()
    }


def growth() -> dict[str, dict[str, float]]:
    """MiB by which memory grows in many steps with new edges."""
    steps = dict(new_edges(*NEW[0]))

    def resident() -> float:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20

    for _ in range(100):
        steps["accelerate"]()
    before = resident()
    for _ in range(GROWTH):
        steps["accelerate"]()
    return {"MiB": {"min": resident() - before, "median": resident() - before, "rows": GROWTH}}


def main() -> None:
    threads, seconds, *names = sys.argv[1:]
    torch.set_num_threads(int(threads))
    found = {}
    for name in names:
        found[name] = measured(dict(models(*graph(name))), float(seconds))
    for nodes, nnz in NEW:
        found[f"new: {nnz} edges"] = measured(dict(new_edges(nodes, nnz)), float(seconds), MANY)
    found["growth"] = growth()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
