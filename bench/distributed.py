"""Training on several processes: losses, bytes, memory and time, and a model of more of them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench.distributed_model import NETWORKS, Local, Network, Share, epoch, expected_share
from bench.report import circumstances, table, write
from bench.timing import progress
from sparsetir.data.graphs import graph_name
from sparsetir.tuning.process import THREADS

GENERATED = {"nodes": 100_000, "degree": 10, "far": 0.1}
LARGE = {"nodes": 100e6, "degree": 16, "far": 0.05, "near": 50}  # of the model alone
MACHINES = [2**i for i in range(1, 11)]
SECONDS = 600  # for a run
# How many times as much losses may differ as they do in one process between orders of the nodes,
# which add up the same numbers and round them otherwise: of a few orders, not the worst there is.
TIMES = 4
HIDDEN = 64  # features
DIFFERENT = 1e-5  # by how much losses may differ, relative, beside what rounding does
# The peak resident size over that of one process, by this one's part, and the rows that come.
RATIO = "memory / share and halo"
# Of what processes say: what they have together, the most of one, and each of them.
TOTAL = ("bytes needed", "bytes sent", "bytes that came")
MOST = ("epoch", "split")
EACH = ("own", "nnz", "halo", "memory")


def run(args: argparse.Namespace) -> None:
    """Write the file; status 1 where losses differ."""
    cells: list[dict[str, Any]] = []
    results: dict[str, Any] = {"cells": cells, "stated": {k: list(v) for k, v in NETWORKS.items()}}
    where = circumstances(1)
    for graph, model in product(args.graph or ["cora"], args.model):
        cells.append(cell_of(graph, model, args))
        results["large"] = large(cells)
        write(args.out, "distributed", where, results, quiet=True)  # as far as it is
    show(results, where["cores"])
    write(args.out, "distributed", where, results)
    wrong = [c for c in cells if c["difference"] > DIFFERENT + TIMES * c["rounding"]]
    if wrong:
        raise SystemExit("distributed: losses differ: " + ", ".join(c["graph"] for c in wrong))


def cell_of(graph: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs of one problem by each number of processes, and what follows from them."""
    made = graph == "generated"
    spec: dict[str, Any] = {"graph": graph, "model": model, "order": 0, "hidden": HIDDEN}
    spec |= {"nodes": 0, **(GENERATED if made else {})}
    spec |= {"epochs": 5 if args.quick else args.epochs, "profiled": 2 if args.quick else 10}
    if made and args.quick:
        spec["nodes"] = 5000
    runs = {}
    for size in args.processes:
        progress(f"{graph}, {model}, {size} processes")
        runs[size] = launch(spec, size)
    orders = []
    for order in range(1, args.orders + 1):
        progress(f"{graph}, {model}, nodes in another order")
        orders += launch({**spec, "order": order}, 1)
    progress("")
    first = runs[min(runs)][0]
    losses = {size: found[0]["losses"] for size, found in runs.items()}
    base = np.array(losses[min(runs)])

    def most(others: Iterable[list[float]]) -> float:
        return max((float(np.max(np.abs(np.array(x) / base - 1))) for x in others), default=0.0)

    cell: dict[str, Any] = {"graph": "generated" if made else graph_name(graph)}
    cell |= {k: spec[k] for k in ("model", "hidden")}
    cell |= {k: first[k] for k in ("nodes", "edges", "features", "weights")}
    cell |= {"losses": losses, "difference": most(losses.values())}
    others = [x["losses"] for x in orders]
    cell |= {"losses in other orders": others, "rounding": most(others)}
    cell["runs"] = {size: summary(found, runs.get(1)) for size, found in runs.items()}
    if 1 in runs and len(runs) > 1:
        cell["model of time"] = modelled(cell)
    return cell


