"""Training on several processes: losses, bytes, memory and time, and a model for more of them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from bench.distributed_model import NETWORKS, Local, Network, Share, epoch, expected_share
from bench.harness import circumstances_of, finish
from bench.report import Form, show_times, table, write
from bench.timing import progress
from sparsetir.data.graphs import graph_name
from sparsetir.tuning.process import THREADS

GENERATED = {"nodes": 100_000, "degree": 10, "far": 0.1}
LARGE = {"nodes": 100e6, "degree": 16, "far": 0.05, "near": 50}  # only for the model
MACHINES = [2**i for i in range(1, 11)]
SECONDS = 600  # limit of a run
# Losses may differ by this multiple of their differences in one process between orders of the
# nodes, which sum the same numbers with other rounding: from a few orders, not the worst case.
TIMES = 4
HIDDEN = 64  # features
DIFFERENT = 1e-5  # the relative difference of losses allowed besides rounding
# The peak resident size over that of one process, by this one's share, and the incoming rows.
RATIO = "memory / share and halo"
RATIOS = ("bytes sent / needed", "bytes that came / needed", RATIO)
# Of the processes' figures: sums, the largest, and each process's.
TOTAL = ("bytes needed", "bytes sent", "bytes that came")
MOST = ("epoch", "split")
EACH = ("own", "nnz", "halo", "memory")


def run(args: argparse.Namespace) -> None:
    """Write the file; status 1 if losses differ."""
    cells: list[dict[str, Any]] = []
    results: dict[str, Any] = {"cells": cells, "stated": {k: list(v) for k, v in NETWORKS.items()}}
    about = circumstances_of(args)
    for graph, model in product(args.graph or ["cora"], args.model):
        cells.append(cell_of(graph, model, args))
        results["large"] = large(cells)
        write(args.out, "distributed", about, results, quiet=True)  # the results so far
    show(results, about["cores"])
    wrong = [c["graph"] for c in cells if c["difference"] > DIFFERENT + TIMES * c["rounding"]]
    finish(args, "distributed", results)
    if wrong:
        raise SystemExit(f"distributed: losses differ: {', '.join(wrong)}")


def cell_of(graph: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs of one problem for each number of processes, and the derived figures."""
    synthetic = graph == "generated"
    spec: dict[str, Any] = {"graph": graph, "model": model, "order": 0, "hidden": HIDDEN}
    spec |= {"nodes": 0, **(GENERATED if synthetic else {})}
    spec |= {"epochs": 5 if args.quick else args.epochs, "profiled": 2 if args.quick else 10}
    if synthetic and args.quick:
        spec["nodes"] = 5000
    runs = {}
    for size in args.processes:
        progress(f"{graph}, {model}, {size} processes")
        runs[size] = launch(spec, size)
    progress(f"{graph}, {model}, nodes in other orders")
    orders = [launch({**spec, "order": n}, 1)[0]["losses"] for n in range(1, args.orders + 1)]
    progress("")
    least = min(runs)
    first, losses = runs[least][0], {size: parts[0]["losses"] for size, parts in runs.items()}

    def most(others: Iterable[list[float]]) -> float:
        off = [np.abs(np.array(x) / np.array(losses[least]) - 1).max() for x in others]
        return float(max(off, default=0.0))

    cell: dict[str, Any] = {"graph": "generated" if synthetic else graph_name(graph)}
    cell |= {k: spec[k] for k in ("model", "hidden")}
    cell |= {k: first[k] for k in ("nodes", "edges", "features", "weights")}
    cell |= {"losses": losses, "difference": most(losses.values())}
    cell |= {"losses in other orders": orders, "rounding": most(orders)}
    cell["runs"] = {size: summary(parts, runs.get(1)) for size, parts in runs.items()}
    if 1 in runs and len(runs) > 1:
        cell["model of time"] = modelled(cell)
    return cell


