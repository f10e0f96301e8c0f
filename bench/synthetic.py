"""Random graphs with the sizes of those in table 1 of the SparseTIR paper; matrices of structure.

Degrees of graphs follow a law, edges do not: endpoints are matched at random (a configuration
model), so there are no communities and caches see less locality than with the real graphs. The
others are what simulations, roads and the web are like.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

TAIL = 1.5  # degrees follow a power law with this exponent plus one
MOST = 16  # the largest degree is at most 1 / MOST of all nodes
SPREAD = 0.3  # standard deviation over mean of degrees near their mean
GENERATING_BYTES = 56  # for each edge, while a graph is generated
SHARE = 0.8  # of the memory that is free, which a problem may take


@dataclass(frozen=True)
class Law:
    """Nodes and stored edges (both directions counted where `both`), and the law of degrees.

    central : degrees lie near their mean (as those of ogbn-proteins, section 4.2.1); else they
        follow a power law
    both : an edge is stored in both directions
    """

    nodes: int
    edges: int
    central: bool = False
    both: bool = True


LAWS = {
    "cora": Law(2_708, 10_556),
    "citeseer": Law(3_327, 9_228),
    "pubmed": Law(19_717, 88_651),
    "ppi": Law(44_906, 1_271_274),
    "ogbn-arxiv": Law(169_343, 1_166_243, both=False),
    "ogbn-proteins": Law(132_534, 39_561_252, central=True),
    "reddit": Law(232_965, 114_615_892),
}


def degrees(law: Law, rng: np.random.Generator) -> np.ndarray:
    """A degree for each node, whose sum is the number of edges."""
    mean = law.edges / law.nodes
    if law.central:
        wanted = rng.gamma(SPREAD**-2, mean * SPREAD**2, law.nodes)
    else:
        wanted = 1 + rng.pareto(TAIL, law.nodes)
    wanted *= mean / wanted.mean()
    for _ in range(9):  # what is cut from hubs goes to the others
        wanted = np.minimum(wanted, law.nodes / MOST)
        wanted *= mean / wanted.mean()
    whole = wanted.astype(np.int64)
    missing = law.edges - int(whole.sum())
    whole[np.argsort(whole - wanted, kind="stable")[:missing]] += 1
    return whole


def generate(law: Law, seed: int = 0) -> Any:
    """A CSR matrix with exactly the edges of the law; the same for the same seed."""
    rng = np.random.default_rng(seed)
    if law.both:
        # An edge and its reverse; an odd number needs one edge that is its own reverse.
        ends = _stubs(degrees(law, rng), rng)
        half = law.edges // 2
        keys = _distinct(ends[:half], ends[half : 2 * half], half, law.nodes, rng, ordered=True)
        i, j = np.divmod(keys, law.nodes)
        loop = np.zeros(law.edges % 2, np.int64)
        i, j = np.concatenate([i, j, loop]), np.concatenate([j, i, loop])
    else:
        rows, columns = (_stubs(degrees(law, rng), rng) for _ in range(2))
        keys = _distinct(rows, columns, law.edges, law.nodes, rng, ordered=False)
        i, j = np.divmod(keys, law.nodes)
    values = rng.uniform(-1, 1, len(i)).astype("float32")
    shape = (law.nodes, law.nodes)
    matrix = sp.csr_array((values, (i.astype("int32"), j.astype("int32"))), shape=shape)
    matrix.sort_indices()
    return matrix


def _stubs(degree: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each node as often as its degree says, in random order."""
    # Which node is a hub is random too, or rows and columns of a directed graph had the same ones.
    return rng.permutation(np.repeat(rng.permutation(len(degree)), degree))


