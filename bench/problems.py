"""Matrices for measuring operators: graphs and weights from files, generated graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.synthetic import LAWS, generate
from sparsetir.data.graphs import GraphError, graph_name, load_graph
from sparsetir.data.graphs import layers as layers_of

GRAPH, PRUNED = "graph", "pruned"
MADE = "synthetic:"


@dataclass(frozen=True)
class Problem:
    """A sparse matrix: float32 CSR, sorted int32 indices, values that differ.

    kind : "graph" or "pruned"
    load : loads the matrix; only the one being measured is in memory
    """

    name: str
    kind: str
    load: Callable[[], Any]


def problems(
    files: Sequence[str], weights: Sequence[str] = (), layers: int = 1
) -> Iterator[Problem]:
    """Problems of the command line; Cora if it names none.

    files : see `matrix_of`
    weights : see `pruned`; layers : the number of layers per file
    """
    for text in files if files or weights else ["cora"]:
        name = text if text.startswith(MADE) else graph_name(text)
        yield Problem(name, GRAPH, lambda t=text: weighted(matrix_of(t)))
    for text in weights:
        for name, matrix in pruned([text], layers).items():
            yield Problem(name, PRUNED, lambda m=matrix: m)


def matrix_of(text: str) -> Any:
    """A graph: `synthetic:` and a name of `LAWS`, or as `sparsetir.graphs.load_graph` takes it."""
    if not text.startswith(MADE):
        return load_graph(text)
    if text.removeprefix(MADE) not in LAWS:
        raise GraphError(f"{text}: expected {MADE} and one of {', '.join(LAWS)}")
    return generate(LAWS[text.removeprefix(MADE)])


def weighted(matrix: Any) -> Any:
    """The matrix in float32, with random values if all are equal.

    So peers cannot skip reading the values.
    """
    matrix = matrix.astype("float32")
    if matrix.nnz and (matrix.data == matrix.data[0]).all():
        matrix = matrix.copy()
        matrix.data = np.random.default_rng(0).uniform(-1, 1, matrix.nnz).astype("float32")
    return matrix


def pruned(files: Sequence[str], layers: int) -> dict[str, Any]:
    """Pruned weights from npz files that hold several: `<layer>.shape`, `.indptr`, `.indices`.

    files : a path, for `layers` of its layers, spread over the file; or `path:layer` for that one
    """
    layers_by_name = {}
    for text in files:
        path, _, wanted = text.partition(".npz:")
        path = Path(path if path.endswith(".npz") else f"{path}.npz")
        names = [wanted] if wanted else layers_of(path)
        if not names:
            raise GraphError(f"{path}: has no arrays <layer>.indptr")
        picks = np.linspace(0, len(names) - 1, min(layers, len(names))).astype(int)
        for layer in [names[i] for i in picks]:
            one = f"{path}:{layer}"
            layers_by_name[graph_name(one)] = weighted(load_graph(one))
    return layers_by_name
