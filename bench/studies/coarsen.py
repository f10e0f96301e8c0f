"""Enumerate-and-sparse-coarsen on a CPU (figures 9 and 10, table 2): panels of rows by pattern.

Products of pruned layers by share of zeros and features: panels, row blocks (the default without
panels), what is chosen, the dense product and MKL where they are installed. Beside them what panels
store and how long it takes to convert to them; and how long kernels take to compile, a loop for
each pattern or, compacted, for each number of rows (section 3.5).
On a GPU, and with --counts, those of GPUs (:mod:`bench.studies.coarsen_gpu`).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import sparsetir
from bench import plots
from bench.peers import mkl
from bench.report import table
from bench.studies import coarsen_gpu, common
from bench.studies.pruned_patterns import layers_of, random_layers
from bench.timing import interleaved
from sparsetir.schedules.templates.spmm import RowBlocks
from sparsetir.schedules.templates.spmm_panels import PanelRows

ROWS, PANELS, CHOSEN, DENSE, MKL = "row blocks", "panels", "chosen", "dense", "MKL"
FEATURES = (32, 128, 512)
PANEL_ROWS = (2, 3, 4, 5, 6)
CONVERSIONS = 5
INT, FLOAT = 4, 4  # bytes
LINE = 16  # floats of a cache line


def run(args: argparse.Namespace) -> None:
    """The command."""
    layers = layers_of(args.data) if args.data else random_layers(args.quick)
    torch = None if args.counts else common.device(args)
    if args.counts or torch is not None:
        coarsen_gpu.run(args, layers, torch)
        return
    features = FEATURES[:1] if args.quick else FEATURES
    cells = list(_cells(args, layers, features))
    stored = [_storage(m, s, a) for m, by in layers.items() for s, a in by.items()]
    compiled = _compiled(layers, PANEL_ROWS[:1] if args.quick else PANEL_ROWS)
    show(cells, stored, compiled)
    path = common.finish(args, "times", {
        "paper": "Albakri and Cheshmi, figures 9 and 10, table 2, of an NVIDIA A100",
        "layers": "patterns of DLMC's transformer; of 60 % zeros those of 50 %, thinned"
        if args.data else "elements at random places",
        "operator": "SpMM", "dtype": "float32", "load": list(os.getloadavg()),
        "clock": "processor time of the thread" if args.threads == 1 else "time",
        "cells": cells, "storage": stored, "compile": compiled,
    })  # fmt: skip
    draw(path)


# -- times ----------------------------------------------------------------------------------------


def _cells(args: argparse.Namespace, layers: Any, features: Any) -> Iterator[dict[str, Any]]:
    todo = [(shape, s, a, n) for shape, by in layers.items() for s, a in by.items()
            for n in features]  # fmt: skip
    step = common.Steps(len(todo))
    for shape, sparsity, matrix, feat in todo:
        step(f"{shape[0]} x {shape[1]}, {sparsity:.0%} zeros, {feat} features")
        yield {
            "shape": shape, "sparsity": sparsity, "nnz": matrix.nnz, "feat": feat,
            **_measured(matrix, feat, args.threads, 0.02 if args.quick else 1.0),
        }  # fmt: skip


def _measured(matrix: Any, feat: int, threads: int, seconds: float) -> dict[str, Any]:
    """Seconds by way, and which config is chosen."""
    rng = np.random.default_rng(0)
    b = _aligned(matrix.shape[1], feat)
    b[:] = rng.random(b.shape, dtype="float32") - np.float32(0.5)
    known = sparsetir.plan_candidates("spmm", matrix, feat, threads=threads)
    rows = next(c for c in known if isinstance(c, RowBlocks))
    own = [c for c in known if isinstance(c, PanelRows)]
    tile = min(feat, 4 * rows.lanes)
    panels = own[0] if own else PanelRows(
        4, tile, rows.lanes, None if feat % tile == 0 else feat, True, rows.blocks, rows.parallel
    )  # fmt: skip
    exact = matrix.astype("float64") @ b
    unit = abs(matrix).astype("float64") @ np.abs(b)
    calls: dict[str, Callable[[], Any]] = {}
    handles = []
    for way, config in {ROWS: rows, PANELS: panels}.items():
        plan = sparsetir.plan("spmm", matrix, feat, config=config, threads=threads)
        out = _aligned(*exact.shape)
        out[:] = np.nan
        calls[way] = partial(plan, b, out=out)
        calls[way]()
        common.check(way, out, exact, unit)
    dense = _dense(matrix, b, threads)
    if dense is not None:
        calls[DENSE] = dense
    try:
        handles.append(mkl.Handle(mkl.load(), matrix, feat, inspect=True))
        calls[MKL] = handles[0].product(b, np.empty(exact.shape, "float32"))
    except OSError:
        pass
    # Of one thread the processor's time, which other work on the machine changes less.
    clock = time.thread_time if threads == 1 else time.perf_counter
    ways = interleaved(calls, seconds, clock=clock)
    for handle in handles:
        handle.close()
    chosen = PANELS if isinstance(known[0], PanelRows) else ROWS
    return {"chosen": chosen, "config": repr(known[0]), "ways": ways}


def _aligned(rows: int, columns: int) -> np.ndarray:
    """An array that begins with a cache line, as torch's do and NumPy's seldom."""
    memory = np.empty(rows * columns + LINE, "float32")
    first = -memory.ctypes.data // FLOAT % LINE
    return memory[first : first + rows * columns].reshape(rows, columns)


def _dense(matrix: Any, b: np.ndarray, threads: int) -> Callable[[], Any] | None:
    """torch's product; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(threads)
    a, operand = torch.from_numpy(matrix.toarray()), torch.from_numpy(b)
    return partial(torch.mm, a, operand, out=torch.empty(matrix.shape[0], b.shape[1]))


