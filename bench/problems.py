"""What operators are measured on: graphs and pruned weights from files, generated graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.synthetic import LAWS, STRUCTURED, generate, refusal
from sparsetir.data.graphs import GraphError, graph_name, load_graph, load_relations
from sparsetir.data.graphs import layers as layers_of
from sparsetir.formats import Pattern

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
    weights : see `pruned`; layers : how many of a file
    names : of `LAWS` and `STRUCTURED` of `synthetic`
    """
    for text in files if files or weights or names else ["cora"]:
        yield Problem(graph_name(text), GRAPH, lambda t=text: weighted(load_graph(t)))
    for text in weights:
        for name, matrix in pruned([text], layers).items():
            yield Problem(name, PRUNED, lambda m=matrix: m)
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
    """The matrix in float32, with random values where all are the same.

    So nobody may read the pattern alone.
    """
    matrix = matrix.astype("float32")
    if matrix.nnz and (matrix.data == matrix.data[0]).all():
        matrix = matrix.copy()
        matrix.data = np.random.default_rng(0).uniform(-1, 1, matrix.nnz).astype("float32")
    return matrix


def graphs(paths: list[Path]) -> dict[str, Any]:
    """Cora and the given graphs: float32 CSR with int32 sorted indices, by name."""
    return {graph_name(p): weighted(load_graph(p)) for p in ["cora", *paths]}


def pattern_of(matrix: Any) -> Pattern:
    """The pattern of a matrix as `graphs` and `pruned` give it."""
    return Pattern.from_csr(matrix.indptr, matrix.indices, matrix.shape)


def pruned(files: list[str], layers: int) -> dict[str, Any]:
    """Pruned weights from npz files that hold several: `<layer>.shape`, `.indptr`, `.indices`.

    files : a path, for `layers` of its layers, far from each other; or `path:layer` for that one
    """
    found = {}
    for text in files:
        path, _, wanted = text.partition(".npz:")
        path = Path(path if path.endswith(".npz") else f"{path}.npz")
        names = [wanted] if wanted else layers_of(path)
        if not names:
            raise GraphError(f"{path}: has no arrays <layer>.indptr")
        at = np.linspace(0, len(names) - 1, min(layers, len(names))).astype(int)
        for layer in [names[i] for i in at]:
            one = f"{path}:{layer}"
            found[graph_name(one)] = weighted(load_graph(one))
    return found


def relations(paths: list[Path]) -> dict[str, Pattern]:
    """Graphs with relations: patterns over (relation, destination, source)."""
    return {path.stem: load_relations(path).pattern for path in paths}