def launch(spec: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """What each process says; raises SystemExit where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(json.dumps(spec))
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        worker = ["-m", "bench.distributed_worker", str(path), folder]
        command = [sys.executable, "-m", *torchrun, *worker]
        alone = dict.fromkeys(THREADS, "1")
        done = subprocess.run(
            command, env={**os.environ, **alone}, capture_output=True, text=True, timeout=SECONDS
        )
        if done.returncode:
            raise SystemExit(f"distributed: {size} processes failed:\n{done.stderr[-4000:]}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]


def summary(found: list[dict[str, Any]], one: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Of the processes of a run together, or of the one with the most."""
    out: dict[str, Any] = {k: {n: max(p[k][n] for p in found) for n in found[0][k]} for k in MOST}
    out |= {k: sum(p[k] for p in found) for k in TOTAL} | {k: [p[k] for p in found] for k in EACH}
    out |= {k: found[0][k] for k in ("network", "epoch of a small graph")}
    needed = out["bytes needed"]
    if needed:
        out["bytes sent / needed"] = out["bytes sent"] / needed
        out["bytes that came / needed"] = out["bytes that came"] / needed
    if one is not None:
        shares = [share_and_halo(p, one[0]) for p in found]
        out["memory, share and halo"] = shares
        out[RATIO] = max(p["memory"] / share for p, share in zip(found, shares, strict=True))
    return out


def share_and_halo(process: dict[str, Any], one: dict[str, Any]) -> float:
    """What one process takes, by this one's part of nodes and edges, and the rows that come once.

    By parts: of features by nodes, of the rest by edges.
    """
    by_nodes = one["bytes"] * one["nodes"] * one["features"]
    rest = max(0, one["memory"] - by_nodes)
    share = by_nodes * process["own"] / one["nodes"] + rest * (
        (process["nnz"] + process["own"]) / (one["edges"] + one["nodes"])
    )
    return share + one["bytes"] * process["halo"] * process["features"]


# -- the model ------------------------------------------------------------------------------------


def local_speeds(cell: dict[str, Any]) -> Local:
    """Of one process: what its epoch takes, by edges and nodes."""
    one = cell["runs"][1]
    scale = one["epoch"]["min"] / one["split"]["epoch, profiled"]  # without the profiler's part
    products = scale * (one["split"]["local product"] + one["split"]["remote product"])
    constant = min(one["epoch of a small graph"], one["epoch"]["min"])
    rest = max(one["epoch"]["min"] - products - constant, 0.0)
    per_packed = 0.0
    two = cell["runs"].get(2)
    if two and sum(two["halo"]):
        work = two["split"]["pack"] + two["split"]["unpack"]
        per_packed = work / max(two["halo"])
    return Local(products / cell["edges"], rest / cell["nodes"], per_packed, constant)


def numbers_of(cell: dict[str, Any]) -> int:
    from bench.distributed_worker import exchanged

    return exchanged(cell["model"], cell["features"], cell["hidden"])


def modelled(cell: dict[str, Any]) -> dict[str, Any]:
    """Compare the model with what was measured here."""
    local, numbers, weights = local_speeds(cell), numbers_of(cell), cell["weights"]
    cores = len(os.sched_getaffinity(0))
    check = {}
    for size, found in cell["runs"].items():
        if size == 1:
            continue
        here = Network(found["network"]["latency"], found["network"]["speed"])
        split = found["split"]
        products = split["remote product"] + split["local product"]
        remote = split["remote product"] / max(1e-12, products)
        share = Share(max(found["nnz"]), max(found["own"]), max(found["halo"]), remote)
        crowding = max(1.0, size / cores)
        said = epoch(local, share, here, size, numbers, weights, crowding=crowding)
        measured = found["epoch"]["min"]
        check[size] = {"model": said["epoch"], "measured": measured, "parts": said}
        check[size] |= {"model / measured": said["epoch"] / measured, "edges": sum(found["nnz"])}
    return {"local": local._asdict(), "check": check}


def large(cells: list[dict[str, Any]]) -> dict[str, Any] | None:
    """A graph that one machine cannot hold, by the speeds of the largest that was measured."""
    known = [c for c in cells if "model of time" in c]
    if not known:
        return None
    cell = max(known, key=lambda c: c["edges"])
    local, numbers = local_speeds(cell), numbers_of(cell)
    found: dict[str, Any] = {"speeds of": f"{cell['model']} on {cell['graph']}", **LARGE}
    whole = Share(LARGE["nodes"] * LARGE["degree"], LARGE["nodes"], 0)
    found["one"] = epoch(local, whole, Network(0, 1), 1, numbers, cell["weights"])["epoch"]
    for name, stated in NETWORKS.items():
        found[name] = {}
        for count in MACHINES:
            share = expected_share(LARGE, count)
            found[name][count] = epoch(local, share, stated, count, numbers, cell["weights"])
    return found


# -- what is shown --------------------------------------------------------------------------------


def show(results: dict[str, Any], cores: int) -> None:
    """Tables of epochs, of their steps, and of the model."""
    rows, splits, checks = [], [], []
    names = ("bytes sent / needed", "bytes that came / needed", RATIO)
    for cell in results["cells"]:
        name = f"{cell['model']}, {cell['graph']}"
        for size, found in cell["runs"].items():
            row = [name, size, *(f"{1e3 * found['epoch'][k]:.1f}" for k in ("min", "median"))]
            row.append(f"{found['bytes needed'] / 1e6:.2f}")
            row += [f"{found[k]:.3f}" if k in found else "-" for k in names]
            row.append(f"{max(found['memory']) / 2**20:.1f}")
            rows.append([*row, f"{cell['difference']:.1e}", f"{cell['rounding']:.1e}"])
            splits.append([name, size, *(f"{1e3 * t:.2f}" for t in found["split"].values())])
        for size, said in cell.get("model of time", {}).get("check", {}).items():
            times = [f"{1e3 * said[k]:.1f}" for k in ("model", "measured")]
            checks.append([name, size, *times, f"{said['model / measured']:.2f}"])
    head = ["", "processes", "ms", "median", "MB", "sent", "came", "memory", "MiB"]
    title = (
        f"Epochs on this machine of {cores} cores, a thread for each process; MB that other "
        "processes' rows need, what was sent and came over that; memory over share and halo; "
        "losses by processes and by the order of nodes"
    )
    table(title, [*head, "losses differ", "by order"], rows)
    head = ["", "processes", *next(iter(results["cells"][0]["runs"].values()))["split"]]
    table("An epoch, in ms by torch's profiler; the slowest process of each step", head, splits)
    if checks:
        head = ["", "processes", "model, ms", "measured", "ratio"]
        table("The model beside what was measured here", head, checks)
    if found := results["large"]:
        rows = [[1, f"{found['one']:.2f}", ""]]
        for n in MACHINES:
            times = [found[name][n]["epoch"] for name in NETWORKS]
            rows.append([n, *(f"{t:.3f} ({found['one'] / t:.0f})" for t in times)])
        title = f"By the model: s for an epoch of {found['nodes']:.0e} nodes with {found['degree']}"
        title += f" edges each, {found['far']:.0%} of them far; times as fast as one machine"
        table(title, ["machines", *NETWORKS], rows)