def launch(spec: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Run processes, and return the measurements of each; SystemExit if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(json.dumps(spec))
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        worker = ["-m", "bench.distributed_worker", str(path), folder]
        done = subprocess.run(
            [sys.executable, "-m", *torchrun, *worker], capture_output=True, text=True,
            timeout=SECONDS, env={**os.environ, **dict.fromkeys(THREADS, "1")},
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"distributed: {size} processes failed:\n{done.stderr[-4000:]}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]


def summary(parts: list[dict[str, Any]], one: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Sums over the processes of a run, or the largest of one."""
    out: dict[str, Any] = {k: {n: max(p[k][n] for p in parts) for n in parts[0][k]} for k in MOST}
    out |= {k: sum(p[k] for p in parts) for k in TOTAL} | {k: [p[k] for p in parts] for k in EACH}
    out |= {k: parts[0][k] for k in ("network", "epoch of a small graph")}
    if needed := out["bytes needed"]:
        out |= {f"{k} / needed": out[k] / needed for k in ("bytes sent", "bytes that came")}
    if one is not None:
        shares = [share_and_halo(p, one[0]) for p in parts]
        out["memory, share and halo"] = shares
        out[RATIO] = max(p["memory"] / share for p, share in zip(parts, shares, strict=True))
    return out


def share_and_halo(process: dict[str, Any], one: dict[str, Any]) -> float:
    """Memory of one process for this one's share of nodes and edges, and the incoming rows once.

    By share: features by nodes, the rest by edges.
    """
    row = one["bytes"] * one["features"]
    rest = max(0, one["memory"] - row * one["nodes"])
    part = (process["nnz"] + process["own"]) / (one["edges"] + one["nodes"])
    return row * (process["own"] + process["halo"]) + rest * part


# -- the model ------------------------------------------------------------------------------------


def local_speeds(cell: dict[str, Any]) -> Local:
    """Speeds of one process: its epoch by edges and nodes."""
    one, two = cell["runs"][1], cell["runs"].get(2)
    split, took = one["split"], one["epoch"]["min"]
    # Without the profiler's overhead.
    products = took * (split["local product"] + split["remote product"]) / split["epoch, profiled"]
    constant = min(one["epoch of a small graph"], took)
    per_packed = 0.0
    if two and sum(two["halo"]):
        per_packed = (two["split"]["pack"] + two["split"]["unpack"]) / max(two["halo"])
    per_node = max(took - products - constant, 0.0) / cell["nodes"]
    return Local(products / cell["edges"], per_node, per_packed, constant)


def numbers_of(cell: dict[str, Any]) -> tuple[int, int]:
    """Numbers exchanged per row, and numbers of weights."""
    from bench.distributed_worker import exchanged

    return exchanged(cell["model"], cell["features"], cell["hidden"]), cell["weights"]


def modelled(cell: dict[str, Any]) -> dict[str, Any]:
    """Compare the model with the measurements."""
    local, numbers, check = local_speeds(cell), numbers_of(cell), {}
    for size, each in cell["runs"].items():
        if size == 1:
            continue
        split, measured = each["split"], each["epoch"]["min"]
        remote = split["remote product"]
        far = remote / max(1e-12, remote + split["local product"])
        nnz, nodes, halo = (max(each[k]) for k in ("nnz", "own", "halo"))
        share = Share(nnz, nodes, halo, far)
        crowding = max(1.0, size / len(os.sched_getaffinity(0)))
        parts = epoch(local, share, Network(**each["network"]), size, *numbers, crowding=crowding)
        result = {"model": parts["epoch"], "measured": measured, "parts": parts}
        result["model / measured"] = parts["epoch"] / measured
        check[size] = {**result, "edges": sum(each["nnz"])}
    return {"local": local._asdict(), "check": check}


def large(cells: list[dict[str, Any]]) -> dict[str, Any] | None:
    """A graph that one machine cannot hold, at the speeds of the largest measured one."""
    modelled_cells = [c for c in cells if "model of time" in c]
    if not modelled_cells:
        return None
    cell = max(modelled_cells, key=lambda c: c["edges"])
    local, numbers = local_speeds(cell), numbers_of(cell)
    whole = Share(LARGE["nodes"] * LARGE["degree"], LARGE["nodes"], 0)
    times: dict[str, Any] = {"speeds of": f"{cell['model']} on {cell['graph']}", **LARGE}
    times["one"] = epoch(local, whole, Network(0, 1), 1, *numbers)["epoch"]
    for name, stated in NETWORKS.items():
        shares = {count: expected_share(LARGE, count) for count in MACHINES}
        times[name] = {n: epoch(local, of, stated, n, *numbers) for n, of in shares.items()}
    return times


# -- tables ---------------------------------------------------------------------------------------


def show(results: dict[str, Any], cores: int) -> None:
    """Tables of epochs, of their steps, and of the model."""
    runs, checks, about = [], [], ("graph", "processes")
    for cell in results["cells"]:
        name = f"{cell['model']}, {cell['graph']}"
        for size, parts in cell["runs"].items():
            runs.append({**cell, **parts, "graph": name, "processes": size})
        for size, check in cell.get("model of time", {}).get("check", {}).items():
            times = {k: check[k] for k in ("model", "measured")}
            checks.append({"graph": name, "processes": size, "times": times})
    columns: dict[str, Any] = {k: itemgetter(k) for k in about}
    columns["MB"] = lambda run: f"{run['bytes needed'] / 1e6:.2f}"
    for name, ratio in zip(("sent", "came", "memory"), RATIOS, strict=True):
        columns[name] = lambda run, k=ratio: f"{run[k]:.3f}" if k in run else "-"
    columns["MiB"] = lambda run: f"{max(run['memory']) / 2**20:.1f}"
    columns["losses differ"] = lambda run: f"{run['difference']:.1e}"
    columns["by order"] = lambda run: f"{run['rounding']:.1e}"
    title = (
        f"Epochs on this machine of {cores} cores, a thread for each process; MB that other "
        "processes' rows need, what was sent and came over that; memory over share and halo; "
        "losses by processes and by the order of nodes; ms"
    )
    show_times(title, runs, "epoch", columns, "", Form(digits=1))
    split = "An epoch, in ms by torch's profiler; the slowest process of each step"
    show_times(split, runs, "split", about, "")
    check = "The model beside what was measured here, ms"
    show_times(check, checks, "times", about, "measured", Form(digits=1))
    if parts := results["large"]:
        rows = [[1, f"{parts['one']:.2f}", ""]]
        for n in MACHINES:
            times = [parts[name][n]["epoch"] for name in NETWORKS]
            rows.append([n, *(f"{t:.3f} ({parts['one'] / t:.0f})" for t in times)])
        title = f"By the model: s for an epoch of {parts['nodes']:.0e} nodes with {parts['degree']}"
        title += f" edges each, {parts['far']:.0%} of them far; times as fast as one machine"
        table(title, ["machines", *NETWORKS], rows)
