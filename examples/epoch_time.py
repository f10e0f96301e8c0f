"""Time of a training epoch and its memory, beside PyTorch Geometric, on a CPU.

Each library trains in a process of its own, and they take turns: while one runs, the others are
stopped, so that no threads of theirs are in its way. PyG trains with edges (`pyg edges`), and with
its fastest kind of graph, a matrix in `torch.sparse_csr` (`pyg adj_t`). Features are given as a
dense tensor, but for `sparsetir sparse`; `--no-zeros` makes those of Cora random numbers.

    python examples/epoch_time.py --graphs cora graph.npz --models gcn sage --hidden 128
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

# Features of Cora are nearly all zero. Our layers are told so, or given a sparse matrix.
SPARSE = "sparsetir sparse"
PEERS = ("sparsetir", SPARSE, "pyg edges", "pyg adj_t")
MODELS = ("gcn", "sage")
# Of graphs that come without.
FEATURES, CLASSES, TRAINED = 128, 10, 0.5
FEW = 0.05  # of all features, where layers are told that the others are zero


# -- in the process of a library -------------------------------------------------------------------


def data_of(graph: str) -> tuple[Any, Any, Any, Any]:
    """Features (n, d), edges (2, E), classes (n,) and the mask of nodes to train on (n,)."""
    import numpy as np
    import torch

    from sparsetir.graphs import load_graph

    if graph == "cora":
        import cora

        data = cora.load()
        return data.x.to_dense(), data.edge_index, data.y, data.train
    target, source = load_graph(graph).nonzero()
    edge_index = torch.from_numpy(np.stack([source, target]).astype(np.int64))
    nodes = load_graph(graph).shape[0]
    torch.manual_seed(0)
    x, y = torch.randn(nodes, FEATURES), torch.randint(CLASSES, (nodes,))
    return x, edge_index, y, torch.rand(nodes) < TRAINED


def model_of(
    peer: str, name: str, features: int, hidden: int, classes: int, sparse: bool = False
) -> Any:
    """Two layers with a ReLU between; normalised once where the model normalises.

    sparse : whether features are dense ones that are nearly all zero, which our layers may be told
    """
    import torch

    if peer.startswith("sparsetir"):
        from sparsetir.nn import GCNConv, SAGEConv
    else:
        from torch_geometric.nn import GCNConv, SAGEConv

    layer, options = (GCNConv, {"cached": True}) if name == "gcn" else (SAGEConv, {})

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            told = {"sparse_features": True} if sparse and peer == "sparsetir" else {}
            self.first = layer(features, hidden, **options, **told)
            self.second = layer(hidden, classes, **options)

        def forward(self, x: Any, graph: Any) -> Any:
            return self.second(self.first(x, graph).relu(), graph)

    return Model()


def serve(peer: str, arguments: argparse.Namespace) -> None:
    """Answer to each line of the input with the seconds of some epochs."""
    import torch
    import torch.nn.functional as F

    warnings.filterwarnings("ignore", message="Sparse")
    torch.set_num_threads(arguments.threads)
    x, graph, y, mask = data_of(arguments.graphs[0])
    if arguments.no_zeros:
        x = torch.rand_like(x)
    if peer == SPARSE:
        x = x.to_sparse_csr()
    if peer == "pyg adj_t":
        from torch_geometric.utils import to_torch_csr_tensor

        graph = to_torch_csr_tensor(graph.flip(0), size=len(x))
    torch.manual_seed(0)
    sparse = x.layout is torch.strided and bool(x.count_nonzero() < FEW * x.numel())
    classes = int(y.max()) + 1
    model = model_of(peer, arguments.models[0], x.shape[1], arguments.hidden, classes, sparse)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    losses = []

    def epoch() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, graph)[mask], y[mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return time.perf_counter() - start

    first = epoch()
    epoch()
    answer({"first": first, "losses": losses})
    for _ in sys.stdin:
        seconds = [epoch() for _ in range(arguments.epochs)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answer({"seconds": seconds, "memory_mib": (peak - before) / 1024})


def answer(record: dict[str, Any]) -> None:
    """A line for the process that asks."""
    print(json.dumps(record), flush=True)


# -- in the process that asks ---------------------------------------------------------------------


class Peer:
    """A library's process, stopped except while it is asked."""

    def __init__(self, name: str, model: str, graph: str, arguments: argparse.Namespace) -> None:
        threads = str(arguments.threads)
        # Threads that spin would take the processors from torch's, and its own from them.
        variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
                     "TVM_NUM_THREADS": threads, "TVM_THREAD_POOL_SPIN_COUNT": "0",
                     "TVM_BIND_THREADS": "0"}  # fmt: skip
        command = [
            sys.executable, __file__, "--serve", name, "--models", model, "--graphs", graph,
            "--hidden", str(arguments.hidden), "--threads", threads,
            "--epochs", str(arguments.epochs), *["--no-zeros"] * arguments.no_zeros,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.seconds: list[float] = []
        self.memory_mib = 0.0
        self.started = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"epoch_time: a process ended with status {self.process.wait()}")
        self.process.send_signal(signal.SIGSTOP)
        return json.loads(line)

    def turn(self) -> None:
        """Some epochs."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        print(file=self.process.stdin, flush=True)
        found = self._answer()
        self.seconds += found["seconds"]
        self.memory_mib = max(self.memory_mib, found["memory_mib"])

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def compare(model: str, graph: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of epochs of all libraries, and that they do the same: their losses."""
    peers: dict[str, Peer] = {}
    try:
        zeros = graph == "cora" and not arguments.no_zeros
        for name in (p for p in PEERS if p != SPARSE or zeros):
            peers[name] = Peer(name, model, graph, arguments)
        for _ in range(arguments.rounds):
            for peer in peers.values():
                peer.turn()
    finally:
        for peer in peers.values():
            peer.close()
    found = {
        name: {
            "min": min(p.seconds), "median": statistics.median(p.seconds),
            "first": p.started["first"], "memory_mib": p.memory_mib,
            "losses": p.started["losses"],
        }
        for name, p in peers.items()
    }  # fmt: skip
    name = Path(graph).stem + (" without zeros" if arguments.no_zeros else "")
    return {"model": model, "graph": name, "hidden": arguments.hidden,
            "threads": arguments.threads, "peers": found}  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """A table."""
    print(f"{found['model']} on {found['graph']}, {found['hidden']} hidden features, "
          f"{found['threads']} threads")  # fmt: skip
    print(f"  {'':16} {'epoch':>10} {'median':>10} {'memory':>10}  times that of sparsetir")
    ours = found["peers"]["sparsetir"]["min"]
    for name, peer in found["peers"].items():
        ratio = "" if name == "sparsetir" else f"{peer['min'] / ours:6.2f}"
        print(f"  {name:16} {1e3 * peer['min']:7.1f} ms {1e3 * peer['median']:7.1f} ms "
              f"{peer['memory_mib']:6.0f} MiB  {ratio}", flush=True)  # fmt: skip


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Compare on each graph with each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--graphs", nargs="+", default=["cora"], help="cora, or files of graphs")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--hidden", type=int, default=128, help="hidden features")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each library")
    parser.add_argument("--no-zeros", action="store_true", help="random features")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each library")
    parser.add_argument("--epochs", type=int, default=5, help="epochs in a turn")
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    parser.add_argument("--serve", choices=PEERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve:
        serve(arguments.serve, arguments)
        return []
    results = []
    for graph in arguments.graphs:
        for model in arguments.models:
            results.append(compare(model, graph, arguments))
            show(results[-1])
    if arguments.json:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from bench.report import circumstances

        data = {**circumstances(arguments.threads), "results": results}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
    return results


if __name__ == "__main__":
    main()
