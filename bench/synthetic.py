"""Random graphs with the sizes of those in table 1 of the SparseTIR paper.

Degrees of graphs follow a law, edges do not: endpoints are matched at random (a configuration
model), so there are no communities, and caches see less locality than with the real graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

TAIL = 1.5  # degrees follow a power law with this exponent plus one
MOST = 16  # the largest degree is at most 1 / MOST of all nodes
SPREAD = 0.3  # standard deviation over mean of degrees that lie near their mean


@dataclass(frozen=True)
class Law:
    """Nodes and stored edges (both directions counted if `both`), and the law of degrees.

    central : whether degrees lie near their mean (as those of ogbn-proteins, section 4.2.1); else
        they follow a power law
    both : whether edges are stored in both directions
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
    """A degree for each node, which sum to the number of edges."""
    mean = law.edges / law.nodes
    if law.central:
        wanted = rng.gamma(SPREAD**-2, mean * SPREAD**2, law.nodes)
    else:
        wanted = 1 + rng.pareto(TAIL, law.nodes)
    wanted *= mean / wanted.mean()
    for _ in range(9):  # edges cut from hubs go to the others
        wanted = np.minimum(wanted, law.nodes / MOST)
        wanted *= mean / wanted.mean()
    whole = wanted.astype(np.int64)
    missing = law.edges - int(whole.sum())
    whole[np.argsort(whole - wanted, kind="stable")[:missing]] += 1
    return whole


def generate(law: Law, seed: int = 0) -> Any:
    """A CSR matrix with exactly the edges of the law; deterministic for a seed."""
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
    """Nodes in random order, each repeated degree times."""
    # Hubs are random too, otherwise rows and columns of a directed graph would have the same ones.
    return rng.permutation(np.repeat(rng.permutation(len(degree)), degree))


def _distinct(
    i: np.ndarray, j: np.ndarray, count: int, nodes: int, rng: np.random.Generator, ordered: bool
) -> np.ndarray:
    """Keys `i * nodes + j` of that many distinct edges, without loops if `ordered` (i < j).

    Pairs matched twice or with themselves are matched again, by degree.
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
