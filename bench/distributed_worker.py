"""A process of `bench distributed`: trains on its part of a graph, and reports its costs.

torchrun --nproc-per-node 2 -m bench.distributed_worker SPEC.json FOLDER
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bench import memory
from bench.timing import shortest, timed
from sparsetir import nn
from sparsetir.data.datasets import load_cora_dataset
from sparsetir.data.graphs import load_graph
from sparsetir.distributed import DistGraph, mean
from sparsetir.ops import clear_cache

CLASSES, FEATURES, HEADS = 7, 128, 4
SMALL = {"nodes": 400, "degree": 8, "far": 0.5}  # a graph with the fixed costs of an epoch
STEPS = ("local product", "remote product", "pack", "unpack", "wait")
BLOCK = 4096  # targets of generated graphs that are drawn together
# Of struct tcp_info, linux/tcp.h: bytes received.
TCP_INFO_SIZE, BYTES_RECEIVED = 232, 128
LIBC = ctypes.CDLL(None)
# The least size for which malloc maps each block separately and unmaps it when it is freed.
M_MMAP_THRESHOLD, GIVEN_BACK = -3, 128 << 10


class Model(torch.nn.Module):
    """Two layers, without dropout: processes would draw different ones."""

    def __init__(self, kind: str, features: int, hidden: int) -> None:
        super().__init__()
        layer: Any = nn.GATConv if kind == "gat" else nn.SAGEConv
        sizes = (hidden // HEADS, HEADS) if kind == "gat" else (hidden,)
        self.first, self.second = layer(features, *sizes), layer(hidden, CLASSES)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        return self.second(F.elu(self.first(x, graph)), graph)


def exchanged(kind: str, features: int, hidden: int) -> int:
    """Numbers that an epoch needs for each node of another process, there and back.

    GraphSAGE sums whichever is narrower, the features or their images by weights, for which
    gradients come back; GAT the images by weights, of all heads.
    """
    if kind == "gat":
        return 2 * hidden + 2 * CLASSES
    return min(2 * hidden, features) + 2 * min(CLASSES, hidden)


def generated(nodes: int, degree: int, far: float, part: int, parts: int) -> Tensor:
    """(2, E) edges of a part of the targets: `degree` each, nearby except for a share of `far`.

    The graph is the same for any number of parts; no part needs the others.
    """
    blocks = -(-nodes // BLOCK)
    drawn = []
    for block in range(blocks * part // parts, blocks * (part + 1) // parts):
        random = np.random.default_rng(block)
        target = np.arange(block * BLOCK, min(nodes, (block + 1) * BLOCK)).repeat(degree)
        near = target + random.integers(-50, 51, len(target))
        source = np.where(
            random.random(len(target)) < far, random.integers(0, nodes, len(target)), near
        )
        drawn.append(np.stack([source % nodes, target]))
    edges = np.concatenate(drawn, 1) if drawn else np.empty((2, 0), np.int64)
    return torch.from_numpy(edges)


def graph_of(spec: dict[str, Any]) -> DistGraph:
    """The graph of a measurement, with its nodes in the specified order."""
    rank, size, nodes, values = dist.get_rank(), dist.get_world_size(), spec["nodes"], None
    if not nodes and not spec["order"]:
        return DistGraph.from_file(spec["graph"])
    if nodes:
        edges = generated(nodes, spec["degree"], spec["far"], rank, size)
    else:
        A = load_graph(spec["graph"]).tocoo()
        nodes, edges = A.shape[0], torch.from_numpy(np.stack([A.col, A.row]).astype(np.int64))
        values = None if (A.data == 1).all() else torch.from_numpy(A.data)
    if spec["order"]:  # on one process: the same sums with other rounding
        edges = torch.from_numpy(np.argsort(order_of(spec, nodes)))[edges]
        in_order = torch.from_numpy(np.lexsort(edges.numpy()))
        edges, values = edges[:, in_order], None if values is None else values[in_order]
    return DistGraph.from_edges(edges, nodes, values)


def order_of(spec: dict[str, Any], nodes: int) -> np.ndarray:
    """The node of each number, in one of many orders; 0 is their own."""
    order = spec["order"]
    return np.random.default_rng(order).permutation(nodes) if order else np.arange(nodes)


def rows_of(spec: dict[str, Any], graph: DistGraph) -> tuple[Tensor, Tensor, Tensor]:
    """Features, classes and training mask of own nodes."""
    nodes = torch.from_numpy(order_of(spec, graph.num_nodes))[graph.nodes]
    if spec["graph"] == "cora":
        cora = load_cora_dataset()
        mine = nodes.numpy()
        x = torch.from_numpy(cora.features[mine].toarray())
        x = x / x.sum(1, keepdim=True).clamp(min=1)
        return x, torch.from_numpy(cora.labels[mine]), torch.from_numpy(cora.train[mine])
    # From a node's number alone, so that no process needs those of others.
    x = (nodes[:, None] * torch.arange(1, FEATURES + 1)).double().mul_(0.7310585).sin_().float()
    return x, (nodes * 40503 // 64) % CLASSES, nodes % 3 != 0


def give_back() -> None:
    """Return free memory to the system: the memory of a graph excludes that of its construction."""
    gc.collect()
    LIBC.malloc_trim(0)


def bytes_received() -> int:
    """Bytes received on this process's connections so far, by the kernel's counts."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as link:
                info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_SIZE)
                total += int.from_bytes(info[BYTES_RECEIVED : BYTES_RECEIVED + 8], sys.byteorder)
        except OSError:  # not TCP, or closed since
            continue
    return total


