"""Fused relational gather-matmul-scatter: launches and traffic (SparseTIR, section 4.4, fig. 20).

Counted beside what the three steps of its unfused form take by themselves: rows are gathered into
an array of edges times features, multiplied with the matrix of each relation into another, and
these rows are added to the result. A graph whose relations and rows have very different numbers of
edges, and the kernel map of a sparse convolution, whose relations are offsets.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import plots
from bench.report import table
from bench.studies import common
from bench.studies.counting import MEANINGS, runner
from sparsetir.formats import Pattern
from sparsetir.schedules.gpu.rgms import RelationalRows
from sparsetir.schedules.gpu.rgms_tensor_cores import RelationalTensorCores
from sparsetir.schedules.gpu.rgms_tiles import sizes_of
from sparsetir.schedules.operators.rgms import Rgms
from sparsetir.schedules.templates.registry import template_of

SECTOR = 32  # bytes
# Nodes, relations and edges of the graph; the sides of the grid that the points are in, of which
# they take a surface; features.
SIZES = {"quick": (40, 3, 120, 6, 8), "counts": (2_000, 16, 20_000, 28, 32)}
ROWS = 64  # that a product of the unfused form has of a matrix's reads
HALF = 2.0**-11  # what inner sums of float16 are rounded to


@dataclass(frozen=True)
class Case:
    """Edges by relation, with the kinds of kernels that they are for."""

    pattern: Pattern
    weighted: bool


def graph(nodes: int, relations: int, edges: int) -> Pattern:
    """Relations and rows drawn so that the n-th is about 1 / n as likely as the first."""
    rng = np.random.default_rng(0)

    def drawn(count: int) -> np.ndarray:
        weights = 1 / np.arange(1, count + 1)
        return rng.permutation(count)[rng.choice(count, edges, p=weights / weights.sum())]

    r, i, j = drawn(relations), drawn(nodes), rng.integers(0, nodes, edges)
    places = np.unique((r.astype("int64") * nodes + i) * nodes + j)
    coords = [places // nodes**2, places // nodes % nodes, places % nodes]
    return Pattern([c.astype("int32") for c in coords], (relations, nodes, nodes))


def kernel_map(side: int) -> Pattern:
    """Of a submanifold convolution of 3 x 3 x 3 over points of a surface in a cube."""
    rng = np.random.default_rng(0)
    x, y = np.divmod(np.flatnonzero(rng.random(side * side) < 0.7), side)
    z = ((np.sin(x / 5) + np.cos(y / 7) + 2) * side / 4.01).astype(int)
    number = {point: n for n, point in enumerate(zip(x, y, z, strict=True))}
    found = [
        (offset, n, number[near])
        for offset, (dx, dy, dz) in enumerate(itertools.product((-1, 0, 1), repeat=3))
        for (px, py, pz), n in number.items()
        if (near := (px + dx, py + dy, pz + dz)) in number
    ]
    coords = [np.array(c, "int32") for c in zip(*found, strict=True)]
    return Pattern(coords, (27, len(number), len(number)))


def run(args: argparse.Namespace) -> None:
    """The command."""
    if not args.counts:
        from bench.studies import relation_orders  # which needs torch

        relation_orders.run(args)
        return
    print(f"Counted, not timed; {common.NO_GPU}")
    nodes, relations, edges, side, feat = SIZES["quick" if args.quick else "counts"]
    cases = {
        "graph": Case(graph(nodes, relations, edges), True),
        "convolution": Case(kernel_map(side), False),
    }
    cells = list(_cells(cases, feat))
    _show(cells)
    results = {
        "paper": "SparseTIR, section 4.4 and figure 20, on an NVIDIA V100; ours are other graphs",
        "meanings": {
            "bytes": "of sectors of global memory, of all launches; caches are not looked at",
            "between": "bytes of edges times features that are written, and read again",
            "sectors": MEANINGS["sectors"], "atomics": MEANINGS["atomics"],
            "unfused": "by its numbers alone: each array is read and written once for each use",
        },
        "cells": cells,
    }  # fmt: skip
    draw(common.finish(args, "counts", results))


def _cells(cases: dict[str, Case], feat: int) -> Iterator[dict[str, Any]]:
    step = common.Steps(2 * len(cases))
    for name, case in cases.items():
        pattern = case.pattern
        for dtype in ("float32", "float16"):
            step(f"{name}, {dtype}")
            problem = Rgms(dtype, weighted=case.weighted, out="float32")
            yield {
                "case": name, "dtype": dtype, "edges": pattern.nnz, "features": feat,
                "relations": len(np.unique(pattern.coords[0])), "rows": pattern.shape[1],
                "fused": fused(problem, pattern, feat), "unfused": unfused(problem, pattern, feat),
            }  # fmt: skip


def fused(problem: Rgms, pattern: Pattern, feat: int) -> dict[str, Any]:
    """The counts of a kernel, which is checked too."""
    kind = RelationalRows if problem.dtype == "float32" else RelationalTensorCores
    config = kind.for_features(feat, feat, problem.dtype, *sizes_of(pattern)[0])
    template = template_of(config, problem, gpu=True)
    rng, (relations, m, n) = np.random.default_rng(0), pattern.shape
    a, x, w = (
        (rng.random(shape) - 0.5).astype(problem.dtype)
        for shape in (pattern.nnz, (n, feat), (relations, feat, feat))
    )
    if not problem.weighted:
        a[:] = 1
    given = template.arrange(pattern, problem, config)
    args = {**given.arguments, "x": x, "w": w, "feat_in": feat, "feat": feat}
    args |= given.stored.values(A=a) if problem.weighted else {}
    args["out"] = np.full((m, feat), np.nan, "float32")
    kernel = runner().CudaStages(template.program(problem, config), template.apply, config)
    found = kernel(args, seeds=(0,), races=False, count=True)["out"]
    exact, unit = _exact(pattern, a, x, w), _exact(pattern, *map(np.abs, (a, x, w)))
    rounding = HALF if problem.dtype == "float16" else 0.0
    excess = np.maximum(np.abs(found - exact) - rounding * unit, 0)
    common.check(f"{problem.dtype}, {config}", exact + excess, exact, unit)
    function = kernel.function
    each = [
        {"blocks": int(np.prod(grid)), "bytes": int(c.sectors) * SECTOR, "atomics": int(c.atomics)}
        for c, (_, grid, _) in zip(function.launch_counts, function.launches, strict=True)
    ]
    return {
        "config": repr(config), "launches": len(each), "each": each, "between": 0,
        "bytes": sum(e["bytes"] for e in each), "atomics": sum(e["atomics"] for e in each),
    }  # fmt: skip


def _exact(pattern: Pattern, a: Any, x: Any, w: Any) -> np.ndarray:
    relation, row, column = pattern.coords
    out = np.zeros((pattern.shape[1], w.shape[2]))
    for r in np.unique(relation):
        at = relation == r
        terms = a[at, None].astype("float64") * x[column[at]].astype("float64")
        np.add.at(out, row[at], terms @ w[r].astype("float64"))
    return out


def unfused(problem: Rgms, pattern: Pattern, feat: int) -> dict[str, Any]:
    """What gathering, multiplying and adding take, each a launch for each relation."""
    item, edges, m = np.dtype(problem.dtype).itemsize, pattern.nnz, pattern.shape[1]
    counts = np.bincount(pattern.coords[0])
    counts = counts[counts > 0]
    array = edges * feat * item  # of edges times features
    matrices = int((-(-counts // ROWS)).sum()) * feat * feat * item
    indices = edges * (2 * 4 + (item if problem.weighted else 0))
    added = edges * feat * 4
    return {
        "launches": 1 + 3 * len(counts), "between": 4 * array, "atomics": edges * feat,
        # Gathered rows are read, written and read, products written and read.
        "bytes": 5 * array + matrices + indices + added + m * feat * 4,
    }  # fmt: skip


def _show(cells: list[dict[str, Any]]) -> None:
    rows = [
        [f"{c['case']}, {c['dtype']}", way, c[way]["launches"], *(
            f"{c[way][what] / 1e6:.2f}" for what in ("bytes", "between", "atomics")
        )]
        for c in cells for way in ("fused", "unfused")
    ]  # fmt: skip
    head = ["case", "form", "launches", "MB", "MB between", "M atomics"]
    table("Relational gather-matmul-scatter: launches and traffic", head, rows)


def draw(path: Any) -> Any:
    """Bytes of both forms, beside the JSON file."""
    plt, _, results = plots.load(path)
    figure, axis = plt.subplots(figsize=(6, 3.4))
    cells = results["cells"]
    names = [f"{c['case']}\n{c['dtype']}" for c in cells]
    moved = {way: [c[way]["bytes"] / 1e6 for c in cells] for way in ("fused", "unfused")}
    plots.bars(axis, names, moved)
    axis.set_ylabel("MB of global memory")
    plots.legend_on_top(figure, axis, "Relational gather-matmul-scatter: traffic, counted")
    return plots.save(plt, figure, path)
