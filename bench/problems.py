"""What operators are measured on: graphs and pruned weights from files, generated graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.graphs import pruned, single
from bench.structured import STRUCTURED
from bench.synthetic import LAWS, generate, refusal
from sparsetir.data.graphs import graph_name, load_graph

GRAPH, PRUNED, MATRIX = "graph", "pruned", "matrix"


@dataclass(frozen=True)
class Problem:
    """A sparse matrix: float32 CSR, sorted int32 indices, values that differ.

    kind : "graph", "pruned" or "matrix"
    load : makes the matrix; only the one that is being measured is in memory
    """

    name: str
    kind: str
    load: Callable[[], Any]


def problems(
    files: list[str], weights: list[str], layers: int, names: list[str]
) -> Iterator[Problem]:
    """Those of the command line; Cora where it names none.

    files : as :func:`sparsetir.graphs.load_graph` takes them
    weights : see `bench.graphs.pruned`; layers : how many of a file
    names : of `bench.synthetic.LAWS` and `bench.structured.STRUCTURED`
    """
    for text in files if files or weights or names else ["cora"]:
        yield Problem(graph_name(text), GRAPH, lambda t=text: weighted(single(load_graph(t))))
    for text in weights:
        for name, matrix in pruned([text], layers).items():
            yield Problem(name, PRUNED, lambda m=matrix: weighted(m))
    for name in names:
        make = STRUCTURED.get(name) or (lambda n=name: generate(LAWS[n]))
        yield Problem(f"synthetic:{name}", MATRIX if name in STRUCTURED else GRAPH, make)


def chosen(names: list[str]) -> list[str]:
    """Names of generated matrices: all graphs for "all", what has a structure for "structured"."""
    groups = {"all": [*LAWS], "structured": [*STRUCTURED]}
    known = [*LAWS, *STRUCTURED, "structured", "all"]
    unknown = set(names) - {*known}
    if unknown:
        raise SystemExit(
            f"--synthetic: expected {', '.join(known[:-1])} or all, got {unknown.pop()}"
        )
    return list(dict.fromkeys(n for name in names for n in groups.get(name, [name])))


def too_large(problem: Problem, features: int, processes: int) -> str | None:
    """Why a generated problem is not measured here, or None."""
    name = problem.name.removeprefix("synthetic:")
    generated = name != problem.name and name in LAWS
    return refusal(name, features, processes) if generated else None


def weighted(matrix: Any) -> Any:
    """The matrix with random values where all are the same: nobody may read the pattern alone."""
    if matrix.nnz and (matrix.data == matrix.data[0]).all():
        matrix = matrix.copy()
        matrix.data = np.random.default_rng(0).uniform(-1, 1, matrix.nnz).astype("float32")
    return matrix
