"""Cells of `python -m bench readme`, compared with other libraries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.peers.mkl import CODES
from bench.readme import FORCED
from bench.report import geomean

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
EVEN = 0.01  # a cell within this share of the other's time is neither won nor lost
OURS, BACKEND, PYG, INDUCTOR = "sparsetir", "backend sparsetir", "PyG", "Inductor"
NO_PEERS = ("sparsetir", "sparsetir float32", "before", "yardstick")  # of `bench run`
# Our ways, whose times on two threads are those of two.
OWN = (*NO_PEERS, BACKEND, "accelerate", "sparsetir.nn", "planned", "values alone", "terms listed")
GRAPHS = {
    "synthetic:ppi": "generated", "1e5": "generated", "cora": "Cora", "twitch_de": "Twitch",
    "fb100_amherst41": "Amherst", "fb100_cornell5": "Cornell",
}  # fmt: skip


class Missing(Exception):
    """A step that is not in the file."""


def file() -> Path:
    """The newest of the files, of whatever CPU."""
    files = RESULTS.glob("readme-*.json")
    return max(files, key=lambda p: json.loads(p.read_text())["date"])


@cache
def record() -> dict[str, Any]:
    """The contents of that file."""
    return json.loads(file().read_text())


def step(name: str) -> Any:
    """Results of a step."""
    steps = record()["results"]["steps"]
    if name not in steps:
        raise Missing(name)
    return steps[name]["results"]


def cells(name: str) -> list[dict[str, Any]]:
    """The cells of a step; none where it was not measured.

    On two threads another library has the better of its times on one thread and on two, as a
    user would choose.
    """
    try:
        measured = step(name)["cells"]
    except Missing:
        return []
    alone = cells(f"{name[:-2]}1t") if name.endswith(" 2t") else measured
    one = {_place(c): c for c in alone if c.get("threads", 1) == 1}
    two = name.endswith(" 2t")
    return [
        _with_better_times(c, one.get(_place(c), c)) if two or c.get("threads") == 2 else c
        for c in measured
    ]


def _place(cell: dict[str, Any]) -> frozenset[tuple[str, str | int]]:
    """What a cell is of, beside the number of threads."""
    told = {k: v for k, v in cell.items() if isinstance(v, str | int) and k != "threads"}
    return frozenset(told.items())


def _with_better_times(cell: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """A cell on two threads, with the times of other libraries on one where these are better."""

    def better(way: str, took: Any, of: Any) -> Any:
        known = isinstance(took, dict) and "min" in took and "min" in of.get(way, {})
        return min(took, of[way], key=lambda t: t["min"]) if known and way not in OWN else took

    return {
        key: {way: better(way, took, alone[key]) for way, took in value.items()}
        if isinstance(value, dict) and isinstance(alone.get(key), dict)
        else value
        for key, value in cell.items()
    }


def graph(name: str) -> str:
    """A graph or matrix in words."""
    name = GRAPHS.get(name, name)
    return re.sub(r"^dlmc_(\w+?)_magnitude_", r"\1 ", name).replace("_", " ")


def ms(seconds: float) -> str:
    """Milliseconds of three digits."""
    value = 1e3 * seconds
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def times(ratio: float) -> str:
    """A ratio in words, of three digits at most."""
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def grid(head: Iterable[str], rows: Iterable[Iterable[Any]], right: int = 0) -> str:
    """A table of Markdown, whose last columns may be set to the right."""
    head = list(head)
    lines = ["|".join(["---"] * (len(head) - right) + ["--:"] * right)]
    for row in (head, *rows):
        lines.append("|".join(f" {cell} " if cell != "" else " " for cell in row))
    lines[:2] = lines[1::-1]
    return "".join(f"|{line}|\n" for line in lines)


# -- comparisons ----------------------------------------------------------------------------------


class Cell(NamedTuple):
    """One measurement: what of, and how many times as long the other takes."""

    name: str
    ratio: float


class Comparison(NamedTuple):
    """A line of the table: what, beside whom, in words; `key` names it in pages."""

    key: str
    what: str
    beside: str
    cells: list[Cell]

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios."""
        return geomean(c.ratio for c in self.cells)

    @property
    def worst(self) -> Cell:
        return min(self.cells, key=lambda c: c.ratio)

    @property
    def lost(self) -> list[Cell]:
        """Cells in which the other is faster, the worst first."""
        return sorted((c for c in self.cells if c.ratio < 1 - EVEN), key=lambda c: c.ratio)


