"""Every format on real matrices: how large is it, how long do a conversion and a product take?"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import numpy as np

import sparsetir
from bench.harness import check, through
from bench.problems import problems
from bench.report import geomean, table
from bench.timing import interleaved
from sparsetir.formats import Format, Hyb, Pattern
from sparsetir.formats.library import library, refusal

FEATURES = 32
LEGEND = """padding: median. most: the largest. ns/nnz: of the conversion, median. x CSR: times what
the default schedule takes for CSR, geometric mean."""


def run(args: argparse.Namespace) -> None:
    """Write the file; status 1 if a result was wrong or something failed."""
    todo = []
    for problem in problems(args.graph, args.pruned, args.layers):
        matrix = problem.load()
        pattern = Pattern.from_csr(matrix.indptr, matrix.indices, matrix.shape)
        for fmt in library(pattern):
            if args.format is None or label(fmt) in args.format:
                given = (problem.name, matrix, pattern, fmt, 0.0 if args.quick else 0.05)
                todo.append((f"{problem.name}, {fmt.name}", partial(measure, *given)))
    through(args, "formats", todo, show)


def label(fmt: Format) -> str:
    """The name of a format in tables, where k depends on the matrix."""
    return f"hyb_{fmt.c}_k" if isinstance(fmt, Hyb) else fmt.name


def measure(
    name: str, matrix: Any, pattern: Pattern, fmt: Format, seconds: float
) -> dict[str, Any]:
    """Size and times of one format for one matrix; a failure is part of the result."""
    cell = {"matrix": name, "nnz": pattern.nnz, "format": fmt.name, "label": label(fmt)}
    if reason := refusal(pattern, fmt.places(pattern)):
        return {**cell, "skipped": reason}
    b = np.random.default_rng(0).uniform(-1, 1, (matrix.shape[1], FEATURES)).astype("float32")
    out = np.full((matrix.shape[0], FEATURES), np.nan, "float32")
    try:
        plan = sparsetir.plan("spmm", matrix, FEATURES, format=fmt)
        plan(b, out=out)
        check(fmt.name, out, matrix.astype("float64") @ b, abs(matrix) @ abs(b) + 0.1)
    except (Exception, SystemExit) as error:  # told at the end, with all others
        return {**cell, "failed": f"{type(error).__name__}: {error}"}
    converted = fmt.convert(pattern)
    calls = {"product": lambda: plan(b, out=out), "scipy": lambda: matrix @ b}
    times = interleaved(calls, seconds, least=2)
    convert = lambda: fmt.convert(pattern).arguments(A=matrix.data)  # noqa: E731
    times |= interleaved({"convert": convert}, seconds, least=2, warm_up=0)
    return {**cell, "padding": converted.padding, "bytes": converted.nbytes, "seconds": times}


def show(cells: list[dict[str, Any]]) -> None:
    """A line for each format, and all that was skipped or failed."""
    done = [c for c in cells if "seconds" in c]
    base = {c["matrix"]: c["seconds"]["product"]["min"] for c in done if c["label"] == "csr"}
    rows = []
    for name in dict.fromkeys(c["label"] for c in done):
        mine = [c for c in done if c["label"] == name]
        paddings = [c["padding"] for c in mine]
        per = [c["seconds"]["convert"]["min"] / max(1, c["nnz"]) for c in mine]
        ratios = [c["seconds"]["product"]["min"] / base[c["matrix"]] for c in mine if base]
        row = [name, len(mine), f"{statistics.median(paddings):.1%}", f"{max(paddings):.1%}"]
        rows.append([*row, f"{statistics.median(per) * 1e9:.0f}", f"{geomean(ratios):.2f}"])
    table("Formats", ["", "matrices", "padding", "most", "ns/nnz", "x CSR"], rows)
    print(LEGEND)
    for cell in cells:
        for what in ("skipped", "failed"):
            if what in cell:
                print(f"{what}: {cell['matrix']}, {cell['format']}: {cell[what]}")
