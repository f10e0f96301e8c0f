"""What it costs to bring a pattern into another format, beside scipy; `formats` has all of them."""

from __future__ import annotations

import argparse
import math
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp

import sparsetir
from bench.harness import each, finish
from bench.problems import graphs, pattern_of
from bench.report import ms, table
from bench.timing import interleaved
from sparsetir.formats import BSR, COO, CSR, SRBCRS, Format, Hyb, Pattern, RuleFormat
from sparsetir.formats.library import refusal

BLOCKS = (2, 4, 8, 16, 32)
COLUMN_PARTS = (1, 2, 4, 8, 16)
FEATURES = 64  # of the product that conversions are held against
SIZES = (10**4, 10**5, 10**6, 10**7)
TARGETS = {
    "bsr": "at most 1.5 times scipy's tobsr",
    "hyb": "at most 60 ms for 1.6 million elements with c = 1",
    "growth": "linear; at most 4 times the bytes of input and output",
}
# Padding in percent of hyb, SparseTIR, table 1, which does not say c.
PAPER = {"cora": 15.9, "citeseer": 13.0, "pubmed": 23.1, "ppi": 22.9, "ogbn-arxiv": 17.5}
PAPER |= {"ogbn-proteins": 21.6, "reddit": 28.6}
# A format as a user describes it: two rows together.
ROW_PAIRS = """
@T.prim_func
def row_pairs(
    a: T.handle, indptr: T.handle, indices: T.handle, m: T.int32, n: T.int32, nnz: T.int32
) -> None:
    IO = T.dense_fixed(m)
    J2 = T.sparse_variable(IO, (n, nnz), (indptr, indices))
    II = T.dense_fixed(2)
    A = T.match_sparse_buffer(a, (IO, J2, II), "float32")
"""
Todo = Iterator[tuple[str, Callable[[], dict[str, Any]]]]


def run(args: argparse.Namespace) -> None:
    """The command; status 1 if a format does not give its values back."""
    seconds, matrices = 0.05 if args.quick else 1.0, graphs(args.graph)
    sizes = [s for s in SIZES if not args.quick or s <= 10**5]
    blocks = BLOCKS[:2] if args.quick else BLOCKS
    todo: dict[str, Todo] = {
        "bsr": (
            (f"{n}: blocks of {b}", partial(bsr, n, m, b, seconds))
            for n, m in matrices.items()
            for b in blocks
        ),
        "hyb": ((f"{n}: hyb", partial(hyb, n, m, seconds)) for n, m in matrices.items()),
        "growth": growth(sizes, seconds / 5),
    }
    results: dict[str, Any] = {name: each(cells) for name, cells in todo.items()}
    show(results)
    finish(args, "convert", {**results, "targets": TARGETS})


def conversion(fmt: Format, pattern: Pattern, values: np.ndarray) -> Callable[[], dict[str, Any]]:
    """The arguments of a kernel from a pattern and values; checked once."""
    converted = fmt.convert(pattern)
    if not np.array_equal(converted.restore("A", converted.arguments(A=values)), values):
        raise SystemExit(f"{fmt} does not give its values back")
    return lambda: fmt.convert(pattern).arguments(A=values)


