"""The measured speed in pages: tables and pictures of what `python -m bench readme` wrote.

    python -m docs.speed

fills pages between `<!-- speed NAME -->`, or `<!-- speed ratio KEY -->`, and `<!-- end -->` by
the function of that name in `TEXTS`, and draws docs/pictures/speed.png and steps.png. Steps that
are not in the file are said not to be measured; `tests/project/test_readme.py` checks the pages.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

from docs.measured import (
    BACKEND,
    EVEN,
    INDUCTOR,
    OURS,
    PYG,
    ROOT,
    Cell,
    Missing,
    cells,
    comparisons,
    file,
    graph,
    grid,
    mkl_code,
    ms,
    record,
    step,
    times,
)  # fmt: skip

from bench.report import geomean

PICTURES = ROOT / "docs" / "pictures"
MARK = re.compile(r"(?<=<!-- speed )(\w+)(?: ([^>\n]+))?( -->\n?)(.*?)(?=<!-- end -->)", re.DOTALL)
OF_DOCS = sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))
PAGES = ("README.md", "examples/README.md", *OF_DOCS)
COMPILED = 'torch.compile(model, backend="sparsetir")'
ABSENT = "Not measured.\n"
QUICK = " **A quick round, which shows that all runs, and no speed.**"


# -- texts of pages -------------------------------------------------------------------------------


def readme() -> str:
    """The README's table: milliseconds of each snippet, and how many times as fast as others."""
    rows = []
    for what, snippet, name, wanted, ways in README_ROWS:
        one, two = ([c for c in cells(f"{name} {n}t") if wanted(c)] for n in (1, 2))
        for cell in one:
            same = [c for c in two if _on(c) == _on(cell)]
            texts = [_beside(ways(c)) for c in (cell, *same)] + ["not measured"] * (not same)
            count = cell.get("edges") or (0 if "op" in cell else cell["nnz"])  # of a result: no
            size = f", {count:,} edges" if count else ""
            rows.append([what, f"`{snippet}`", f"{graph(_on(cell))}{size}", *texts])
            what = snippet = ""  # the other graphs of a row
    about = record()
    head = ["measured", "as", "graph", "1 thread; times as fast as", "2 threads"]
    rows = [[*row[:1], row[1].replace("``", ""), *row[2:]] for row in rows]
    where = f"`bench/results/{file().name}`"
    end = f"{_cpu(about)}, commit {about['commit']}: {where}.{QUICK * about.get('quick', False)}"
    return f"{grid(head, rows)}\n{end}\n"


def _on(cell: dict[str, Any]) -> str:
    """The graph or problem of a cell."""
    return cell.get("problem") or cell["graph"]


def _beside(took: dict[str, Any]) -> str:
    """Our time, the first, and how many times as fast it is as each other."""
    (_, ours), *others = took.items()
    told = (f"{times(t['min'] / ours['min'])}x {name}" for name, t in others)
    return f"{ms(ours['min'])} ms; {', '.join(told)}"


