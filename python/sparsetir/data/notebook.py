"""HTML representations of sparse tensors for notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsetir.formats.pattern import Pattern

if TYPE_CHECKING:
    from sparsetir.data.sparse_tensor import SparseTensor

CELLS = 48  # along the longer side of a picture
PIXELS = 192
FAINTEST = 0.25  # opacity of a cell with one element


def html_of(tensor: SparseTensor) -> str:
    """Shape, elements and type, and for a matrix a picture of its density."""
    shape = " x ".join(f"{n:,}" for n in tensor.shape)
    places = np.prod([float(n) for n in tensor.shape])
    share = f", {tensor.nnz / places:.2g} of all places" if places else ""
    text = f"{type(tensor).__name__}: {shape}, {tensor.nnz:,} elements{share}, {tensor.dtype}"
    picture = _picture(tensor.pattern, text) if len(tensor.shape) == 2 and tensor.nnz else ""
    return f"<div><code>{text}</code>{picture}</div>"


def _picture(pattern: Pattern, text: str) -> str:
    """An SVG in the colour of the surrounding text; denser cells are darker.

    text : a description, as tooltip and for screen readers
    """
    longest = max(pattern.shape)
    edge = max(1, -(-longest // CELLS))  # elements along a side of a cell
    rows, columns = (-(-n // edge) for n in pattern.shape)
    cell = (pattern.coords[0] // edge).astype(np.int64) * columns + pattern.coords[1] // edge
    counts = np.bincount(cell)
    (filled,) = np.nonzero(counts)
    opacity = FAINTEST + (1 - FAINTEST) * np.sqrt(counts[filled] / counts.max())
    cells = "".join(
        f'<rect x="{x}" y="{y}" width="1" height="1" opacity="{shade:.2f}"/>'
        for y, x, shade in zip(*np.divmod(filled, columns), opacity, strict=True)
    )
    scale = PIXELS / max(rows, columns)
    return (
        f'<br><svg width="{columns * scale:.0f}" height="{rows * scale:.0f}" '
        f'viewBox="0 0 {columns} {rows}" fill="currentColor" role="img" '
        'style="outline: 1px solid; shape-rendering: crispEdges">'
        f"<title>Elements of a {text}</title>{cells}</svg>"
    )
