"""A model of an epoch's time on many machines, from local speeds and a network's figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Network(NamedTuple):
    """The least seconds of a message, and bytes per second into a machine."""

    latency: float
    speed: float


# Assumed figures, not measured: of Ethernet with TCP, and of a faster network.
NETWORKS = {"10 Gbit/s, 50 us": Network(50e-6, 1.25e9), "100 Gbit/s, 10 us": Network(10e-6, 12.5e9)}


class Local(NamedTuple):
    """Seconds of one process: per edge, per node, and per row that is packed or added.

    per_epoch : independent of sizes: Python, the optimizer
    """

    per_edge: float
    per_node: float
    per_packed: float
    per_epoch: float


class Share(NamedTuple):
    """The largest share of a process: edges, nodes, incoming rows, and the part of far edges."""

    nnz: float
    own: float
    halo: float
    far: float = 0.5


def epoch(
    local: Local,
    share: Share,
    network: Network,
    processes: int,
    numbers: int,
    weights: int,
    exchanges: int = 4,
    crowding: float = 1.0,
) -> dict[str, float]:
    """Seconds of an epoch.

    numbers : numbers exchanged per row of a halo, there and back, of 4 bytes
    weights : numbers whose gradients are reduced, in a ring
    exchanges : of rows; each waits for the slowest message, and messages to other processes are
        started one after the other, on a machine's own time
    crowding : processes per core

    Edges between own nodes are multiplied while rows are in transit; the rest follows.
    """
    if processes == 1:
        alone = share.nnz * local.per_edge + share.own * local.per_node + local.per_epoch
        return {"compute": alone, "exchange": 0.0, "hidden": 0.0, "reduce": 0.0, "epoch": alone}
    edges = share.nnz * local.per_edge * crowding
    others = (share.own * local.per_node + share.halo * local.per_packed) * crowding
    per_message = network.latency / 10  # to start one, besides the transit of the first
    sending = exchanges * (network.latency + (processes - 2) * per_message)
    exchange = sending + 4 * numbers * share.halo / network.speed
    hidden = min(exchange, (1 - share.far) * edges)
    ring = 2 * (processes - 1)
    # For the weights, and for the loss, which is one number.
    reduce = 2 * ring * network.latency + 4 * weights * ring / processes / network.speed
    total = edges + others + local.per_epoch * crowding + exchange - hidden + reduce
    compute = edges + others + local.per_epoch * crowding
    parts = {"compute": compute, "exchange": exchange, "hidden": hidden, "reduce": reduce}
    return {**parts, "epoch": total}


def expected_share(graph: Mapping[str, Any], processes: int) -> Share:
    """The share of a graph of `nodes` with `degree` sources, all but a part `far` within `near`."""
    nodes, degree, far, near = (graph[k] for k in ("nodes", "degree", "far", "near"))
    nodes_each = nodes / processes
    elsewhere = nodes - nodes_each
    draws = nodes_each * degree * far
    halo = elsewhere * -math.expm1(-draws / nodes) + (2 * near if processes > 1 else 0)
    return Share(nodes_each * degree, nodes_each, halo, far * (1 - 1 / processes))
