"""Enumerate-and-sparse-coarsen on a GPU: times; without one counts, and what nvcc makes of kernels.

Times are of all layers, beside the dense product. Counts are those of the CUDA text on the CPU, of
the first rows of a layer: sectors and instructions of panels, with atomics and without, beside rows
by themselves. They say what is read and how evenly work is spread, not how long it takes. Of
kernels by pattern and compacted (figure 8) it is seconds to compile and registers.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import sparsetir
from bench import gpucode, plots
from bench.peers.gpu_clock import Clock
from bench.report import table
from bench.studies import common
from bench.studies.counting import MEANINGS, Counted
from sparsetir.schedules.gpu import spmm as spmm_gpu
from sparsetir.schedules.gpu import spmm_panels as spmm_panels_gpu
from sparsetir.schedules.gpu.spmm import RowSplit
from sparsetir.schedules.gpu.spmm_panels import MOST_BY_PATTERN, PanelThreads
from sparsetir.schedules.operators.problems import Spmm
from sparsetir.schedules.operators.spmm import program

COUNTED_ROWS = 64  # of a layer
SHAPE = (512, 512)  # of the layer that is counted
ARCH = "sm_90"
ROWS = "rows"  # by themselves
DENSE = "dense"
SIZES = (2, 3, 4, 5, 6, 8)  # of panels that nvcc compiles
# Figures by way, of a matrix and features; kernels that are made are kept by way.
Measure = Callable[[Any, int, dict[str, Any]], dict[str, Any]]


def run(args: argparse.Namespace, layers: Any, torch: Any = None) -> None:
    """The command, of layers by shape and share of zeros; torch : of the GPU, None to count."""
    features = [*gpucode.PANELS][: 1 if args.quick else None]
    about = {
        "paper": "Albakri and Cheshmi, figures 8 and 9, table 2, of an NVIDIA A100",
        "operator": "SpMM", "dtype": "float32",
    }  # fmt: skip
    if torch is not None:
        step = common.Steps(_count(layers, features))
        rounds = 2 if args.quick else common.ROUNDS
        cells = list(_cells(layers, features, _timed(torch, rounds), step))
        _show_ratios(cells, "min", "Times as fast as rows by themselves")
        path = common.finish(args, "times", {**about, "cells": cells}, torch)
        draw(path, "min", "time")
        return
    print(f"Counted, not timed; {common.NO_GPU}")
    shape = SHAPE if SHAPE in layers else next(iter(layers))
    few = {shape: {s: a[:COUNTED_ROWS] for s, a in layers[shape].items()}}
    kernels = [] if shutil.which("nvcc") is None else _kernels(SIZES[:1] if args.quick else SIZES)
    step = common.Steps(_count(few, features) + len(kernels))
    cells = list(_cells(few, features, _counted, step))
    compiled = list(_compiled(kernels, step))
    _show(cells, compiled)
    path = common.finish(args, "counts", {
        **about, "meanings": MEANINGS, "arch": ARCH, "cells": cells, "compile": compiled,
    })  # fmt: skip
    draw(path, "sectors", "sectors")


def ways(feat: int, unroll: int) -> dict[str, Any]:
    """Configs by name.

    unroll : UFk, at most. It changes no counts, and with 1 g++ compiles less
    """
    rows, most, warp_tile, block = gpucode.PANELS[feat]
    printed = gpucode.of_schedule(feat, rows, min(most, unroll), warp_tile, block, atomics=True)
    found: dict[str, Any] = {ROWS: RowSplit.for_features(feat)}
    for size in (2, 3, 4):
        found[f"panels of {size}"] = PanelThreads.for_features(feat, rows=size, unroll=unroll)
    adding: list[dict[str, Any]] = [{"atomics": True}, {"atomics": True, "compact": True}]
    for what in adding:
        name = ", ".join(["panels of 4", *what])
        found[name] = PanelThreads.for_features(feat, rows=4, unroll=unroll, **what)
    found["table 2"] = printed
    return found


def _schedule(name: str) -> Any:
    return (spmm_gpu if name == ROWS else spmm_panels_gpu).apply


def _count(layers: Any, features: list[int]) -> int:
    """How many cells there are."""
    return len(features) * sum(map(len, layers.values()))


def _cells(
    layers: Any, features: list[int], measure: Measure, step: common.Steps
) -> Iterator[dict[str, Any]]:
    for feat in features:
        made: dict[str, Any] = {}
        for shape, by_zeros in layers.items():
            for sparsity, matrix in by_zeros.items():
                step(f"{shape[0]} x {shape[1]}, {sparsity:.0%} zeros, {feat} features")
                yield {
                    "shape": matrix.shape, "sparsity": sparsity, "nnz": matrix.nnz, "feat": feat,
                    "ways": measure(matrix, feat, made),
                }  # fmt: skip


def _arguments(matrix: Any, feat: int) -> dict[str, Any]:
    m, n = matrix.shape
    b = np.random.default_rng(0).random((n, feat), dtype="float32") - np.float32(0.5)
    return {
        "a": matrix.data, "b": b, "out": np.full((m, feat), np.nan, "float32"),
        "indptr": matrix.indptr, "indices": matrix.indices, "m": m, "n": n, "nnz": matrix.nnz,
        "feat": feat,
    }  # fmt: skip


def _check(way: str, found: np.ndarray, matrix: Any, b: np.ndarray) -> None:
    exact, unit = matrix.astype("float64") @ b, abs(matrix).astype("float64") @ np.abs(b)
    common.check(way, found, exact, unit)


def _counted(matrix: Any, feat: int, made: dict[str, Any]) -> dict[str, Any]:
    """Counts by way; made : kernels, which are added where there are none."""
    arguments, found = _arguments(matrix, feat), {}
    for way, config in ways(feat, unroll=1).items():
        if way not in made:
            made[way] = Counted(program(Spmm(), config), _schedule(way), config)
        out, found[way] = made[way](arguments)
        _check(way, out["out"], matrix, arguments["b"])
    return found


def _timed(torch: Any, rounds: int) -> Measure:
    """What measures seconds by way, that of the dense product beside."""
    clock = Clock(torch)

    def measure(matrix: Any, feat: int, made: dict[str, Any]) -> dict[str, Any]:
        arguments, calls = _arguments(matrix, feat), {}
        there = common.on_gpu(torch, arguments)
        for way, config in ways(feat, unroll=8).items():
            if way not in made:
                made[way] = sparsetir.build(
                    program(Spmm(), config), "cuda", schedule=_schedule(way), config=config
                )
            calls[way] = common.ready(torch, made[way], there)
            there["out"].fill_(float("nan"))
            calls[way]()
            _check(way, there["out"].cpu().numpy(), matrix, arguments["b"])
        dense = torch.from_numpy(matrix.toarray()).cuda()
        calls[DENSE] = partial(torch.mm, dense, there["b"], out=there["out"])
        return common.gpu_seconds(clock, calls, rounds)

    return measure


def _kernels(sizes: Sequence[int]) -> list[PanelThreads]:
    """Panels of some rows for 128 features, by pattern as far as there are such, and compacted."""
    return [
        PanelThreads.for_features(128, rows=rows, compact=compact, atomics=atomics)
        for rows in sizes
        for compact in ((False, True) if rows <= MOST_BY_PATTERN else (True,))
        for atomics in (False, True)
    ]


def _compiled(kernels: list[PanelThreads], step: common.Steps) -> Iterator[dict[str, Any]]:
    """What nvcc makes of kernels."""
    for config in kernels:
        by = "count" if config.compact else "pattern"
        atomics = ", atomics" if config.atomics else ""
        step(f"nvcc: panels of {config.rows} by {by}{atomics}")
        about = {"rows": config.rows, "compact": config.compact, "atomics": config.atomics}
        yield about | gpucode.measure(Spmm(), config, ARCH, "nvcc")


def _show_ratios(cells: list[dict[str, Any]], what: str, title: str) -> None:
    """A table of each way beside rows; of seconds how many times as fast."""
    names = [w for w in cells[0]["ways"] if w != ROWS]
    turned = -1 if what == "min" else 1
    table(
        title, ["layer", "zeros", "features", *names],
        [[" x ".join(map(str, c["shape"])), f"{c['sparsity']:.0%}", c["feat"],
          *(f"{(c['ways'][w][what] / c['ways'][ROWS][what]) ** turned:.2f}" for w in names)]
         for c in cells],
    )  # fmt: skip


def _show(cells: list[dict[str, Any]], compiled: list[dict[str, Any]]) -> None:
    names = [w for w in cells[0]["ways"] if w != ROWS]
    for what in ("sectors", "instructions"):
        _show_ratios(cells, what, f"{what.capitalize()}, of those of rows by themselves")
    table(
        "Blocks, and the longest over the mean one", ["zeros", "features", ROWS, *names],
        [[f"{c['sparsity']:.0%}", c["feat"],
          *(f"{c['ways'][w]['blocks']} / {c['ways'][w]['imbalance']:.1f}" for w in [ROWS, *names])]
         for c in cells],
    )  # fmt: skip
    table(
        f"Compiled by nvcc for {ARCH}, 128 features",
        ["rows", "code by", "atomics", "seconds", "registers", "spills"],
        [[c["rows"], "count" if c["compact"] else "pattern", "yes" if c["atomics"] else "no",
          f"{c['compile_seconds']:.1f}", c["registers"], c["spill_bytes"]] for c in compiled],
    )  # fmt: skip


def draw(path: Any, what: str, named: str) -> None:
    """The picture: a figure of each way over that of rows, by share of zeros; the first shape."""
    plt, _, results = plots.load(path)
    cells = [c for c in results["cells"] if c["shape"] == results["cells"][0]["shape"]]
    features = list(dict.fromkeys(c["feat"] for c in cells))
    size = (3.4 * len(features) + 0.4, 3.4)
    figure, axes = plt.subplots(1, len(features), figsize=size, squeeze=False)
    for x, feat in enumerate(features):
        here = [c for c in cells if c["feat"] == feat]
        shares = {
            w: [c["ways"][w][what] / c["ways"][ROWS][what] for c in here] for w in here[0]["ways"]
        }
        plots.lines(axes[0][x], [f"{c['sparsity']:.0%}" for c in here], shares)
        axes[0][x].set_ylim(bottom=0)
        axes[0][x].set_title(f"{feat} features", fontsize=8.5)
        if x == 0:
            axes[0][x].set_ylabel(f"{named}, of that of rows", fontsize=8)
    plots.legend_on_top(figure, axes[0][0], "SpMM of a pruned layer by share of zeros, float32")
    plots.save(plt, figure, path)
