"""What operators are measured on: graphs and pruned weights from files, generated graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsetir.bench.graphs import graphs, load_graph, pruned
from sparsetir.bench.synthetic import LAWS, generate, refusal

GRAPH, PRUNED = "graph", "pruned"


@dataclass(frozen=True)
class Problem:
    """A sparse matrix: float32 CSR, sorted int32 indices, values that differ.

    kind : "graph" or "pruned"
    load : makes the matrix; only the one that is being measured is in memory
    """

    name: str
    kind: str
    load: Callable[[], Any]


def problems(
    files: list[str], weights: list[str], layers: int, names: list[str]
) -> Iterator[Problem]:
    """Those of the command line; Cora where it names none.

    files : npz or mtx files of graphs, or "cora"; with ":T" behind it, the transposed graph
    weights : see `bench.graphs.pruned`; layers : how many of a file
    names : of `bench.synthetic.LAWS`
    """
    for text in files if files or weights or names else ["cora"]:
        path, transposed = Path(text.removesuffix(":T")), text.endswith(":T")
        stem = path.name.removesuffix(".gz").removesuffix(path.suffix).removesuffix(".mtx")
        name = stem + (":T" if transposed else "")
        yield Problem(name, GRAPH, lambda p=path, t=transposed: _graph(p, t))
    for text in weights:
        for name, matrix in pruned([text], layers).items():
            yield Problem(name, PRUNED, lambda m=matrix: weighted(m))
    for name in names:
        yield Problem(f"synthetic:{name}", GRAPH, lambda n=name: generate(LAWS[n]))


def chosen(names: list[str]) -> list[str]:
    """Names of generated graphs, all for "all"."""
    unknown = set(names) - {*LAWS, "all"}
    if unknown:
        raise SystemExit(f"--synthetic: expected {', '.join(LAWS)} or all, got {unknown.pop()}")
    return list(LAWS) if "all" in names else names


def too_large(problem: Problem, features: int, processes: int) -> str | None:
    """Why a generated problem is not measured here, or None."""
    name = problem.name.removeprefix("synthetic:")
    return None if name == problem.name else refusal(name, features, processes)


def weighted(matrix: Any) -> Any:
    """The matrix with random values where all are the same: nobody may read the pattern alone."""
    if matrix.nnz and (matrix.data == matrix.data[0]).all():
        matrix = matrix.copy()
        matrix.data = np.random.default_rng(0).uniform(-1, 1, matrix.nnz).astype("float32")
    return matrix


def _graph(path: Path, transposed: bool) -> Any:
    matrix = graphs([])["cora"] if str(path) == "cora" else load_graph(path)
    if transposed:
        matrix = matrix.T.tocsr()
        matrix.sort_indices()
        matrix.indptr, matrix.indices = (x.astype("int32") for x in (matrix.indptr, matrix.indices))
    return weighted(matrix)
