"""Two hops along the edges of a graph, a program that no template names: default and tuned."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import tvm_ffi

import sparsetir
from bench.graphs import graphs
from bench.harness import check, each, finish
from bench.programs import TWO_HOP
from bench.report import table
from bench.timing import interleaved


def run(args: argparse.Namespace) -> None:
    """The command."""
    seconds, trials = (0.05, 2) if args.quick else (5.0, args.trials)
    plain = sparsetir.from_source(TWO_HOP)
    cells = each(
        (f"{name}, {feat} features", partial(measure, plain, name, matrix, feat, trials, seconds))
        for name, matrix in graphs(args.graph).items()
        for feat in args.feat or ([8] if args.quick else [64, 128])
    )
    rows = [
        [c["graph"], c["feat"], *(f"{1e3 * t['min']:.3f}" for t in c["times"].values()),
         f"{c['speedup']:.2f}", c["config"]]
        for c in cells
    ]  # fmt: skip
    columns = ["graph", "features", *cells[0]["times"], "default / tuned", "config"]
    table(f"Two hops in float32, threads: {args.threads}; shortest times in ms", columns, rows)
    finish(args, "two_hop", {"cells": cells, "trials": trials})


def measure(
    plain: Any, name: str, matrix: Any, feat: int, trials: int, seconds: float
) -> dict[str, Any]:
    """One graph: the tuned schedule, found by its own measurements, in turns with the default."""
    there = sp.csr_array(matrix)
    back = sp.csr_array(there.T)
    arguments = {
        "x": np.random.default_rng(0).random((there.shape[0], feat), dtype="float32"),
        "y": np.full((there.shape[0], feat), np.nan, "float32"),
        "there_ptr": there.indptr.astype("int32"), "there_idx": there.indices.astype("int32"),
        "back_ptr": back.indptr.astype("int32"), "back_idx": back.indices.astype("int32"),
    }  # fmt: skip
    found = sparsetir.tune(plain, arguments, trials=trials, records="", graph=name)
    kernels = {
        "default": sparsetir.build(plain),
        "tuned": sparsetir.build(plain, schedule=found.schedule, config=found.config),
    }
    hops = [sp.csr_array((np.ones(m.nnz), m.indices, m.indptr), m.shape) for m in (there, back)]
    exact = hops[0] @ (hops[1] @ arguments["x"].astype("float64"))
    calls = {}
    for way, kernel in kernels.items():
        own = {**arguments, "y": np.full_like(arguments["y"], np.nan)}
        kernel(**own)
        check(f"two_hop: {way} of {name}", own["y"], exact, np.maximum(exact, 1))
        arrays = {n: tvm_ffi.from_dlpack(x) for n, x in own.items()}
        calls[way] = lambda kernel=kernel, arrays=arrays: kernel(**arrays)
    times = interleaved(calls, seconds)
    return {
        "graph": name, "nodes": there.shape[0], "nnz": there.nnz, "feat": feat, "times": times,
        "speedup": times["default"]["min"] / times["tuned"]["min"], "config": str(found.config),
    }  # fmt: skip
