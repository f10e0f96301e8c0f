"""Blocks of bfloat16 in tiles of the CPU's matrix engine, beside torch's dense products."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import scipy.sparse as sp
import tvm

from bench.harness import each, finish
from bench.report import table
from bench.timing import interleaved
from sparsetir.formats import BSR
from sparsetir.runtime.build import kernel_of
from sparsetir.runtime.matrix_engine import allowed
from sparsetir.runtime.pipeline import lower_template
from sparsetir.runtime.targets import host_target
from sparsetir.schedules.operators.problems import CsrPattern, Spmm
from sparsetir.schedules.passes.amx_tiles import PRODUCTS
from sparsetir.schedules.templates import amx
from sparsetir.schedules.templates.amx import AmxBlocks

BLOCK = 32
PROBLEM = Spmm("bfloat16")
# What is asked: times as fast as torch's dense product in bfloat16, and in float32.
GOALS = {"B brought into tiles in each call": (2.5, 20), "B kept in tiles": (3.5, None)}


def run(args: argparse.Namespace) -> None:
    """The command; measures nothing where there is no such engine, and says so."""
    refused = allowed(PRODUCTS["bfloat16"].features)
    if refused:
        print(f"amx: nothing is measured here: {refused}")
        return
    import torch

    torch.set_num_threads(args.threads)
    size, feat = (128, 64) if args.quick else (1024, 512)
    seconds = 0.05 if args.quick else 5.0
    cells = each(
        (f"{size} x {size}, {density:.0%} of the blocks, {feat} features",
         partial(measure, size, feat, density, args.threads, seconds))
        for density in ((0.1,) if args.quick else (0.05, 0.1, 0.3))
    )  # fmt: skip
    rows = [
        [f"{c['density']:.0%}", way, f"{1e3 * c['times'][way]['min']:.3f}",
         *(f"{c['faster'][way][dense]:.2f}" for dense in ("bfloat16", "float32"))]
        for c in cells for way in c["faster"]
    ]  # fmt: skip
    columns = ["blocks", "way", "ms", "times torch's dense bfloat16", "float32"]
    table(f"{size} x {size} in blocks of {BLOCK}, {feat} features", columns, rows)
    finish(args, "amx", {"cells": cells, "goals": GOALS})


def measure(size: int, feat: int, density: float, threads: int, seconds: float) -> dict[str, Any]:
    """One matrix: both ways in turns with torch."""
    import torch

    rng = np.random.default_rng(0)
    mask = rng.random((size // BLOCK, size // BLOCK)) < density
    mask[0, 0] = True
    whole = np.kron(mask, np.ones((BLOCK, BLOCK))) * rng.choice([-1, 1], (size, size))
    a = (whole * rng.uniform(0.5, 1, (size, size))).astype(ml_dtypes.bfloat16)
    b = rng.uniform(-1, 1, (size, feat)).astype(ml_dtypes.bfloat16)
    exact = a.astype("float64") @ b.astype("float64")
    config = AmxBlocks(BSR(BLOCK, BLOCK), blocks=amx.BLOCKS_OF_A_THREAD * threads)
    calls: dict[str, Callable[[], Any]] = {}
    for way, given in zip(GOALS, (False, True), strict=True):
        calls[way], out = prepared(a, b, replace(config, given=given))
        calls[way]()
        error = float(np.abs(out.numpy().astype("float64") - exact).max() / np.abs(exact).max())
        if not error < 2**-7:  # NaN is wrong too
            raise SystemExit(f"amx: {way} is wrong by {error}")
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.from_numpy(x.astype("float32")).to(dtype) for x in (a, b))
        calls[f"torch dense {dtype}"] = lambda left=left, right=right: left @ right
    times = interleaved(calls, seconds)
    faster = {
        way: {
            str(dtype).split(".")[1]: times[f"torch dense {dtype}"]["min"] / times[way]["min"]
            for dtype in (torch.bfloat16, torch.float32)
        }
        for way in GOALS
    }
    return {"size": size, "feat": feat, "density": float(mask.mean()), "times": times,
            "faster": faster}  # fmt: skip


def prepared(a: np.ndarray, b: np.ndarray, config: AmxBlocks) -> tuple[Callable[[], Any], Any]:
    """A call without checks, and the array that it writes."""
    target = host_target()
    kernel = kernel_of(lower_template(amx.TEMPLATE, PROBLEM, config, target), target)
    stored = sp.csr_array(a.astype("float32"))
    indptr, indices = (x.astype("int32") for x in (stored.indptr, stored.indices))
    pattern = CsrPattern(indptr, indices, (a.shape[0], a.shape[1]))
    arranged = amx.arrange(pattern, PROBLEM, config)
    values, feat = arranged.stored.values(A=stored.data.astype(a.dtype)), b.shape[1]
    if config.given:
        bits = amx.in_tiles(b.view("uint16"), config.format.cols, config.features)
        b = bits.view(a.dtype)
    sizes = {"feat": feat, **arranged.arguments}
    made = arranged.computed(kernel.signature.func, sizes)
    out = np.full((a.shape[0], feat), np.nan, "float32").astype(a.dtype)
    given = {**sizes, **made, **values, "b": b, "out": out}
    ready = {n: tvm.runtime.tensor(x) if hasattr(x, "shape") else x for n, x in given.items()}
    order = [ready[name] for name in kernel.signature.passed]
    return lambda: kernel.run_unchecked(order), ready["out"]