# -- storage, conversion, compilation -------------------------------------------------------------


def _storage(shape: Any, sparsity: float, matrix: Any) -> dict[str, Any]:
    """Bytes beside CSR's, elements of an entry, and nanoseconds of conversion for each element."""
    m, nnz, rows = shape[0], matrix.nnz, 4
    config = PanelRows(rows, 32, 16, 32, parallel=False)
    plan, taken = sparsetir.plan("spmm", matrix, 32, config=config), []
    for _ in range(CONVERSIONS):
        start = time.thread_time()  # of one thread, which makes all of a plan
        plan = sparsetir.plan("spmm", matrix, 32, config=config)
        taken.append(time.thread_time() - start)
    panels = -(-m // rows)
    row = np.repeat(np.arange(m), np.diff(matrix.indptr)) // rows
    entries = len(np.unique(row * shape[1] + matrix.indices))
    pointers = 2 * panels * ((1 << rows) - 1) + 1
    return {
        "shape": shape, "sparsity": sparsity, "nnz": nnz, "rows": rows,
        "csr_bytes": nnz * (INT + FLOAT) + (m + 1) * INT,
        "bytes": entries * INT + nnz * FLOAT + pointers * INT, "padding": plan.padding,
        "elements_of_an_entry": nnz / max(1, entries),
        "ns_per_element": 1e9 * min(taken) / max(1, nnz),
    }  # fmt: skip


def _compiled(layers: Any, sizes: Any) -> list[dict[str, Any]]:
    """Seconds to compile for panels of some rows, by pattern and compacted."""
    matrix = next(a for by in layers.values() for a in by.values())
    out = []
    for rows in sizes:
        vectors = 2 if rows > 4 else 4
        config = PanelRows(rows, 16 * vectors, 16, parallel=False)
        by_pattern = sparsetir.plan("spmm", matrix, 16 * vectors, config=config)
        config = replace(config, compact=True)
        compact = sparsetir.plan("spmm", matrix, 16 * vectors, config=config)
        out.append({
            "rows": rows, "patterns": (1 << rows) - 1, "by_pattern": by_pattern.compile_seconds,
            "compacted": compact.compile_seconds,
        })  # fmt: skip
    return out


# -- tables and the picture -----------------------------------------------------------------------


def show(cells: list[dict[str, Any]], stored: list[dict[str, Any]], compiled: Any) -> None:
    """Print what was found: how many times as fast panels, and what is chosen, are."""
    ways = [w for w in (ROWS, DENSE, MKL) if w in cells[0]["ways"]]
    head = ["layer", "zeros", "features", *(f"panels / {w}" for w in ways),
            *(f"chosen / {w}" for w in ways), "chosen"]  # fmt: skip
    rows = [
        [_name(c), f"{c['sparsity']:.0%}", c["feat"],
         *(f"{_ratio(c, way, ours):.2f}" for ours in (PANELS, CHOSEN) for way in ways), c["chosen"]]
        for c in cells
    ]  # fmt: skip
    table("Times as fast", head, rows)
    table(
        "Storage and conversion, panels of 4", ["layer", "zeros", "bytes / CSR", "per entry", "ns"],
        [[_name(s), f"{s['sparsity']:.0%}", f"{s['bytes'] / s['csr_bytes']:.2f}",
          f"{s['elements_of_an_entry']:.2f}", f"{s['ns_per_element']:.0f}"] for s in stored],
    )  # fmt: skip
    table(
        "Seconds to compile", ["rows", "patterns", "by pattern", "compacted"],
        [[c["rows"], c["patterns"], f"{c['by_pattern']:.2f}", f"{c['compacted']:.2f}"]
         for c in compiled],
    )  # fmt: skip


def _name(cell: dict[str, Any]) -> str:
    return " x ".join(map(str, cell["shape"]))


def _ratio(cell: dict[str, Any], way: str, ours: str) -> float:
    """How many times as fast as another way panels are, or what is chosen."""
    mine = cell["chosen"] if ours == CHOSEN else ours
    return cell["ways"][way]["min"] / cell["ways"][mine]["min"]


def draw(path: Any) -> None:
    """The picture: rates by share of zeros, for each shape and number of features."""
    plt, record, results = plots.load(path)
    cells = results["cells"]
    shapes = list(dict.fromkeys(_name(c) for c in cells))
    features = list(dict.fromkeys(c["feat"] for c in cells))
    size = (3.4 * len(shapes) + 0.4, 2.2 * len(features) + 1.0)
    figure, axes = plt.subplots(len(features), len(shapes), figsize=size, squeeze=False)
    for y, feat in enumerate(features):
        for x, shape in enumerate(shapes):
            here = [c for c in cells if _name(c) == shape and c["feat"] == feat]
            rates = {
                way: [2e-9 * c["nnz"] * feat / c["ways"][way]["min"] for c in here]
                for way in here[0]["ways"]
            }
            plots.lines(axes[y][x], [f"{c['sparsity']:.0%}" for c in here], rates)
            axes[y][x].set_ylim(bottom=0)
            axes[y][x].set_title(f"{shape}, {feat} features", fontsize=8.5)
            if x == 0:
                axes[y][x].set_ylabel("GFLOP/s of what is stored", fontsize=8)
    title = f"SpMM by share of zeros, float32, {plots.place(record)}"
    plots.legend_on_top(figure, axes[0][0], title)
    plots.save(plt, figure, path)
