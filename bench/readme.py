"""What the README says of speed: one number for each of its snippets, on generated graphs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from bench import graph as models
from bench import rgcn, sparse_results
from bench.harness import each, finish
from bench.report import table
from bench.synthetic import LAWS, generate
from bench.timing import clock_of, interleaved
from bench.ways import Device
from sparsetir import SparseMatrix

GRAPH, FEATURES = "ppi", 64  # sizes of this graph, edges at random
RELATIONAL = (100_000, 100)  # edges and relations
PRODUCT = "pubmed"
COMPILED = 'torch.compile(model, backend="sparsetir")'
# By the name of a layer of `bench graph`.
LAYERS = {
    "GCN": "an epoch of a two-layer GCN of PyG",
    "GAT": "an epoch of a two-layer GAT of PyG",
    "gate": "an epoch of a user's own gated messages",
}


def run(args: argparse.Namespace) -> None:
    """The command; status 1 where a result was wrong."""
    torch.set_num_threads(args.threads)
    seconds = 0.1 if args.quick else args.seconds
    law, other = ("cora", "cora") if args.quick else (GRAPH, PRODUCT)
    todo: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (what, partial(epoch, law, layer, what, seconds)) for layer, what in LAYERS.items()
    ]
    todo += [
        ("RGCN", partial(relational, (2000, 6) if args.quick else RELATIONAL, seconds)),
        ("SpMM", partial(product, law, seconds)),
        ("SpGEMM", partial(sparse_product, other, seconds)),
    ]
    rows = each(iter(todo))
    head = ["what", "snippet", "beside", "ms", "times as fast"]
    told = [
        [
            row["what"], row["snippet"], peer, f"{1e3 * times[peer]['min']:.1f}",
            f"{times[peer]['min'] / times['sparsetir']['min']:.2f}",
        ]
        for row in rows
        for times in [row["seconds"]]
        for peer in times
    ]  # fmt: skip
    table(f"{args.threads} threads", head, told)
    wrong = [row for row in rows if row.get("wrong")]
    results = {"rows": rows, "clock": _clock().__name__}
    finish(args, "readme", results, wrong, load=os.getloadavg()[0])


def _clock() -> Callable[[], float]:
    return clock_of(torch.get_num_threads())


def epoch(law: str, layer: str, what: str, seconds: float) -> dict[str, Any]:
    """Of a model of PyG in torch.compile, beside PyG as it is and Inductor."""
    nodes, edges = models.edges_of_matrix(generate(LAWS[law]))
    ways = [models.INDUCTOR, models.OURS, models.PYG]
    cell = models.measure(law, nodes, edges, layer, ways, seconds)
    times = {"sparsetir": cell["epoch"].pop(models.OURS), **cell["epoch"]}
    about = {"what": what, "snippet": COMPILED, "graph": law, "edges": edges.shape[1]}
    return {**about, "seconds": times, "wrong": cell["wrong"], "missing": cell["missing"]}


def relational(sizes: tuple[int, int], seconds: float) -> dict[str, Any]:
    """A step of training of a relational layer, beside both of PyG."""
    graph = rgcn.generated(*sizes)
    cell = rgcn.measure(graph, 32, rgcn.WAYS, Device(seconds=seconds, least=3, clock=_clock()))
    times = {"sparsetir": cell["training"].pop(rgcn.OURS), **cell["training"]}
    about = {"what": "a step of training of an RGCN layer", "snippet": "sparsetir.nn.RGCNConv"}
    return {**about, "edges": graph.edges, "seconds": times, "wrong": cell["wrong"]}


def product(law: str, seconds: float) -> dict[str, Any]:
    """A sparse matrix times features."""
    matrix = generate(LAWS[law])
    x = np.random.default_rng(0).random((matrix.shape[1], FEATURES), "float32")
    A, exact = SparseMatrix(matrix), matrix @ x
    tensor = A.to_torch()
    dense = torch.from_numpy(x)
    wrong = None if np.allclose(A @ x, exact, rtol=1e-4, atol=1e-4) else "A @ x"
    calls = {"sparsetir": lambda: A @ x, "scipy": lambda: matrix @ x}
    times = interleaved({**calls, "torch (MKL)": lambda: tensor @ dense}, seconds, clock=_clock())
    about = {"what": f"a sparse matrix times {FEATURES} features", "snippet": "A @ X"}
    return {**about, "nnz": matrix.nnz, "seconds": times, "wrong": wrong}


def sparse_product(law: str, seconds: float) -> dict[str, Any]:
    """A sparse matrix times itself."""
    cell = sparse_results.product(law, generate(LAWS[law]), None, seconds)
    found = cell["seconds"]
    times = {n: found[n] for n in ("sparsetir", "scipy")} | {"torch (MKL)": found["torch"]}
    about = {"what": "a sparse matrix times itself", "snippet": "A @ A"}
    return {**about, "nnz": cell["nnz"], "seconds": times}