def _layer(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda c: c["layer"] == name


def _epoch(cell: dict[str, Any]) -> dict[str, Any]:
    return {n: cell["epoch"][n] for n in (BACKEND, INDUCTOR, PYG) if n in cell["epoch"]}


def _squared() -> str:
    """The graph of the README's product: without data Cora."""
    there = [c["graph"] for c in cells("sparse 1t")]
    return "fb100_amherst41" if "fb100_amherst41" in there else "cora"


def _square(cell: dict[str, Any]) -> dict[str, Any]:
    names = {OURS: OURS, "scipy": "scipy", "torch": "torch (MKL)"}
    return {words: cell["seconds"][name] for name, words in names.items()}


README_ROWS: list[tuple[str, str, str, Callable[..., bool], Callable[..., Any]]] = [
    ("an epoch of a two-layer GCN of PyG", COMPILED, "models", _layer("GCN"), _epoch),
    ("an epoch of a two-layer GAT of PyG", COMPILED, "models", _layer("GAT"), _epoch),
    ("an epoch of a two-layer GATv2 of PyG, with 8 numbers of each edge", COMPILED, "models",
     _layer("edge features"), _epoch),
    ("an epoch of a user's own gated messages", COMPILED, "models", _layer("gate"), _epoch),
    ("a step of training of an RGCN layer", "sparsetir.nn.RGCNConv", "relations",
     lambda c: (c["graph"], c["feat"]) == ("1e5", 32), lambda c: c["training"]),
    ("a sparse matrix times 64 features", "A @ X", "products", lambda c: c["what"] == "A @ X",
     lambda c: c["seconds"]),
    ("a sparse matrix times itself", "A @ A", "sparse",
     lambda c: c["op"] == "product" and c["graph"] == _squared(), _square),
]  # fmt: skip


def _cpu(about: dict[str, Any]) -> str:
    cpu = re.sub(r"\(\w+\)| Processor", "", about["cpu"])
    return f"{cpu} ({about['llvm_cpu']})"


def machine() -> str:
    """The machine and versions of the measurements: CPU, commit, threads and how they wait."""
    about = record()
    libraries = ("torch", "torch_geometric", "scipy", "numpy", "apache-tvm")
    versions = ", ".join(f"{n} {v}" for n in libraries if (v := about["versions"].get(n)))
    said = [c["peers"]["mkl"]["about"] for c in cells("operators") if "mkl" in c["peers"]]
    mkl = f"{said[0]['version']}, which runs its {mkl_code()} here" if said else "no other MKL"
    counts = [k for k in about["variables"] if k.endswith("_NUM_THREADS")]
    rest = [f"`{k}={v}`" for k, v in about["variables"].items() if k not in (*counts, "MKL_RT")]
    loads = (of["load"] for of in about["results"]["steps"].values())
    load = max(x if isinstance(x, float | int) else x[0] for x in loads)
    return (
        f"{_cpu(about)}, {about['cores']} cores; {about['date'][:10]}, commit {about['commit']}, "
        f"load average at most {load:.1f}: `bench/results/{file().name}`. {versions}; {mkl}. "
        f"{', '.join(f'`{k}`' for k in counts)} are the number of threads; {', '.join(rest)}; "
        f"else threads wait as each library has it by default.{QUICK * about.get('quick', False)}\n"
    )


def table() -> str:
    """The table of all comparisons."""
    rows = []
    for n, c in enumerate(comparisons(), 1):
        won = sum(cell.ratio > 1 + EVEN for cell in c.cells)
        worst = f"{times(c.worst.ratio)}: {c.worst.name}"
        rows.append([n, c.what, c.beside, f"{won} of {len(c.cells)}", times(c.mean), worst])
    return grid(["", "", "beside", "faster in", "times as fast, mean", "worst cell"], rows)


def losses() -> str:
    """Every cell that loses, by the numbers of the table."""
    lost, others = [], []
    for n, c in enumerate(comparisons(), 1):
        if c.lost:
            lost += [f"**{n}: {c.what}**", "", *_in_lines(c.lost)]
        else:
            others.append(str(n))
    return "\n".join([*lost, f"None lose in {', '.join(others) or 'any other'}.", ""])


def _in_lines(measured: list[Cell]) -> list[str]:
    """Cells in columns, those that differ in the number of features in one row."""
    rows: dict[str, dict[int, str]] = {}
    for cell in measured:
        name, _, feat = cell.name.rpartition(", ")
        if not feat.isdigit():
            name, feat = cell.name, "0"
        rows.setdefault(name, {})[int(feat)] = f"{cell.ratio:.2f}"
    feats = sorted({feat for of in rows.values() for feat in of})
    width = max(map(len, rows))
    shown = [["", *(str(feat or "") for feat in feats)]]
    shown += [
        [name, *(of.get(feat, "") for feat in feats)]
        for name, of in sorted(rows.items(), key=lambda row: min(row[1].values()))
    ]
    lines = (f"{row[0]:{width}}" + "".join(f"{x:>6}" for x in row[1:]) for row in shown)
    return ["```none", *(line.rstrip() for line in lines if line.strip()), "```", ""]


def ratio(key: str) -> str:
    """The ratios of a comparison: worst, best and mean."""
    for c in comparisons():
        if c.key == key:
            most = max(cell.ratio for cell in c.cells)
            return f"{times(c.worst.ratio)} to {times(most)}, {times(c.mean)} in the mean"
    return "not measured"


def calls() -> str:
    """The table of calls, kernels included, in microseconds."""
    took = step("calls")["seconds"]["now"]
    times_of = {"the kernel alone": took["floors"]["kernel, NumPy"], **took["calls"]}
    rows = [[n, f"{1e6 * t['min']:.2f}", f"{1e6 * t['median']:.2f}"] for n, t in times_of.items()]
    return grid(["", "microseconds", "median"], rows, 2)


def compiling() -> str:
    """Seconds that plans and models take to compile."""
    ours = [c["peers"][OURS]["about"] for c in step("operators")["cells"] if OURS in c["peers"]]
    plans = sorted(p["compile_seconds"] for of in ours for p in of["plans"].values())
    models = sorted(c["first"][BACKEND] for c in step("layers")["cells"] if BACKEND in c["first"])
    return (
        f"A plan compiles in {plans[-1]:.1f} seconds at most, a model's first step through "
        f"torch.compile takes {models[0]:.1f} to {models[-1]:.1f}.\n"
    )


def layers() -> str:
    """Epochs of all layers, and means."""
    measured = step("layers")["cells"] + cells("models 1t")
    sizes = {c["graph"]: c["edges"] for c in measured}
    took = {
        (c["layer"], c["graph"]): {w: t["min"] for w, t in c["epoch"].items()} for c in measured
    }

    def told(of: dict[str, float]) -> str:
        others = (times(of[p] / of[BACKEND]) if p in of else "-" for p in (INDUCTOR, PYG))
        return f"{ms(of[BACKEND])}; {', '.join(others)}" if BACKEND in of else ""

    names = dict.fromkeys(c["layer"] for c in measured)
    rows = [[name, *(told(took.get((name, g), {})) for g in sizes)] for name in names]
    text = grid(["layer", *(f"{graph(g)}, {n:,}" for g, n in sizes.items())], rows, len(sizes))
    rows = []
    for way in (INDUCTOR, PYG, "accelerate", "sparsetir.nn"):
        for words, small in (("Cora", True), ("graphs above 50,000 edges", False)):
            ratios = [
                c["epoch"][way]["min"] / c["epoch"][BACKEND]["min"]
                for c in measured
                if way in c["epoch"] and (c["edges"] < 50_000) == small
            ]
            if ratios:
                mean, worst = times(geomean(ratios)), times(min(ratios))
                rows.append([f"{way}, {words}", len(ratios), mean, worst])
    head = ["backend, times as fast as", "cells", "geometric mean", "worst"]
    return text + "\n" + grid(head, rows, 3)


def exported() -> str:
    """Calls of exported models."""
    ways = {"exported": "exported library", BACKEND: "backend", PYG: PYG}
    rows = [
        [f"{c['layer']}, {graph(c['graph'])}", *(ms(c["call"][w]["min"]) for w in ways)]
        for c in step("exported")["cells"]
    ]
    return grid(["a call, ms", *ways.values()], rows, 3)


def memory() -> str:
    """Memory of an epoch."""
    (cell,) = step("memory")["cells"]
    words = {BACKEND: "through the backend"}
    told = ", ".join(
        f"{t['bytes'] / 2**20:.0f} {words.get(way, f'by {way}')}"
        for way, t in cell["memory"].items()
    )
    of = f"{cell['layer']} on {graph(cell['graph'])}"
    return f"A later epoch of {of} allocates at most, in MiB: {told} (a process each).\n"


def new_edges() -> str:
    """Steps on edges that are new in each."""
    rows = []
    for group, took in step("new edges")["seconds"]["now, 1 threads"].items():
        for layer, prefix in (("SAGE", ""), ("GAT", "GAT, ")):
            epochs = [took.get(prefix + w) for w in (PYG, "accelerate", "sparsetir.nn", BACKEND)]
            if group.startswith("new: ") and any(epochs):
                edges = f"{int(group.split()[1]):,}"
                rows.append([f"{edges}, {layer}", *(ms(t["min"]) if t else "" for t in epochs)])
    return grid(["edges, layer", PYG, "`accelerate`", "`sparsetir.nn`", "backend"], rows, 4)


def sparse() -> str:
    """Products and sums of sparse matrices."""
    count = len({c["graph"] for c in step("sparse 1t")["cells"]})
    out = [f"Of {count} matrices:\n"]
    for threads in (1, 2):
        rows = []
        for op, way, words in SPARSE_ROWS:
            took = [c["seconds"] for c in cells(f"sparse {threads}t") if c["op"] == op]
            mkl = "mkl values" if way == "values alone" else "mkl"
            peers = ("scipy", mkl, "torch")
            told = [
                _spread(t[p]["min"] / t[way]["min"] for t in took if p in t and way in t)
                for p in peers
            ]
            if any(told):
                rows.append([words, *told])
        title = f"{threads} thread{'s' * (threads > 1)}"
        out.append(grid([title, "scipy", "MKL, in order of columns", "torch"], rows))
    return "\n".join(out)


SPARSE_ROWS = [
    ("product", "sparsetir", "product, A A or A Aᵀ"), ("product", "planned", "planned"),
    ("product", "values alone", "values alone, MKL's too"),
    ("triangles", "sparsetir", "triangles, with the mask"),
    ("triangles", "terms listed", "terms listed"),
    *((f"sum of {n}", way, words) for n, word in ((2, "two"), (4, "four"), (8, "eight"))
      for way, words in (("sparsetir", f"sum of {word}"), ("planned", "planned"))),
]  # fmt: skip


def _spread(ratios: Iterable[float]) -> str:
    each = list(ratios)
    extremes = f" ({times(min(each))} to {times(max(each))})" if len(each) > 1 else ""
    return times(geomean(each)) + extremes if each else ""


def primitives() -> str:
    """The effect of each primitive of SpMM's schedule."""
    graphs = step("steps")["cells"]
    first, *names = graphs[0]["seconds"]
    rows = []
    for cell in graphs:
        took = cell["seconds"]
        told = [times(took[first] / took[n]) for n in names]
        rows.append([f"{graph(cell['problem'])}, {cell['feat']}", ms(took[first]), *told])
    return grid(["", f"{first}, ms", *names], rows, len(names) + 1)


def ranks() -> str:
    """Training on several processes."""
    (cell,) = step("processes")["cells"]
    columns = {
        "bytes sent / needed": "sent / needed", "bytes that came / needed": "came / needed",
        "memory / share and halo": "memory over share and halo",
    }  # fmt: skip
    rows = [
        [size, ms(of["epoch"]["min"]), f"{max(of['memory']) / 2**20:.0f}",
         *(f"{of[k]:.3f}" if k in of else "" for k in columns)]
        for size, of in cell["runs"].items()
    ]  # fmt: skip
    text = grid(["ranks", "epoch, ms", "MiB", *columns.values()], rows, 5)
    checks = cell["model of time"]["check"].values()
    told = ", ".join(f"{ms(c['model'])} ms where {ms(c['measured'])} were measured" for c in checks)
    return (
        f"{text}\nLosses differ by {cell['difference']:.0e} at most, in other orders of nodes by "
        f"{cell['rounding']:.0e}. The model below says {told}.\n"
    )


def scaling() -> str:
    """Speedups over one machine, by the model."""
    large = step("processes")["large"]
    names = [name for name in large if "bit/s" in name]
    rows = [
        [count, *(f"{large['one'] / large[n][count]['epoch']:.0f}" for n in names)]
        for count in ("16", "64", "256", "1024")
    ]
    return grid(["machines", *names], rows, len(names))


TEXTS: dict[str, Callable[..., str]] = {
    "readme": readme, "machine": machine, "comparisons": table, "losses": losses, "calls": calls,
    "compiling": compiling, "layers": layers, "exported": exported, "memory": memory,
    "new_edges": new_edges, "sparse": sparse, "primitives": primitives, "ranks": ranks,
    "scaling": scaling, "ratio": ratio,
}  # fmt: skip


def filled(page: str) -> str:
    """A page with all that stands between marks as the file says it."""

    def text(match: re.Match[str]) -> str:
        name, argument, mark, _ = match.groups()
        try:
            told = TEXTS[name](*filter(None, [argument]))
        except Missing:
            told = ABSENT
        return f"{name}{f' {argument}' if argument else ''}{mark}{told}"

    return MARK.sub(text, page)


# -- pictures -------------------------------------------------------------------------------------


def draw() -> None:
    """A dot for each cell, on a logarithmic scale; left of the line the other is faster."""
    from matplotlib.figure import Figure

    each = comparisons()
    figure = Figure(figsize=(9, 0.36 * len(each) + 1.1), layout="constrained")
    ax = figure.subplots()
    for n, comparison in enumerate(each):
        ratios = [c.ratio for c in comparison.cells]
        spread = [n + 0.22 * math.sin(2.4 * k) for k in range(len(ratios))]
        colours = ["#D55E00" if r < 1 - EVEN else "#0072B2" for r in ratios]
        ax.scatter(ratios, spread, c=colours, s=14, alpha=0.75, linewidths=0, zorder=3)
        ax.plot([comparison.mean] * 2, [n - 0.36, n + 0.36], color="black", linewidth=1.6, zorder=4)
    ax.axvline(1, color="0.4", linewidth=1)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.set_yticks(range(len(each)), [f"{c.what}, beside {c.beside}" for c in each], fontsize=8)
    ax.set_ylim(len(each) - 0.4, -0.6)
    ax.set_xlabel("times as fast; orange: slower; bars: geometric means", fontsize=9)
    ax.grid(axis="x", color="0.9", zorder=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=120, facecolor="white")
    _small(drawn, PICTURES / "speed.png")


def draw_steps() -> None:
    """Bars of what each primitive is worth."""
    from bench import steps

    about = {k: v for k, v in record().items() if k != "results"}
    path = PICTURES / "steps.json"
    try:
        results = step("steps")
    except Missing:
        return
    path.write_text(json.dumps({**about, "threads": 1, "results": results}))
    try:
        _small(steps.draw(path), path.with_suffix(".png"))
    finally:
        path.unlink()


def _small(drawn: Any, path: Path) -> None:
    """Save with 256 colours: with fewer the rare orange ones turn brown."""
    from PIL import Image

    Image.open(drawn).convert("RGB").quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(filled(path.read_text()))
    draw()
    draw_steps()
