"""What it costs to bring a pattern into another format, beside scipy."""

from __future__ import annotations

import argparse
import math
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp

import sparsetir
from bench.graphs import graphs, pattern_of, values_of
from bench.harness import finish, ms
from bench.programs import ROW_PAIRS
from bench.report import table
from bench.timing import interleaved, progress, shortest
from sparsetir.formats import BSR, COO, CSR, SRBCRS, Format, Hyb, Pattern, RuleFormat
from sparsetir.formats.library import library, refusal

BLOCKS = (2, 4, 8, 16, 32)
COLUMN_PARTS = (1, 2, 4, 8, 16)
FEATURES = 64  # of the product that conversions are held against
SIZES = (10**4, 10**5, 10**6, 10**7)
TARGETS = {
    "bsr": "at most 1.5 times scipy's tobsr",
    "hyb": "at most 60 ms for 1.6 million elements with c = 1",
    "sr_bcrs": "at most 5 ms",
    "growth": "linear; at most 4 times the bytes of input and output",
}
# Padding in percent of hyb, SparseTIR, table 1, which does not say c.
PAPER = {
    "cora": 15.9, "citeseer": 13.0, "pubmed": 23.1, "ppi": 22.9, "ogbn-arxiv": 17.5,
    "ogbn-proteins": 21.6, "reddit": 28.6,
}  # fmt: skip


def run(args: argparse.Namespace) -> None:
    seconds = 0.05 if args.quick else 1.0
    matrices = graphs(args.graph)
    products = {n: _product_seconds(m, seconds / 5) for n, m in matrices.items()}
    largest = max(matrices, key=lambda n: matrices[n].nnz)
    blocks = BLOCKS[:2] if args.quick else BLOCKS
    results = {
        "bsr": [bsr(n, m, b, seconds) for n, m in matrices.items() for b in blocks],
        "hyb": [hyb(n, m, products[n], seconds) for n, m in matrices.items()],
        "sr_bcrs": sr_bcrs(seconds),
        "formats": every_format(largest, matrices[largest], products[largest], seconds / 5),
        "growth": growth([s for s in SIZES if not args.quick or s <= 10**5], seconds / 5),
        "targets": TARGETS,
    }
    progress("")
    show(results)
    finish(args, "convert", results)


def _conversion(fmt: Format, pattern: Pattern, values: np.ndarray) -> Callable[[], dict[str, Any]]:
    """The arguments of a kernel from a pattern and values; checked once."""
    converted = fmt.convert(pattern)
    if not np.array_equal(converted.restore("A", converted.arguments(A=values)), values):
        raise SystemExit(f"{fmt} does not give its values back")
    return lambda: fmt.convert(pattern).arguments(A=values)


def _product_seconds(matrix: Any, seconds: float) -> float:
    b = np.random.default_rng(0).uniform(-1, 1, (matrix.shape[1], FEATURES)).astype("float32")
    return interleaved({"scipy": lambda: matrix @ b}, seconds)["scipy"]["min"]