@cache
def comparisons() -> list[Comparison]:
    """All that is shown, in the order of the table."""
    best, epochs = "the best of scipy, torch and MKL", "epochs by torch.compile"
    described: list[tuple[str, str, str, Iterable[Cell]]] = []
    for n, words in ((1, "1 thread"), (2, "2 threads")):
        models = ["models 1t", "layers"] if n == 1 else ["models 2t"]
        rgcn, ran = _rgcn(f"relations {n}t"), partial(_runs, "operators", threads=n)
        product, total = (_sparse(f"sparse {n}t", op) for op in ("product", "sum of 2"))
        described += [
            (f"epochs {n} {INDUCTOR}", f"{epochs}, {words}", INDUCTOR, _epochs(models, INDUCTOR)),
            (f"epochs {n} {PYG}", f"{epochs}, {words}", PYG, _epochs(models, PYG)),
            (f"rgcn {n}", f"RGCN layers, {words}", "PyG's faster layer", rgcn),
            (f"spmm {n}", f"SpMM, {words}", best, ran("spmm")),
            (f"spmv {n}", f"SpMV, {words}", best, ran("spmv")),
            (f"sddmm {n}", f"SDDMM, {words}", "torch", ran("sddmm")),
            (f"product {n}", f"sparse times sparse, {words}", best, product),
            (f"sum {n}", f"sum of two sparse matrices, {words}", best, total),
        ]
    nests, gather = "the best of 3 loop nests in C++", "torch: gather, mm, scatter"
    libraries = "the best of scipy, NumPy, sparse, GraphBLAS, tensora"
    forced = f"MKL's {mkl_code(FORCED)}, forced"
    described += [
        ("forced", "SpMM, 1 thread", forced, _runs(FORCED, "spmm", threads=1)),
        ("pruned", "pruned weights, 1 thread", "a dense product of torch", _pruned()),
        ("attention", "attention with a mask, 2 threads", "FlexAttention", _attention()),
        ("points", "convolutions of points, 1 thread", gather, _convolutions()),
        ("mttkrp", "MTTKRP, tuned, 1 thread", nests, _mttkrp()),
        ("expressions", "lines of index notation, 1 thread", libraries, _expressions()),
    ]
    filled = [Comparison(key, what, beside, list(of)) for key, what, beside, of in described]
    return [c for c in filled if c.cells]


def mkl_code(name: str = "operators") -> str:
    """The code that MKL ran, in words."""
    said = (c["peers"]["mkl"]["about"].get("code") for c in cells(name) if "mkl" in c["peers"])
    return CODES.get(next(said, None) or "", "own choice of code")


def _epochs(tables: list[str], peer: str) -> Iterator[Cell]:
    for cell in (c for name in tables for c in cells(name)):
        if peer in cell["epoch"] and BACKEND in cell["epoch"]:
            ratio = cell["epoch"][peer]["min"] / cell["epoch"][BACKEND]["min"]
            yield Cell(f"{cell['layer']}, {graph(cell['graph'])}", ratio)


def _runs(name: str, op: str, threads: int) -> Iterator[Cell]:
    """Beside the fastest library of each cell; MKL with the faster one of its codes."""
    intel = {}
    if name != FORCED:
        intel = {
            _place(c): c["peers"]["mkl"]["min"] / c["peers"][OURS]["min"]  # of the same run
            for c in cells(FORCED)
            if c["threads"] == threads
        }
    for cell in cells(name):
        if (cell["op"], cell["threads"]) != (op, threads) or OURS not in cell["peers"]:
            continue
        others = [p["min"] for n, p in cell["peers"].items() if n not in NO_PEERS]
        if others:
            feat = f", {cell['feat']}" if op != "spmv" else ""
            ratio = min(others) / cell["peers"][OURS]["min"]
            yield Cell(graph(cell["problem"]) + feat, min(ratio, intel.get(_place(cell), ratio)))


def _rgcn(name: str) -> Iterator[Cell]:
    for cell in cells(name):
        for way in ("inference", "training", "epoch"):
            took = {n: t["min"] for n, t in cell.get(way, {}).items()}
            pyg = [t for n, t in took.items() if n != OURS]
            if pyg:
                words = f"{cell['graph']} edges, {cell['feat']} features, {way}"
                yield Cell(words, min(pyg) / took[OURS])


def _sparse(name: str, op: str) -> Iterator[Cell]:
    for cell in cells(name):
        if cell["op"] == op:
            took = {n: t["min"] for n, t in cell["seconds"].items()}
            others = [took[n] for n in ("scipy", "torch", "mkl") if n in took]
            yield Cell(graph(cell["graph"]), min(others) / took[OURS])


def _pruned() -> Iterator[Cell]:
    for cell in cells("products 1t"):
        if cell["what"] == "pruned":
            took = {n: t["min"] for n, t in cell["seconds"].items()}
            yield Cell(f"{cell['problem']}, {cell['feat']}", took["dense"] / took[OURS])


def _attention() -> Iterator[Cell]:
    for cell in cells("attention"):
        took = {n: t["min"] for n, t in cell["forward"].items()}
        flex = [t for n, t in took.items() if n.startswith("flex")]
        if flex:
            yield Cell(f"{cell['mask']}, length {cell['length']}", min(flex) / took[OURS])


def _convolutions() -> Iterator[Cell]:
    for cloud in _or_none("convolutions"):
        for cell in cloud["cells"]:
            for way in ("forward", "training"):
                if "gather" in cell.get(way, {}):
                    took = {n: t["min"] for n, t in cell[way].items()}
                    channels = " to ".join(map(str, cell["channels"]))
                    yield Cell(f"{cell['layer']}, {channels}, {way}", took["gather"] / took[OURS])


def _mttkrp() -> Iterator[Cell]:
    for cell in cells("tensors"):
        took = cell["seconds"]
        nests = [t for n, t in took.items() if n.startswith("c++")]
        if nests:
            yield Cell(f"{graph(cell['tensor'])}, mode {cell['mode']}", min(nests) / took["tuned"])


def _expressions() -> Iterator[Cell]:
    for cell in cells("expressions"):
        ours, fastest = (t["min"] for t in cell["beside the fastest"].values())
        yield Cell(f"`{cell['expression']}`, {graph(cell['graph'])}", fastest / ours)


def _or_none(name: str) -> Any:
    try:
        return step(name)
    except Missing:
        return []
