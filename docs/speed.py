"""The measured speed, from bench/results: a table and a picture of all comparisons.

    python -m docs.speed

writes docs/pictures/speed.png; between `<!-- readme -->` and `<!-- end -->` in README.md what
`python -m bench readme` found; and in docs/performance.md, between other marks, the table of all
comparisons, what loses, and what a call takes. `tests/test_docs.py` checks that these say what the
files do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from bench.peers.mkl import CODES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
MARKED = {
    name: re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    for name in ("readme", "comparisons", "speed", "calls")
}
CALLS = "calls-amd-epyc-znver5-1t"
EVEN = 0.01  # a cell within this share of the other's time is neither won nor lost


class Cell(NamedTuple):
    """One measurement: what of, and how many times as long the other takes."""

    name: str
    ratio: float


class Comparison(NamedTuple):
    """A line of the table.

    what, beside : in words; file : below bench/results
    busy : whether more processes ran than there are cores, as far as the file says
    """

    what: str
    beside: str
    file: str
    cells: list[Cell]
    busy: bool

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios."""
        return math.exp(sum(math.log(c.ratio) for c in self.cells) / len(self.cells))

    @property
    def lost(self) -> list[Cell]:
        """Cells in which the other is faster, the worst first."""
        return sorted((c for c in self.cells if c.ratio < 1 - EVEN), key=lambda c: c.ratio)


def comparisons() -> list[Comparison]:
    """All that is shown, in the order of the table."""
    spmm = "run-spmm-mkl-2026-intel-r-xeon-r-processor-2-50ghz-cascadelake-1t"
    cascade = "{}-intel-r-xeon-r-processor-2-50ghz-cascadelake-{}t"
    zen, amd = "run-spmm-mkl-2026-amd-epyc-znver5-2-1t", "{}-amd-epyc-znver5-{}t"
    graphs = {op: _newest(f"run-{op}", "2-1t") for op in ("spmm", "spmv", "sddmm")}
    epochs, no_zeros = _newest("epoch", "1t"), _newest("epoch-no-zeros", "1t")
    mttkrp = _newest("mttkrp", "1t")
    libraries = "the best of scipy, torch, MKL"
    forced = "run-spmm-mkl-2026-avx512-amd-epyc-znver5-1t"
    return [
        _runs("SpMM", f"{_mkl(spmm)} on Intel", spmm, 1),
        _runs("SpMM", f"{_mkl(zen)} on AMD", zen, 1),
        _runs("SpMM", f"{_mkl(zen)} on AMD", zen, 2),
        _runs("SpMM", f"{_mkl(forced)} on AMD", forced, 1),
        _runs("SpMM", f"{libraries}{_on(graphs['spmm'])}", graphs["spmm"], 1),
        _runs("SpMM", f"{libraries}{_on(graphs['spmm'])}", graphs["spmm"], 2),
        _runs("SpMV", f"{libraries}{_on(graphs['spmv'])}", graphs["spmv"], 1),
        _runs("SpMV", f"{libraries}{_on(graphs['spmv'])}", graphs["spmv"], 2),
        _runs("SDDMM", f"torch{_on(graphs['sddmm'])}", graphs["sddmm"], 1),
        _runs("SDDMM", f"torch{_on(graphs['sddmm'])}", graphs["sddmm"], 2),
        _made("Pruned weights, 1 thread", "a dense product on Intel, by MKL", _coarsen,
              cascade.format("study-coarsen", 1)),
        _made("Pruned weights, 1 thread", "a dense product on AMD, MKL's generic code", _coarsen,
              amd.format("study-coarsen", 1)),
        _made("Attention with a mask, 2 threads", "FlexAttention, the better block", _attention,
              cascade.format("attention", 2)),
        _made("Sparse convolutions, 1 thread", "torch: gather, mm, scatter", _convolutions,
              cascade.format("sparse_conv", 1)),
        _made("RGCN layers, 1 thread", "PyG on AMD, the better layer", _rgcn,
              amd.format("rgcn", 1)),
        _made("Epochs of GCN, SAGE, 1 thread", f"PyG, its fastest graph{_on(epochs)}", _epochs,
              epochs),
        _made("The same, features without zeros", f"PyG, its fastest graph{_on(no_zeros)}",
              _epochs, no_zeros),
        _made("MTTKRP, tuned, 1 thread", f"the best of 3 loop nests in C++{_on(mttkrp)}", _mttkrp,
              mttkrp),
    ]  # fmt: skip


def _newest(what: str, threads: str) -> str:
    """Of the files of a measurement, on whatever CPU, the one that was written last."""
    named = re.compile(rf"{what}-(amd|intel)-.*-{threads}")
    found = [p for p in RESULTS.glob(f"{what}-*.json") if named.fullmatch(p.stem)]
    return max(found, key=lambda p: json.loads(p.read_text())["date"]).stem


def _on(file: str) -> str:
    """Whose CPU a file is of."""
    return " on AMD" if "-amd-" in file else " on Intel"