def bsr(name: str, matrix: Any, block: int, seconds: float) -> dict[str, Any]:
    """Square blocks, beside scipy; scipy's are not sorted and do not say what is padding."""
    progress(f"{name}: blocks of {block}")
    pattern, values = pattern_of(matrix), values_of(matrix)
    out = {"graph": name, "nnz": pattern.nnz, "block": block}
    reason = refusal(pattern, BSR(block, block).places(pattern), most_places=math.inf)
    if reason:
        return {**out, "skipped": reason}
    shape = [-(-n // block) * block for n in matrix.shape]
    indptr = np.append(matrix.indptr, np.repeat(matrix.indptr[-1:], shape[0] - matrix.shape[0]))
    padded = sp.csr_array((values, matrix.indices, indptr), shape=shape)

    def in_order() -> Any:
        found = padded.tobsr(blocksize=(block, block))
        found.sort_indices()
        return found

    fmt = BSR(block, block)
    ours = _conversion(fmt, pattern, values)
    if not np.array_equal(ours()[f"a_{fmt.name}"], in_order().data):
        raise SystemExit(f"{fmt} is wrong on {name}")
    calls: dict[str, Callable[[], Any]] = {
        "sparsetir": ours,
        "scipy": lambda: padded.tobsr(blocksize=(block, block)),
        "scipy sorted": in_order,
        "pattern": lambda: pattern_of(matrix),
    }
    return {
        **out, "padding": fmt.convert(pattern).padding, "seconds": interleaved(calls, seconds)
    }  # fmt: skip


def whole_places(pattern: Pattern, c: int, k: int) -> int:
    """Places of hyb(c, k) where what remains of a row longer than 2^k is padded to 2^k."""
    width = max(1, -(-pattern.shape[1] // c))
    rows, cols = pattern.coords
    lengths = np.bincount(rows.astype(np.int64) * c + cols // width)
    lengths = lengths[lengths > 0]
    short = 2 ** np.ceil(np.log2(lengths)).astype(np.int64)
    return int(np.where(lengths <= 2**k, short, -(-lengths // 2**k) * 2**k).sum())


def hyb(name: str, matrix: Any, product: float, seconds: float) -> dict[str, Any]:
    """hyb(1, k) with the k of the paper, and the padding of hyb(c, k)."""
    progress(f"{name}: hyb")
    pattern = pattern_of(matrix)
    k = Hyb.for_pattern(pattern).k
    call = _conversion(Hyb(1, k), pattern, values_of(matrix))
    times = interleaved({"sparsetir": call}, seconds)["sparsetir"]
    padding = {
        c: {
            "sparsetir": Hyb(c, k).convert(pattern).padding,
            "whole": 1 - pattern.nnz / max(1, whole_places(pattern, c, k)),
        }
        for c in COLUMN_PARTS
    }
    return {
        "graph": name, "nnz": pattern.nnz, "k": k, "seconds": times, "padding": padding,
        "paper": PAPER.get(name), "products": times["min"] / product,
    }  # fmt: skip


def sr_bcrs(seconds: float) -> dict[str, Any]:
    """SRBCRS(8, 32) of a random weight, beside scipy's blocks of 8 rows and 1 column."""
    progress("sr_bcrs")
    weight = sp.csr_array(sp.random_array((2048, 512), density=0.1, rng=0, dtype="float32"))
    weight.indptr, weight.indices = weight.indptr.astype("int32"), weight.indices.astype("int32")
    weight.sort_indices()
    fmt, pattern = SRBCRS(8, 32), pattern_of(weight)
    calls = {
        "sparsetir": _conversion(fmt, pattern, weight.data),
        "scipy tobsr((8, 1))": lambda: weight.tobsr(blocksize=(8, 1)),
    }
    return {
        "shape": weight.shape, "nnz": pattern.nnz, "padding": fmt.convert(pattern).padding,
        "seconds": interleaved(calls, seconds),
    }  # fmt: skip


def every_format(name: str, matrix: Any, product: float, seconds: float) -> dict[str, Any]:
    """Each format of the library on one graph."""
    pattern, values = pattern_of(matrix), values_of(matrix)
    cells = []
    for fmt in library(pattern):
        progress(f"{name}: {fmt.name}")
        reason = refusal(pattern, fmt.places(pattern))
        if reason:
            cells.append({"format": fmt.name, "skipped": reason})
            continue
        times = least_of(_conversion(fmt, pattern, values), seconds)
        converted = fmt.convert(pattern)
        cells.append({
            "format": fmt.name, "seconds": times, "padding": converted.padding,
            "bytes": converted.nbytes, "products": times["min"] / product,
        })  # fmt: skip
    return {"graph": name, "nnz": pattern.nnz, "product_seconds": product, "cells": cells}


def growth(sizes: list[int], seconds: float) -> list[dict[str, Any]]:
    """Time for each element, and memory, of graphs with sixteen elements in a row."""
    user = RuleFormat(
        sparsetir.FormatRewriteRule(
            "row_pairs", sparsetir.from_source(ROW_PAIRS), ["A"], ["I", "J"], ["IO", "J2", "II"],
            {"I": ["IO", "II"], "J": ["J2"]},
            lambda i, j: (i // 2, j, i % 2), lambda io, j, ii: (io * 2 + ii, j),
        )
    )  # fmt: skip
    scattered, near = (CSR(), COO(), Hyb(1, 4), user), (BSR(4, 4), SRBCRS(8, 32))
    cells = []
    for size in sizes:
        for kind, formats in (("scattered", scattered), ("near", near)):
            pattern = random_pattern(size, kind)
            values = np.random.default_rng(1).standard_normal(pattern.nnz).astype("float32")
            for fmt in formats:
                progress(f"{size:.0e} elements, {kind}: {fmt.name}")
                call = _conversion(fmt, pattern, values)
                cells.append({
                    "format": fmt.name, "graph": kind, "nnz": pattern.nnz, "size": size,
                    "seconds": least_of(call, seconds), "memory": memory(call, pattern, values),
                })  # fmt: skip
    return cells


def random_pattern(size: int, kind: str) -> Pattern:
    """About `size` elements, sixteen in a row: anywhere, or within 64 columns of each other."""
    rng, rows = np.random.default_rng(0), size // 16
    across = rows if kind == "scattered" else min(64, rows)
    keys = np.unique(np.repeat(np.arange(rows), 16) * across + rng.integers(0, across, rows * 16))
    i, j = (c.astype(np.int32) for c in np.divmod(keys, across))
    return Pattern([i, j] if kind == "scattered" else [i, i + j], (rows, rows + across))


def memory(call: Callable[[], dict[str, Any]], pattern: Pattern, values: np.ndarray) -> float:
    """Most bytes at a time, over those of input and output, which are both counted in it."""
    given = values.nbytes + sum(c.nbytes for c in pattern.coords)
    tracemalloc.start()
    try:
        out = call()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    made = sum(a.nbytes for a in out.values() if isinstance(a, np.ndarray))
    return (given + most) / (given + made)


def least_of(call: Callable[[], Any], seconds: float) -> dict[str, float]:
    """Minimum and median of a call alone: rounds until the time is over, at least two."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return shortest(found, rounds=len(found))


def show(results: dict[str, Any]) -> None:
    """Times as minimum/median in ms."""
    _show_bsr(results["bsr"])
    _show_hyb(results["hyb"])
    found = results["sr_bcrs"]
    rows, columns = found["shape"]
    table(f"SRBCRS(8, 32) of a {rows} x {columns} weight, 90 % zeros (ms)",
          ["", "min", "median"],
          [[n, f"{t['min'] * 1e3:.2f}", f"{t['median'] * 1e3:.2f}"]
           for n, t in found["seconds"].items()])  # fmt: skip
    print(f"target: {TARGETS['sr_bcrs']}. padding: {found['padding']:.1%}")
    _show_formats(results["formats"])
    _show_growth(results["growth"])


def _show_bsr(cells: list[dict[str, Any]]) -> None:
    head = ["graph", "nnz", "block", "padding", "sparsetir", "scipy", "scipy sorted", "x scipy",
            "x sorted", "pattern"]  # fmt: skip
    rows = []
    for cell in cells:
        row = [cell["graph"], cell["nnz"], cell["block"]]
        if "skipped" in cell:
            rows.append([*row, *["-"] * 7])
            continue
        times = cell["seconds"]
        row += [f"{cell['padding']:.1%}"]
        row += [ms(times[n]) for n in ("sparsetir", "scipy", "scipy sorted")]
        for peer in ("scipy", "scipy sorted"):
            least, middle = (times["sparsetir"][k] / times[peer][k] for k in ("min", "median"))
            row.append(f"{least:.2f}/{middle:.2f}")
        rows.append([*row, ms(times["pattern"])])
    table("CSR to BSR: ms as min/median", head, rows)
    print(f"target: {TARGETS['bsr']}. x: sparsetir's time over scipy's.")
    print("pattern: Pattern.from_csr, which checks the arrays; not in the other columns.")
    for cell in cells:
        if "skipped" in cell:
            print(f"skipped: {cell['graph']}, block {cell['block']}: {cell['skipped']}")


def _show_hyb(cells: list[dict[str, Any]]) -> None:
    rows = [[c["graph"], c["nnz"], c["k"], ms(c["seconds"]), f"{c['products']:.1f}"] for c in cells]
    table("Hyb(1, k): ms as min/median", ["graph", "nnz", "k", "ms", "products"], rows)
    print(f"target: {TARGETS['hyb']}. products: scipy's with {FEATURES} features in that time.")
    rows = []
    for c in cells:
        for kind, text in (("sparsetir", "fitted"), ("whole", "whole")):
            row = [
                c["graph"],
                c["k"],
                text,
                *[f"{c['padding'][n][kind]:.1%}" for n in COLUMN_PARTS],
            ]
            rows.append([*row, "" if c["paper"] is None else f"{c['paper']} %"])
    head = ["graph", "k", "remainder", *[f"c = {n}" for n in COLUMN_PARTS], "paper"]
    table("Padding of Hyb(c, k)", head, rows)
    print("remainder of a row longer than 2^k: in the bucket it fits (as here), or padded to 2^k.")
    print("paper: SparseTIR, table 1, which does not say c.")


def _show_formats(found: dict[str, Any]) -> None:
    rows = []
    for cell in found["cells"]:
        if "skipped" in cell:
            rows.append([cell["format"], *["-"] * 5])
            continue
        rows.append([
            cell["format"], ms(cell["seconds"]),
            f"{cell['seconds']['min'] / max(1, found['nnz']) * 1e9:.1f}",
            f"{cell['padding']:.1%}", f"{cell['bytes'] / 1e6:.2f}", f"{cell['products']:.1f}",
        ])  # fmt: skip
    table(f"Formats on {found['graph']}: ms as min/median",
          ["", "ms", "ns/nnz", "padding", "MB", "products"], rows)  # fmt: skip
    for cell in found["cells"]:
        if "skipped" in cell:
            print(f"skipped: {cell['format']}: {cell['skipped']}")


def _show_growth(cells: list[dict[str, Any]]) -> None:
    sizes = sorted({c["size"] for c in cells})
    rows = {}
    for cell in cells:
        row = rows.setdefault(cell["format"], [cell["format"], cell["graph"]])
        row.append(f"{cell['seconds']['min'] / cell['nnz'] * 1e9:.1f} ({cell['memory']:.1f}x)")
    table("Growth: ns for each element (and memory)",
          ["", "graph", *[f"{s:.0e}" for s in sizes]], list(rows.values()))  # fmt: skip
    print(f"target: {TARGETS['growth']}.")
