"""`sparsetir formats`: statistics of a graph, and its size in each format."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparsetir.cli import arguments
from sparsetir.cli.arguments import Facts, Failed, Parser, UsageError
from sparsetir.runtime.texts import aligned, many, memory

if TYPE_CHECKING:
    import scipy.sparse as sp

    from sparsetir.formats import Format, Pattern

QUANTILES = (0, 0.25, 0.5, 0.75, 0.9, 0.99, 1)
EPILOG = """\
Places count elements and padding; bytes are those of float32 values, indices and masks. Formats
that need too much memory are skipped. "default" is the config of a plan that was not tuned. Formats
are named as in the table, or with other parameters: "bsr_16_16", "hyb(2, 4)".

examples:
  sparsetir formats cora
  sparsetir formats cora --format csr "BSR(8, 8)" hyb_2_4
  sparsetir formats graph.mtx --picture graph.png
  sparsetir formats weights.npz:conv1 --picture hyb.svg --format hyb_1_3
"""


def add(out: Parser) -> None:
    """Add the arguments."""
    out.add_argument("graph", help="see `sparsetir tune --help`")
    out.add_argument("--format", nargs="+", metavar="NAME", help="only these, or NAME(1, 2)")
    out.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw the graph, or the single format of --format, into a .png, .svg or .pdf file",
    )
    arguments.add_json(out)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from sparsetir.formats import Pattern
    from sparsetir.formats.library import library

    if args.picture is not None and args.picture.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"argument --picture: expected .png, .svg or .pdf, got '{args.picture}'")
    name, matrix = arguments.graph(args.graph, "graph")
    pattern = Pattern.from_csr(matrix.indptr, matrix.indices, matrix.shape)
    known = {fmt.name: fmt for fmt in library(pattern)}
    chosen = [format_of(n, known) for n in args.format] if args.format else list(known.values())
    about, cells = describe(matrix), [_cell(fmt, pattern) for fmt in chosen]
    defaults = _defaults(matrix)
    if args.picture is not None:
        _draw(args.picture, name, pattern, chosen if args.format else [])
    if args.json:
        picture = None if args.picture is None else str(args.picture)
        facts = {"graph": name, "statistics": about, "formats": cells}
        arguments.print_json({**facts, "defaults": defaults, "picture": picture})
        return 0
    _show(name, about, cells, defaults)
    if args.picture is not None:
        print(f"picture: {args.picture}")
    return 0


def format_of(text: str, known: Mapping[str, Format]) -> Format:
    """The format of a name: a known one, or a class followed by parameters.

    text : for example "csr", "BSR(8, 8)" or "bsr_8_8"
    """
    from sparsetir.formats.format import REGISTRY

    if text in known:
        return known[text]
    classes = {name.lower(): entry.kind for name, entry in REGISTRY.items()}
    short = {"enum": "enumeratedpatterns"}
    match = re.fullmatch(r"([a-z_]+?)_?(?:\((.*)\)|((?:_?\d+)*))", text.strip().lower())
    name = match[1].replace("_", "") if match else ""
    kind = classes.get(short.get(name, name))
    if match is None or kind is None:
        raise UsageError(
            f"argument --format: expected {', '.join(known)}, or one of {', '.join(REGISTRY)} with "
            f"parameters, such as BSR(8, 8); got {text}"
        )
    try:
        parameter_text = match[3].strip("_").replace("_", ", ") if match[3] else match[2] or ""
        parameters = ast.literal_eval(
            f"({parameter_text},)" if parameter_text.strip(", ") else "()"
        )
        return kind(*parameters)
    except (SyntaxError, TypeError, ValueError) as error:
        raise UsageError(f"argument --format: {text}: {error}") from error


def describe(matrix: sp.csr_array) -> Facts:
    """Statistics of a CSR matrix, for JSON.

    bandwidth : the largest |row - column| of an element
    symmetric : whether the pattern, whatever its values, equals that of the transpose
    row_length, column_length : quantiles by their share; mean and standard deviation
    """
    m, n = matrix.shape
    rows = np.diff(matrix.indptr)
    columns = np.bincount(matrix.indices, minlength=n)
    row = np.repeat(np.arange(m, dtype=matrix.indices.dtype), rows)
    distance = np.abs(row.astype(np.int64) - matrix.indices)
    return {
        "shape": [m, n],
        "nnz": int(matrix.nnz),
        "density": matrix.nnz / max(1, m * n),
        "dtype": str(matrix.dtype),
        "row_length": _lengths(rows),
        "column_length": _lengths(columns),
        "empty_rows": int((rows == 0).sum()),
        "empty_columns": int((columns == 0).sum()),
        "bandwidth": int(distance.max(initial=0)),
        "diagonal": int((distance == 0).sum()),
        "symmetric": m == n and _symmetric(matrix),
    }


def _lengths(lengths: np.ndarray) -> dict[str, object]:
    if not len(lengths):
        return {"mean": 0.0, "std": 0.0, "quantiles": {}}
    quantiles = np.quantile(lengths, QUANTILES)
    return {
        "mean": float(lengths.mean()),
        "std": float(lengths.std()),
        "quantiles": {str(q): float(v) for q, v in zip(QUANTILES, quantiles, strict=True)},
    }


def _symmetric(matrix: sp.csr_array) -> bool:
    other = matrix.T.tocsr()
    other.sort_indices()
    return np.array_equal(other.indptr, matrix.indptr) and np.array_equal(
        other.indices, matrix.indices
    )


def _cell(fmt: Format, pattern: Pattern) -> Facts:
    """Slots, padding and bytes of a format; "skipped" is the reason why it was not converted."""
    from sparsetir.formats.library import refusal

    count = fmt.places(pattern)
    padding = 1 - pattern.nnz / count if count else 0.0
    out = {"format": fmt.name, "places": count, "padding": padding}
    reason = refusal(pattern, count)
    if reason is not None:
        return {**out, "parts": None, "bytes": None, "skipped": reason}
    converted = fmt.convert(pattern)
    return {**out, "parts": len(converted.parts), "bytes": converted.nbytes}


def _defaults(matrix: object) -> dict[str, object]:
    """The default configs of plans for this graph on this machine's CPU."""
    from sparsetir.planning.plan import plan_candidates
    from sparsetir.schedules.search.configs import to_data

    wanted = (("spmv", 1), ("spmm", 32), ("spmm", 512), ("sddmm", 32))
    return {
        op if feat == 1 else f"{op}, {feat} features": to_data(plan_candidates(op, matrix, feat)[0])
        for op, feat in wanted
    }