def readme() -> str:
    """The README's table: of each of its snippets how many times as fast it is as others."""
    files = {n: _newest("readme", f"{n}t") for n in (1, 2)}
    records = {n: json.loads((RESULTS / f"{file}.json").read_text()) for n, file in files.items()}
    rows = {n: {r["what"]: r for r in record["results"]["rows"]} for n, record in records.items()}
    out = ["| measured | as | times as fast, 1 thread | 2 threads |", "|---|---|---|---|"]
    for what, row in rows[1].items():
        told = [f"| {what} | `{row['snippet']}` |"]
        for n in files:
            times = {name: t["min"] for name, t in rows[n][what]["seconds"].items()}
            ours = times.pop("sparsetir")
            told.append(", ".join(f"{t / ours:.1f} ({o})" for o, t in times.items()) + " |")
        out.append(" ".join(told))
    record = records[1]
    cpu = re.sub(r"\(\w+\)| Processor", "", record["cpu"])
    where = " and ".join(f"`bench/results/{file}.json`" for file in files.values())
    out += ["", f"{cpu} ({record['llvm_cpu']}), commit {record['commit']}: {where}."]
    return "\n".join(out) + "\n"


def table() -> str:
    """The lines of the table of all comparisons."""
    out = ["| | | beside | faster in | times as fast, mean | worst cell |",
           "|---|---|---|---|---|---|"]  # fmt: skip
    for n, c in enumerate(comparisons(), 1):
        worst = min(c.cells, key=lambda cell: cell.ratio)
        won = sum(cell.ratio > 1 + EVEN for cell in c.cells)
        out.append(
            f"| {n} | {c.what}{' (busy)' * c.busy} | {c.beside} | {won} of {len(c.cells)} "
            f"| {c.mean:.2f} | {worst.ratio:.2f}: {worst.name} |"
        )
    return "\n".join(out) + "\n"


def losses() -> str:
    """Every cell that loses, by the numbers of the table, and the file of each comparison."""
    lost, others = [], []
    for n, c in enumerate(comparisons(), 1):
        record = json.loads((RESULTS / f"{c.file}.json").read_text())
        where = f"{n}: `{c.file}`, {record['commit']}"
        if c.lost:
            lost += [f"**{where}**", "", *_in_lines(c.lost)]
        else:
            others.append(where)
    return "\n".join([*lost, f"None lose in {'; '.join(others)}.", ""])


def _in_lines(cells: list[Cell]) -> list[str]:
    """Cells in columns, those that differ in the number of features in one row."""
    rows: dict[str, dict[int, str]] = {}
    for cell in cells:
        name, _, feat = cell.name.rpartition(", ")
        if not feat.isdigit():
            name, feat = cell.name, "0"
        rows.setdefault(name, {})[int(feat)] = f"{cell.ratio:.2f}"
    feats = sorted({feat for found in rows.values() for feat in found})
    width = max(map(len, rows))
    table = [["", *(str(feat or "") for feat in feats)]]
    table += [
        [name, *(found.get(feat, "") for feat in feats)]
        for name, found in sorted(rows.items(), key=lambda row: min(row[1].values()))
    ]
    lines = (f"{row[0]:{width}}" + "".join(f"{x:>6}" for x in row[1:]) for row in table)
    return ["```none", *(line.rstrip() for line in lines if line.strip()), "```", ""]


def _mkl(file: str) -> str:
    """MKL in words, with what it runs on that CPU where the file says so."""
    cells = json.loads((RESULTS / f"{file}.json").read_text())["results"]["cells"]
    code = next((c["peers"]["mkl"]["about"].get("code") for c in cells if "peers" in c), None)
    return f"MKL 2026's {CODES[code]}" if code else "MKL 2026"


def _runs(op: str, beside: str, file: str, threads: int) -> Comparison:
    """Of `bench run`: beside the fastest library of each cell."""

    def cells(results: Any) -> Iterator[Cell]:
        for cell in results["cells"]:
            if cell["threads"] != threads or "sparsetir" not in cell.get("peers", {}):
                continue
            times = {n: p["min"] for n, p in cell["peers"].items() if n not in OURS}
            ratio = min(times.values()) / cell["peers"]["sparsetir"]["min"]
            problem = re.sub(r"^dlmc_(\w+?)_magnitude_", r"\1 ", cell["problem"]).replace("_", " ")
            feat = f", {cell['feat']}" if op != "SpMV" else ""
            yield Cell(f"{problem}{feat}", ratio)

    words = f"{op}, {threads} thread{'s' if threads > 1 else ''}"
    return _made(words, beside, cells, file)


# Of a run: what is measured beside the libraries, and no library.
OURS = ("sparsetir", "sparsetir float32", "before", "yardstick")


def _made(what: str, beside: str, cells: Any, file: str) -> Comparison:
    record = json.loads((RESULTS / f"{file}.json").read_text())
    load = record.get("load") or 0
    busy = (load if isinstance(load, float | int) else load[0]) > record.get("cores", 2) + 0.5
    return Comparison(what, beside, file, list(cells(record["results"])), busy)


