"""Epochs of models through `torch.compile(model, backend="sparsetir")`, beside PyG and Inductor."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import tvm
from torch_geometric.utils import to_torch_csr_tensor

import sparsetir
from bench import memory
from bench.harness import in_a_process, run_cells
from bench.messages import Distance, Gate, Own, Raw
from bench.problems import matrix_of
from bench.report import Form, show_means, show_others, show_times
from bench.timing import clock_of, interleaved
from bench.training import (
    ACCELERATE,
    COMPILED,
    INDUCTOR,
    OFF,
    OURS,
    PYG,
    Trained,
    begun,
    epoch_times,
)
from bench.training import LAYERS as OWN
from sparsetir import nn
from sparsetir.graph.backend import backend

EXPORTED = "exported"
CSR = "PyG, CSR"
ORDER = (INDUCTOR, OURS, COMPILED, PYG, CSR, ACCELERATE, OWN)  # see `begun`
ADJACENCY = ("GCN", "SAGE", "GIN")  # these take a sparse matrix of torch's
OF_EDGES = 8  # numbers per edge, for the layer with features of edges
WEIGHTED = ("raw", "gate", "distance", "own")  # layers with a number for each edge
LAYERS: dict[str, Callable[[int, int], Any]] = {
    "raw": Raw, "GCN": pyg.GCNConv, "SAGE": pyg.SAGEConv,
    "GIN": lambda a, b: pyg.GINConv(torch.nn.Linear(a, b)), "GAT": pyg.GATConv,
    "GATv2": pyg.GATv2Conv, "Transformer": pyg.TransformerConv, "gate": Gate,
    "distance": Distance, "own": Own,
    "edge features": lambda a, b: pyg.GATv2Conv(a, b, edge_dim=OF_EDGES),
}  # fmt: skip
INPUTS, HIDDEN, CLASSES = 128, 64, 8
SHUFFLED = ", shuffled"  # suffix of the names of graphs
ABOUT = ("graph", "edges", "layer")
MIB = Form(2.0**-20, 0, "bytes")


class Net(torch.nn.Module):
    """Two layers."""

    def __init__(self, layer: Callable[[int, int], Any]) -> None:
        super().__init__()
        self.first, self.second = layer(INPUTS, HIDDEN), layer(HIDDEN, CLASSES)

    def forward(self, x: Any, edge_index: Any, *w: Any) -> Any:
        return self.second(F.relu(self.first(x, edge_index, *w)), edge_index, *w)


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a loss was wrong."""
    torch.set_num_threads(args.threads)
    torch._dynamo.config.cache_size_limit = 256
    layers = args.layer or (["raw"] if args.quick else list(LAYERS))
    ways = [w for w in ORDER if w == OURS or args.peers is None or w in args.peers]
    files = {Path(name).stem: name for name in args.graph or ["cora"]}
    graphs = [(name, *edges_of(file)) for name, file in files.items()]
    if args.shuffle:
        graphs = [(n + SHUFFLED, m, e[:, torch.randperm(e.shape[1])]) for n, m, e in graphs]
    seconds, clock = 0.1 if args.quick else args.seconds, clock_of(args.threads).__name__
    if args.exported:
        measured = partial(measure_exported, seconds=seconds)
    else:
        measured = partial(measure, ways=ways, seconds=seconds, files=args.memory and files)
    todo = [
        (f"{graph[0]}, {layer}", partial(measured, *graph, layer))
        for graph, layer in product(graphs, layers)
    ]
    if args.exported:
        show_calls = lambda cells: show_times("calls", cells, "call", ABOUT, EXPORTED)  # noqa: E731
        return run_cells(args, "graph-exported", todo, show_calls, clock=clock)
    run_cells(args, "graph", todo, show, clock=clock)


def edges_of(name: str) -> tuple[int, torch.Tensor]:
    """Nodes and (2, E) edges of a graph, in the order of their targets."""
    matrix = matrix_of(name).tocsr()
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    return matrix.shape[0], torch.from_numpy(np.stack([matrix.indices, rows]).astype(np.int64))