def _distinct(
    i: np.ndarray, j: np.ndarray, count: int, nodes: int, rng: np.random.Generator, ordered: bool
) -> np.ndarray:
    """Keys `i * nodes + j` of that many different edges, without loops where `ordered` (i < j).

    What was matched twice or with itself is matched anew, by degree.
    """
    sources, targets = i, j
    keys = np.empty(0, np.int64)
    while True:
        if ordered:
            i, j = np.minimum(i, j), np.maximum(i, j)
            i, j = i[i != j], j[i != j]
        keys = np.unique(np.concatenate([keys, i * nodes + j]))
        missing = count - len(keys)
        if missing <= 0:
            return keys if not missing else np.sort(rng.permutation(keys)[:count])
        i = sources[rng.integers(0, len(sources), missing + 16)]
        j = targets[rng.integers(0, len(targets), missing + 16)]


def available_memory() -> int:
    """Bytes that are free on this machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("available_memory: /proc/meminfo has no MemAvailable")


def bytes_needed(nodes: int, edges: int, features: int, processes: int) -> int:
    """Memory of a problem: the matrix and both operands once in each process, or generating it.

    A float64 reference of the same size comes on top, in one process.
    """
    dense, sparse = 2 * nodes * features * 4, 12 * edges + 8 * nodes
    return max(GENERATING_BYTES * edges, processes * (dense + 2 * sparse) + 3 * dense)


def refusal(
    name: str, features: int, processes: int, available: Callable[[], int] = available_memory
) -> str | None:
    """Why a graph is not generated here, or None."""
    law = LAWS[name]
    needed, free = bytes_needed(law.nodes, law.edges, features, processes), available()
    if needed <= SHARE * free:
        return None
    return f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"


# -- of known structure ---------------------------------------------------------------------------


def _valued(pattern: Any) -> Any:
    """CSR of random values where a matrix has anything, each once."""
    found = sp.csr_array(pattern, dtype="float32")
    found.sum_duplicates()
    found.data = np.random.default_rng(0).uniform(-1, 1, found.nnz).astype("float32")
    found.indptr, found.indices = (x.astype("int32") for x in (found.indptr, found.indices))
    return found


def _line(side: int) -> Any:
    """Which nodes of a line are neighbours."""
    return sp.diags_array(np.ones((2, side - 1)), offsets=(-1, 1), shape=(side, side))


def _finite_elements(side: int = 61, unknowns: int = 3) -> Any:
    """Elasticity on a grid by rows of nodes: 11,163 rows of 39 nonzeros, near the diagonal."""
    one = sp.eye_array(side)
    near = sp.kron(_line(side), one) + sp.kron(one, _line(side)) + sp.eye_array(side * side)
    return _valued(sp.kron(near @ near, np.ones((unknowns, unknowns)), format="csr"))


def _banded(size: int = 50_000, each: int = 21, width: int = 128) -> Any:
    """Nonzeros at random within a band."""
    rows = np.repeat(np.arange(size), each)
    columns = rows + np.random.default_rng(1).integers(-width, width + 1, len(rows))
    there = (0 <= columns) & (columns < size)
    places = rows[there], columns[there]
    return _valued(sp.coo_array((np.ones(there.sum()), places), shape=(size, size)))


def _blocks(size: int = 16_384, block: int = 8, each: int = 4) -> Any:
    """Full blocks at random places."""
    count = size // block
    at = (
        np.repeat(np.arange(count), each),
        np.random.default_rng(2).integers(0, count, count * each),
    )
    grid = sp.coo_array((np.ones(len(at[0])), at), shape=(count, count))
    return _valued(sp.kron(grid, np.ones((block, block)), format="csr"))


def _roads(side: int = 450, kept: float = 0.65) -> Any:
    """A grid of streets, some of which are missing: 2.6 nonzeros a row, in both directions."""
    one = sp.eye_array(side)
    ahead = sp.triu(sp.kron(_line(side), one) + sp.kron(one, _line(side))).tocoo()
    there = np.random.default_rng(3).random(ahead.nnz) < kept
    i, j = (x[there] for x in ahead.coords)
    streets = sp.coo_array((np.ones(len(i)), (i, j)), shape=ahead.shape)
    return _valued(streets + streets.T)


STRUCTURED: dict[str, Callable[[], Any]] = {
    "finite-elements": _finite_elements,
    "banded": _banded,
    "blocks": _blocks,
    "roads": _roads,
    "power-law": lambda: generate(Law(50_000, 800_000)),
}