def _coarsen(results: Any) -> Iterator[Cell]:
    for cell in results["cells"]:
        ways = {name: way["min"] for name, way in cell["ways"].items()}
        m, n = cell["shape"]
        name = f"{m} x {n}, {cell['sparsity']:.0%} zeros, {cell['feat']}"
        yield Cell(name, ways["dense"] / ways[cell["chosen"]])


def _attention(results: Any) -> Iterator[Cell]:
    for cell in results["cells"]:
        times = {n: t["min"] for n, t in cell["forward"].items()}
        flex = min(t for n, t in times.items() if n.startswith("flex"))
        yield Cell(f"{cell['mask']}, {cell['length']}", flex / times["sparsetir"])


def _convolutions(results: Any) -> Iterator[Cell]:
    for cloud in results:
        for cell in cloud["cells"]:
            for way in ("forward", "training"):
                if "gather" in cell.get(way, {}):
                    here = {n: t["min"] for n, t in cell[way].items()}
                    channels = " to ".join(map(str, cell["channels"]))
                    name = f"{cell['layer']}, {channels}, {way}, {cell['dtype']}"
                    yield Cell(name, here["gather"] / here["sparsetir"])


def _rgcn(results: Any) -> Iterator[Cell]:
    for cell in results["cells"]:
        for way in ("inference", "training", "epoch"):
            times = {n: t["min"] for n, t in cell.get(way, {}).items()}
            pyg = [t for n, t in times.items() if n not in ("sparsetir", "unfused")]
            if pyg:
                yield Cell(
                    f"{cell['graph']} edges, {cell['feat']}, {way}", min(pyg) / times["sparsetir"]
                )


def _epochs(results: Any) -> Iterator[Cell]:
    for cell in results:
        times = {n: t["min"] for n, t in cell["peers"].items()}
        pyg = min(t for n, t in times.items() if n.startswith("pyg"))
        yield Cell(f"{cell['model']}, {cell['graph'].replace('_', ' ')}", pyg / times["sparsetir"])


def _mttkrp(results: Any) -> Iterator[Cell]:
    for cell in results["cells"]:
        times = cell["seconds"]
        nests = min(t for n, t in times.items() if n.startswith("c++"))
        yield Cell(
            f"{cell['tensor']}, mode {cell['mode']}, {cell['dtype']}", nests / times["tuned"]
        )


def calls() -> str:
    """What a call takes, with its kernel, in microseconds; the file has its parts, too."""
    record = json.loads((RESULTS / f"{CALLS}.json").read_text())
    out = [
        f"`{CALLS}.json`, {record['cpu']} ({record['llvm_cpu']}), commit {record['commit']}.",
        "", "| | microseconds |", "|---|---:|",
    ]  # fmt: skip
    for name, found in record["results"]["seconds"]["now"]["calls"].items():
        out.append(f"| {name} | {1e6 * found['min']:.2f} |")
    return "\n".join(out) + "\n"


def draw() -> None:
    """A dot for each cell, on a logarithmic scale; left of the line the other is faster."""
    from matplotlib.figure import Figure
    from PIL import Image

    found = comparisons()
    figure = Figure(figsize=(9, 0.36 * len(found) + 1.1), layout="constrained")
    ax = figure.subplots()
    for n, comparison in enumerate(found):
        ratios = [c.ratio for c in comparison.cells]
        spread = [n + 0.22 * math.sin(2.4 * k) for k in range(len(ratios))]
        colours = ["#D55E00" if r < 1 - EVEN else "#0072B2" for r in ratios]
        ax.scatter(ratios, spread, c=colours, s=14, alpha=0.75, linewidths=0, zorder=3)
        ax.plot([comparison.mean] * 2, [n - 0.36, n + 0.36], color="black", linewidth=1.6, zorder=4)
    ax.axvline(1, color="0.4", linewidth=1)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.set_yticks(range(len(found)), [f"{c.what}, beside {c.beside}" for c in found], fontsize=8)
    ax.set_ylim(len(found) - 0.4, -0.6)
    ax.set_xlabel("times as fast; orange: slower; bars: geometric means", fontsize=9)
    ax.grid(axis="x", color="0.9", zorder=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    file = BytesIO()
    figure.savefig(file, dpi=120, facecolor="white")
    picture = ROOT / "docs" / "pictures" / "speed.png"
    Image.open(file).convert("RGB").quantize(64).save(picture, optimize=True)


def rewrite(path: Path, text: str, name: str) -> None:
    """Put a table between the marks of a page."""
    page = path.read_text()
    assert MARKED[name].search(page), path
    path.write_text(MARKED[name].sub(lambda _: text, page, count=1))


if __name__ == "__main__":
    rewrite(ROOT / "README.md", readme(), "readme")
    rewrite(ROOT / "docs" / "performance.md", table(), "comparisons")
    rewrite(ROOT / "docs" / "performance.md", losses(), "speed")
    rewrite(ROOT / "docs" / "performance.md", calls(), "calls")
    draw()
