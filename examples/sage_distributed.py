"""GraphSAGE on Cora by several processes, each with a part of the graph.

    torchrun --nproc-per-node 2 examples/sage_distributed.py

On several machines the same, with torchrun's --nnodes and --rdzv-endpoint. A graph of yours:
--graph FILE, of which each process reads a part; it is given random features and classes.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sparsetir.datasets import load_cora_dataset
from sparsetir.distributed import DistGraph, mean
from sparsetir.nn import SAGEConv

FEATURES, CLASSES = 64, 7  # of graphs that come without


class SAGE(torch.nn.Module):
    """Two layers, 16 hidden features."""

    def __init__(self, features: int, classes: int, hidden: int = 16) -> None:
        super().__init__()
        self.first = SAGEConv(features, hidden)
        self.second = SAGEConv(hidden, classes)

    def forward(self, x: Tensor, graph: DistGraph) -> Tensor:
        """Scores (own, classes) of own nodes."""
        return self.second(F.dropout(self.first(x, graph).relu(), 0.5, self.training), graph)


def data_of(name: str, graph: DistGraph) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features (own, d), classes (own,), and which of them to train and to test on (own,)."""
    own = graph.nodes.cpu()
    if name != "cora":
        x = torch.randn(graph.own, FEATURES)
        return x, own % CLASSES, own % 2 == 0, own % 2 == 1
    # Small enough to be read by each process, which keeps its own rows.
    cora = load_cora_dataset()
    x = torch.from_numpy(cora.features[own.numpy()].toarray())
    labels, train, test = (torch.from_numpy(a)[own] for a in (cora.labels, cora.train, cora.test))
    return x / x.sum(1, keepdim=True), labels, train, test


def main(argv: list[str] | None = None) -> None:
    """Train, and print from one process what all of them know together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", default="cora", help="cora, or a file: npz, or an edge list")
    parser.add_argument("--partition", choices=("rows", "metis"), default="rows")
    parser.add_argument("--epochs", type=int, default=60)
    arguments = parser.parse_args(argv)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # of torchrun
        torch.cuda.set_device(device)
    # The engine; if a process ends or hangs the others end after so long, with an error.
    engine = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(engine, timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    graph = DistGraph.from_file(arguments.graph, partition=arguments.partition, device=device)
    print(f"process {rank}: {graph}\n", end="", flush=True)
    x, y, train, test = (t.to(device) for t in data_of(arguments.graph, graph))
    torch.manual_seed(0)  # the same weights on all processes
    model = DistributedDataParallel(SAGE(x.shape[1], CLASSES).to(device))
    torch.manual_seed(rank)  # but other dropout
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(1, arguments.epochs + 1):
        model.train()
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x, graph)[train], y[train], reduction="none")
        loss = mean(losses)
        loss.backward()
        optimizer.step()
        if rank == 0 and epoch % 20 == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        right = model(x, graph)[test].argmax(1) == y[test]
    accuracy = mean(right.float())
    if rank == 0:
        print(f"test accuracy {accuracy.item():.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