def epoch_of(
    model: torch.nn.Module, x: Tensor, graph: Any, y: Tensor, train: Tensor
) -> Callable[[], float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = mean(F.cross_entropy(model(x, graph)[train], y[train], reduction="none"))
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


def split_times(epoch: Callable[[], float], epochs: int) -> dict[str, float]:
    """Seconds of an epoch in each step, on this process, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        whole = timed(lambda: [epoch() for _ in range(epochs)])() / epochs
    times = {"epoch, profiled": whole} | dict.fromkeys((*STEPS, "exchange", "reduce"), 0.0)
    for event in profile.key_averages():
        seconds = event.cpu_time_total / 1e6 / epochs
        if event.key.startswith("sparsetir: "):
            times[event.key.removeprefix("sparsetir: ")] += seconds
        elif event.key in ("gloo:all_to_all", "gloo:all_reduce"):
            times["exchange" if "all_to_all" in event.key else "reduce"] += seconds
    return times


def network() -> dict[str, float]:
    """Latency and speed of exchanges here: seconds for few bytes, bytes per second for many."""
    size = dist.get_world_size()

    def exchange(count: int) -> float:
        x = torch.zeros(size * count, dtype=torch.uint8)
        out = torch.empty_like(x)
        once, times = timed(lambda: dist.all_to_all_single(out, x)), []
        for _ in range(12):
            dist.barrier()
            times.append(once())
        slowest = torch.tensor([min(times)], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    if size == 1:
        return {"latency": 0.0, "speed": 0.0}
    small, count = exchange(8), 4 << 20
    large = exchange(count)
    return {"latency": small, "speed": (size - 1) * count / (large - small)}


class Training(NamedTuple):
    """A graph on this process, with everything that training on it needs."""

    graph: DistGraph
    x: Tensor
    y: Tensor
    train: Tensor
    model: torch.nn.Module
    epoch: Callable[[], float]


def begun(spec: dict[str, Any]) -> Training:
    """A new model on the graph."""
    graph = graph_of(spec)
    x, y, train = rows_of(spec, graph)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(spec["model"], x.shape[1], spec["hidden"]))
    return Training(graph, x, y, train, model, epoch_of(model, x, graph, y, train))


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Times, memory and bytes of epochs on this process."""
    LIBC.mallopt(M_MMAP_THRESHOLD, GIVEN_BACK)
    # Loads libraries and opens connections.
    warm = begun({**spec, "graph": "generated", **SMALL}).epoch
    cell: dict[str, Any] = {"epoch of a small graph": min(timed(warm)() for _ in range(10))}
    split_times(warm, 1)
    cell["network"] = network()
    begun(spec).epoch()  # compiles the kernels of the graph
    del warm
    clear_cache()
    give_back()
    base = memory.held()
    graph, x, y, train, model, epoch = begun(spec)
    cell |= {k: getattr(graph, k) for k in ("own", "halo", "nnz")}
    cell |= {"nodes": graph.num_nodes, "edges": graph.num_edges, "features": x.shape[1]}
    cell |= {"bytes": x.itemsize, "weights": sum(p.numel() for p in model.parameters())}
    losses = [epoch(), epoch()]
    give_back()
    cell["memory"] = memory.peak(lambda: losses.extend([epoch(), epoch()])) - base
    times = []
    for _ in range(max(1, spec["epochs"] - 4)):
        dist.barrier()
        times.append(timed(lambda: losses.append(epoch()))())
    cell |= {"losses": losses, "epoch": shortest(times)}
    cell["split"] = split_times(epoch, spec["profiled"])
    # Without reductions of weights' gradients, which would count too.
    kind, hidden = spec["model"], spec["hidden"]
    alone = epoch_of(Model(kind, x.shape[1], hidden), x, graph, y, train)
    alone()
    dist.barrier()
    counted, wire = graph.exchange.bytes_sent, bytes_received()
    for _ in range(4):
        alone()
    dist.barrier()
    cell["bytes sent"] = (graph.exchange.bytes_sent - counted) / 4
    cell["bytes that came"] = (bytes_received() - wire) / 4
    cell["bytes needed"] = x.itemsize * graph.halo * exchanged(kind, x.shape[1], hidden)
    return cell


def main() -> None:
    """Run as a process of torchrun."""
    spec, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        if spec["order"]:
            epoch = begun(spec).epoch
            cell: dict[str, Any] = {"losses": [epoch() for _ in range(spec["epochs"])]}
        else:
            cell = measure(spec)
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(cell))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