def _draw(path: Path, name: str, pattern: Pattern, chosen: list[Format]) -> None:
    from sparsetir.extras import need
    from sparsetir.runtime.file_errors import whole

    if len(chosen) > 1:
        raise UsageError("argument --picture: expected one --format to draw, or none")
    patterns = need("argument --picture", "sparsetir.plotting.patterns")
    if chosen:
        figure = patterns.plot_format(chosen[0].convert(pattern), name=name)
    else:
        figure = patterns.plot_pattern(pattern, name=name)
    try:
        with whole(path) as unfinished:
            figure.savefig(unfinished)
    except OSError as error:
        raise Failed(f"{path}: cannot be written: {error.strerror or error}") from error


def _show(name: str, about: Facts, cells: list[Facts], defaults: Facts) -> None:
    m, n = about["shape"]
    print(f"{name}: {m:,} x {n:,}, {many(about['nnz'], 'element')}, density {about['density']:.3g}")
    print(
        f"pattern {'' if about['symmetric'] else 'not '}symmetric, {about['diagonal']:,} on the "
        f"diagonal, bandwidth {about['bandwidth']:,}"
    )
    rows = [["lengths of", "min", "25 %", "median", "75 %", "90 %", "99 %", "max"]]
    rows[0] += ["mean", "std", "empty", ""]
    for what in ("row", "column"):
        length = about[f"{what}_length"]
        values = [f"{v:,.0f}" for v in length["quantiles"].values()] or ["-"] * len(QUANTILES)
        values += [f"{length['mean']:,.1f}", f"{length['std']:,.1f}"]
        rows.append([f"{what}s", *values, f"{about[f'empty_{what}s']:,}", ""])
    print("", *aligned(rows, right=True), "", sep="\n")
    least = min((c["bytes"] for c in cells if c["bytes"] is not None), default=None)
    rows = [["format", "parts", "slots", "padding", "memory", ""]]
    for cell in cells:
        note = "least memory" if cell["bytes"] == least else ""
        parts = "-" if cell["parts"] is None else f"{cell['parts']:,}"
        size = memory(cell["bytes"]), f"not made: {cell['skipped']}" if "skipped" in cell else note
        rows.append([cell["format"], parts, f"{cell['places']:,}", f"{cell['padding']:.1%}", *size])
    print(*aligned(rows, right=True), "\ndefault on this CPU", sep="\n")
    rows = []
    for problem, config in defaults.items():
        rows.append([f"  {problem}", arguments.config_text(config)])
    print(*aligned(rows), sep="\n", flush=True)
