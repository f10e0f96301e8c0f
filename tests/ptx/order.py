"""The order in which basic blocks run, so that threads which part meet again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def order(successors: Mapping[int, Sequence[int]], entry: int = 0) -> list[int]:
    """Blocks, each after all that lead to it, but for ways back to the head of a loop.

    Of all threads those at the first of their blocks run. Threads that take the shorter way to a
    block thus wait there for the others, and those that leave a loop wait for its last turn.
    """
    nodes = sorted(successors)
    if len(nodes) < 2:
        return nodes
    leads = _reachable(nodes, successors)
    # All blocks of a loop lead to each other; of two others the later one is led to by more.
    loops = (leads & leads.T).argmax(1)
    ways = leads.sum(0)
    places = sorted(range(len(nodes)), key=lambda n: (ways[n], loops[n], n))
    ordered: list[int] = []
    for loop in dict.fromkeys(int(loops[n]) for n in places):
        inside = [nodes[n] for n in places if loops[n] == loop]
        if len(inside) == 1:
            ordered += inside
            continue
        entered = {m for n in nodes if n not in inside for m in successors[n]} | {entry}
        head = next((n for n in inside if n in entered), inside[0])
        rest = {n: successors[n] for n in inside if n != head}
        first = next((m for m in successors[head] if m in rest), min(rest))
        ordered += [head, *order(rest, first)]
    return ordered


def _reachable(nodes: list[int], successors: Mapping[int, Sequence[int]]) -> np.ndarray:
    """Reachability of blocks, including from themselves."""
    place = {node: n for n, node in enumerate(nodes)}
    leads = np.eye(len(nodes), dtype=np.float32)
    for node in nodes:
        for other in successors[node]:
            if other in place:
                leads[place[node], place[other]] = 1
    while True:
        more = np.minimum(leads @ leads, 1)
        if (more == leads).all():
            return leads > 0
        leads = more