def measure(
    name: str, nodes: int, edges: torch.Tensor, layer: str, ways: list[str], seconds: float,
    files: dict[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Epochs by way: loss, forward, backward, step of Adam; and seconds of the first one.

    files : of the graphs, with which memory is measured, each way in a separate process
    """
    torch._dynamo.reset()
    args, y = inputs(nodes, edges, layer)
    cell = {"graph": name, "nodes": nodes, "edges": edges.shape[1], "layer": layer}
    trained_ways = begun(ways, lambda way: trained(way, layer, args, y), cell)
    exact = cell["losses"].get(PYG) or next(iter(cell["losses"].values()))
    for way, losses in cell["losses"].items():
        if not np.allclose(losses, exact, rtol=OFF):
            cell["wrong"][way] = f"losses {losses}, not {exact}"
            del trained_ways[way]
    cell["epoch"] = epoch_times(trained_ways, seconds)
    if files:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # freed memory is returned
        of = layer, files[name.removesuffix(SHUFFLED)], torch.get_num_threads()
        cell["memory"] = {way: in_a_process(_peak, way, *of) for way in trained_ways}
    return cell


def measure_exported(
    name: str, nodes: int, edges: torch.Tensor, layer: str, seconds: float
) -> dict[str, Any]:
    """Calls of a model: from its exported library, through the backend, and eager."""
    torch._dynamo.reset()
    args, _ = inputs(nodes, edges, layer)
    torch.manual_seed(1)
    net = Net(LAYERS[layer]).eval()
    compiled = torch.compile(net, backend=backend)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        sparsetir.export(net, args, Path(folder) / "model.so")
        took = time.perf_counter() - start
        library = tvm.runtime.load_module(f"{folder}/model.so")
    vm = tvm.relax.VirtualMachine(library, tvm.cpu())
    arrays = [tvm.runtime.tensor(x.numpy()) for x in args]
    ways = {EXPORTED: lambda: vm["main"](*arrays), OURS: lambda: compiled(*args)}
    ways[PYG] = lambda: net(*args)
    with torch.no_grad():
        exact, result = net(*args).numpy(), ways[EXPORTED]().numpy()
        clock = clock_of(torch.get_num_threads())
        times = interleaved(ways, seconds, least=4, warm_up=1, clock=clock)
    off = float(np.abs(result - exact).max() / np.abs(exact).max())
    return {
        "graph": name, "nodes": nodes, "edges": edges.shape[1], "layer": layer, "export": took,
        "call": times, "wrong": f"off by {off}" if off > OFF else "",
    }  # fmt: skip


def inputs(nodes: int, edges: torch.Tensor, layer: str) -> tuple[tuple[Any, ...], torch.Tensor]:
    """Arguments of a model, and classes."""
    torch.manual_seed(0)
    x, y = torch.randn(nodes, INPUTS), torch.randint(0, CLASSES, (nodes,))
    shape = {"edge features": (OF_EDGES,), **dict.fromkeys(WEIGHTED, ())}.get(layer)
    return (x, edges, *([] if shape is None else [torch.rand(edges.shape[1], *shape)])), y


def _peak(way: str, layer: str, name: str, threads: int) -> dict[str, int]:
    """The peak memory in bytes of a later epoch, above that held between epochs."""
    torch.set_num_threads(threads)
    args, y = inputs(*edges_of(name), layer)
    epoch = begun([way], lambda way: trained(way, layer, args, y), {})[way].epoch
    before = memory.held()
    return {"bytes": memory.peak(epoch) - before}


def trained(way: str, layer: str, args: Any, y: Any) -> Trained:
    """A model of a layer, in one way."""
    ours = {"GCN": nn.GCNConv, "SAGE": nn.SAGEConv, "GAT": nn.GATConv}
    if way == OWN and layer not in ours:
        raise ValueError("has no such layer")
    if way == CSR:
        if layer not in ADJACENCY:
            raise ValueError("takes no sparse adjacency matrix")
        x, edges = args
        args = x, to_torch_csr_tensor(edges.flip(0), size=(len(x), len(x)))
    torch.manual_seed(1)
    net = Net(ours[layer] if way == OWN else LAYERS[layer])
    return Trained(way, net, lambda call: F.cross_entropy(call(*args), y))


def show(cells: list[dict[str, Any]]) -> None:
    """Print tables of epochs and memory, the means, and peers that are missing or wrong."""
    show_times("epochs", cells, "epoch", ABOUT, OURS)
    show_times("memory of an epoch, MiB", cells, "memory", ABOUT, OURS, MIB)
    show_means(cells, "epoch", OURS)
    show_others(cells, lambda c: f"{c['graph']}, {c['layer']}")