def bsr(name: str, matrix: Any, block: int, seconds: float) -> dict[str, Any]:
    """Square blocks, beside scipy; scipy's are not sorted and do not say what is padding."""
    pattern, values, fmt = pattern_of(matrix), matrix.data, BSR(block, block)
    out = {"graph": name, "nnz": pattern.nnz, "block": block}
    if reason := refusal(pattern, fmt.places(pattern), most_places=math.inf):
        return {**out, "skipped": reason}
    shape = [-(-n // block) * block for n in matrix.shape]
    padded = sp.csr_array(matrix)
    padded.resize(shape)

    def in_order() -> Any:
        found = padded.tobsr(blocksize=(block, block))
        found.sort_indices()
        return found

    ours = conversion(fmt, pattern, values)
    if not np.array_equal(ours()[f"a_{fmt.name}"], in_order().data):
        raise SystemExit(f"{fmt} is wrong on {name}")
    calls: dict[str, Callable[[], Any]] = {
        "sparsetir": ours,
        "scipy": lambda: padded.tobsr(blocksize=(block, block)),
        "scipy sorted": in_order,
        "pattern": lambda: pattern_of(matrix),
    }
    padding = fmt.convert(pattern).padding
    return {**out, "padding": padding, "seconds": interleaved(calls, seconds)}


def hyb(name: str, matrix: Any, seconds: float) -> dict[str, Any]:
    """hyb(1, k) with the k of the paper beside scipy's product, and the padding of hyb(c, k)."""
    pattern = pattern_of(matrix)
    k = Hyb.for_pattern(pattern).k
    b = np.random.default_rng(0).uniform(-1, 1, (matrix.shape[1], FEATURES)).astype("float32")
    call = conversion(Hyb(1, k), pattern, matrix.data)
    times = interleaved({"sparsetir": call, "product": lambda: matrix @ b}, seconds)
    padding = {c: Hyb(c, k).convert(pattern).padding for c in COLUMN_PARTS}
    about = {"graph": name, "nnz": pattern.nnz, "k": k, "paper": PAPER.get(name)}
    products = times["sparsetir"]["min"] / times["product"]["min"]
    return {**about, "seconds": times["sparsetir"], "padding": padding, "products": products}


def growth(sizes: list[int], seconds: float) -> Todo:
    """Time for each element, and memory, of graphs with sixteen elements in a row."""
    rule = sparsetir.FormatRewriteRule(
        "row_pairs", sparsetir.from_source(ROW_PAIRS), ["A"], ["I", "J"], ["IO", "J2", "II"],
        {"I": ["IO", "II"], "J": ["J2"]},
        lambda i, j: (i // 2, j, i % 2), lambda io, j, ii: (io * 2 + ii, j),
    )  # fmt: skip
    scattered = (CSR(), COO(), Hyb(1, 4), RuleFormat(rule))
    for size in sizes:
        for kind, formats in (("scattered", scattered), ("near", (BSR(4, 4), SRBCRS(8, 32)))):
            pattern = random_pattern(size, kind)
            for fmt in formats:
                label = f"{size:.0e} elements, {kind}: {fmt.name}"
                yield label, partial(grown, fmt, pattern, size, kind, seconds)


def grown(fmt: Format, pattern: Pattern, size: int, kind: str, seconds: float) -> dict[str, Any]:
    """One format at one size."""
    values = np.random.default_rng(1).standard_normal(pattern.nnz).astype("float32")
    call = conversion(fmt, pattern, values)
    about = {"format": fmt.name, "graph": kind, "nnz": pattern.nnz, "size": size}
    times = interleaved({"": call}, seconds, least=2, warm_up=0)[""]
    return {**about, "seconds": times, "memory": memory(call, pattern, values)}


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


# -- what is shown --------------------------------------------------------------------------------


def show(results: dict[str, Any]) -> None:
    """Times as minimum/median in ms."""
    _show_bsr(results["bsr"])
    _show_hyb(results["hyb"])
    _show_growth(results["growth"])


def _show_bsr(cells: list[dict[str, Any]]) -> None:
    peers, rows = ("scipy", "scipy sorted"), []
    for cell in (c for c in cells if "skipped" not in c):
        times = cell["seconds"]
        ours = {k: times["sparsetir"][k] for k in ("min", "median")}
        ratios = ["/".join(f"{ours[k] / times[p][k]:.2f}" for k in ours) for p in peers]
        about = [cell["graph"], cell["nnz"], cell["block"], f"{cell['padding']:.1%}"]
        shown = [ms(times[n]) for n in ("sparsetir", *peers)]
        rows.append([*about, *shown, *ratios, ms(times["pattern"])])
    head = ["graph", "nnz", "block", "padding", "sparsetir", *peers, "x scipy", "x sorted"]
    table("CSR to BSR: ms as min/median", [*head, "pattern"], rows)
    print(f"target: {TARGETS['bsr']}. x: sparsetir's time over scipy's.")
    print("pattern: Pattern.from_csr, which checks the arrays; not in the other columns.")
    for cell in (c for c in cells if "skipped" in c):
        print(f"skipped: {cell['graph']}, block {cell['block']}: {cell['skipped']}")


def _show_hyb(cells: list[dict[str, Any]]) -> None:
    rows = [[c["graph"], c["nnz"], c["k"], ms(c["seconds"]), f"{c['products']:.1f}"] for c in cells]
    table("Hyb(1, k): ms as min/median", ["graph", "nnz", "k", "ms", "products"], rows)
    print(f"target: {TARGETS['hyb']}. products: scipy's with {FEATURES} features in that time.")
    rows = []
    for c in cells:
        paper = "" if c["paper"] is None else f"{c['paper']} %"
        shares = [f"{c['padding'][n]:.1%}" for n in COLUMN_PARTS]
        rows.append([c["graph"], c["k"], *shares, paper])
    table(
        "Padding of Hyb(c, k)", ["graph", "k", *[f"c = {n}" for n in COLUMN_PARTS], "paper"], rows
    )
    print("paper: SparseTIR, table 1, which does not say c.")


def _show_growth(cells: list[dict[str, Any]]) -> None:
    sizes, rows = sorted({c["size"] for c in cells}), {}
    for cell in cells:
        row = rows.setdefault(cell["format"], [cell["format"], cell["graph"]])
        row.append(f"{cell['seconds']['min'] / cell['nnz'] * 1e9:.1f} ({cell['memory']:.1f}x)")
    head = ["", "graph", *[f"{s:.0e}" for s in sizes]]
    table("Growth: ns for each element (and memory)", head, list(rows.values()))
    print(f"target: {TARGETS['growth']}.")
